"""Write a page about runs: curves, settings, findings and samples.

minigrpo report RUN [RUN ...] --out report.html

The page is one file that loads nothing else. Charts are computed here as SVG coordinates, and
report.html.j2 draws them; jinja2 escapes every text of a run. Several runs share each chart.
"""

import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro
from jinja2 import Environment, FileSystemLoader
from pydantic import Field

from ..config import Config, Group
from ..runtime.console import Console
from ..runtime.logging import SAMPLES, read_jsonl
from ..runtime.stats import SAMPLED, wilson
from ..types import ConfigError
from .doctor import diagnose
from .runs import Run, Warn, differing, is_number, read_runs

# each has a contrast of at least 3 with the cards of both themes
COLORS = "#2f7fd6", "#d9741a", "#2e9e6b", "#b85cc4", "#a9821f", "#3a93a8", "#d1495b", "#7d828b"
WIDTH, HEIGHT, LEFT, BOTTOM = 400, 190, 50, 20  # of a chart, and of the room for its numbers
FEW, MOST_POINTS = 20, 100  # up to so many points are dots; more than that are averaged
MOST_SAMPLES, MOST_COMPLETIONS, LONGEST = 24, 32, 4000  # groups, completions, characters
OWN = ("out_dir", "resume", "stop_after")  # settings that no other run would take over


class Panel(NamedTuple):
    """Charts of the page: one for each metric whose name the pattern fits."""

    pattern: str  # SUCCESS stands for the measure of right answers
    title: str  # {} is what stands at the pattern's *
    about: str = ""
    held_out: bool = False  # of eval.jsonl, not of metrics.jsonl


PANELS = {
    "Does it learn?": (
        Panel(
            "SUCCESS" + SAMPLED, "Right answers, sampled", "Held out, with 95 % intervals.", True
        ),
        Panel("SUCCESS", "Right answers, greedy", "Held out, with 95 % intervals.", True),
        Panel("reward", "Reward in training", "Mean over all completions of a step."),
        Panel("reward" + SAMPLED, "Reward, held out", "Sampled.", True),
        Panel("rewards/*/mean", "Reward function {}", "Mean in training, before its weight."),
        Panel("pass@*", "pass@{}", "Held out.", True),
        Panel("SUCCESS/*", "Right answers: {}", "Held out, greedy, of one kind.", True),
        Panel("*" + SAMPLED, "{}, held out", "Sampled.", True),
    ),
    "Is the policy healthy?": (
        Panel("frac_reward_zero_std", "Groups of equal rewards", "They teach nothing."),
        Panel("entropy", "Entropy", "Nats per token. A fall to 0 ends exploration."),
        Panel("kl", "KL to the initial model", "Nats per token."),
        Panel("completions/mean_length", "Length", "Tokens per completion."),
        Panel("completions/clipped_ratio", "Cut off", "Share that reaches --max-new-tokens."),
        Panel("clip_ratio/*_mean", "Clipped ratios, {}", "Share of tokens."),
        Panel("grad_norm", "Gradient norm", "Before it is clipped."),
        Panel("learning_rate", "Learning rate"),
        Panel("loss", "Loss", "About 0 is right with one update per rollout."),
        Panel("sampling/logp_difference_mean", "Sampler and trainer", "Difference of log-probs."),
        Panel("rewards/*/failures", "Failures of {}", "Completions per step."),
        Panel("skipped_steps", "Skipped steps", "So far."),
    ),
    "What does it cost?": (
        Panel("step_time", "Seconds per step"),
        Panel("time/*", "Seconds: {}"),
        Panel("memory/peak_mib", "Memory", "Peak MiB of the process."),
        Panel("tokens/run", "Tokens per update", "Distinct ones, which the model runs."),
    ),
}

# --- curves ---------------------------------------------------------------------------------------


