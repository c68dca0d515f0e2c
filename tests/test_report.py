"""The page of `minigrpo report` as HTML; test_report_browser.py opens it."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minigrpo.runtime.measures import OTHER_EXAMPLES
from minigrpo.runtime.samples import explainer, texts_of
from minigrpo.runtime.text import parse_json
from minigrpo.tasks.own import load_own_task
from minigrpo.tools import report
from minigrpo.tools.page import facts
from minigrpo.tools.page.charts import COLORS, charts
from minigrpo.tools.page.panels import GROUPS, label
from minigrpo.tools.page.render import Source, evaluated, of_training
from minigrpo.tools.page.samples import ROOM, evenly, fit, samples
from minigrpo.tools.run_data import RunData, read_run

from .test_misuse_tools import refused
from .test_reliability import make

PAGE = Path(facts.__file__).parent
TRUE = "8/8/8/8/4P3/8/8/K6k b - e3 0 1+0.001+0+0"
WRONG = "8/8/8/8/3P4/8/8/K6k b - d3 0 1+0.001+0+0"
HOSTILE = '</script><script>document.title="taken"</script><img src=x onerror=alert(1)>\ud800'


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def completion(step: int, g: int, text: str, **more: Any) -> dict[str, Any]:
    """A line of samples.jsonl, whose tokens are the characters of the text."""
    return {
        "step": step,
        "source": "train",
        "index": step,
        "kind": "quiet" if step % 20 else "capture",
        "prompt": f"A: position {step}",
        "truth": TRUE,
        "completion": text,
        "parts": {"exact": float(text == TRUE), "similarity": 0.5},
        "reward": float(text == TRUE),
        "advantage": 1.0 - g,
        "prompt_tokens": 12,
        "token_ids": [ord(c) for c in text],
        "tokens": list(text),
        **more,
    }


def held_out(step: int, index: int, decoding: str, text: str) -> dict[str, Any]:
    more = {
        "source": "held_out",
        "index": index,
        "decoding": decoding,
        "right": float(text == TRUE),
    }
    record = completion(step, 0, text, **more)
    return {name: record[name] for name in record if name not in ("advantage", "tokens")} | {
        "prompt": f"A: held out {index}",
        "kind": "capture" if index else "quiet",
    }


def write_run(folder: Path, steps: int = 40, texts: tuple[str, ...] = (TRUE, WRONG, TRUE)) -> Path:
    """The files of a made-up run of chess."""
    folder.mkdir(parents=True)
    metrics = [
        {
            "step": step,
            "reward": step / steps,
            "rewards/exact/mean": 0.25,
            "kl": 0.0,
            "time/rollout": 1.0,
            "time/update": 2.0,
            "step_time": 3.0,
        }
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text(lines(metrics))
    shares = {0: 0.25, steps: 0.75}
    (folder / "eval.jsonl").write_text(
        lines(
            [
                {"step": step, "n": 100, "exact_sampled": x, "exact": x, "exact/quiet": x}
                for step, x in shares.items()
            ]
        )
    )
    records = [
        completion(step, g, text)
        for step in range(10, steps + 1, 10)
        for g, text in enumerate(texts)
    ]
    for step, text in ((0, WRONG), (steps, TRUE)):
        for index in range(3):
            for decoding in ("greedy", "sampled"):
                records.append(held_out(step, index, decoding, WRONG if index == 2 else text))
    (folder / "samples.jsonl").write_text(lines(records))
    (folder / "summary.json").write_text(
        json.dumps({"status": "finished", "step": steps, "wall_seconds": 60.0})
    )
    (folder / "config.toml").write_text(
        '[sampling]\ngroup_size = 3\n\n[versions]\npython = "3.11"\n', encoding="utf-8"
    )
    return folder


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run whose texts try to leave their place."""
    pytest.importorskip("bokeh")
    folder = tmp_path_factory.mktemp("runs")
    run = write_run(folder / "a<b>", texts=(TRUE, HOSTILE, WRONG))
    report.main([str(run), "--out", str(folder / "page.html")])
    return (folder / "page.html").read_text(encoding="utf-8")


