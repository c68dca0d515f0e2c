"""`minigrpo compare`: which runs are paired, and what their paired tests show."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minigrpo.config import Config
from minigrpo.runtime.stats import Difference, mcnemar
from minigrpo.tools import cli
from minigrpo.tools.compare import differences, settings_of
from minigrpo.tools.runs import read_run

from .tiny import toml


def lines(records: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def write_run(
    folder: Path,
    right: Sequence[float],
    *,
    examples: Sequence[str] | None = None,
    similarity: Sequence[float] | None = None,
    **settings: Any,
) -> Path:
    """The files of a finished run whose last answers are right (1) or wrong (0)."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(toml(Config.of(**settings), a="1"))
    (folder / "metrics.jsonl").write_text(
        lines([{"step": step, "reward": step / 3, "step_time": 0.5} for step in (1, 2, 3)])
    )
    share = float(np.mean(right))
    ends = [(0, 0.25), (3, share)]
    (folder / "eval.jsonl").write_text(
        lines([{"step": x, "n": len(right), "exact_sampled": y, "exact": y} for x, y in ends])
    )
    names = examples or [f"example {i}" for i in range(len(right))]
    parts = [{"exact": x, "reward": 2 * x} for x in right]
    for part, value in zip(parts, similarity or (), strict=False):
        part["similarity"] = value
    answers = [
        {"step": 3, "example": name, "prompt": name, "truth": "yes", "completion": "yes",
         "greedy": part, "sampled": part}
        for name, part in zip(names, parts, strict=True)
    ]  # fmt: skip
    (folder / "held_out.jsonl").write_text(lines(answers))
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "step": 3}))
    return folder


def compared(*runs: Path, pool: bool = False) -> dict[str, Difference]:
    """The tests of the second setting against the first by measure."""
    first, second = settings_of([read_run(run, print) for run in runs], pool).values()
    return differences(first, second)


def test_examples_are_paired_and_tested_by_mcnemar(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [1] * 30 + [0] * 30)
    b = write_run(tmp_path / "b", [1] * 29 + [0] + [1] * 12 + [0] * 18, learning_rate=1e-3)
    tests = compared(a, b)
    found = tests["exact_sampled"]
    assert found.n == 60
    assert found.p == mcnemar(1, 12) == pytest.approx(2 * (1 + 13) / 2**13)
    assert found.change == pytest.approx(11 / 60)
    assert found.is_shown