def charts_of(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """The charts of each group of panels, without metrics that are missing or always 0."""
    success, shown = runs[0].success, set()
    groups: dict[str, list[dict[str, Any]]] = {group: [] for group in PANELS}
    for group, panel in ((key, panel) for key, panels in PANELS.items() for panel in panels):
        pattern = panel.pattern.replace("SUCCESS", success)
        logs = [run.evaluations if panel.held_out else run.metrics for run in runs]
        for name in dict.fromkeys(name for log in logs for record in log for name in record):
            if (panel.held_out, name) in shown or not fnmatchcase(name, pattern):
                continue
            shown.add((panel.held_out, name))
            is_share = panel.held_out and name.removesuffix(SAMPLED) == success
            lines = [line_of(run, name, panel.held_out, is_share) for run in runs]
            if any(line.values.any() for line in lines):
                start, _, end = pattern.partition("*")
                title = panel.title.format(name[len(start) : len(name) - len(end)])
                groups[group].append({"title": title, "about": panel.about, **chart(lines)})
    return groups


class Line(NamedTuple):
    """A metric of one run."""

    run: str
    steps: np.ndarray  # [n]
    values: np.ndarray  # [n]
    ends: np.ndarray  # [2, n], of 95 % intervals; [2, 0] without them


def line_of(run: Run, name: str, held_out: bool, is_share: bool) -> Line:
    """A metric of a run; of more than MOST_POINTS, each point is the mean of some neighbours."""
    if is_share:
        steps, values, sizes = run.shares(name)
        found = [wilson(share, n) for share, n in zip(values, sizes, strict=True)]
        return Line(run.name, steps, values, np.array([(x.low, x.high) for x in found]).T)
    parts = [np.array_split(x, MOST_POINTS) for x in run.points(name, held_out=held_out)]
    steps, values = (np.array([part.mean() for part in x if len(part)]) for x in parts)
    return Line(run.name, steps, values, np.zeros((2, 0)))


class Axis(NamedTuple):
    """A range of numbers, and the places of its ends in a chart."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def of(cls, series: Sequence[np.ndarray], start: float, end: float) -> "Axis":
        known = np.concatenate([values.ravel() for values in series])
        low, high = float(known.min()), float(known.max())
        room = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
        return cls(low - room, high + room, start, end)

    def at(self, values: np.ndarray) -> list[float]:
        """Places of values, in tenths of a pixel."""
        share = (values - self.low) / (self.high - self.low)
        return np.round(self.start + share * (self.end - self.start), 1).tolist()

    def ticks(self) -> list[tuple[float, str]]:
        """Places and texts of some round numbers."""
        rough = (self.high - self.low) / 4
        unit = 10.0 ** math.floor(math.log10(rough))
        step = unit * min((1, 2, 5, 10), key=lambda factor: abs(factor * unit - rough))
        numbers = np.arange(math.ceil(self.low / step), math.floor(self.high / step) + 1) * step
        return list(zip(self.at(numbers), (f"{x:.6g}" for x in numbers), strict=True))


def chart(lines: Sequence[Line]) -> dict[str, Any]:
    """The SVG coordinates of lines and ticks, and what a pointer over the chart reads."""
    xs = Axis.of([line.steps for line in lines], LEFT, WIDTH - 8)
    ys = Axis.of([x for line in lines for x in (line.values, line.ends)], HEIGHT - BOTTOM, 8)
    drawn, hover = [], []
    for line in lines:
        x, y = xs.at(line.steps), ys.at(line.values)
        points = list(zip(x, y, strict=True))
        bars = list(zip(x, *map(ys.at, line.ends), strict=False))
        drawn.append({"points": points, "dots": len(points) <= FEW, "bars": bars})
        pairs = zip(line.steps, line.values, strict=True)
        texts = [f"step {step:.0f}: {value:.4g}" for step, value in pairs]
        hover.append({"run": line.run, "x": x, "text": texts})
    return {"lines": drawn, "x": xs.ticks(), "y": ys.ticks(), "hover": json.dumps(hover)}


# --- words and samples ----------------------------------------------------------------------------


def result_of(run: Run) -> str:
    """The share of right held-out answers, or the reward or loss where none was measured."""
    _, values, sizes = run.shares(run.success + SAMPLED)
    if not len(values):
        name = "loss" if run.config.supervised else "reward"
        return "mean {} in training: {:.3g} to {:.3g}".format(name, *run.ends(name))
    last = wilson(values[-1], sizes[-1])
    shares = f"{values[0]:.1%} to {last.value:.1%} [{last.low:.1%}, {last.high:.1%}]"
    return f"{run.success}, held out and sampled: {shares}"


def changed_settings(runs: Sequence[Run]) -> list[list[str]]:
    """A setting, its default for the first run's task and its value in each run; they differ."""
    task = runs[0].config.task
    configs = [Config.of(task=task.name, data=task.data), *(run.config for run in runs)]
    return [row for row in differing([x.flat() for x in configs]) if row[0] not in OWN]


def samples_of(run: Run, warn: Warn) -> dict[str, list[list[Mapping[str, Any]]]]:
    """Evenly spaced groups of training, and held-out prompts with their answers over the run."""
    file = run.folder / SAMPLES
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in read_jsonl(file, warn) if file.exists() else ():
        is_held_out = record.get("source") == "held_out"
        key = is_held_out, "" if is_held_out else str(record.get("step")), str(record.get("prompt"))
        shown = {name: str(x)[:LONGEST] for name, x in record.items() if isinstance(x, str)}
        groups.setdefault(key, []).append({**record, **shown})
    train, held_out = (
        [rows for (source, *_), rows in groups.items() if source is x] for x in (False, True)
    )
    return {"Groups in training": evenly(train), "The same held-out prompts": evenly(held_out)}


def evenly(items: Sequence[list[Any]]) -> list[list[Any]]:
    """At most MOST_SAMPLES of the lists, evenly spaced, the first and the last among them."""
    places = np.linspace(0, len(items) - 1, min(len(items), MOST_SAMPLES)).round()
    return [items[int(i)][:MOST_COMPLETIONS] for i in places]


# --- the command ----------------------------------------------------------------------------------


class Arguments(Group):
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, Field(min_length=1)]
    """Folders of runs."""
    out: Path = Path("report.html")
    """The page."""


def render(runs: Sequence[Run], warn: Warn) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    environment.filters["number"] = lambda value: f"{value:.4g}" if is_number(value) else ""
    return environment.get_template("report.html.j2").render(
        runs=runs,
        colors=[COLORS[number % len(COLORS)] for number in range(len(runs))],
        results=[result_of(run) for run in runs],
        findings=[diagnose(run) for run in runs],
        samples=[samples_of(run, warn) for run in runs],
        groups=charts_of(runs),
        changed=changed_settings(runs),
        size={"width": WIDTH, "height": HEIGHT, "left": LEFT, "bottom": BOTTOM},
    )


def main(argv: Sequence[str], prog: str) -> None:
    arguments = tyro.cli(Arguments, args=argv, prog=prog, description=__doc__)
    if arguments.out.suffix not in (".html", ".htm"):  # a slip must not cost a run's log
        raise ConfigError(f"--out must end with .html, got {arguments.out}")
    console = Console()
    html = render(read_runs(arguments.runs, console.warn), console.warn)
    arguments.out.write_text(html, encoding="utf-8", errors="replace")
    console.say(f"wrote {arguments.out} ({len(html) / 1e6:.1f} MB)")
