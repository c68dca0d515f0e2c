"""`minigrpo compare`: the tests are exact, runs are paired by their examples, and what cannot be
compared is one line.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minigrpo import Config
from minigrpo.runtime.answers import digest
from minigrpo.runtime.measures import OTHER_EXAMPLES
from minigrpo.runtime.settings import toml_lines
from minigrpo.tools import compare
from minigrpo.tools.paired import agresti_min, bootstrap, difference, mcnemar
from minigrpo.tools.records import read_lines, read_records
from minigrpo.types import Example

from .test_misuse_tools import refused
from .test_reliability import make


def make_run(
    folder: Path,
    right: Sequence[int],
    *,
    similarity: Sequence[float] | None = None,
    examples: Sequence[str] | None = None,
    **settings: Any,
) -> Path:
    """A made-up run that answers example i rightly where `right[i]`, greedy and sampled."""
    folder.mkdir()
    lines = [*toml_lines(Config.of(**settings)), "", "[versions]", 'torch = "2"']
    (folder / "config.toml").write_text("\n".join(lines))
    metrics = {"completions/mean_length": 10, "step_time": 2.0, "memory/peak_mib": 300}
    write(folder / "metrics.jsonl", [{"step": step, **metrics} for step in (1, 2, 3)])
    share = sum(right) / len(right)
    evaluations = [{"step": s, "n": len(right), "exact_sampled": share} for s in (0, 3)]
    write(folder / "eval.jsonl", evaluations)
    answers = []
    for i, is_right in enumerate(right):
        values = {"exact": float(is_right), "reward": 1.0}
        if similarity is not None:
            values["similarity"] = similarity[i]
        said = {"prompt": f"question {i}", "truth": "yes", "completion": "yes" * is_right or "no"}
        name = examples[i] if examples else str(i)
        answers.append({"step": 3, "example": name, **said, "greedy": values, "sampled": values})
    write(folder / "held_out.jsonl", answers)
    return folder


def write(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def output(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    compare.main([str(word) for word in argv])
    return capsys.readouterr().out


# --- the statistics -------------------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (0, 6), (1, 5), (3, 3), (2, 9)])
def test_mcnemar_counts_the_coins_that_are_as_uneven(lost: int, won: int) -> None:
    """All 2**n ways in which a fair coin may decide the discordant pairs."""
    n, apart = lost + won, abs(lost - won)
    as_uneven = sum(abs(2 * sum(coins) - n) >= apart for coins in product((0, 1), repeat=n))
    assert mcnemar(lost, won) == pytest.approx(as_uneven / 2**n, rel=1e-12)
    assert mcnemar(lost, won) == mcnemar(won, lost)


def test_mcnemar_is_finite_for_many_examples() -> None:
    assert 0 < mcnemar(4900, 5100) < 0.05 < mcnemar(4950, 5050)


def test_intervals_cover_the_true_difference_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    hits = {"agresti_min": 0, "bootstrap": 0}
    for _ in range(100):
        cells = rng.choice(3, size=30, p=(0.75, 0.05, 0.2))
        low, high = agresti_min(int((cells == 1).sum()), int((cells == 2).sum()), 30)
        hits["agresti_min"] += low <= 0.15 <= high
        low, high = bootstrap(rng.uniform(size=30) - 0.2)
        hits["bootstrap"] += low <= 0.3 <= high
    assert all(88 < number <= 99 for number in hits.values()), hits


def test_equal_answers_leave_room_for_a_difference_that_few_examples_cannot_show() -> None:
    found = difference(np.ones(10), np.ones(10))
    assert found.p == 1 and not found.is_shown
    assert found.low < -0.05 and found.high > 0.05


def test_a_measure_is_compared_over_the_examples_that_it_concerns_in_both() -> None:
    found = difference(np.array([1, 0, np.nan, 1]), np.array([1, 1, 1, np.nan]))
    assert (found.n, found.won, found.lost, found.change) == (2, 1, 0, 0.5)
    with pytest.raises(ValueError, match="no example"):
        difference(np.array([np.nan]), np.array([1.0]))


def test_a_mean_has_a_bootstrap_interval_and_one_example_has_none() -> None:
    found = difference(np.linspace(0, 0.5, 50), np.linspace(0.2, 0.7, 50))
    assert math.isnan(found.p) and found.is_shown
    assert found.low == pytest.approx(0.2) == found.high
    assert math.isnan(difference(np.array([0.5]), np.array([0.7])).low)


# --- runs -----------------------------------------------------------------------------------------


def test_a_difference_is_shown_with_what_was_won_and_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = make_run(tmp_path / "a", [1] * 30 + [0] * 30)
    b = make_run(tmp_path / "b", [1] * 29 + [0] + [1] * 12 + [0] * 18, learning_rate=1e-3)
    file = tmp_path / "found.json"
    out = output(capsys, a, b, "--json", file, "--examples", 1)
    assert re.search(r"--learning-rate +0.0006 +0.001\b", out) and "--group-size" not in out
    assert "exactly right, sampled: b is better than a: 68.3% against 50.0%, +18.3 points" in out
    assert "p = 0.0034, 12 won and 1 lost" in out
    assert "won by b, greedy: 12 examples, such as\n  prompt: question 30\n" in out
    assert "question 31" not in out and "lost by b, greedy: 1 examples" in out
    assert "  truth: yes\n" in out
    (record,) = json.loads(file.read_text())["comparisons"]
    assert [x["prompt"] for x in record["lost"]] == ["question 29"] and len(record["won"]) == 12
    assert record["measures"][0]["is_shown"] is True


def test_an_answer_is_called_the_truth_only_where_a_right_completion_equals_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of countdown is a random attempt, and that of code one program of many."""
    a, b = make_run(tmp_path / "a", [0] * 9), make_run(tmp_path / "b", [1] * 9)
    for file in (*a.glob("*.jsonl"), *b.glob("*.jsonl")):
        file.write_text(file.read_text().replace('"exact', '"solved'))
    out = output(capsys, a, b, "--examples", 1)
    assert "  answer for --loss nll: yes\n" in out and "truth" not in out


