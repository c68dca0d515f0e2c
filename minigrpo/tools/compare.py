"""Tell what differs between runs, and whether the difference is more than chance.

minigrpo compare RUN RUN ... [--pool] [--plot curves.png]

It prints the settings that differ, the first and the last evaluation of each run, and paired tests:
each run against the first one, example by example, by the answers in held_out.jsonl. With --pool
runs that differ in their seed alone are one setting, and three seeds or more decide, not examples.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime.logging import HELD_OUT, read_jsonl
from ..runtime.stats import SAMPLED, Difference, Estimate, difference, over_seeds
from .runs import ENDS, Run, RunArguments, differing, draw, is_number, runs_of

Setting = Sequence[Run]  # runs of one setting, by seed
# of a run: measure -> place in the file and digest of the example -> value
Answers = dict[str, dict[tuple[int, str], float]]
HOWS = {"sampled": SAMPLED, "greedy": ""}
LEAST_SEEDS = 3  # from which the seeds decide
# settings that a comparison of results is not about
BESIDE = {"seed", "out_dir", "resume", "stop_after", "keep_last", "profile", "track"}
# settings that say what the reward is
REWARD = ("task", "task_args", "rewards", "reward_weights")
COLUMNS = ("", "n", "first", "second", "change", "p", "shown")


def settings_of(runs: Sequence[Run], pool: bool) -> Mapping[str, Setting]:
    """The settings by name, in the order of their first runs; without `pool`, each run is one."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(str(flat(run)) if pool else run.name, []).append(run)
    found = {}
    for group in groups.values():
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        found[group[0].name + more] = sorted(group, key=lambda run: run.config.run.seed)
    return found


def flat(run: Run) -> dict[str, Any]:
    """The settings that a run's results depend on, besides the seed."""
    return {name: x for name, x in run.config.flat().items() if name not in BESIDE}


# --- tests ----------------------------------------------------------------------------------------


def differences(first: Setting, second: Setting) -> dict[str, Difference]:
    """Each measure that both settings have, tested on the held-out examples that they share.

    Runs of equal seeds are paired, or if there are none, in the order of their seeds. Seeds that
    were asked the same examples are averaged example by example, others are joined. The names are
    those of eval.jsonl.
    """
    both = [(x, y) for x in first for y in second if x.config.run.seed == y.config.run.seed]
    both = both or list(zip(first, second, strict=False))
    pairs = [(answers_of(x), answers_of(y)) for x, y in both]
    asked_alike = len({frozenset[Any]().union(*x.values()) for x, _ in pairs}) == 1
    join = np.stack if asked_alike else np.concatenate
    same_reward = all(flat(first[0])[name] == flat(second[0])[name] for name in REWARD)
    tests = {}
    for measure in pairs[0][0]:
        shared = [x[measure].keys() & y[measure].keys() for x, y in pairs]
        if asked_alike:
            shared = [set.intersection(*shared)] * len(pairs)
        if not all(shared) or (measure.removesuffix(SAMPLED) == "reward" and not same_reward):
            continue
        values = [
            np.array([[answers[measure][x] for x in sorted(examples)] for answers in pair])
            for pair, examples in zip(pairs, shared, strict=True)
        ]
        if found := difference(*join(values, axis=1)):
            tests[measure] = decided(found, [x for each in values if (x := difference(*each))])
    return tests


def answers_of(run: Run) -> Answers:
    """The last answers of a run."""
    found: Answers = defaultdict(dict)
    for place, answer in enumerate(read_jsonl(run.folder / HELD_OUT)):
        for how, ending in HOWS.items():
            measures = answer.get(how)
            for measure, x in measures.items() if isinstance(measures, dict) else ():
                if is_number(x):
                    found[measure + ending][place, str(answer.get("example"))] = x
    return found


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


def row_of(name: str, x: Difference) -> list[str]:
    """The cells of COLUMNS."""
    change = str(Estimate(x.change, x.low, x.high))
    p = "" if math.isnan(x.p) else f"{x.p:.2g}"
    shown = "yes" if x.is_shown else ""
    return [name, str(x.n), f"{x.first:.3f}", f"{x.second:.3f}", change, p, shown]


class Arguments(RunArguments):
    pool: bool = False
    """Take runs that differ in their seed alone as one setting."""
    plot: Path | None = None
    """Draw the held-out success of all settings here (PNG, SVG or PDF); needs matplotlib."""


def main(argv: Sequence[str], prog: str) -> None:
    arguments, console, runs = runs_of(Arguments, argv, prog, __doc__)
    settings = settings_of(runs, arguments.pool)
    sides = [flat(runs[0]) | dict(runs[0].versions) for runs in settings.values()]
    console.table("settings and software that differ", ("", *settings), differing(sides))
    console.table("held out, sampled; medians of cost", ENDS, [run.ends() for run in runs])
    (first, base), *others = settings.items()
    for second, setting in others:
        rows = [row_of(name, x) for name, x in differences(base, setting).items()]
        found = "example by example, 95 % intervals" if rows else "no held-out examples in common"
        console.table(f"{second} against {first}: {found}", COLUMNS, rows)
    if arguments.plot:
        draw(settings, base[0].success + SAMPLED, arguments.plot, held_out=True)
        console.say(f"wrote {arguments.plot}")
