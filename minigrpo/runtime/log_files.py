"""The files of a run's logs: records of steps as JSONL, and TensorBoard's events.

All of them are `AppendedFile`s. A log must never end a run: while the disk is full, records wait in
memory, and they are written when there is room. What a resume has to cut is cut in a copy, which
replaces the file when it is whole.
"""

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import text as text_summary

from .failures import reason_of
from .files import PARTIAL, put_in_place, to_json, write_aside, write_whole
from .flags import ConfigError
from .text import parse_json, quoted

Scalars = Mapping[str, float]
Say = Callable[[str], object]
MAX_WAITING = 64 * 2**20  # bytes per file; beyond that, the oldest records that wait are dropped
MAX_WARNINGS = 3  # about damaged lines of one file


class LogTrouble:
    """Says once that logs cannot be written, and once that they are written again."""

    def __init__(self, warn: Say) -> None:
        self.warn = warn
        self.files: set[Path] = set()  # that have records waiting

    def begins(self, path: Path, error: OSError) -> None:
        if not self.files:
            self.warn(
                f"{path}: NOT WRITTEN ({reason_of(error)}); training continues, "
                "and the logs are written when there is room"
            )
        self.files.add(path)

    def ends(self, path: Path) -> None:
        if path in self.files:
            self.files.remove(path)
            if not self.files:
                self.warn(f"{path}: the logs are written again")


class AppendedFile:
    """A file that whole records are appended to, without ever raising for a full disk."""

    def __init__(self, path: Path, trouble: LogTrouble, line_end: bytes = b"") -> None:
        """Open or create the file. Raises ConfigError if that is not possible.

        `line_end`: what records end with; it is added to a last line that somebody has cut.
        """
        self.path, self.trouble, self.line_end = path, trouble, line_end
        self.waiting: deque[bytes] = deque()
        self.size_waiting, self.dropped = 0, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "a+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({reason_of(error)})") from None

    def append(self, record: bytes) -> None:
        self.waiting.append(record)
        self.size_waiting += len(record)
        try:
            while self.waiting:
                self._write(self.waiting[0])
                self._forget_first()
        except OSError as error:
            self.trouble.begins(self.path, error)
            while self.size_waiting > MAX_WAITING:
                self._forget_first()
                self.dropped += 1
        else:
            self.trouble.ends(self.path)

    def close(self) -> None:
        if self.waiting:
            self.append(b"")  # one more try
        if lost := self.dropped + sum(1 for record in self.waiting if record):
            self.trouble.warn(f"{self.path}: {lost} records could not be written and are lost")
        self.file.close()

    def _follow(self) -> None:
        """Open the file anew if it was removed or replaced, as editors do when they save.

        What is written to the old one would be lost. Raises OSError if the folder has gone.
        """
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), os.fstat(self.file.fileno())):
                return
        anew = open(self.path, "a+b", buffering=0)
        self.file.close()
        self.file = anew
        self.trouble.warn(
            f"{self.path}: was removed or replaced during the run; what follows is in the new file"
        )

    def _forget_first(self) -> None:
        self.size_waiting -= len(self.waiting.popleft())

    def _write(self, record: bytes) -> None:
        """Write all of a record or, as far as the file system allows, nothing."""
        self._follow()
        size = os.fstat(self.file.fileno()).st_size
        is_cut = size and self.line_end not in (b"", os.pread(self.file.fileno(), 1, size - 1))
        rest = memoryview(self.line_end * bool(is_cut) + record)
        try:
            while rest:  # a disk that fills up takes a part without complaint
                rest = rest[self.file.write(rest) :]
        except OSError:
            os.ftruncate(self.file.fileno(), size)
            raise


