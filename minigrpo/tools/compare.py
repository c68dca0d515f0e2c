"""Tell what differs between runs, and whether the difference is more than chance.

minigrpo compare RUN RUN ... [--pool] [--plot curves.png]

It prints the settings that differ, the first and the last evaluation of each run, and paired tests:
each run against the first one, example by example, by the answers in held_out.jsonl. With --pool
runs that differ in their seed alone are one setting, and three seeds or more decide, not examples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import tyro
from pydantic import Field

from ..config import Group
from ..runtime.console import Console
from ..runtime.logging import HELD_OUT, read_jsonl
from ..runtime.stats import SAMPLED, Difference, difference, over_seeds
from ..types import ConfigError
from .runs import Run, Warn, differing, is_number, read_runs

Answers = Sequence[Mapping[str, Any]]  # the lines of held_out.jsonl, one per held-out example
HOWS = ("sampled", "greedy")
LEAST_SEEDS = 3  # from which the seeds decide
# settings that a comparison of results is not about
BESIDE = {"seed", "out_dir", "resume", "stop_after", "keep_last", "profile", "track"}
# settings that say what the reward is
REWARD = ("task", "task_args", "rewards", "reward_weights")
COLUMNS = ("", "first", "second", "change", "low", "high", "won/lost", "p")
ENDS = ("", "steps", "sampled", "to", "greedy", "to", "s/step", "peak MiB")


@dataclass(frozen=True)
class Setting:
    """The runs of one setting, by seed, and the answers of each run's last evaluation."""

    name: str
    runs: Sequence[Run]
    answers: Sequence[Answers]

    @property
    def flat(self) -> dict[str, Any]:
        """What its results depend on, besides the seed."""
        flat = self.runs[0].config.flat()
        return {name: x for name, x in flat.items() if name not in BESIDE}


def settings_of(runs: Sequence[Run], pool: bool, warn: Warn) -> list[Setting]:
    """The settings, in the order of their first runs; without `pool`, each run is one."""
    groups: dict[str, list[Run]] = {}
    for number, run in enumerate(runs):
        same = repr(Setting("", [run], []).flat) if pool else str(number)
        groups.setdefault(same, []).append(run)
    found = []
    for group in groups.values():
        group.sort(key=lambda run: run.config.run.seed)
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        answers = [read_answers(run, warn) for run in group]
        found.append(Setting(group[0].name + more, group, answers))
    return found


def read_answers(run: Run, warn: Warn) -> Answers:
    """The answers that a run keeps; none, with a warning, if they are not whole."""
    file = run.folder / HELD_OUT
    lines = read_jsonl(file, warn) if file.exists() else []
    whole = [x for x in lines if all(isinstance(x.get(how), dict) for how in HOWS)]
    if not whole or len(whole) < len(lines):
        warn(f"{file}: has no answers, or damaged ones, so {run.name} has no paired test")
        return []
    return whole


# --- tests ----------------------------------------------------------------------------------------


def differences(first: Setting, second: Setting) -> dict[str, Difference]:
    """Each measure that both settings have, tested on the held-out examples that they share.

    Runs are paired in the order of their seeds. Seeds that were asked the same examples are
    averaged example by example, others are joined. The names are those of eval.jsonl.
    """
    pairs, tests = [], {}
    for one, other in zip(first.answers, second.answers, strict=False):
        n = min(len(one), len(other))
        if n and asked(one[:n]) == asked(other[:n]):
            pairs.append((one[:n], other[:n]))
    join = np.stack if len({asked(one) for one, _ in pairs}) == 1 else np.concatenate
    same_reward = all(first.flat[name] == second.flat[name] for name in REWARD)
    for measure in dict.fromkeys(name for one, _ in pairs for name in one[0]["greedy"]):
        for how in HOWS if same_reward or measure != "reward" else ():
            values = [[values_of(x, how, measure) for x in pair] for pair in pairs]
            found = difference(*(join(side) for side in zip(*values, strict=True)))
            seeds = [x for pair in values if (x := difference(*pair))]
            if found and len(seeds) == len(pairs):
                tests[measure + SAMPLED * (how == "sampled")] = decided(found, seeds)
    return tests


def asked(answers: Answers) -> tuple[str, ...]:
    """A digest of what each example asks."""
    return tuple(str(record.get("example")) for record in answers)


def values_of(answers: Answers, how: str, measure: str) -> np.ndarray:
    """`[n]` values of a measure; NaN where it does not concern the example."""
    found = (record[how].get(measure) for record in answers)
    return np.array([x if is_number(x) else math.nan for x in found], dtype=float)


