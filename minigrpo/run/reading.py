"""Read the folder of a run, for `report`, `compare` and `doctor`, also while the run is going."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median

from ..config import Config
from ..metrics import SAMPLED, headline
from ..model.source import RECORD, RunRecord
from ..statistics import Estimate, wilson
from ..types import REWARD, ConfigError, Warn
from .logging import EVALUATIONS, METRICS, read_jsonl

LoggedNumbers = Mapping[str, float]  # a line of metrics.jsonl or eval.jsonl, with its `step`
EVAL = "eval/"  # begins the names of curves of evaluations, as in TensorBoard
OVERVIEW_COLUMNS = ("", "steps", "held out, at first", "at last", "s/step", "peak MiB")


@dataclass(frozen=True)
class Run:
    folder: Path
    config: Config
    metrics: Sequence[LoggedNumbers]  # by step
    evaluations: Sequence[LoggedNumbers]  # by step
    versions: dict[str, object]  # versions of software, and digests of the files that it uses

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def success(self) -> str:
        """The headline of evaluations: the fraction of right greedy completions, or REWARD."""
        return headline(self.evaluations[-1] if self.evaluations else {})

    @property
    def headlines(self) -> list[Estimate]:
        """The headline of each evaluation, sampled. A fraction has Wilson's interval."""
        numbers = {record["step"]: record.get("n", 0) for record in self.evaluations}
        estimates = []
        for step, value in self.curve(EVAL + self.success + SAMPLED).items():
            is_fraction = self.success != REWARD and 0 <= value <= 1 <= numbers[step]
            estimates.append(wilson(value, numbers[step]) if is_fraction else Estimate(value))
        return estimates

    def curve(self, name: str) -> dict[float, float]:
        """The values of a metric by step. EVAL before its name makes it one of the evaluations."""
        measure = name.removeprefix(EVAL)
        records = self.metrics if name == measure else self.evaluations
        return {record["step"]: record[measure] for record in records if measure in record}

    def overview(self) -> list[str]:
        """The cells of OVERVIEW_COLUMNS. The costs are medians over steps."""
        held_out = [str(estimate) for estimate in self.headlines] or [""]
        costs = []
        for name in ("step_time", "memory/peak_mib"):
            values = self.curve(name).values()
            costs.append(f"{median(values):.3g}" if values else "")
        steps = str(self.metrics[-1]["step"])
        return [self.name, steps, held_out[0], held_out[-1], *costs]


def read_run(folder: Path, warn: Warn) -> Run:
    """Read the folder of a run; warn of damaged lines. Raises ConfigError if it is not one."""
    metrics = _read_numbers(folder / METRICS, warn)
    evaluations = _read_numbers(folder / EVALUATIONS, warn)
    record = RunRecord.read(folder)
    if not (metrics and record):
        raise ConfigError(f"{folder}: is not a run, or has no steps yet")
    config = Config.from_toml(folder / RECORD)
    return Run(folder, config, metrics, evaluations, record.versions)


def _read_numbers(path: Path, warn: Warn) -> list[LoggedNumbers]:
    """The numbers of the lines of a log. A line whose step is no number is left out."""
    lines = [finite_numbers(line) for line in read_jsonl(path, warn)]
    return [line for line in lines if "step" in line]


def finite_numbers(record: object) -> dict[str, float]:
    """The numbers of a JSON object that numpy can hold, by names that can be printed.

    A value that is not an object has none.
    """
    pairs = record.items() if isinstance(record, dict) else ()
    numbers = {name: x for name, x in pairs if type(x) in (int, float) and abs(x) < 2**63}
    return {name: x for name, x in numbers.items() if name.isprintable()}


def differing(sides: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Rows of a name and its value on each side, where these differ."""
    rows = []
    for name in dict.fromkeys(chain(*sides)):
        values = [str(side.get(name, "")) for side in sides]
        if len(set(values)) > 1:
            rows.append([name, *values])
    return rows
