"""The samples of the page: groups of training completions, and held-out prompts over the run.

page.js draws them from what `samples` returns, so it holds plain JSON. Tokens are numbers into a
table of their texts. A page has room for only so much: of the logged steps, evenly spaced ones are
kept, the first and the last among them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from ...runtime.flags import ConfigError
from ...runtime.log_files import records_of
from ..boards import differences, ranks, squares
from ..records import Record, is_number

ROOM = 1_800_000  # characters of JSON for all runs together
LONGEST = 4_000  # characters of a text, and tokens of a completion
MOST_COMPLETIONS = 64  # of a group
EVER = 2**63
Say = Callable[[str], object]


def samples(folder: Path, warn: Say, room: int = ROOM) -> dict[str, Any]:
    """The samples of a run: `train` groups by step, `held_out` prompts, and `pieces` of tokens."""
    records = read(folder / "samples.jsonl", warn)
    pieces: dict[tuple[int, str], int] = {}
    groups = [_group(group, pieces) for group in _by_step_and_prompt(records)]
    prompts = _by_prompt([r for r in records if r.get("source") == "held_out"])
    kept = fit(groups, room * 2 // 3)
    return {
        "train": kept,
        "num_train": len(groups),
        "held_out": [_prompt(rows) for rows in fit(prompts, room // 3)],
        "num_held_out": len(prompts),
        "pieces": [piece for _, piece in pieces],
    }


def read(path: Path, warn: Say) -> list[Record]:
    """The samples in a run's folder; none, with a warning, if the file cannot be read."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        warn(f"{path}: is not a file, so the page has no samples")
        return []
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        warn(f"{path}: cannot be read ({error.strerror}), so the page has no samples")
        return []
    found = records_of(content, EVER, path, warn)
    return [r for r in found if isinstance(r.get("completion"), str)]


def fit(items: Sequence[Any], room: int) -> list[Any]:
    """As many evenly spaced items as there is room for as JSON, at least one."""
    sizes = [len(json.dumps(item)) for item in items]
    count = len(items)
    while count > 1 and sum(sizes[i] for i in evenly(len(items), count)) > room:
        count -= max(1, count // 10)
    return [items[i] for i in evenly(len(items), count)]


def evenly(number: int, count: int) -> list[int]:
    """`count` of the places 0 to number - 1, evenly spaced, the first and the last among them.

    >>> evenly(10, 4)
    [0, 3, 6, 9]
    """
    if count <= 1:
        return list(range(number))[-1:]
    return [round(i * (number - 1) / (count - 1)) for i in range(count)]


# --- groups of training ---------------------------------------------------------------------------


def _by_step_and_prompt(records: Sequence[Record]) -> list[list[Record]]:
    """The records of training by step and prompt; old runs logged two of a group."""
    groups: dict[tuple[int, str], list[Record]] = {}
    for record in records:
        if record.get("source", "train") == "train":
            groups.setdefault((record["step"], str(record.get("prompt"))), []).append(record)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def _group(records: Sequence[Record], pieces: dict[tuple[int, str], int]) -> dict[str, Any]:
    first = records[0]
    return {
        **_asked(first),
        "step": first["step"],
        "prompt_tokens": max(0, int(_number(first.get("prompt_tokens")) or 0)),
        "completions": [
            {
                **_written(record),
                "advantage": _number(record.get("advantage")),
                "tokens": _tokens(record, pieces),
            }
            for record in records[:MOST_COMPLETIONS]
        ],
    }


def _tokens(record: Record, pieces: dict[tuple[int, str], int]) -> list[int]:
    """A completion's tokens as places in the table of texts."""
    ids, texts = record.get("token_ids"), record.get("tokens")
    if not isinstance(ids, list) or not isinstance(texts, list) or len(ids) != len(texts):
        return []
    pairs = zip(ids[:LONGEST], texts[:LONGEST], strict=True)
    return [
        pieces.setdefault((number, text), len(pieces))
        for number, text in pairs
        if isinstance(number, int) and isinstance(text, str)
    ]


# --- held-out prompts over the run ----------------------------------------------------------------


def _by_prompt(records: Sequence[Record]) -> list[list[Record]]:
    prompts: dict[tuple[Any, str], list[Record]] = {}
    for record in records:
        prompts.setdefault((str(record.get("index")), str(record.get("prompt"))), []).append(record)
    return list(prompts.values())


def _prompt(records: Sequence[Record]) -> dict[str, Any]:
    rows: dict[int, dict[str, Any]] = {}
    for record in records:  # of an evaluation that was made twice, the later one counts
        row = rows.setdefault(record["step"], {})
        row[str(record.get("decoding", "sampled"))] = {
            **_written(record),
            "right": _number(record.get("right")),
        }
    steps = [{"step": step, **rows[step]} for step in sorted(rows)]
    return {**_asked(records[0]), "rows": steps}


# --- both -----------------------------------------------------------------------------------------


def _asked(record: Record) -> dict[str, Any]:
    truth = _text(record.get("truth"))
    board = {"board": _board(truth)} if is_board(truth) else {}
    kind = _text(record.get("kind"))
    return {"prompt": _text(record.get("prompt")), "truth": truth, "kind": kind, **board}


def _written(record: Record) -> dict[str, Any]:
    text, truth = record["completion"], _text(record.get("truth"))
    parts = record.get("parts")
    out: dict[str, Any] = {
        "text": _text(text),
        "reward": _number(record.get("reward")),
        "parts": {str(name): _number(x) for name, x in parts.items()}
        if isinstance(parts, Mapping)
        else {},
    }
    if record.get("explained"):
        out["explained"] = _text(record["explained"])
    if is_board(truth) and text != truth:
        out |= {"board": _board(text), "explained": "; ".join(differences(truth, text))}
    return out


def is_board(truth: str) -> bool:
    """Whether a true answer begins with a chess position."""
    rows = ranks(truth)
    return len(rows) == 8 and all(len(row) == 8 for row in rows)


def _board(text: str) -> str:
    """64 squares, the eighth rank first; what is no piece is shown as a question mark."""
    every = (square for row in squares(text) for square in row)
    return "".join(x if x in "pnbrqkPNBRQK." else "?" for x in every)


def pieces_svg() -> str:
    """python-chess's pieces as SVG symbols, which page.js puts on its boards."""
    try:
        from chess.svg import PIECES
    except ImportError:
        raise ConfigError("minigrpo report needs python-chess: pip install chess") from None
    return "".join(f'<g id="piece-{name}">{svg}</g>' for name, svg in PIECES.items())


def _text(value: object) -> str:
    text = value if isinstance(value, str) else ""
    return text if len(text) <= LONGEST else text[:LONGEST] + " … (cut for this page)"


def _number(value: object) -> float | None:
    return round(float(value), 4) if is_number(value) and isfinite(value) else None