def decided(found: Difference, seeds: Sequence[Difference]) -> Difference:
    """With three seeds or more, the difference over seeds, each of which counts alike.

    Its interval is never narrower than that over the examples: seeds may agree by chance.
    """
    if len(seeds) < LEAST_SEEDS:
        return found
    change = over_seeds([seed.change for seed in seeds])
    low, high = min(change.low, found.low), max(change.high, found.high)
    first, second = np.mean([(seed.first, seed.second) for seed in seeds], axis=0)
    return replace(found, first=first, second=second, low=low, high=high, p=math.nan)


# --- what is printed ------------------------------------------------------------------------------


def ends_of(run: Run) -> list[str]:
    """The cells of ENDS: a run's first and last evaluation, and the medians of its cost."""
    ends = [run.evaluations[0], run.evaluations[-1]] if run.evaluations else [{}, {}]
    names = [run.success + SAMPLED, run.success]
    shares = [f"{end[name]:.3f}" if name in end else "-" for name in names for end in ends]
    costs = [run.points(name)[1] for name in ("step_time", "memory/peak_mib")]
    medians = [f"{median(values):.3g}" if len(values) else "-" for values in costs]
    return [run.name, str(run.metrics[-1]["step"]), *shares, *medians]


def show(console: Console, first: Setting, second: Setting) -> None:
    """Print whether the first measure shows a difference, and the table of all measures."""
    if not (tests := differences(first, second)):
        console.say(
            f"{second.name} against {first.name}: no paired test, because their last evaluations "
            "have no held-out examples in common"
        )
        return
    name, found = next(iter(tests.items()))
    better = "better" if found.change > 0 else "worse"
    says = f"is {better} than" if found.is_shown else "shows no difference from"
    console.say(f"{second.name} {says} {first.name} ({name})")
    rows = []
    for name, x in tests.items():
        numbers = [f"{x.first:.3f}", f"{x.second:.3f}", f"{x.change:+.3f}"]
        ends = ["" if math.isnan(end) else f"{end:+.3f}" for end in (x.low, x.high)]
        p = "" if math.isnan(x.p) else f"{x.p:.2g}"
        rows.append([name, *numbers, *ends, f"{x.won}/{x.lost}", p])
    seeds = f", {len(first.runs)} and {len(second.runs)} runs"
    console.table(f"{found.n} held-out examples{seeds}, 95 % intervals", COLUMNS, rows)


def plot(settings: Sequence[Setting], out: Path) -> None:
    """Draw the held-out success by step: the mean of a setting's runs, with their range."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'minigrpo[report]'") from None
    matplotlib.use("Agg")  # draws into files, and needs no display
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for setting in settings:
        curves = [run.points(run.success + SAMPLED, held_out=True) for run in setting.runs]
        steps = sorted(set.intersection(*({*curve[0].tolist()} for curve in curves)))
        values = np.stack([y[np.isin(x, steps)] for x, y in curves])
        axes.plot(steps, values.mean(axis=0), "o-", label=setting.name)
        axes.fill_between(steps, values.min(axis=0), values.max(axis=0), alpha=0.2)
    axes.set(xlabel="step", ylabel=f"{settings[0].runs[0].success}, held out, sampled")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=140)
    plt.close(figure)


class Arguments(Group):
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, Field(min_length=2)]
    """Folders of runs; the others are compared with the first one."""
    pool: bool = False
    """Take runs that differ in their seed alone as one setting."""
    plot: Path | None = None
    """Draw the curves of all settings here (PNG, SVG or PDF); needs matplotlib."""


def main(argv: Sequence[str], prog: str) -> None:
    arguments = tyro.cli(Arguments, args=argv, prog=prog, description=__doc__)
    if arguments.plot and arguments.plot.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot must end with .png, .svg or .pdf, got {arguments.plot}")
    console = Console()
    runs = read_runs(arguments.runs, console.warn)
    settings = settings_of(runs, arguments.pool, console.warn)
    columns = ["", *(setting.name for setting in settings)]
    software = (dict(setting.runs[0].versions) for setting in settings)
    rows = differing([setting.flat | x for setting, x in zip(settings, software, strict=True)])
    console.table("settings and software that differ", columns, rows)
    ends = [ends_of(run) for setting in settings for run in setting.runs]
    console.table("held out, first to last evaluation; medians of cost", ENDS, ends)
    for other in settings[1:]:
        show(console, settings[0], other)
    if arguments.plot:
        plot(settings, arguments.plot)
        console.say(f"wrote {arguments.plot}")
