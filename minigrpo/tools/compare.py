"""Say what differs between runs, and whether the difference is more than chance.

minigrpo compare RUN RUN ... --plot curves.png

The settings that differ, speed and memory, and the measures of the last evaluation: each setting
against the first one, with a paired test on the same held-out examples. Runs whose settings differ
in their seed alone are one setting.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

import tyro

from ..runtime.files import to_json
from ..runtime.flags import ConfigError, parse
from ..runtime.logging import Screen
from ..runtime.measures import SAMPLED, answer_in_words, in_words
from ..runtime.outputs import check_apart, check_is_not_read, check_output_file, write_output
from ..runtime.text import printable
from . import curve_tables, curves
from .comparison import Comparison, Pair, Row, compared, to_record
from .curve_tables import MISSING
from .loading import inputs_of
from .messages import one_line_errors
from .settings_of_runs import Setting, differing, grouped, read

MOST_CHARACTERS = 100  # of a text in the list of examples


@dataclass(frozen=True)
class Arguments:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs; the first one's setting is what the others are compared with."""
    examples: int = 2
    """How many of the examples that were won, and of those that were lost, to show."""
    plot: Path | None = None
    """Draw the curves of all settings here (PNG, SVG or PDF); needs matplotlib."""
    json: Path | None = None
    """Write the differences here, with all examples that were won and lost."""

    def check(self) -> None:
        """Raises ConfigError, in one line, for what can be told without reading a run."""
        if len(self.runs) < 2:
            raise ConfigError("minigrpo compare needs the folders of at least two runs")
        places = [run.resolve() for run in self.runs]
        if twice := next((run for run in self.runs if places.count(run.resolve()) > 1), None):
            raise ConfigError(f"{twice}: is given twice")
        if self.examples < 0:
            raise ConfigError(f"--examples must be at least 0, got {self.examples}")
        if self.plot is not None:
            check_output_file("--plot", self.plot, curves.FORMATS)
        if self.json is not None:
            check_output_file("--json", self.json)
        check_apart({"--json": self.json, "--plot": self.plot})


# --- what is printed ------------------------------------------------------------------------------


def show_settings(screen: Screen, settings: Sequence[Setting]) -> None:
    names = [setting.name for setting in settings]
    rows = [[name, *values] for name, values in differing(settings).items()]
    if rows:
        screen.table("settings that differ", ["", *names], rows, narrow=True)
    else:
        screen.say("settings and versions are the same")


def show_evaluations(screen: Screen, settings: Sequence[Setting]) -> None:
    """The first and the last evaluation of each run, and how long it took."""
    runs = [run for setting in settings for run in setting.runs]
    for run in runs:
        if not run.data.evaluations:
            screen.say(f"{run.name}: has not been evaluated")
    records = {run.folder: run.data.evaluations for run in runs if run.data.evaluations}
    names = curve_tables.names_of([run.folder for run in runs])
    rows = []
    for run in runs:
        if run.folder in records:
            seconds = curve_tables.value(run.data.summary, "wall_seconds")
            rows.append([names[run.folder], *curve_tables.cells(records[run.folder], seconds)])
    if rows:
        screen.table("first and last evaluation", ["", *curve_tables.COLUMNS], rows, narrow=True)
    for words in curve_tables.other_examples(records):
        screen.say(words, wrap=True)


def show_cost(screen: Screen, settings: Sequence[Setting]) -> None:
    """Medians per step; speed is that of the first setting over the others'.

    The quartiles show how unsteady the steps were: a busy machine moves medians, too.
    """
    first = settings[0].median("step_time")
    rows = []
    for setting in settings:
        run = setting.runs[0].data
        seconds = setting.median("step_time") or math.nan
        group = 1 if run.supervised else run.settings["group_size"]
        length = setting.median("completions/mean_length")
        tokens = length * run.settings["prompts_per_step"] * group / seconds
        steps = ", ".join(dict.fromkeys(str(run.data.metrics[-1]["step"]) for run in setting.runs))
        low, high = setting.quartiles("step_time")
        figures = (
            (first / seconds, ".2f"),
            (tokens, ",.0f"),
            (setting.median("memory/peak_mib"), ",.0f"),
        )
        cells = [MISSING if math.isnan(x) else f"{x:{form}}" for x, form in figures]
        took = MISSING if math.isnan(seconds) else f"{seconds:.3g} ({low:.3g}-{high:.3g})"
        seeds = ", ".join(str(run.seed) for run in setting.runs)
        rows.append([setting.name, seeds, steps, took, *cells])
    columns = ["", "seeds", "steps", "s/step", "speed", "tok/s", "peak MiB"]
    screen.table(
        "speed and memory, medians over the steps (with quartiles)", columns, rows, narrow=True
    )