def test_no_difference_is_said_where_the_examples_could_show_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = make_run(tmp_path / "a", [1, 0] * 20)
    b = make_run(tmp_path / "b", [1, 0] * 18 + [1] * 4, group_size=8)
    out = output(capsys, a, b)
    assert "no difference that 40 examples could show between b and a" in out
    assert "p = 0.5, 2 won and 0 lost" in out


def test_the_seeds_of_a_setting_are_one_group_and_three_of_them_decide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [[f"{seed}/{i}" for i in range(50)] for seed in range(3)]
    # +20, -4 and +18 points: the examples together show it, the seeds do not agree
    for seed, won in enumerate((10, -2, 9)):
        right = [1] * 10 + [0] * 40
        make_run(tmp_path / f"a-{seed}", right, examples=names[seed], seed=seed)
        right = [1] * (10 + won) + [0] * (40 - won)
        make_run(tmp_path / f"b-{seed}", right, examples=names[seed], seed=seed, kl_coef=0.1)
    runs = [tmp_path / f"{name}-{seed}" for name in "ab" for seed in (2, 0, 1)]
    out = output(capsys, *runs)
    assert "150 held-out examples of 3 seeds" in out
    assert "no difference that 3 seeds could show between b and a" in out
    two = output(capsys, *(run for run in runs if run.name[-1] != "1"))
    assert "b is better than a" in two and "; by seed +20.0, +18.0" in two
    alone = output(capsys, *runs[:2])
    assert "all runs have one setting" in alone


