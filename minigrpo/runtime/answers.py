"""held_out.jsonl: the answers of a run's last evaluation, one line per held-out example.

`minigrpo compare` pairs the lines of two runs. Each has these keys:

    step, example (a digest of all that the example says), kind, prompt, truth
    completion: the greedy one
    greedy, sampled: the value of each measure; of the sampled completions, their mean
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..types import Example
from .failures import reason_of
from .files import to_json, write_whole
from .graded import Graded
from .text import parse_json

ANSWERS = "held_out.jsonl"


def write_answers(
    run: Path, step: int, greedy: Graded, drawn: Graded, warn: Callable[[str], object]
) -> None:
    """Replace the file in the folder of a run; if that is not possible, warn."""
    file = run / ANSWERS
    text = "".join(to_json(record) for record in answers(step, greedy, drawn))
    try:
        write_whole(file, lambda aside: aside.write_text(text, encoding="utf-8"))
    except OSError as error:
        warn(f"{file}: NOT WRITTEN ({reason_of(error)})")


def drop_later_answers(run: Path, step: int) -> None:
    """Remove the file if its answers are of a later step, which a resume from `step` gives up."""
    file = run / ANSWERS
    with suppress(OSError, ValueError, TypeError, KeyError):  # no file, or a damaged one
        with open(file, "rb") as lines:
            evaluated = parse_json(lines.readline())["step"]
        if evaluated > step:
            file.unlink()


def answers(step: int, greedy: Graded, drawn: Graded) -> Iterator[dict[str, Any]]:
    """The lines of the file. A measure that does not concern an example is left out."""
    means = {"greedy": _means(greedy), "sampled": _means(drawn)}
    for row, example in enumerate(greedy.examples):
        yield {
            "step": step,
            "example": digest(example),
            "kind": example.kind,
            "prompt": example.prompt,
            "truth": example.answer,
            "completion": greedy.texts[row][0],
            **{
                how: {name: float(x[row]) for name, x in found.items() if not np.isnan(x[row])}
                for how, found in means.items()
            },
        }


def digest(example: Example) -> str:
    """Equal for examples that ask and are scored alike."""
    messages = [dict(message) for message in example.messages]
    said = {"prompt": example.prompt, "answer": example.answer, "messages": messages}
    digested = to_json(said) + _stable(example.fields)
    return hashlib.sha256(digested.encode(errors="replace")).hexdigest()[:16]


def _stable(value: Any) -> str:
    """The `repr` of a value, the same in every process: sets have no order, objects no address."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_stable(k)}: {_stable(x)}' for k, x in value.items()))}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(_stable, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_stable, value))}]"
    try:
        return re.sub(" at 0x[0-9a-f]+", "", repr(value))
    except Exception:  # of a user's class
        return type(value).__name__


def _means(graded: Graded) -> dict[str, np.ndarray]:
    """`[n]` means over the completions of each example; NaN where a measure concerns none."""
    found = {}
    for name, values in graded.measures.items():
        known = ~np.isnan(values)
        sums = np.where(known, values, 0.0).sum(axis=1, dtype=np.float64)
        found[name] = np.divide(
            sums, known.sum(axis=1), out=np.full(len(values), np.nan), where=known.any(axis=1)
        )
    return found
