"""Tell what differs between runs, and whether the difference is more than chance.

minigrpo compare RUN RUN ... [--pool] [--plot curves.png]

It prints the settings that differ, the first and the last evaluation of each run, and paired tests:
each run against the first one, example by example, by the answers in held_out.jsonl. With --pool
runs that differ in their seed alone are one setting, and three seeds or more decide, not examples.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from ..metrics import SAMPLED
from ..run.logging import HELD_OUT, read_jsonl
from ..runtime.statistics import Difference, difference
from ..types import REWARD
from .runs import ENDS, EVAL, Run, RunArguments, differing, draw, numbers, runs_of

Setting = Sequence[Run]  # runs that differ in their seed at most
Answer = tuple[str, int, str]  # a measure, an example's place in the file and its digest
# settings that a comparison ignores
BESIDE = {"seed", "out_dir", "resume", "stop_after", "keep_last", "profile", "track"}
# settings that say what the reward is
OF_REWARD = ("task", "task_args", "rewards", "reward_weights")
COLUMNS = ("", "n", "first", "second", "change", "p", "shown")


def settings_of(runs: Sequence[Run], pool: bool) -> Mapping[str, Setting]:
    """The settings by name, in the order of their first runs; without `pool`, each run is one."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(str(flat(run)) if pool else run.name, []).append(run)
    return {f"{x[0].name} x {len(x)}" if pool else x[0].name: x for x in groups.values()}


def flat(run: Run) -> dict[str, Any]:
    """The settings that a run's results depend on, besides the seed."""
    return {name: x for name, x in run.config.flat().items() if name not in BESIDE}


# --- tests ----------------------------------------------------------------------------------------


def differences(first: Setting, second: Setting) -> dict[str, Difference]:
    """Each measure that both settings have, tested on the held-out examples that they share.

    Runs of equal seeds are paired, or if there are none, in their order. An example that several
    pairs were asked counts once, with its means. The names are those of eval.jsonl.
    """
    both = [(x, y) for x in first for y in second if x.config.run.seed == y.config.run.seed]
    rows = defaultdict(list)  # measure -> of each answer: its pair, and its values
    for pair, runs in enumerate(both or zip(first, second, strict=False)):
        old, new = map(answers_of, runs)
        for answer, x in old.items():
            if answer in new:
                rows[answer[0]].append((answer, pair, x, new[answer]))
    if any(flat(first[0])[name] != flat(second[0])[name] for name in OF_REWARD):
        for measure in (REWARD, REWARD + SAMPLED):
            rows.pop(measure, None)
    tests = {}
    for measure, columns in rows.items():
        answers, pairs, xs, ys = zip(*columns, strict=True)
        by_seed = mean_by(pairs, ys) - mean_by(pairs, xs)
        tests[measure] = difference(mean_by(answers, xs), mean_by(answers, ys), by_seed)
    return tests


def answers_of(run: Run) -> dict[Answer, float]:
    """The last answers of a run."""
    found = {}
    for place, line in enumerate(read_jsonl(run.folder / HELD_OUT)):
        for how, ending in (("sampled", SAMPLED), ("greedy", "")):
            for measure, value in numbers(line.get(how)).items():
                found[measure + ending, place, str(line.get("example"))] = value
    return found


def mean_by(keys: Sequence[object], values: Sequence[float]) -> np.ndarray:
    """The mean of the values of each distinct key, in order."""
    groups = defaultdict(list)
    for key, value in zip(keys, values, strict=True):
        groups[key].append(value)
    return np.array([np.mean(group) for group in groups.values()])


# --- what is printed ------------------------------------------------------------------------------


def row_of(name: str, x: Difference) -> list[str]:
    """The cells of COLUMNS."""
    p = "" if math.isnan(x.p) else f"{x.p:.2g}"
    shown = "yes" if x.is_shown else ""
    return [name, str(x.n), f"{x.first:.3f}", f"{x.second:.3f}", str(x.change), p, shown]


class Arguments(RunArguments):
    pool: bool = False
    """Take runs that differ in their seed alone as one setting."""
    plot: str = Field("", pattern=r"^$|\.(png|svg|pdf)$")
    """Draw the held-out success of all settings here (PNG, SVG or PDF); needs matplotlib."""


def main(argv: Sequence[str], prog: str) -> None:
    arguments, console, runs = runs_of(Arguments, argv, prog, __doc__)
    settings = settings_of(runs, arguments.pool)
    sides = [flat(runs[0]) | runs[0].versions for runs in settings.values()]
    console.table("settings and software that differ", ("", *settings), differing(sides))
    console.table("held out, sampled; medians of cost", ENDS, [run.ends() for run in runs])
    (first, base), *others = settings.items()
    for second, setting in others:
        rows = [row_of(name, x) for name, x in differences(base, setting).items()]
        found = "example by example, 95 % intervals" if rows else "no held-out examples in common"
        console.table(f"{second} against {first}: {found}", COLUMNS, rows)
    if arguments.plot:
        draw(settings, EVAL + base[0].success + SAMPLED, arguments.plot)
        console.say(f"wrote {arguments.plot}")
