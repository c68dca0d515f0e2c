"""Read the JSONL files of a run's folder; what is wrong in one is named with its line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

from ..runtime.flags import ConfigError
from ..runtime.text import parse_json, quoted

Record = dict[str, Any]
MOST = 10**300  # JSON may spell whole numbers for which a float has no room


def read_records(
    path: Path, *, only_numbers: bool = False, warn: Callable[[str], object] = lambda text: None
) -> list[Record]:
    """The records of a JSONL file of which each line is an object with an integer `step`, by step.

    An incomplete last line is left out, because a run may be writing it, or have died while it did.
    Of several lines about one step the last one counts. Runs write neither those nor lines out of
    order: `warn` is told of them, because two runs may have written to the file.

    Args:
        only_numbers: all values must be numbers or null.

    Raises:
        ConfigError: one line that names the file, the line in it, and what is wrong.
    """
    return _by_step(path, read_lines(path, only_numbers=only_numbers), warn)


def read_lines(path: Path, *, only_numbers: bool = False) -> list[Record]:
    """The same, one record per line in the order of the file, where several may have one step."""
    if not (path.is_file() or path.is_dir()):  # a pipe would be waited for
        raise ConfigError(f"{path}: is not a file")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        where = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {where}: is not UTF-8") from None
    records: list[Record] = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError:
            if number == len(lines):
                break
            raise ConfigError(f"{path}, line {number}: is not JSON") from None
        if problem := _problem(record, only_numbers):
            raise ConfigError(f"{path}, line {number}: {problem}")
        records.append(record)
    if not records:
        raise ConfigError(f"{path}: has no records")
    return records


def _by_step(path: Path, records: list[Record], warn: Callable[[str], object]) -> list[Record]:
    """One record per step, in order. Shuffled steps would be drawn as zigzag, and have no trend."""
    steps = [record["step"] for record in records]
    in_order = sorted({record["step"]: record for record in records}.items())
    if twice := len(steps) - len(in_order):
        warn(
            f"{path}: {twice} lines repeat the step of an earlier one; the last line of each step "
            "counts. Did two runs write to this folder?"
        )
    elif steps != sorted(steps):
        warn(f"{path}: its steps are not in order; they are read as if they were")
    return [record for _, record in in_order]


def read_object(path: Path) -> Record:
    """The object in a JSON file. Raises ConfigError in one line."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise ConfigError(f"{path}: is not whole JSON") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return value


def is_number(value: object) -> TypeGuard[float]:
    """Whether a JSON value is a number that a float can hold; true and false are not."""
    if isinstance(value, int) and abs(value) > MOST:
        return False
    return isinstance(value, int | float) and not isinstance(value, bool)


def _problem(record: object, only_numbers: bool) -> str:
    """What is wrong with a record, or ""."""
    if not isinstance(record, dict):
        return "must be a JSON object"
    step = record.get("step")
    if not isinstance(step, int) or not is_number(step):
        return f"step must be a whole number, got {quoted(step)}"
    for name, value in record.items() if only_numbers else ():
        if value is not None and not is_number(value):
            return f"{quoted(name)} must be a number, got {quoted(value)}"
    return ""