def show(screen: Screen, found: Comparison, examples: int) -> None:
    """Print a comparison: verdicts first, then all measures, then examples."""
    first, second = found.first.name, found.second.name
    for words in found.why_not:
        screen.say(words, wrap=True)
    if not found.rows:
        screen.say(f"{second} against {first}: no paired test")
        return
    headline = found.rows[0].measure
    for row in found.rows:
        if row.measure == headline:
            screen.say(verdict(row, first, second), wrap=True)
    seeds = f" of {len(found.pairs)} seeds" if len(found.pairs) > 1 else ""
    cells = [
        [
            row.measure,
            row.how,
            *(f"{mean:.3f}" for mean in row.means),
            f"{row.change:+.3f} {bracketed(*row.interval, 1, '.3f')}",
            "" if math.isnan(row.p) else p_value(row.p).removeprefix("= "),
        ]
        for row in found.rows
    ]
    both = [run for pair in found.pairs for run in (pair.first, pair.second)]
    steps = dict.fromkeys(run.last_step for run in both)
    asked = f"{found.num_examples} held-out examples{seeds}"
    title = f"{asked} at step {' and '.join(steps)}, with 95 % intervals"
    screen.table(title, ["", "", first, second, "difference", "p"], cells, narrow=True)
    if headline != found.pairs[0].first.data.success:
        return
    for words, rows in (("won", found.won), ("lost", found.lost)):
        such = ", such as" if rows and examples else ""
        screen.say(f"{words} by {second}, greedy: {len(rows)} examples{such}")
        for pair, i in rows[:examples]:
            show_example(screen, pair, i)


def show_example(screen: Screen, pair: Pair, i: int) -> None:
    first, second = pair.first.answers[i], pair.second.answers[i]
    for name, text in (
        ("prompt", first.get("prompt")),
        (answer_in_words(pair.first.data.success), first.get("truth")),
        (pair.first.name, first.get("completion")),
        (pair.second.name, second.get("completion")),
    ):
        line = printable(str(text))
        shown = line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}..."
        screen.say(f"  {name}: {shown}")
    screen.say("")


def verdict(row: Row, first: str, second: str) -> str:
    """Whether the examples, or the seeds, show a difference, in one line."""
    found, seeds = row.found, len(row.by_seed)
    if row.seeds_decide:
        how = f"over {seeds} seeds"
    elif math.isnan(row.p):
        how = "bootstrap"
    else:
        how = f"p {p_value(row.p)}, {found.won} won and {found.lost} lost"
    if seeds > 1 and not row.seeds_decide:
        how += "; by seed " + ", ".join(f"{100 * x:+.1f}" for x in row.by_seed)
    enough = f"{seeds} seeds" if row.seeds_decide else f"{found.n} examples"
    if row.is_shown:
        what = f"{second} is {'better' if row.change > 0 else 'worse'} than {first}"
    else:
        what = f"no difference that {enough} could show between {second} and {first}"
    before, after = row.means
    shares = f"{after:.1%} against {before:.1%}"
    points = f"{100 * row.change:+.1f} points {bracketed(*row.interval, 100, '.1f')}"
    return f"{in_words(row.measure)}, {row.how}: {what}: {shares}, {points} ({how})"


def bracketed(low: float, high: float, scale: float, form: str) -> str:
    return "" if math.isnan(low) else f"[{scale * low:{form}}, {scale * high:{form}}]"


def p_value(p: float) -> str:
    return "< 0.0001" if p < 0.0001 else f"= {p:.2g}"


def draw(settings: Sequence[Setting], out: Path, screen: Screen) -> None:
    """The curves of all settings, a band for the seeds of each. Raises ConfigError."""
    metric = settings[0].runs[0].data.success + SAMPLED
    lines: dict[str, list[curve_tables.Records]] = {}
    for setting in settings:
        runs = [run.data.evaluations for run in setting.runs]
        lines[setting.name] = [
            run for run in runs if any(curve_tables.value(x, metric) is not None for x in run)
        ]
        if not lines[setting.name]:
            raise ConfigError(f"--plot: {setting.name} has no evaluation with {metric}")
    curves.check_common_steps(lines, metric, screen.warn, by="--plot")
    curves.draw(lines, metric, out, by="--plot")
    screen.say(f"wrote {out}")


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    with one_line_errors():
        arguments = parse(Arguments, argv, description=__doc__, prog=prog or "minigrpo compare")
        arguments.check()
        screen = Screen(has_result=True)
        runs = [read(folder, screen.warn) for folder in arguments.runs]
        for name, path in (("--json", arguments.json), ("--plot", arguments.plot)):
            if path is not None:
                read_by = (inputs_of(run.data.settings) for run in runs)
                check_is_not_read(name, path, chain.from_iterable(read_by))
        settings = grouped(runs)
        show_settings(screen, settings)
        show_evaluations(screen, settings)
        show_cost(screen, settings)
        if len(settings) < 2:
            screen.say("all runs have one setting, and differ in their seeds alone")
        found = [compared(settings[0], other) for other in settings[1:]]
        for one in found:
            screen.say("")
            show(screen, one, arguments.examples)
        if arguments.json:
            text = to_json({"comparisons": [to_record(one) for one in found]}, indent=1)
            write_output("--json", arguments.json, lambda path: path.write_text(text))
            screen.say(f"wrote {arguments.json}")
        if arguments.plot:
            draw(settings, arguments.plot, screen)


if __name__ == "__main__":
    main()
