"""The page of `minigrpo report`: what it draws, and that nothing in a run can leave its place."""

import html
import io
import itertools
import re
from pathlib import Path
from typing import Any

from minigrpo.config import Config
from minigrpo.run.logging import differing, read_run
from minigrpo.statistics import wilson
from minigrpo.tools import cli
from minigrpo.tools.report import MAX_SAMPLES, figures_of, plot_curve

from .test_compare import COSTS, write_run
from .test_doctor import made_up
from .tiny import toml, write_jsonl

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'{{ 7 * 7 }}\ud800\x1b[2J"
)


def sample(step: int, text: str, **more: Any) -> dict[str, Any]:
    """A line of samples.jsonl."""
    return {
        "step": step,
        "source": "train",
        "index": 0,
        "messages": [],
        "prompt": f"question {step}",
        "truth": "42",
        "completion": text,
        "rewards": {"exact": 0.0},
        "reward": 0.5,
        "advantage": -1.0,
        **more,
    }


def held_out(step: int, number: int, text: str) -> dict[str, Any]:
    more = {"source": "held_out", "decoding": "greedy", "right": 0.0, "prompt": f"held {number}"}
    return sample(step, text, **more)


def run_with_samples(folder: Path, records: list[dict[str, Any]]) -> Path:
    run = write_run(folder, [1, 0] * 20)
    write_jsonl(run / "samples.jsonl", records)
    return run


def page_of(*runs: Path) -> str:
    out = runs[0].parent / "page.html"
    cli.main(["report", *map(str, runs), "--out", str(out)])
    return out.read_text(encoding="utf-8")


def test_texts_of_a_run_stay_texts(tmp_path: Path) -> None:
    said = [{"role": HOSTILE, "content": HOSTILE}, {"role": "tool", "content": "42 degrees"}]
    odd = sample(10, HOSTILE, prompt=HOSTILE, truth=HOSTILE, parts={HOSTILE: 1}, dialogue=said)
    run = run_with_samples(tmp_path / "a<b>&", [odd, held_out(3, 0, HOSTILE)])
    printable = "".join(filter(str.isprintable, HOSTILE))
    metric = f"rewards/{printable}/mean"
    write_jsonl(run / "metrics.jsonl", [{"step": 1, metric: 0.5, **COSTS}])
    (run / "eval.jsonl").unlink()
    config = Config.of(group_size=8, task_args={"x": HOSTILE.replace("\ud800", "")})
    (run / "config.toml").write_text(toml(config))
    page = page_of(run)
    assert page.count("<svg") == 3
    assert not re.search(r"<script|<img|<[^>]* on\w+=", page)
    shown = html.unescape(page)
    assert "</script><script>alert(1)</script>" in shown
    assert "{{ 7 * 7 }}" in shown  # the template in the text is not run
    assert "a<b>&" in shown
    assert "42 degrees" in shown


def test_held_out_prompts_of_equal_texts_stay_apart(tmp_path: Path) -> None:
    lines = []
    for step, index in itertools.product((1, 2), range(3)):
        lines.append({**held_out(step, 0, f"answer {index}"), "index": index})
    page = page_of(run_with_samples(tmp_path / "a", lines))
    groups = [re.findall(r"answer \d", group) for group in page.split("<details>")[1:]]
    assert groups == [[f"answer {index}"] * 2 for index in range(3)]


def test_the_page_asks_for_nothing_and_is_small(tmp_path: Path) -> None:
    records = [sample(step, "x" * 900) for step in range(10, 5000, 10) for _ in range(16)]
    run = run_with_samples(tmp_path / "long", records)
    (run / "eval.jsonl").unlink()
    names = [f"rewards/{i}/mean" for i in range(3)]
    metrics = [{"step": i, **COSTS, **dict.fromkeys(names, i % 7)} for i in range(1, 5001)]
    write_jsonl(run / "metrics.jsonl", metrics)
    page = page_of(run)
    assert len(page) < 2e6
    assert not re.search(r'(src|href)="(?!#|data:|")', page)
    assert not re.search(r"@import|url\((?!#)", page)
    assert page.count("<details") == MAX_SAMPLES


def test_a_metric_has_one_figure_and_one_that_is_always_0_has_none() -> None:
    run = made_up({"reward": [2, 2, 2], "entropy": [0, 0, 0]}, [])
    assert len(figures_of([run])) == 1


def test_several_runs_share_each_figure_and_shares_have_wilsons_intervals(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [1, 0, 0, 0] * 10)
    b = write_run(tmp_path / "b", [1, 1], group_size=8)
    runs = [read_run(a), read_run(b), made_up({"reward": range(6)}, [])]
    assert runs[0].headlines == [wilson(0.25, 40)] * 2
    assert runs[0].curve("eval/exact_sampled") == {0: 0.25, 3: 0.25}
    assert runs[0].curve("reward")[3] == 1
    plot_curve({run.name: [run] for run in runs}, "reward", out := io.StringIO())
    lines = re.findall(r'<g id="line2d_\d+">\s*<path d="([^"]+)" clip', out.getvalue())
    points = [len(re.findall(r"[ML] \S+ \S+", line)) for line in lines]
    assert [number for number in points if number > 2] == [3, 3, 6]  # other lines are the grid's
    assert ["group_size", "16", "8", "16"] in differing([run.config.flat() for run in runs])
