"""Tell what differs between runs, and whether the difference is more than chance.

minigrpo compare RUN RUN ... [--pool]

It prints the settings that differ, the first and the last evaluation of each run, and paired tests:
each run against the first one, example by example, by the answers in held_out.jsonl. With --pool
runs that differ in their seed alone are one setting, and three seeds or more decide, not examples.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import tyro

from ..metrics import SAMPLED
from ..run.console import Console
from ..run.logging import HELD_OUT, OVERVIEW_COLUMNS, Run, differing, read_jsonl, read_run
from ..statistics import Difference, difference
from .doctor import RunArguments

Runs = Sequence[Run]  # of one setting: they differ in their seed at most
ExampleKey = tuple[int, str]  # the place of its line in held_out.jsonl, and its digest
Answers = dict[ExampleKey, float]  # values of a measure
COLUMNS = ("", "n", "first", "second", "change", "p", "shown")


def runs_by_setting(runs: Sequence[Run], pool: bool) -> Mapping[str, Runs]:
    """The runs by the name of their setting. Without `pool`, each run is a setting of its own."""
    if not pool:
        return {run.name: [run] for run in runs}
    pools = defaultdict[str, list[Run]](list)
    for run in runs:
        pools[f"{run.config.replace(seed=0)} {run.versions}"].append(run)
    return {f"{pooled[0].name} x {len(pooled)}": pooled for pooled in pools.values()}


def differences(first: Runs, second: Runs) -> dict[str, Difference]:
    """Each measure that both settings have, tested on the held-out examples that they share.

    Runs of equal seeds are pairs. If some have no partner, runs are paired in their order.
    """
    pairs = [(x, y) for x in first for y in second if x.config.run.seed == y.config.run.seed]
    fewer = min(len(first), len(second))
    if len(pairs) < fewer:
        pairs = list(zip(first, second, strict=False))
    answers = [(last_answers(one), last_answers(other)) for one, other in pairs]
    tests = {}
    for measure in dict.fromkeys(measure for one, _ in answers for measure in one):
        values = [(one[measure], other[measure]) for one, other in answers]
        if any(one.keys() & other.keys() for one, other in values):
            tests[measure] = paired_test(values)
    return tests


def paired_test(pairs: Sequence[tuple[Answers, Answers]]) -> Difference:
    """The test of a measure. An example that several pairs were asked counts once, by its means."""
    by_example = defaultdict[ExampleKey, list[tuple[float, float]]](list)
    changes_by_pair = []
    for one, other in pairs:
        shared = {example: (one[example], other[example]) for example in one if example in other}
        for example, values in shared.items():
            by_example[example].append(values)
        if shared:
            changes = [after - before for before, after in shared.values()]
            changes_by_pair.append(np.mean(changes))
    means = np.array([np.mean(values, axis=0) for values in by_example.values()])
    return difference(means[:, 0], means[:, 1], np.array(changes_by_pair))


def last_answers(run: Run) -> defaultdict[str, Answers]:
    answers = defaultdict[str, Answers](dict)
    for place, line in enumerate(read_jsonl(run.folder / HELD_OUT)):
        for decoding, ending in (("sampled", SAMPLED), ("greedy", "")):
            for measure, value in line[decoding].items():
                answers[measure + ending][place, line["example"]] = value
    return answers


class CompareArguments(RunArguments):
    pool: bool = False
    """Take runs that differ in their seed alone as one setting."""


def compare_command(argv: Sequence[str], prog: str) -> None:
    arguments = tyro.cli(CompareArguments, args=argv, prog=prog, description=__doc__)
    console = Console()
    runs = [read_run(folder) for folder in arguments.runs]
    settings = runs_by_setting(runs, arguments.pool)

    # 1. What the runs are, and how they went.
    first_runs = [same[0] for same in settings.values()]
    used = [run.config.flat() | run.versions for run in first_runs]
    console.table("settings and software that differ", ("", *settings), differing(used))
    overviews = [run.overview() for run in runs]
    console.table("held out, sampled; medians of cost", OVERVIEW_COLUMNS, overviews)

    # 2. Each setting against the first one.
    (base, base_runs), *others = settings.items()
    for name, other_runs in others:
        tests = differences(base_runs, other_runs)
        how = "example by example, 95 % intervals" if tests else "no held-out examples in common"
        rows = []
        for measure, test in tests.items():
            rows.append(
                [
                    measure,
                    str(test.n),
                    f"{test.first:.3f}",
                    f"{test.second:.3f}",
                    str(test.change),
                    "" if test.p is None else f"{test.p:.2g}",
                    "yes" if test.is_shown else "",
                ]
            )
        console.table(f"{name} against {base}: {how}", COLUMNS, rows)
