"""Write a page with all that is known of a run: curves, settings, findings and samples.

minigrpo report RUN [RUN ...] --out report.html

The page is one file that asks for nothing from anywhere. With --watch it is written again while the
run goes on, and an open browser loads it again.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..runtime.flags import ConfigError, parse
from ..runtime.logging import Screen
from ..runtime.outputs import check_output_file, write_output
from ..runtime.summary import SUMMARY
from .messages import one_line_errors
from .page.charts import require_bokeh
from .run_data import read_run

LOGS = ("metrics.jsonl", "eval.jsonl", "samples.jsonl", SUMMARY)


@dataclass(frozen=True)
class Arguments:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    out: Path = Path("report.html")
    """The page."""
    watch: bool = False
    """Write the page again whenever a run has logged something, until all of them have ended."""
    every: int = 15
    """With --watch: seconds between two looks, and after which a browser loads the page again."""

    def check(self) -> None:
        """Raises ConfigError, in one line, for what can be told without reading a run."""
        if not self.runs:
            raise ConfigError("minigrpo report needs the folder of at least one run")
        if self.every < 1:
            raise ConfigError(f"--every must be at least 1, got {self.every}")
        check_output_file("--out", self.out, (".html", ".htm"))
        require_bokeh()


def write(arguments: Arguments, screen: Screen) -> None:
    """Write the page once. Raises ConfigError, in one line."""
    from .page.render import Source, render

    sources = []
    for folder in dict.fromkeys(arguments.runs):
        notices: list[str] = []
        sources.append(Source(folder, read_run(folder, notices.append), notices))
    going = arguments.watch and not ended(arguments.runs)
    html = render(sources, arguments.every if going else 0)
    write_output("--out", arguments.out, lambda path: path.write_text(html, encoding="utf-8"))
    for source in sources:
        for notice in source.notices:
            screen.warn(notice)
    steps = ", ".join(f"{len(source.run.metrics)} steps of {source.folder}" for source in sources)
    screen.say(f"wrote {arguments.out} ({len(html.encode()) / 1e6:.1f} MB): {steps}")


def ended(runs: Sequence[Path]) -> bool:
    return all((run / SUMMARY).exists() for run in runs)


def changes(runs: Sequence[Path]) -> list[tuple[int, int]]:
    """What differs once a run has logged something: sizes and times of its files."""
    found = []
    for run in runs:
        for name in LOGS:
            path = run / name
            stat = path.stat() if path.exists() else None
            found.append((stat.st_size, stat.st_mtime_ns) if stat else (0, 0))
    return found


def watch(arguments: Arguments, screen: Screen) -> None:
    """Write the page whenever something has changed, until all runs have ended."""
    before: list[tuple[int, int]] = []
    while True:
        last, now = ended(arguments.runs), changes(arguments.runs)
        if now != before:
            before = now
            try:
                write(arguments, screen)
            except ConfigError as error:  # such as a run that has not made its first step
                if last:
                    raise
                screen.say(f"{error}; waiting")
        if last:
            return
        time.sleep(arguments.every)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    with one_line_errors():
        arguments = parse(Arguments, argv, description=__doc__, prog=prog or "minigrpo report")
        arguments.check()
        screen = Screen(has_result=True)
        (watch if arguments.watch else write)(arguments, screen)


if __name__ == "__main__":
    main()
