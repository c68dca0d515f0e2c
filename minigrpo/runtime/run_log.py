"""A run's logs: metrics, evaluations, samples, the last answers, TensorBoard, and listeners."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .answers import drop_later_answers, write_answers
from .files import NUM_NOT_FINITE
from .graded import Graded, doubts
from .log_files import EventFile, JSONLines, LogTrouble, Say, Scalars


class Listener(Protocol):
    """Gets what a run logs while it goes, such as a tracker; it must not raise."""

    def step(self, step: int, values: Scalars) -> None: ...

    def evaluation(self, step: int, values: Scalars) -> None: ...

    def sample(self, step: int, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """The logs in a run's folder: metrics, evaluations, samples, TensorBoard."""

    def __init__(
        self,
        folder: Path,
        warn: Say,
        *,
        start_step: int,
        listeners: Sequence[Listener] = (),
        before_cutting: Callable[[], object] = lambda: None,
    ) -> None:
        """`start_step` steps are done; lines of later steps, from a lost run, are dropped.

        `before_cutting` is called once copies without them are written, before a file changes.

        Raises ConfigError if a file is in the way or cannot be written.
        """
        self.folder, self.warn, self.listeners = folder, warn, listeners
        self.start_step = start_step
        # a run that starts afresh keeps nothing, not even the evaluation at step 0
        last = start_step or -1
        trouble = LogTrouble(warn)
        logs = list[JSONLines]()
        try:
            for name in ("metrics", "eval", "samples"):
                file, only_numbers = folder / f"{name}.jsonl", name != "samples"
                logs.append(JSONLines(file, trouble, up_to_step=last, only_numbers=only_numbers))
            before_cutting()
        except ValueError:
            for log in logs:
                log.give_up()
            raise
        for log in logs:
            log.open()
        self.metrics, self.evaluations, self.samples = logs
        drop_later_answers(folder, last)
        for log in (self.metrics, self.evaluations):
            if start_step and not log.kept:
                warn(f"{log.file.path}: has nothing of the {start_step} steps before the resume")
        there = len({record["step"] for record in self.metrics.kept})
        if 0 < there < start_step and not self.metrics.is_damaged:
            file = self.metrics.file.path
            warn(f"{file}: has {there} of the {start_step} steps before the resume")
        self.board = EventFile(folder / "tensorboard", trouble, first_step=last + 1)

    @property
    def evaluated(self) -> list[dict[str, Any]]:
        """Evaluations from before the resume by step, with NaN for what was not finite."""
        return [
            {
                name: math.nan if value is None else value
                for name, value in record.items()
                if name != NUM_NOT_FINITE
            }
            for record in sorted(self.evaluations.kept, key=lambda record: record["step"])
        ]

    def step(self, step: int, values: Scalars) -> None:
        self.metrics.write({"step": step, **values})
        named = {name if "/" in name else f"train/{name}": x for name, x in values.items()}
        self.board.scalars(step, named)
        for listener in self.listeners:
            listener.step(step, values)

    def evaluation(self, step: int, values: Scalars) -> None:
        self.evaluations.write_anew([{"step": step, **values}], lambda x: x["step"] == step)
        shown = {
            f"eval/{name}": value
            for name, value in values.items()
            if name != "n" and not name.startswith("count/")
        }
        self.board.scalars(step, shown)
        for listener in self.listeners:
            listener.evaluation(step, values)

    def answers(self, step: int, greedy: Graded, drawn: Graded) -> None:
        """Keep the answers of an evaluation, in place of those of the one before.

        Warns of scores that are none: eval.jsonl cannot tell the floor of a failure from a score.
        """
        for doubt in doubts(greedy, drawn):
            self.warn(f"evaluation at step {step}: {doubt}")
        write_answers(self.folder, step, greedy, drawn, self.warn)

    def sample(self, step: int, record: Mapping[str, Any]) -> None:
        self.samples.write({"step": step, **record})
        for listener in self.listeners:
            listener.sample(step, record)

    def held_out_samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Log an evaluation's samples. Those of a step before a resume replace the ones there."""
        records = [{"step": step, **record} for record in records]
        if step > self.start_step:
            for record in records:
                self.samples.write(record)
        else:
            held_out = {"step": step, "source": "held_out"}
            self.samples.write_anew(records, lambda x: held_out.items() <= x.items())
        for record, listener in itertools.product(records, self.listeners):
            listener.sample(step, record)

    def sample_text(self, step: int, text: str) -> None:
        self.board.text(step, "samples", text)

    def close(self) -> None:
        for log in (self.metrics, self.evaluations, self.samples, self.board):
            log.file.close()
        for listener in self.listeners:
            listener.close()


class NoLog:
    """The log of all processes but the main one: it does nothing."""

    evaluated: list[dict[str, Any]] = []  # noqa: RUF012 - nothing is ever added

    def step(self, step: int, values: Scalars) -> None: ...

    def evaluation(self, step: int, values: Scalars) -> None: ...

    def answers(self, step: int, greedy: Graded, drawn: Graded) -> None: ...

    def sample(self, step: int, record: Mapping[str, Any]) -> None: ...

    def held_out_samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None: ...

    def sample_text(self, step: int, text: str) -> None: ...

    def close(self) -> None: ...