def test_only_the_examples_that_both_were_asked_are_compared(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", [1, 0] * 20), write_run(tmp_path / "b", [1, 0] * 10)
    other = write_run(tmp_path / "c", [1, 0] * 20, examples=[f"x{i}" for i in range(40)])
    assert compared(a, b)["exact"].n == 20
    assert compared(a, other) == {}


def test_rewards_that_are_weighted_differently_are_not_compared(tmp_path: Path) -> None:
    likeness = [0.1, 0.3] * 20
    a = write_run(tmp_path / "a", [1, 0] * 20, similarity=likeness)
    b = write_run(tmp_path / "b", [1, 0] * 20, similarity=likeness, reward_weights="similarity=1")
    c = write_run(tmp_path / "c", [1, 0] * 20, similarity=likeness, seed=1)
    assert {"exact", "similarity"} <= compared(a, b).keys()
    assert "reward" not in compared(a, b)
    assert "reward" in compared(a, c)


def seeds(folder: Path, name: str, right: Sequence[Sequence[float]], **settings: Any) -> list[Path]:
    """Runs of one setting with other seeds, each asked examples of its own."""
    runs = []
    for seed, answers in enumerate(right):
        names = [f"{seed}/{i}" for i in range(len(answers))]
        path = folder / f"{name}-{seed}"
        runs.append(write_run(path, answers, examples=names, seed=seed, **settings))
    return runs


def test_runs_are_paired_by_their_seeds(tmp_path: Path) -> None:
    first = [read_run(x, print) for x in seeds(tmp_path, "a", [[1, 0], [1, 1], [0, 0]])]
    second = [read_run(x, print) for x in seeds(tmp_path, "b", [[0, 0], [0, 1], [1, 1]])]
    found = differences(first, second[1:])["exact_sampled"]
    assert found.n == 4 and found.p == mcnemar(1, 2)


@pytest.mark.parametrize(("won", "shown"), [((10, -2, 9), False), ((10, 9, 11), True)])
def test_three_seeds_decide_by_their_spread(
    tmp_path: Path, won: tuple[int, ...], shown: bool
) -> None:
    """All examples together would show a difference in both cases."""
    a = seeds(tmp_path, "a", [[1] * 10 + [0] * 40] * 3)
    b = seeds(tmp_path, "b", [[1] * (10 + x) + [0] * (40 - x) for x in won], kl_coef=0.1)
    tests = compared(*a, *b, pool=True)
    found = tests["exact"]
    assert found.is_shown == shown
    assert found.change == pytest.approx(sum(won) / 150)
    assert math.isnan(found.p)


def test_seeds_that_agree_by_chance_show_no_more_than_their_examples(tmp_path: Path) -> None:
    """Three differences of one example each have no spread, so their interval has no length."""
    a = seeds(tmp_path, "a", [[1] * 30 + [0] * 34] * 3)
    b = seeds(tmp_path, "b", [[1] * 31 + [0] * 33] * 3, kl_coef=0.1)
    assert not compared(*a, *b, pool=True)["exact"].is_shown


def test_seeds_of_unequal_size_count_alike(tmp_path: Path) -> None:
    right = [[1, 0] * 20, [1, 0] * 5, [1, 0] * 20]
    a = seeds(tmp_path, "a", right)
    b = seeds(tmp_path, "b", [right[0], [1] * 10, right[2]], kl_coef=0.1)
    found = compared(*a, *b, pool=True)["exact"]
    assert (found.first, found.second) == (pytest.approx(0.5), pytest.approx(2 / 3))


@pytest.mark.parametrize("shared", [True, False])
def test_examples_that_seeds_share_count_once(tmp_path: Path, shared: bool) -> None:
    """Four examples won by both seeds are four, not eight."""
    runs = []
    for name, num_right, kl in (("a", 30, 0.0), ("b", 34, 0.1)):
        for seed in range(2):
            names = [f"{0 if shared else seed}/{i}" for i in range(64)]
            right = [1.0] * num_right + [0.0] * (64 - num_right)
            path = tmp_path / f"{name}-{seed}"
            runs.append(write_run(path, right, examples=names, seed=seed, kl_coef=kl))
    found = compared(*runs, pool=True)["exact"]
    assert found.n == (64 if shared else 128)
    assert found.is_shown == (not shared)


def test_a_measure_is_compared_where_it_concerns_the_examples_of_both(tmp_path: Path) -> None:
    """The other examples of each run have no similarity."""
    runs = [
        write_run(tmp_path / name, [1, 0] * 8, similarity=[0.5] * n, seed=seed, kl_coef=kl)
        for name, n, seed, kl in (
            ("a", 9, 0, 0.0),
            ("b", 7, 1, 0.0),
            ("c", 8, 0, 0.1),
            ("d", 8, 1, 0.1),
        )
    ]
    found = compared(*runs, pool=True)
    assert (found["exact"].n, found["similarity"].n) == (16, 7)


def test_the_command_draws_runs_of_any_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    a = write_run(tmp_path / "[bold] a $x_", [1, 0] * 8)
    b = write_run(tmp_path / "b", [1, 1] * 8, group_size=8)
    cli.main(["compare", str(a), str(b), "--plot", str(tmp_path / "c.png")])
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "argv", [["a", "nowhere"], ["a", "."], ["a", "b", "--plot", "a/metrics.jsonl"]]
)
def test_misuse_ends_with_code_2_and_writes_nothing(
    tmp_path: Path, argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "a", [1, 0])
    write_run(tmp_path / "b", [1, 0])
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as stop:
        cli.main(["compare", *argv])
    assert stop.value.code == 2
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
