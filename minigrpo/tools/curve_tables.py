"""The tables of `minigrpo curves`: first and last evaluations, and those by kind of question."""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from ..runtime.measures import OTHER_EXAMPLES, SAMPLED, headline, number_of, sizes
from .records import is_number

MISSING = "-"
ENDS = "after", "change"
COLUMNS = ("steps", "sampled\nbefore", *ENDS, "greedy\nbefore", *ENDS, "seconds")
Records = Sequence[Mapping[str, Any]]  # the evaluations of a run, as eval.jsonl has them


def value(record: Mapping[str, Any], metric: str) -> float | None:
    """A metric of an evaluation, or None if it is missing, null or not finite."""
    found = record.get(metric)
    return float(found) if is_number(found) and isfinite(found) else None


def names_of(runs: Sequence[Path]) -> dict[Path, str]:
    """A label for each run: its folder's name, or its path where two folders have one name."""
    names = {run: run.resolve().name for run in runs}
    taken = list(names.values())
    return {run: name if taken.count(name) == 1 else str(run) for run, name in names.items()}


def table(runs: Mapping[Path, Records], seconds: Mapping[Path, float | None]) -> Table:
    """The first and the last evaluation, the success sampled and greedy, one row per run."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    out.add_column("run", overflow="fold", min_width=8)  # names fold, figures do not
    for name in COLUMNS:
        out.add_column(name, justify="right", no_wrap=True)
    names = names_of(list(runs))
    for run, records in runs.items():
        # as Text, because brackets in it are no markup
        out.add_row(Text(names[run]), *cells(records, seconds[run]))
    return out


def cells(records: Records, seconds: float | None) -> list[str]:
    """What COLUMNS name, of the first and the last evaluation of a run."""
    first, last = records[0], records[-1]
    shares, success = list[str](), headline(last)
    for metric in (success + SAMPLED, success):
        shares += change(value(first, metric), value(last, metric))
    return [str(last["step"]), *shares, MISSING if seconds is None else f"{seconds:.0f}"]


def change(before: float | None, after: float | None) -> list[str]:
    """Two shares as percentages, and their difference in points."""
    cells = [MISSING if x is None else f"{x:.1%}" for x in (before, after)]
    if before is None or after is None:
        return [*cells, MISSING]
    return [*cells, f"{100 * (after - before):+.1f}"]


def other_examples(runs: Mapping[Path, Records]) -> Iterator[str]:
    """A line for each run whose first and last evaluation have other numbers of examples."""
    names = names_of(list(runs))
    for run, records in runs.items():
        first, last = (number_of(records[i]) for i in (0, -1))
        if first != last:
            yield f"{names[run]}: {sizes(first, last, ' held-out examples')}{OTHER_EXAMPLES}"


def table_of_kinds(runs: Mapping[Path, Records]) -> Table:
    """The greedy success before and after by kind of question, pooled over the runs."""
    out = Table()
    out.add_column("kind")
    for name in ("n", "before", "after"):
        out.add_column(name, justify="right")
    ends = [(records[0], records[-1]) for records in runs.values()]
    counted = {name for _, last in ends for name in last if name.startswith("count/")}
    for kind in sorted(name.removeprefix("count/") for name in counted):
        shares, counts = [], [0.0, 0.0]
        for i in (0, 1):
            hits = 0.0
            for end in ends:
                names = (f"count/{kind}", f"{headline(end[i])}/{kind}")
                count, share = (value(end[i], name) for name in names)
                if count is not None and share is not None:
                    counts[i] += count
                    hits += count * share
            shares.append(f"{hits / counts[i]:.0%}" if counts[i] else MISSING)
        out.add_row(Text(kind), sizes(counts[0], counts[1]), *shares)
    return out
