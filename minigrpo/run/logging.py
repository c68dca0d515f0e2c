"""A run's logs: JSONL files, which `report`, `compare` and `doctor` read, and TensorBoard.

A log never ends a run: what a full disk refuses is lost, with a warning. The JSON is strict: a
value that is not finite is null. docs/running.md says what the lines hold.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from ..checkpoint import write_text
from ..config import Config
from ..errors import ConfigError
from ..identity import digest
from ..metrics import SAMPLED, Graded, headline
from ..model.source import RECORD, RunRecord
from ..statistics import Estimate, PartlyKnown, wilson
from ..text.encoding import token_texts
from ..text.tokenizer import Tokenizer
from ..types import REWARD, RolloutBatch, Warn

METRICS = "metrics.jsonl"
EVALUATIONS = "eval.jsonl"
SAMPLES = "samples.jsonl"
HELD_OUT = "held_out.jsonl"
LOGS = (METRICS, EVALUATIONS, SAMPLES, HELD_OUT)
LogLine = Mapping[str, Any]  # a JSON object, with `step` among its keys
LoggedNumbers = Mapping[str, float]  # a line of metrics.jsonl or eval.jsonl, with its `step`
EVAL = "eval/"  # begins the names of curves of evaluations, as in TensorBoard
OVERVIEW_COLUMNS = ("", "steps", "held out, at first", "at last", "s/step", "peak MiB")


def to_json(record: LogLine, indent: int | None = None) -> str:
    """A record as strict JSON, with a line break at the end."""
    strict = json.loads(json.dumps(record), parse_constant=lambda name: None)
    return json.dumps(strict, indent=indent) + "\n"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects in a log, or none if there is no file.

    A line that a kill or a full disk has cut off is left out, like one that is being written.
    """
    records = []
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for line in lines:
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


class RunLog:
    """The logs of a run. Only the main process opens them; until then nothing is written."""

    def __init__(self, warn: Warn, check: Callable[[], object] = lambda: None) -> None:
        """`check` raises RunFailed if the folder belongs to another run by now."""
        self.warn = warn
        self.check = check
        self.folder: Path | None = None
        self.after_failure = ""  # ends a line that a full disk has cut off
        self.board: SummaryWriter | None = None

    def open(self, folder: Path, step: int, base: Path) -> None:
        """Continue the logs of the run in `base`, in `folder`, without lines after `step`."""
        self.folder = folder
        for name in LOGS:
            lines = read_jsonl(base / name)
            kept = [line for line in lines if line["step"] <= step]
            write_text(folder / name, "".join(map(to_json, kept)))
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.write(METRICS, step, [metrics])
        curves = {x if "/" in x else f"train/{x}": value for x, value in metrics.items()}
        self._draw(step, curves)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Log an evaluation; a resume takes it as done, so its samples are logged before."""
        self.write(EVALUATIONS, step, [values])
        self._draw(step, {EVAL + name: value for name, value in values.items()})

    def write(
        self,
        name: str,
        step: int,
        records: Iterable[LogLine],
        mode: str = "a",
    ) -> None:
        if self.folder is None:
            return
        self.check()
        lines = "".join(to_json({"step": step, **record}) for record in records)
        try:
            with open(self.folder / name, mode, encoding="utf-8") as file:
                file.write(self.after_failure + lines)
        except OSError as error:
            self.after_failure = "\n"
            self.warn(f"{self.folder}: logs are NOT WRITTEN ({error}); training continues")

    def close(self) -> None:
        if self.board:
            with suppress(Exception):
                self.board.close()

    def _draw(self, step: int, values: Mapping[str, float]) -> None:
        """Add points to the curves of TensorBoard. If it fails, it is not called again."""
        if self.board is None:
            return
        try:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()
        except Exception as error:
            self.board = None
            self.warn(f"TensorBoard failed, training continues without it ({error})")


def log_group(
    log: RunLog,
    batch: RolloutBatch,
    step: int,
    tokenizer: Tokenizer,
) -> None:
    """Every ten steps, log the group of the batch's first prompt."""
    if batch.advantages is None or step % 10:
        return
    completions = batch.completions
    records = []
    for g, advantage in enumerate(batch.advantages[0].tolist()):
        ids = completions.completion_ids[0, g][completions.completion_mask[0, g]].tolist()
        own = {"advantage": advantage, "tokens": token_texts(tokenizer, ids)}
        records.append({"source": "train", **_shared_fields(batch, 0, g), **own})
    log.write(SAMPLES, step, records)


def log_held_out(
    log: RunLog,
    greedy: Graded,
    drawn: Graded,
    step: int,
) -> None:
    """Log the answers of an evaluation, and the completions of its first prompts."""
    samples = []
    for decoding, graded in (("greedy", greedy), ("sampled", drawn)):
        right = graded.right
        for i in range(min(32, len(graded.examples))):
            fields = _shared_fields(graded, i, 0)
            is_right = float(right.values[i, 0]) if right.known[i, 0] else None
            own = {"decoding": decoding, "right": is_right}
            samples.append({"source": "held_out", **fields, **own})
    answers = []
    for i, example in enumerate(greedy.examples):
        fields = _shared_fields(greedy, i, 0)
        values = {"greedy": _known(greedy.measures, i), "sampled": _known(drawn.measures, i)}
        answers.append({"example": digest(replace(example, index=0)), **fields, **values})
    log.write(HELD_OUT, step, answers, mode="w")  # replaces the answers of the last evaluation
    log.write(SAMPLES, step, samples)


def _shared_fields(done: Graded | RolloutBatch, p: int, g: int) -> LogLine:
    example = done.examples[p]
    text = done.texts[p][g]
    rewards = done.rewards
    assert rewards is not None
    return {
        "index": example.index,
        "kind": example.kind,
        "prompt": example.prompt,
        "messages": list(example.messages),
        "truth": example.answer,
        "completion": text,  # the last turn of a dialogue
        "dialogue": text.messages if text.is_dialogue else [],  # all messages after the prompt
        "rewards": _known(rewards.scores, (p, g)),
        "reward": float(rewards.total[p, g]) if rewards.total_known[p, g] else None,
    }


def _known(numbers: Mapping[str, PartlyKnown], place: int | tuple[int, int]) -> dict[str, float]:
    return {name: float(x.values[place]) for name, x in numbers.items() if x.known[place]}


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
            costs.append(f"{median(values):,.4g}")
        steps = str(self.metrics[-1]["step"])
        return [self.name, steps, held_out[0], held_out[-1], *costs]


def read_run(folder: Path) -> Run:
    """Read the folder of a run. Raises ConfigError if it is not one."""
    metrics = read_numbers(folder / METRICS)
    evaluations = read_numbers(folder / EVALUATIONS)
    record = RunRecord.read(folder)
    if not (metrics and record):
        raise ConfigError(f"{folder}: is not a run, or has no steps yet")
    config = Config.from_toml(folder / RECORD)
    return Run(folder, config, metrics, evaluations, record.versions)


def read_numbers(path: Path) -> list[LoggedNumbers]:
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