def test_seeds_that_agree_by_chance_show_no_more_than_their_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three differences of one example each have no spread, so the interval had no length."""
    for seed in range(3):
        make_run(tmp_path / f"a-{seed}", [1] * 30 + [0] * 34, seed=seed)
        make_run(tmp_path / f"b-{seed}", [1] * 31 + [0] * 33, seed=seed, kl_coef=0.1)
        make_run(tmp_path / f"c-{seed}", [1] * 50 + [0] * 14, seed=seed, kl_coef=0.2)
    runs = {name: [tmp_path / f"{name}-{seed}" for seed in range(3)] for name in "abc"}
    assert "no difference that 3 seeds could show" in output(capsys, *runs["a"], *runs["b"])
    assert "c is better than a" in output(capsys, *runs["a"], *runs["c"])


def test_seeds_of_unequal_size_count_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shares of all examples together said +5.6 points, beside a mean of +16.7."""
    for seed, n in enumerate((40, 10, 40)):
        names, right = [f"{seed}/{i}" for i in range(n)], [1, 0] * (n // 2)
        make_run(tmp_path / f"a-{seed}", right, examples=names, seed=seed)
        better = [1] * 10 if n == 10 else right
        make_run(tmp_path / f"b-{seed}", better, examples=names, seed=seed, kl_coef=0.1)
    out = output(capsys, *(tmp_path / f"{name}-{seed}" for name in "ab" for seed in range(3)))
    assert "66.7% against 50.0%, +16.7 points" in out


@pytest.mark.parametrize(("shared", "words"), [(True, "no difference"), (False, "b is better")])
def test_examples_that_seeds_share_count_once(
    tmp_path: Path, shared: bool, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four examples won by both seeds are four, not eight: p is 0.13, not 0.008."""
    for seed in range(2):
        names = [f"{0 if shared else seed}/{i}" for i in range(64)]
        make_run(tmp_path / f"a-{seed}", [1] * 30 + [0] * 34, examples=names, seed=seed)
        right = [1] * 34 + [0] * 30
        make_run(tmp_path / f"b-{seed}", right, examples=names, seed=seed, kl_coef=0.1)
    out = output(capsys, *(tmp_path / f"{name}-{seed}" for name in "ab" for seed in range(2)))
    assert f"exactly right, sampled: {words}" in out
    assert f"{64 if shared else 128} held-out examples of 2 seeds" in out


def test_seeds_are_averaged_where_they_share_their_examples() -> None:
    first, second = (
        np.array([[1, 0, 0, 1.0], [1, 0, 1, 1]]),
        np.array([[1, 1, 0, 0.0], [1, 1, 1, 1]]),
    )
    found = difference(first, second)
    assert (found.n, found.won, found.lost) == (4, 1, 1)
    assert (found.first, found.second, found.p) == (0.625, 0.75, 1)
    assert found.low < 0 < found.high


def test_answers_of_another_step_than_the_last_evaluation_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run(tmp_path / "a", [1, 0] * 9), make_run(tmp_path / "b", [1, 0] * 9)
    with (b / "eval.jsonl").open("a") as file:
        file.write('{"step": 9, "n": 18, "exact_sampled": 0.9}\n')
    compare.main([str(a), str(b)])
    assert f"{b / 'held_out.jsonl'}: has the answers of step 3, not of step 9" in (
        capsys.readouterr().err.replace("\n", "")
    )


def test_another_program_with_the_same_settings_is_compared_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run(tmp_path / "a", [1, 0] * 9), make_run(tmp_path / "b", [1, 0] * 9)
    (b / "config.toml").write_text((b / "config.toml").read_text().replace('"2"', '"3"'))
    assert "torch" in (out := output(capsys, a, b)) and "no difference that 18" in out


def test_fewer_examples_of_the_same_kind_are_paired_and_others_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = make_run(tmp_path / "a", [1, 0] * 20)
    b = make_run(tmp_path / "b", [1, 0] * 10, eval_size=20)
    other = make_run(tmp_path / "c", [1, 0] * 20, examples=[f"x{i}" for i in range(40)], history=2)
    assert "20 held-out examples" in output(capsys, a, b)
    out = output(capsys, a, other)
    assert "a and c: were not evaluated on the same held-out examples (0 of 40 are in both)" in out
    assert "c against a: no paired test" in out


def test_a_first_evaluation_of_another_number_of_examples_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run(tmp_path / "a", [1, 0] * 9), make_run(tmp_path / "b", [1, 0] * 9)
    log = b / "eval.jsonl"
    log.write_text(log.read_text().replace('"n": 18', '"n": 8', 1))
    out = " ".join(output(capsys, a, b).split())
    assert f"b: 8 held-out examples before, 18 after{OTHER_EXAMPLES}" in out
    assert "a: 18 held-out" not in out


@pytest.mark.parametrize("setting", ["data", "rewards", "chat_template"])
def test_nothing_is_written_onto_a_file_that_a_run_has_read(
    tmp_path: Path, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("mine")
    a = make_run(tmp_path / "a", [1, 0] * 9)
    b = make_run(tmp_path / "b", [1, 0] * 9, **{setting: str(mine)})
    said = refused(capsys, compare, a, b, "--json", mine)
    assert f"--json {mine}: is a file that this command reads; take another" in said
    assert mine.read_text() == "mine"


def test_rewards_are_not_compared_where_they_are_paid_differently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    likeness = [0.1, 0.3] * 20
    a = make_run(tmp_path / "a", [1, 0] * 20, similarity=likeness)
    b = make_run(tmp_path / "b", [1, 0] * 20, similarity=likeness, reward_weights="similarity=1")
    out = output(capsys, a, b)
    assert "the reward is not compared" in out
    lines = [line.split()[0] for line in out.splitlines() if line.split()[1:2] == ["sampled"]]
    assert lines == ["exact", "similarity"]


def test_seeds_of_other_files_are_another_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (make_run(tmp_path / f"a-{i}", [1, 0] * 20, seed=i, rewards="r.py") for i in (0, 1))
    for run, found in ((a, "12"), (b, "34")):
        with open(run / "config.toml", "a") as file:
            file.write(f'\n"--rewards r.py" = "{found}"\n')
    out = output(capsys, a, b)
    assert "--rewards r.py" in out and "the reward is not compared" in out


def test_a_plot_overlays_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    a = make_run(tmp_path / "a", [1, 0] * 4)
    b = make_run(tmp_path / "b", [1, 0] * 4, group_size=8)
    assert "wrote" in output(capsys, a, b, "--plot", tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_keeps_the_answers_of_its_last_evaluation(tmp_path: Path) -> None:
    make(tmp_path / "run", max_steps=1).fit()
    answers = read_lines(tmp_path / "run" / "held_out.jsonl")
    last = read_records(tmp_path / "run" / "eval.jsonl")[-1]
    assert {answer["step"] for answer in answers} == {1} and len(answers) == last["n"]
    assert len({answer["example"] for answer in answers}) > 1
    for how, suffix in (("greedy", ""), ("sampled", "_sampled")):
        for name in ("exact", "similarity", "reward"):
            values = [answer[how][name] for answer in answers]
            assert np.mean(values) == pytest.approx(last[name + suffix], abs=1e-6)


@pytest.mark.parametrize(("resume", "steps"), [("2", set()), ("auto", {6})])
def test_answers_of_steps_that_a_resume_gives_up_are_removed(
    tmp_path: Path, resume: str, steps: set[int]
) -> None:
    """They were compared as those of the run, whose eval.jsonl did not have them any more."""
    make(tmp_path / "run", keep_last=9).fit()
    make(tmp_path / "run", keep_last=9, resume=resume, stop_after=3).fit()
    file = tmp_path / "run" / "held_out.jsonl"
    assert {answer["step"] for answer in read_lines(file)} == steps if steps else not file.exists()


def test_a_digest_tells_what_an_example_asks_and_how_it_is_scored() -> None:
    one = Example("2+2=", "4", index=1, kind="sum")
    assert digest(one) == digest(Example("2+2=", "4", index=7))
    others = [
        Example("2+2=?", "4"),
        Example("2+2=", "5"),
        Example("2+2=", "4", messages=({"role": "user", "content": "2+2="},)),
        Example("2+2=", "4", fields={"test_list": ["assert"]}),
    ]
    assert len({digest(example) for example in [one, *others]}) == 5


class Thing:
    """Its `repr` has an address."""


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no repr")


def test_a_digest_is_the_same_in_every_process() -> None:
    """Addresses, and the order of sets and dicts, differ between two runs."""
    names = [f"name {i}" for i in range(20)]
    ways = [
        Example(
            "a", "b", fields={"x": Thing(), "y": Unprintable(), "z": dict.fromkeys(order, (1,))}
        )
        for order in (names, names[::-1])
    ]
    assert digest(ways[0]) == digest(ways[1])
    code = "from minigrpo.runtime.answers import digest; from minigrpo.types import Example\n"
    code += f"print(digest(Example('a', 'b', fields={{'z': set({names})}})))"
    made = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in "12"
    ]
    assert made[0] == made[1]


# --- what is no run, or not whole -----------------------------------------------------------------


def no_answers(run: Path) -> None:
    (run / "held_out.jsonl").unlink()


def other_version(run: Path) -> None:
    (run / "held_out.jsonl").write_text('{"step": 3}\n')


def damaged(run: Path) -> None:
    lines = (run / "held_out.jsonl").read_text().splitlines()
    (run / "held_out.jsonl").write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]) + "\n")


def cut_off(run: Path) -> None:
    (run / "config.toml").write_text((run / "config.toml").read_text().split("[versions]")[0])


def no_steps(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (other_version, "held_out.jsonl, line 1: is no answer of this version"),
        (damaged, "held_out.jsonl, line 2: is not JSON"),
        (cut_off, "config.toml: is cut off"),
        (no_steps, "metrics.jsonl: has no records"),
    ],
)
def test_a_damaged_run_is_one_line(
    tmp_path: Path, damage: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run(tmp_path / "a", [1, 0]), make_run(tmp_path / "b", [1, 0], seed=1)
    damage(b)
    assert words in refused(capsys, compare, a, b)


def test_a_run_without_evaluation_is_compared_by_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run(tmp_path / "a", [1, 0]), make_run(tmp_path / "b", [1, 0], group_size=8)
    no_answers(b)
    out = output(capsys, a, b)
    assert "b: has no held_out.jsonl (not evaluated yet, or made by an older version)" in out
    assert "--group-size" in out and "peak MiB" in out and "no paired test" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["a"], "minigrpo compare needs the folders of at least two runs"),
        (["a", "./a"], "a: is given twice"),
        (["a", "nowhere"], "nowhere: no such folder, so it is no run"),
        (["a", "."], ".: no metrics.jsonl in this folder, so it is no run"),
        (["a", "b", "--examples", "-1"], "--examples must be at least 0, got -1"),
        (["a", "b", "--plot", "c.txt"], "--plot must end with .png, .svg, .pdf"),
        (["a", "b", "--json", "a"], "--json a: is a folder, not a file"),
    ],
)
def test_misuse_is_one_line(
    tmp_path: Path,
    argv: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_run(tmp_path / "a", [1, 0])
    make_run(tmp_path / "b", [1, 0], seed=1)
    monkeypatch.chdir(tmp_path)
    assert words in refused(capsys, compare, *argv)