def data_of(html: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_an_answer_is_called_the_truth_only_where_a_right_completion_equals_it(
    html: str, tmp_path: Path
) -> None:
    (found,) = data_of(html)
    assert found["answer"] == "truth"
    evaluations = write_run(tmp_path / "run") / "eval.jsonl"
    evaluations.write_text(evaluations.read_text().replace('"exact', '"solved'))
    report.main([str(tmp_path / "run"), "--out", str(tmp_path / "page.html")])
    (found,) = data_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert found["answer"] == "answer for --loss nll"


def test_the_page_has_its_parts_and_is_small(html: str) -> None:
    for words in (
        "25.0% [17.5, 34.3]",
        "<strong",
        "75.0% [65.7, 82.5]",
        "+50.0 points",
        "finished after 40 steps in 60 s",
        "Reward parts",
        "--group-size",
        "minigrpo train --group-size 3",
        "<dt>python</dt>",
        'id="piece-K"',
    ):
        assert words in html, words
    assert len(html.encode()) < 2.5e6


def test_the_page_names_no_address_that_a_browser_would_ask_for(html: str) -> None:
    outside = re.sub(r"(<script[^>]*>).*?</script>", r"\1", html, flags=re.DOTALL)
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"'](?!data:)", outside)
    assert "@import" not in html.split("</style>")[0]


