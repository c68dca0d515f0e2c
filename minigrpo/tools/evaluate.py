"""Score a model's greedy completions of held-out examples, in total and by kind of question.

minigrpo evaluate RUN --n 2000

Every figure has a 95 % confidence interval: Wilson's for a share (exact, valid), the normal
approximation for a mean (similarity). Both assume that examples are independent, which is only
nearly true of positions from one game.
"""

import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ..evaluate import Graded, grade
from ..model.encoding import encode_prompts
from ..rewards import RewardScorer
from ..runtime.flags import ConfigError, parse
from ..runtime.logging import Screen
from ..runtime.outputs import check_output_file, write_output
from ..tasks.registry import load_rewards
from .loading import Loaded, ModelSelection, load
from .messages import one_line_errors

Z = 1.959964  # 95 % of a normal distribution lies within this many standard deviations


@dataclass(frozen=True)
class Arguments(ModelSelection):
    n: int = 2000
    """Held-out examples, or as many as there are."""
    json: Path | None = None
    """Write the figures here, as JSON."""

    def check(self) -> None:
        """Raises ConfigError, in one line, for what can be told before the model is loaded."""
        if self.n < 1:
            raise ConfigError(f"--n must be at least 1, got {self.n}")
        if self.json is not None:
            check_output_file("--json", self.json)


@dataclass(frozen=True)
class Estimate:
    """A share or a mean with its 95 % confidence interval; the bounds are NaN without one."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value, low, high = (
            f"{100 * x:.1f}".replace("100.0", "100") for x in (self.value, self.low, self.high)
        )
        return value if math.isnan(self.low) else f"{value} [{low}, {high}]"


def share(hits: np.ndarray) -> Estimate:
    """The share of ones among `[n]` zeros and ones, with Wilson's interval (Wilson 1927).

    Unlike the normal approximation, it stays within [0, 1] and is not empty at shares of 0 and 1.
    """
    n, p = len(hits), float(hits.mean())
    scale = 1 + Z**2 / n
    center = (p + Z**2 / (2 * n)) / scale
    half = Z * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2)) / scale
    return Estimate(p, max(0.0, min(p, center - half)), min(1.0, max(p, center + half)))


def mean(values: np.ndarray) -> Estimate:
    """The mean of `[n]` values in [0, 1], with the normal interval; a single value has none."""
    center = float(values.mean())
    if len(values) < 2:
        return Estimate(center, math.nan, math.nan)
    half = Z * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Estimate(center, max(0.0, center - half), min(1.0, center + half))


COLUMNS = {"exact": share, "valid": share, "similarity": mean}


def estimates(graded: Graded) -> dict[str, dict[str, float | Estimate]]:
    """Kind of question -> n and the columns that the task has. The first kind is "all"."""
    parts = {name: scores[:, 0].astype(float) for name, scores in graded.rewards.parts.items()}
    scores = {**parts, "exact": graded.exact.astype(float)}
    kinds = {"all": np.ones(len(graded.exact), dtype=bool), **graded.by_kind()}
    return {
        kind: {
            "n": int(rows.sum()),
            **{name: of(scores[name][rows]) for name, of in COLUMNS.items() if name in scores},
        }
        for kind, rows in kinds.items()
    }


def run(loaded: Loaded, number: int, screen: Screen) -> Graded:
    """Answer and score `number` held-out examples, with progress on stderr."""
    task, config = loaded.task, loaded.config
    size = min(number, getattr(task, "num_held_out", None) or number)
    scorer = RewardScorer(
        task,
        weights=config.task.weights(),
        functions=load_rewards(config.task.rewards, screen.warn),
        warn=screen.warn,
        timeout_s=config.task.reward_timeout,
    )
    with closing(scorer), Progress(console=screen.errors) as progress:
        examples = [task.held_out(i) for i in progress.track(range(size), description="examples")]
        room = loaded.sampler.model.shape.context - config.sampling.max_new_tokens
        encode_prompts(loaded.sampler.tokenizer, examples, room)  # refuses long ones before work
        bar = progress.add_task("answers", total=size)
        return grade(loaded.sampler, scorer, examples, lambda number: progress.advance(bar, number))


def table(rows: dict[str, dict[str, float | Estimate]]) -> Table:
    """The estimates in percent, one row per kind."""
    out = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("%", *rows["all"]):
        out.add_column(name, justify="left" if name == "%" else "right", no_wrap=True)
    for kind, cells in rows.items():  # as Text, because brackets in them are no markup
        out.add_row(*map(Text, (kind, *map(str, cells.values()))), end_section=kind == "all")
    return out


def write_json(path: Path, loaded: Loaded, rows: dict[str, dict[str, float | Estimate]]) -> None:
    """Write the estimates with their model and seed."""
    kinds = {
        kind: {k: asdict(x) if isinstance(x, Estimate) else x for k, x in row.items()}
        for kind, row in rows.items()
    }
    result = {"model": loaded.name, "seed": loaded.config.run.seed, "kinds": kinds}
    text = json.dumps(result, indent=1) + "\n"
    write_output("--json", path, lambda partial: partial.write_text(text))


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    with one_line_errors("stopped; nothing was written"):
        score(parse(Arguments, argv, description=__doc__, prog=prog or "minigrpo evaluate"))


def score(arguments: Arguments) -> None:
    """Load, answer, print and write. Raises ValueError in one line."""
    arguments.check()
    screen = Screen(has_result=True)
    loaded = load(arguments, screen)
    rows = estimates(run(loaded, arguments.n, screen))
    if arguments.json:
        write_json(arguments.json, loaded, rows)
    size, seed = rows["all"]["n"], loaded.config.run.seed
    screen.say(f"{loaded.name}: greedy, {size} held-out examples, seed {seed}")
    screen.console.print(table(rows))
    screen.say(
        "[95 % confidence intervals]: Wilson's for shares (exact, valid), normal for the mean "
        "(similarity)"
    )
    if arguments.json:
        screen.say(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
