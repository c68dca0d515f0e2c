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
from ..types import REWARD, ConfigError
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
        name = self.success + SAMPLED
        evaluations = [record for record in self.evaluations if name in record]
        if self.success == REWARD:
            return [Estimate(record[name]) for record in evaluations]
        return [wilson(record[name], record["n"]) for record in evaluations]

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
            costs.append(f"{median(values):.3g}")
        steps = str(self.metrics[-1]["step"])
        return [self.name, steps, held_out[0], held_out[-1], *costs]


def read_run(folder: Path) -> Run:
    """Read the folder of a run. Raises ConfigError if it is not one."""
    metrics = _read_numbers(folder / METRICS)
    evaluations = _read_numbers(folder / EVALUATIONS)
    record = RunRecord.read(folder)
    if not (metrics and record):
        raise ConfigError(f"{folder}: is not a run, or has no steps yet")
    config = Config.from_toml(folder / RECORD)
    return Run(folder, config, metrics, evaluations, record.versions)


def _read_numbers(path: Path) -> list[LoggedNumbers]:
    """The lines of a log, without values that were not finite."""
    lines = read_jsonl(path)
    return [{name: x for name, x in line.items() if x is not None} for line in lines]


def differing(sides: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Rows of a name and its value on each side, where these differ."""
    rows = []
    for name in dict.fromkeys(chain(*sides)):
        values = [str(side.get(name, "")) for side in sides]
        if len(set(values)) > 1:
            rows.append([name, *values])
    return rows
