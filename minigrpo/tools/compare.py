"""Tell what differs between runs, and whether the difference is more than chance.

minigrpo compare RUN RUN ... [--pool] [--plot curves.png]

It prints the settings that differ, the first and the last evaluation of each run, and paired tests:
each run against the first one, example by example, by the answers in held_out.jsonl. With --pool
runs that differ in their seed alone are one setting, and three seeds or more decide, not examples.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import tyro
from pydantic import Field

from ..metrics import SAMPLED
from ..run.console import Console
from ..run.logging import HELD_OUT, read_jsonl
from ..run.run_dir import MACHINE
from ..runtime.statistics import Difference, difference
from ..types import REWARD
from .runs import EVAL, OVERVIEW_COLUMNS, Run, RunArguments, differing, finite_numbers, plot_curve

Runs = Sequence[Run]  # of one setting: they differ in their seed at most
Answer = tuple[str, int, str]  # a measure, an example's place in the file, and its digest
# settings that a comparison ignores
BESIDE = {"seed", "out_dir", "resume", "stop_after", "keep_last", "profile", "track"}
COLUMNS = ("", "n", "first", "second", "change", "p", "shown")


def runs_by_setting(runs: Sequence[Run], pool: bool) -> Mapping[str, Runs]:
    """The settings by name, in the order of their first runs; without `pool`, each run is one."""
    if not pool:
        return {run.name: [run] for run in runs}
    pools = defaultdict[str, list[Run]](list)
    for run in runs:
        contents = [x for name, x in run.versions.items() if name not in MACHINE]
        pools[f"{settings_that_count(run)} {contents}"].append(run)
    return {f"{pooled[0].name} x {len(pooled)}": pooled for pooled in pools.values()}


def settings_that_count(run: Run) -> dict[str, object]:
    return {name: value for name, value in run.config.flat().items() if name not in BESIDE}


def differences(first: Runs, second: Runs) -> dict[str, Difference]:
    """Each measure that both settings have, tested on the held-out examples that they share.

    Runs of equal seeds are paired, or if there are none, in their order. An example that several
    pairs were asked counts once, with its means. The names are those of eval.jsonl.
    """
    same_seed = [(x, y) for x in first for y in second if x.config.run.seed == y.config.run.seed]
    pairs = same_seed or [*zip(first, second, strict=False)]
    # measure -> answers that both runs of a pair have, its number, and the values in both
    shared = defaultdict[str, list[tuple[Answer, int, float, float]]](list)
    for pair, (one, other) in enumerate(pairs):
        others_answers = answers_of(other)
        for answer, value in answers_of(one).items():
            if answer in others_answers:
                shared[answer[0]].append((answer, pair, value, others_answers[answer]))
    # rewards that are made otherwise are not compared
    settings = first[0].config.flat()
    other_settings = second[0].config.flat()
    of_reward = ("task", "task_args", "rewards", "reward_weights")
    if any(settings[name] != other_settings[name] for name in of_reward):
        shared.pop(REWARD, None)
        shared.pop(REWARD + SAMPLED, None)
    tests = {}
    for measure, lines in shared.items():
        answers, numbers, values, other_values = zip(*lines, strict=True)
        change_by_pair = mean_by(numbers, other_values) - mean_by(numbers, values)
        means = mean_by(answers, values), mean_by(answers, other_values)
        tests[measure] = difference(*means, change_by_pair)
    return tests


def answers_of(run: Run) -> dict[Answer, float]:
    """The last answers of a run, with their values."""
    values = {}
    for place, line in enumerate(read_jsonl(run.folder / HELD_OUT)):
        for decoding, ending in (("sampled", SAMPLED), ("greedy", "")):
            for measure, value in finite_numbers(line.get(decoding)).items():
                values[measure + ending, place, str(line.get("example"))] = value
    return values


def mean_by(keys: Sequence[object], values: Sequence[float]) -> np.ndarray:
    """The mean of the values of each distinct key, in order."""
    groups = defaultdict(list)
    for key, value in zip(keys, values, strict=True):
        groups[key].append(value)
    return np.array([np.mean(group) for group in groups.values()])


def row_of(measure: str, test: Difference) -> list[str]:
    means = [f"{test.first:.3f}", f"{test.second:.3f}"]
    p = "" if math.isnan(test.p) else f"{test.p:.2g}"
    return [measure, str(test.n), *means, str(test.change), p, "yes" if test.is_shown else ""]


class Arguments(RunArguments):
    pool: bool = False
    """Take runs that differ in their seed alone as one setting."""
    plot: str = Field("", pattern=r"^$|\.(png|svg|pdf)$")
    """Draw the held-out success of all settings here (PNG, SVG or PDF); needs matplotlib."""


def main(argv: Sequence[str], prog: str) -> None:
    arguments = tyro.cli(Arguments, args=argv, prog=prog, description=__doc__)
    console = Console()
    runs = arguments.read(console.warn)
    settings = runs_by_setting(runs, arguments.pool)
    used = [settings_that_count(same[0]) | same[0].versions for same in settings.values()]
    console.table("settings and software that differ", ("", *settings), differing(used))
    overviews = [run.overview() for run in runs]
    console.table("held out, sampled; medians of cost", OVERVIEW_COLUMNS, overviews)
    (base, base_runs), *others = settings.items()
    for name, other_runs in others:
        tests = differences(base_runs, other_runs)
        rows = [row_of(measure, test) for measure, test in tests.items()]
        how = "example by example, 95 % intervals" if rows else "no held-out examples in common"
        console.table(f"{name} against {base}: {how}", COLUMNS, rows)
    if arguments.plot:
        plot_curve(settings, EVAL + base_runs[0].success + SAMPLED, arguments.plot)
        console.say(f"wrote {arguments.plot}")