def test_a_short_run_is_not_called_healthy(tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    for steps in (3, 40):
        run = write_run(tmp_path / str(steps), steps=steps)
        report.main([str(run), "--out", str(tmp_path / "page.html")])
        page = (tmp_path / "page.html").read_text()
        said = "rules find nothing wrong; trends are judged from 20 steps." in page
        assert said == (steps == 3)


def test_texts_of_a_run_stay_texts(html: str) -> None:
    assert 'document.title="taken"</script>' not in html and "<img src=x" not in html
    assert "a<b>" not in html.replace("a\\u003cb>", "") and "a&lt;b&gt;" in html
    (run,) = data_of(html)
    # half of a surrogate pair comes back as it was: JSON spells it
    assert HOSTILE in [one["text"] for one in run["train"][0]["completions"]]


def test_groups_and_prompts_hold_what_the_browser_draws(html: str) -> None:
    (run,) = data_of(html)
    assert [group["step"] for group in run["train"]] == [10, 20, 30, 40]
    first = run["train"][0]["completions"][0]
    assert "".join(run["pieces"][token] for token in first["tokens"]) == TRUE
    wrong = run["train"][0]["completions"][2]
    assert wrong["board"].count("P") == 1 and wrong["board"] != run["train"][0]["board"]
    assert wrong["explained"].startswith("2 squares; en passant")
    assert [len(prompt["rows"]) for prompt in run["held_out"]] == [2, 2, 2]
    assert [row["greedy"]["right"] for row in run["held_out"][0]["rows"]] == [0, 1]


def test_there_is_room_for_a_long_run(tmp_path: Path) -> None:
    texts = tuple("x" * 900 + str(g) for g in range(16))
    run = write_run(tmp_path / "long", steps=120, texts=texts)
    found = samples(run, warn=lambda text: None, room=ROOM // 2)
    assert len(json.dumps(found)) < 0.6 * ROOM
    steps = [group["step"] for group in found["train"]]
    assert found["num_train"] == 12 > len(steps) > 5
    assert steps[0] == 10 and steps[-1] == 120


def test_what_does_not_fit_is_left_out_evenly() -> None:
    assert evenly(10, 4) == [0, 3, 6, 9] and evenly(3, 3) == [0, 1, 2] and evenly(5, 1) == [4]
    assert fit(["x" * 98] * 50, 10_000) == ["x" * 98] * 50
    assert len(fit(list(map(str, range(1000))), 600)) in range(60, 130)
    assert fit(["x" * 100], 1) == ["x" * 100]


def luminance(color: str) -> float:
    """Relative luminance of #rrggbb, as WCAG 2 defines it."""
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_curve_is_seen_on_the_cards_of_both_themes() -> None:
    cards = re.findall(r"--card: (#\w{6})", (PAGE / "page.css").read_text())
    assert len(cards) == 2
    for card in cards:
        for color in COLORS:
            dark, light = sorted((luminance(card), luminance(color)))
            assert (light + 0.05) / (dark + 0.05) >= 3, (card, color)


# --- words ----------------------------------------------------------------------------------------


def made_up(**changes: Any) -> RunData:
    from minigrpo import Config

    options = {"evaluations": [], "summary": {}, **changes}
    settings = Config.of(**options.pop("settings", {})).flat()
    metrics = [{"step": step, "reward": 0.5, "loss": 1.0} for step in range(1, 41)]
    return RunData("made-up", settings, metrics, **options)


def test_the_result_without_evaluations_is_the_reward_or_the_loss() -> None:
    assert facts.result(made_up()).what == "Mean reward in training"
    assert facts.result(made_up(settings={"loss": "nll"})).what == "Mean loss in training"
    one = facts.result(made_up(evaluations=[{"step": 0, "n": 10, "exact_sampled": 0.5}]))
    assert one.after == "50.0% [23.7, 76.3]" and not one.before and not one.change
    odd = [{"step": 0, "n": None, "exact_sampled": None}, {"step": 1, "n": "x", "exact_sampled": 2}]
    assert facts.result(made_up(evaluations=odd)).after == "200.0%"


def test_the_result_names_both_numbers_of_examples_where_they_differ() -> None:
    evaluations = [{"step": s, "n": n, "exact_sampled": 0.5} for s, n in ((0, 8), (4, 40))]
    of = facts.result(made_up(evaluations=evaluations)).details[0]
    assert of.startswith("of 8 held-out examples before, 40 after, sampled at temperature 1;")
    assert of.endswith(OTHER_EXAMPLES)
    same = facts.result(made_up(evaluations=[*evaluations[1:], *evaluations[1:]])).details[0]
    assert same == "of 40 held-out examples, sampled at temperature 1; 95 % interval"


def test_a_metric_and_a_measure_of_one_name_have_their_own_labels() -> None:
    run = made_up(evaluations=[{"step": 0, "n": 8, "exact_sampled": 0.5, "reward": 1.0}])
    panels = {panel.title: panel for panel in GROUPS["Does it learn?"]}
    expected = {
        ("Reward in training", "reward"): "reward",
        ("Reward, held out", "reward"): "greedy",
        ("Right answers, held out", "exact_sampled"): "exactly right, sampled",
        ("Reward parts", "rewards/exact/mean"): "exact",
        ("By kind of question", "exact/quiet"): "quiet",
    }
    assert {pair: label(panels[pair[0]], pair[1], run) for pair in expected} == expected


def test_a_run_that_goes_on_is_not_called_finished() -> None:
    assert facts.status(made_up()) == "at step 40 of 350; it is going, or was killed"
    stopped = {"status": "stopped", "exit_reason": "SIGTERM", "wall_seconds": 7200.0}
    assert facts.status(made_up(summary=stopped)) == "stopped (SIGTERM) after 40 steps in 2.0 h"


def test_the_command_makes_the_run_again() -> None:
    own = {"task": "countdown", "group_size": 5, "fused_optimizer": False, "rewards": "my own.py"}
    run = made_up(settings={**own, "tokenizer": "chess"})
    words = facts.command(run)
    assert words.startswith("minigrpo train --task countdown ")
    for flag in ("--group-size 5", "--no-fused-optimizer", "--rewards 'my own.py'"):
        assert flag in words
    assert "--max-new-tokens" not in words  # the task's own setting


def test_stated_confidences_have_a_reliability_diagram() -> None:
    pytest.importorskip("bokeh")

    def group(step: int, *parts: dict[str, Any]) -> dict[str, Any]:
        return {"step": step, "completions": [{"parts": x} for x in parts]}

    right = {"format": 1, "correct": 1, "confidence": 0.9}
    wrong = {"format": 1, "correct": 0, "confidence": 0.3}
    other_form = {"format": 0, "correct": 0, "confidence": 0}
    odd = {"format": 1, "correct": 1, "confidence": None}
    logged = {
        "train": [group(10, wrong), group(90, right, wrong, odd), group(100, right, other_form)]
    }
    answers = of_training(logged)
    assert answers is not None and answers.where == "steps 90 to 100"
    assert answers.confidence.tolist() == [0.9, 0.3, 0.9] and answers.correct.tolist() == [1, 0, 1]
    card = charts([made_up()], [answers])["Does it learn?"][-1]
    assert card.title == "Reliability"
    assert card.legend[0][1] == "made-up, steps 90 to 100: 3 answers, ECE 0.167"
    assert of_training({"train": [group(10, other_form)]}) is None
    assert of_training({"train": []}) is None


def test_the_reliability_diagram_is_of_the_last_evaluation(tmp_path: Path) -> None:
    source = Source(tmp_path, made_up())
    assert evaluated(source) is None
    sure, unsure = ({"format": 1, "correct": x, "confidence": x} for x in (1, 0))
    file, both = tmp_path / "held_out.jsonl", {"step": 7, "greedy": sure, "sampled": unsure}
    file.write_text(lines([both, both]))
    found = evaluated(source)
    assert found is not None and found.where == "held out at step 7, sampled"
    assert found.confidence.tolist() == found.correct.tolist() == [0, 0]
    file.write_text(lines([both, {**both, "sampled": {**unsure, "correct": 0.5}}]))
    found = evaluated(source)
    assert found is not None and found.where.endswith("greedy") and found.correct.tolist() == [1, 1]
    file.write_text("no JSON\n\n")
    assert evaluated(source) is None and "held_out.jsonl, line 1: is not JSON" in source.notices[0]


# --- reading --------------------------------------------------------------------------------------


def old_format(run: Path) -> None:
    """Samples as they were before groups were logged."""
    old = {"prompt": "p", "completion": "c", "truth": "t", "parts": {"exact": 0.0}, "reward": 0.0}
    (run / "samples.jsonl").write_text(lines([{"step": 10, **old}, {"step": 10, **old}]))


def odd_samples(run: Path) -> None:
    odd = completion(20, 0, "text", parts=7, token_ids=[1, 2], reward=None, truth=[], kind=3)
    endless = completion(30, 0, "text", parts={"exact": None}, advantage="x", prompt_tokens=-1.5)
    text = (
        lines([odd, endless, {"step": 30}])
        + '{"step": 40, "completion": "c", "reward": Infinity}\n'
    )
    (run / "samples.jsonl").write_text(text + "not JSON\n" + '{"step": 50, "comp')


def no_samples(run: Path) -> None:
    (run / "samples.jsonl").unlink()


def a_pipe(run: Path) -> None:
    (run / "samples.jsonl").unlink()
    os.mkfifo(run / "samples.jsonl")


@pytest.mark.parametrize(
    ("change", "groups", "said"),
    [(old_format, 1, 0), (odd_samples, 3, 1), (no_samples, 0, 0), (a_pipe, 0, 1)],
)
def test_samples_of_any_kind_are_read(
    tmp_path: Path, change: Callable[[Path], None], groups: int, said: int
) -> None:
    run, warnings = write_run(tmp_path / "run"), list[str]()
    change(run)
    found = samples(run, warnings.append)
    assert len(found["train"]) == groups and len(warnings) == said
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "at least one run"),
        (["nowhere"], "nowhere: no such folder"),
        (["folder"], "no metrics.jsonl in this folder"),
        (["run", "--out", "page.pdf"], "--out must end with .html, .htm"),
        (["run", "--every", "0"], "--every must be at least 1, got 0"),
    ],
)
def test_misuse_is_one_line(
    tmp_path: Path,
    argv: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("bokeh")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert words in refused(capsys, report, *argv)


def test_damage_of_a_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bokeh")
    run = write_run(tmp_path / "run")
    good = (run / "config.toml").read_text()
    for name, content, words in (
        ("config.toml", "[sampling]\ngroup_size = 3\n", "is cut off"),
        ("config.toml", good + "[future]\nx = 1\n", "unknown key 'future'"),
        ("eval.jsonl", '{"step": 0}\nx\n{"step": 1}\n', "eval.jsonl, line 2: is not JSON"),
        ("metrics.jsonl", "", "metrics.jsonl: has no records"),
    ):
        before = (run / name).read_text()
        (run / name).write_text(content)
        assert words in refused(capsys, report, run, "--out", tmp_path / "page.html")
        (run / name).write_text(before)
    assert not (tmp_path / "page.html").exists()


def test_without_bokeh_one_line_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bokeh", None)
    said = refused(capsys, report, tmp_path)
    assert "minigrpo report needs Bokeh: pip install 'minigrpo[report]'" in said


# --- watching -------------------------------------------------------------------------------------


def test_a_watched_page_is_written_until_the_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bokeh")
    run = write_run(tmp_path / "run")
    summary, metrics = (run / "summary.json"), (run / "metrics.jsonl")
    end, logged = summary.read_text(), metrics.read_text()
    summary.unlink()
    metrics.write_text("")  # no step yet
    happens = [lambda: metrics.write_text(logged), lambda: None, lambda: summary.write_text(end)]
    written = []
    monkeypatch.setattr(report.time, "sleep", lambda seconds: happens.pop(0)())
    monkeypatch.setattr(
        "minigrpo.tools.page.render.render",
        lambda sources, reload: written.append((len(sources[0].run.metrics), reload)) or "page",
    )
    report.main([str(run), "--out", str(tmp_path / "page.html"), "--watch", "--every", "7"])
    assert written == [(40, 7), (40, 0)]
    assert "has no records; waiting" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "page.html").read_text() == "page"


