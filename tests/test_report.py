"""The page of `minigrpo report`: what it draws, and that nothing in a run can leave its place."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minigrpo.config import Config
from minigrpo.runtime.stats import wilson
from minigrpo.tools import cli
from minigrpo.tools.report import MOST_POINTS, MOST_SAMPLES, Axis, charts_of, evenly
from minigrpo.tools.runs import Run, read_run

from .test_compare import lines, write_run

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'{{ 7 * 7 }}\ud800\x1b[2J"
)
VOID = {"meta", "link", "br", "img", "line", "circle", "polyline"}


def sample(step: int, text: str, **more: Any) -> dict[str, Any]:
    """A line of samples.jsonl."""
    return {
        "step": step,
        "source": "train",
        "prompt": f"question {step}",
        "truth": "42",
        "completion": text,
        "parts": {"exact": 0.0},
        "reward": 0.5,
        "advantage": -1.0,
        **more,
    }


def held_out(step: int, number: int, text: str) -> dict[str, Any]:
    more = {"source": "held_out", "decoding": "greedy", "right": 0.0, "prompt": f"held {number}"}
    return sample(step, text, **more)


def run_with_samples(folder: Path, records: list[dict[str, Any]]) -> Path:
    run = write_run(folder, [1, 0] * 20)
    (run / "samples.jsonl").write_text(lines(records))
    return run


def page_of(*runs: Path) -> str:
    out = runs[0].parent / "page.html"
    cli.main(["report", *map(str, runs), "--out", str(out)])
    return out.read_text(encoding="utf-8")


class Parsed(HTMLParser):
    """The elements of a page; it fails on a tag that is not closed in its place."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def number_of(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.found)


def test_texts_of_a_run_stay_texts(tmp_path: Path) -> None:
    plain = run_with_samples(tmp_path / "plain", [sample(10, "text"), held_out(3, 0, "text")])
    odd = sample(10, HOSTILE, prompt=HOSTILE, truth=HOSTILE, explained=HOSTILE, parts={HOSTILE: 1})
    hostile = run_with_samples(tmp_path / "a<b>&", [odd, held_out(3, 0, HOSTILE)])
    (hostile / "metrics.jsonl").write_text(
        lines([{"step": 1, f"rewards/{HOSTILE}/mean": 0.5, "reward": 0.5, "step_time": 1}])
    )
    config = Config.of(group_size=8, task_args={"x": HOSTILE.replace("\ud800", "")})
    (hostile / "config.toml").write_text(config.as_toml())
    page, innocent = Parsed(page_of(hostile)), Parsed(page_of(plain))
    for tag in ("script", "img"):
        assert page.number_of(tag) == innocent.number_of(tag)
    assert not any(name.startswith("on") for _, attributes in page.found for name in attributes)
    shown = "".join(page.text)
    assert "</script><script>alert(1)</script>" in shown
    assert "49" not in shown.partition("alert(2)")[2][:30]  # the template in the text is not run
    assert "a<b>&" in shown


def test_the_page_asks_for_nothing_and_is_small(tmp_path: Path) -> None:
    records = [sample(step, "x" * 900) for step in range(10, 5000, 10) for _ in range(16)]
    run = run_with_samples(tmp_path / "long", records)
    names = [f"rewards/{i}/mean" for i in range(10)]
    metrics = [{"step": i, **dict.fromkeys(names, i % 7)} for i in range(1, 5001)]
    (run / "metrics.jsonl").write_text(lines(metrics))
    html = page_of(run)
    assert len(html) < 3e6
    page = Parsed(html)
    addresses = [x.get("src") or x.get("href") or "" for _, x in page.found]
    assert not [x for x in addresses if x and not x.startswith(("#", "data:"))]
    assert "@import" not in html and "url(" not in html
    assert page.number_of("details") <= MOST_SAMPLES + 2


def made_up(steps: int, **series: Any) -> Run:
    records = [
        {"step": i + 1, **{name.replace("__", "/"): float(x[i]) for name, x in series.items()}}
        for i in range(steps)
    ]
    return Run(Path("a"), "a", Config(), records)


