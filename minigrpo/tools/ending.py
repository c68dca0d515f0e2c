"""How `minigrpo train` ends: the curve, what the doctor says, and what to type next."""

from pathlib import Path

import numpy as np

from ..runtime.flags import ConfigError
from ..runtime.logging import Screen
from . import doctor
from .cli import COMMANDS
from .run_data import RunData, read_run

WIDEST, HEIGHT = 72, 8  # of the curve, in characters
NEXT = {  # what it is good for: the command
    "report": "report {run} --out report.html",
    "sample": "sample {run}",
    "compare": "compare {run} OTHER_RUN",
}
# the bit of each dot in a character of braille, by column and row
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
BLANK = 0x2800


def show_ending(screen: Screen, folder: Path, shown: Path) -> None:
    """Print the ending of the run in a folder, which the user calls `shown`."""
    try:
        run = read_run(folder, screen.warn)
    except ConfigError as error:  # a full disk may have left no metrics; the run is none the worse
        screen.warn(f"no diagnosis: {error}")
        return
    show_curve(screen, run)
    doctor.show(screen, run)
    screen.say("next:")
    for name, line in NEXT.items():
        if name in COMMANDS:
            screen.say(f"  minigrpo {line.format(run=shown)}")


def show_curve(screen: Screen, run: RunData) -> None:
    """Draw the reward, or the loss of a supervised run, where there is a terminal with room."""
    name = "loss" if run.supervised else "reward"
    values = run.series(name)
    lines = chart(values, min(WIDEST, screen.console.width - 10))
    if not (screen.live and screen.console.encoding.startswith("utf") and lines):
        return
    first, last = (str(run.metrics[i]["step"]) for i in (0, -1))
    screen.say(f"{name} by step")
    for line in lines:
        screen.say(line)
    room = len(lines[0]) - len(lines[0].split(" ")[-1])
    screen.say(f"{'':{room}}{first}{last:>{len(lines[0]) - room - len(first)}}")


def chart(values: np.ndarray, width: int, height: int = HEIGHT) -> list[str]:
    """A curve in braille, two columns and four rows of dots per character, with its range.

    Args:
        values: `[n]`; NaN is left out. More than there are columns are averaged.
        width: of the curve in characters, without the numbers beside it.

    Returns:
        `height` lines of equal length; none for fewer than two values.
    """
    known = values[np.isfinite(values)]
    if len(known) < 2 or width < 1:
        return []
    columns, rows = 2 * width, 4 * height
    means = np.array([part.mean() for part in np.array_split(known, min(columns, len(known)))])
    curve = np.interp(np.linspace(0, len(means) - 1, columns), np.arange(len(means)), means)
    low, high = curve.min(), curve.max()
    share = (curve - low) / (high - low) if high > low else np.full(columns, 0.5)
    levels = np.rint((1 - share) * (rows - 1)).astype(int)  # 0 is the top
    cells = np.full((height, width), BLANK)
    for x, (before, now) in enumerate(zip([levels[0], *levels], levels, strict=False)):
        for y in range(min(before, now), max(before, now) + 1):
            cells[y // 4, x // 2] |= DOTS[x % 2][y % 4]
    beside = {0: f"{high:.3g}", height - 1: f"{low:.3g}"}
    room = max(map(len, beside.values()))
    return [f"{beside.get(i, ''):>{room}} {''.join(map(chr, row))}" for i, row in enumerate(cells)]