# --- what a run logs ------------------------------------------------------------------------------


def test_a_run_logs_whole_groups_and_the_same_held_out_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minigrpo.runtime.samples.STEPS_BETWEEN", 2)
    monkeypatch.setattr("minigrpo.runtime.samples.HELD_OUT", 3)
    trainer = make(tmp_path / "run", max_steps=2, eval_every=1)
    trainer.fit()
    records = [parse_json(x) for x in (tmp_path / "run" / "samples.jsonl").open()]
    group = [record for record in records if record["source"] == "train"]
    assert [record["step"] for record in group] == [2, 2, 2]  # --group-size 3
    for record in group:
        assert "".join(record["tokens"]).removesuffix("<|endoftext|>") == record["completion"]
        assert len(record["token_ids"]) == len(record["tokens"])
    rewards = np.array([record["reward"] for record in group])
    advantages = [record["advantage"] for record in group]
    assert np.allclose(np.argsort(advantages), np.argsort(rewards)) and abs(sum(advantages)) < 1e-5
    held = [record for record in records if record["source"] == "held_out"]
    asked = {step: [r["index"] for r in held if r["step"] == step] for step in (0, 1, 2)}
    assert asked == {step: [0, 0, 1, 1, 2, 2] for step in (0, 1, 2)}
    run = read_run(tmp_path / "run")
    (last,) = [r for r in run.evaluations if r["step"] == 2]
    right = [r["right"] for r in held if r["step"] == 2 and r["decoding"] == "greedy"]
    assert len(right) == 3 and sum(right) <= last[run.success] * last["n"]


def test_a_users_explain_cannot_end_a_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("""
from minigrpo.types import Example

class Mine:
    parts = {"right": 1.0}

    def __init__(self, seed):
        pass

    def train(self, number):
        return Example("1+1=", "2")

    held_out = train

    def score(self, example, text):
        return {"right": float(text == example.answer)}

    def explain(self, example, text):
        if text == "?":
            raise SystemExit(3)
        return "" if text == example.answer else f"{example.answer} is right"
""")
    task = load_own_task(str(file), 0)
    told, example = explainer(task), task.train(0)
    assert told(example, "2") == {} and told(example, "3") == {"explained": "2 is right"}
    assert "explain: SystemExit" in told(example, "?")["explained"]


def test_a_character_of_several_tokens_is_whole() -> None:
    class Bytes:
        def decode_bytes(self, ids: list[int], *, show_stops: bool = False) -> bytes:
            return bytes(ids)

    ids = list("aé♚".encode() + b"\xe2")
    found = texts_of(Bytes(), ids)  # type: ignore[arg-type]
    assert found == ["a", "", "é", "", "", "♚", "\N{REPLACEMENT CHARACTER}"]