class JSONLines:
    """A file of records with a `step`; a resume keeps those up to its own step.

    The file changes only when it is opened, and may be given up before.
    """

    def __init__(
        self, path: Path, trouble: LogTrouble, *, up_to_step: int, only_numbers: bool = True
    ) -> None:
        """Write a copy without the lines of later steps, which a lost run wrote.

        `only_numbers`: all values of a record are numbers or null; other records are damaged.

        A damaged line is left out with a warning that names it. Raises ConfigError if the file
        cannot be read or copied.
        """
        self.path, self.trouble = path, trouble
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: is not a file, but a log of the run goes there")
        try:
            old = path.read_bytes() if path.exists() else b""
            damage: list[str] = []
            self.kept = records_of(old, up_to_step, path, damage.append, only_numbers=only_numbers)
            for said in damage:
                trouble.warn(said)
            self.is_damaged = bool(damage)
            new = "".join(map(to_json, self.kept)).encode()
            # a file with another name (cp -al) would grow in the copy, too
            self.is_copied = new != old or (path.exists() and path.stat().st_nlink > 1)
            if self.is_copied:
                write_aside(path.resolve(), lambda aside: aside.write_bytes(new))
        except OSError as error:
            raise self._error(error) from None

    def give_up(self) -> None:
        """Leave the file as it is."""
        if self.is_copied:
            file = self.path.resolve()
            file.with_name(file.name + PARTIAL).unlink(missing_ok=True)

    def open(self) -> None:
        """Put the copy in place, for records to follow. Raises ConfigError if that fails."""
        try:
            if self.is_copied:
                put_in_place(self.path.resolve())
        except OSError as error:
            raise self._error(error) from None
        self.file = AppendedFile(self.path, self.trouble, b"\n")

    def write(self, record: Mapping[str, Any]) -> None:
        self.file.append(to_json(record).encode())

    def write_anew(
        self, records: Sequence[Mapping[str, Any]], is_old: Callable[[Mapping[str, Any]], bool]
    ) -> None:
        """Write records in place of those that `is_old` selects, if there are any."""
        with suppress(OSError):  # else they follow them: the last ones count
            there = records_of(self.path.read_bytes(), sys.maxsize, self.path, lambda said: None)
            kept = [record for record in there if not is_old(record)]
            if len(kept) < len(there) and not self.file.waiting:
                new = "".join(map(to_json, [*kept, *records])).encode()
                write_whole(self.path.resolve(), lambda aside: aside.write_bytes(new))
                self.file.close()
                self.file = AppendedFile(self.path, self.trouble, b"\n")
                return
        for record in records:
            self.write(record)

    def _error(self, error: OSError) -> ConfigError:
        return ConfigError(f"{self.path}: cannot be read and rewritten ({reason_of(error)})")


def records_of(
    content: bytes, up_to_step: int, path: Path, warn: Say, *, only_numbers: bool = False
) -> list[dict[str, Any]]:
    """The records of a log up to a step. `warn` gets the lines that are damaged."""
    kept, damaged = list[dict[str, Any]](), list[str]()
    if up_to_step < 0:
        return []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
            step = record.get("step") if isinstance(record, dict) else None
            if type(step) is not int or not _is_number(step):
                raise ValueError("no object with a step")
            texts = (name for name, x in record.items() if not _is_number(x))
            if only_numbers and (name := next(texts, "")):
                raise ValueError(f"{quoted(name)} is no number")
            if step <= up_to_step:
                kept.append(record)
        except ValueError as error:
            # the last one was cut off when the process died; what it said is made again
            if line and number < len(lines):
                damaged.append(f"{path}, line {number}: left out ({reason_of(error)})")
    for message in damaged[:MAX_WARNINGS]:
        warn(message)
    if len(damaged) > MAX_WARNINGS:
        warn(f"{path}: {len(damaged) - MAX_WARNINGS} more lines are left out")
    return kept


def _is_number(value: Any) -> bool:
    """Whether a value is null or a number that a float can hold."""
    return isinstance(value, float | None) or (isinstance(value, int) and abs(value) < 10**300)


class EventFile:
    """TensorBoard's events, one file per start of the run."""

    def __init__(self, folder: Path, trouble: LogTrouble, *, first_step: int) -> None:
        """Events of `first_step` and later, from a lost run, are not shown any more."""
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.file = AppendedFile(folder / name, trouble)
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def scalars(self, step: int, values: Scalars) -> None:
        rows = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(Event(step=step, summary=Summary(value=rows)))

    def text(self, step: int, name: str, text: str) -> None:
        readable = text.encode("utf-8", "backslashreplace").decode()  # half of a surrogate pair
        self._add(Event(step=step, summary=text_summary(name, readable)))

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        record = BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self.file.append(record.getvalue())