def charts(*runs: Run) -> dict[str, dict[str, Any]]:
    return {chart["title"]: chart for group in charts_of(runs).values() for chart in group}


def test_a_curve_goes_through_its_points() -> None:
    (line,) = charts(made_up(3, reward=[0.0, 1.0, 0.25]))["Reward in training"]["lines"]
    points = np.array(line["points"])
    assert np.allclose(np.diff(points[:, 0]), points[1, 0] - points[0, 0], atol=0.2)
    heights = points[0, 1] - points[:, 1]  # y of SVG points down
    assert np.allclose(heights / heights[1], [0, 1, 0.25], atol=0.01)


def test_axes_have_round_numbers_at_their_places() -> None:
    rng = np.random.default_rng(0)
    for low, width in zip(rng.normal(size=50), 10 ** rng.uniform(-4, 6, 50), strict=True):
        axis = Axis.of([np.array([low, low + width])], 0, 100)
        ticks = axis.ticks()
        assert 2 <= len(ticks) <= 10
        for place, text in ticks:
            assert 0 <= place <= 100
            assert place == pytest.approx(axis.at(np.array([float(text)]))[0], abs=1)


def test_a_constant_has_a_chart_and_what_is_always_0_or_missing_has_none() -> None:
    found = charts(made_up(3, reward=[2, 2, 2], entropy=[0, 0, 0]))
    assert "Reward in training" in found
    assert not {"Entropy", "KL to the initial model"} & found.keys()


def test_a_long_run_is_averaged() -> None:
    noise = np.random.default_rng(0).normal(size=5000)
    for steps, number in ((5000, MOST_POINTS), (50, 50)):
        (line,) = charts(made_up(steps, reward=noise))["Reward in training"]["lines"]
        assert len(line["points"]) == number
    pairs = [(float(x), float(y)) for x, y in line["points"]]
    assert pairs == sorted(pairs)


def test_shares_have_the_intervals_of_wilson(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [1, 0, 0, 0] * 10), print)
    (line,) = charts(run)["Right answers, sampled"]["lines"]
    (_, y), (_, low, high) = line["points"][-1], line["bars"][-1]
    share = wilson(0.25, 40)
    assert low > y > high  # y of SVG points down
    assert (low - y) / (y - high) == pytest.approx(
        (share.value - share.low) / (share.high - share.value), rel=0.05
    )


def test_several_runs_share_each_chart(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", [1, 0]), write_run(tmp_path / "b", [1, 1], group_size=8)
    runs = [read_run(path, print) for path in (a, b)]
    assert all(len(chart["lines"]) == 2 for chart in charts(*runs).values())
    assert "group_size" in page_of(a, b)


def test_a_run_that_has_hardly_begun_has_a_page(tmp_path: Path) -> None:
    run = tmp_path / "begun"
    run.mkdir()
    (run / "config.toml").write_text("")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n{"step": 2, "lo')
    Parsed(page_of(run))


def test_metrics_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [1, 0])
    odd = {"reward": "x", "entropy": [1], "kl": None, "loss": True, "grad_norm": 10**400}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, **odd, "step_time": 2}) + "\n")
    read = read_run(run, print)
    assert read.metrics[-1] == {"step": 4, "step_time": 2}
    Parsed(page_of(run))


def test_samples_are_evenly_spaced_with_both_ends() -> None:
    for number in (0, 1, 2, MOST_SAMPLES, MOST_SAMPLES + 1, 100):
        found = [x for (x,) in evenly([[i] for i in range(number)])]
        assert len(found) == min(number, MOST_SAMPLES)
        assert found == sorted(set(found))
        if number > 1:
            assert (found[0], found[-1]) == (0, number - 1)


@pytest.mark.parametrize("out", ["metrics.jsonl", "page", "nowhere/page.html"])
def test_only_a_page_is_overwritten(
    tmp_path: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "a", [1, 0])
    before = (run / "metrics.jsonl").read_bytes()
    monkeypatch.chdir(run)
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(run), "--out", out])
    assert stop.value.code == 2
    assert (run / "metrics.jsonl").read_bytes() == before
