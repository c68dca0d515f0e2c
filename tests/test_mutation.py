"""A machine that damages every input: what is read is valid, or one printable line and code 2.

Each kind of input is a valid file and what reads it. The file's bytes or JSON values are changed at
random, and it is read in place of a command, so that the command line turns errors into exit codes.
"""

import contextlib
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minigrpo.config import Config
from minigrpo.model import hf
from minigrpo.tasks.loading import load_task
from minigrpo.text.tokenizer import load_tokenizer
from minigrpo.tools import cli

from . import tiny
from .test_tools import call
from .tiny import ask

ODD_TEXTS = (b"", b"\x00", b"\xff\xfe", b"\\ud800", b"\n", b"[", b'"', b"nan", b"-1", b"1e999")
ODD_VALUES = (
    *(None, True, -1, 0, 2**70, -0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\x1b[2J", "\u202e", [], [None], [[1]], {}, {"a": {}}),
)


def damaged_bytes(content: bytes, chance: random.Random) -> bytes:
    """Bytes with a part cut out, repeated, swapped for another or flipped."""
    start = chance.randrange(len(content) + 1)
    stop = start + chance.choice((0, 1, 5, 50, len(content)))
    part = content[start:stop]
    flipped = bytes(x ^ 1 for x in part[:1])
    new = chance.choice([b"", part + part, part[::-1], flipped, *ODD_TEXTS])
    return content[:start] + new + content[stop:]


def damaged_value(value: Any, chance: random.Random) -> Any:
    """A JSON value with one value inside it changed, left out or doubled."""
    if not (isinstance(value, dict | list) and value and chance.random() < 0.9):
        return chance.choice(ODD_VALUES)
    if isinstance(value, list):
        i = chance.randrange(len(value))
        return [*value[:i], damaged_value(value[i], chance), *value[i + 1 :]]
    key = chance.choice(sorted(value))
    how = chance.random()
    if how < 0.1:
        return {name: x for name, x in value.items() if name != key}
    if how < 0.2:
        return {**value, key + "x": value[key]}
    return {**value, key: damaged_value(value[key], chance)}


def damaged_json(content: bytes, chance: random.Random) -> bytes:
    """One line of JSON, or a whole file of it, with a changed value."""
    rows = content.splitlines() if content.startswith(b"{") and b"}\n{" in content else [content]
    i = chance.randrange(len(rows))
    rows[i] = json.dumps(damaged_value(json.loads(rows[i]), chance)).encode()
    return b"\n".join(rows) + b"\n"


def make_settings(folder: Path) -> None:
    config = Config.of(task_args={"difficulty": "2x12"}, reward_weights="exact_fen=1", kl_coef=0.1)
    (folder / "a.toml").write_text(tiny.toml(config))


def read_settings(folder: Path) -> None:
    config = Config.from_toml(folder / "a.toml")
    assert Config.of(**config.flat()) == config


def make_data(folder: Path) -> None:
    rows = [{"prompt": f"ask {i}", "answer": "b", "extra": [1]} for i in range(40)]
    chats = [{"messages": ask(f"ask {i}"), "answer": "b"} for i in range(9)]
    tiny.write_jsonl(folder / "a.jsonl", rows + chats)


def read_data(folder: Path) -> None:
    task = load_task("prompts", seed=0, data=str(folder / "a.jsonl"))
    for example in (task.train(0), task.held_out(0), *task.known()[:3]):
        task.score(example, example.answer)


def read_model(folder: Path) -> None:
    assert hf.read_model(folder)[0].vocab_size > 0


def read_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert all(0 <= number < tokenizer.n_vocab for number in tokenizer.encode("add 12 é"))


Read = Callable[[Path], Any]
INPUTS = {
    "settings": (make_settings, "a.toml", read_settings),
    "data": (make_data, "a.jsonl", read_data),
    "config.json": (tiny.tiny_chat_model, "config.json", read_model),
    "tokenizer.json": (tiny.tiny_chat_model, "tokenizer.json", read_tokenizer),
    "tokenizer_config.json": (tiny.tiny_chat_model, "tokenizer_config.json", read_tokenizer),
}


def outcome(read: Read, folder: Path) -> None:
    """Read in place of a command; assert that it ends well, or with one printable line and 2."""

    def command(argv: list[str], prog: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            read(folder)

    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(errors):
        patch.setattr(cli, "_function", lambda name: command)
        code = call("report")
    assert code in (0, 2)
    if code:
        (line,) = errors.getvalue().splitlines()
        assert line.isprintable() and len(line) > 10


@pytest.mark.parametrize("name", INPUTS)
def test_damage_is_told_in_one_line(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    make, file, read = INPUTS[name]
    folder = tmp_path_factory.mktemp("input")
    make(folder)
    read(folder)  # as it is, it is valid
    paths = sorted(folder.glob(file))

    @settings(suppress_health_check=list(HealthCheck))
    @given(seed=st.integers(0, 2**32), times=st.integers(1, 3))
    def damage(seed: int, times: int) -> None:
        chance = random.Random(seed)
        path = chance.choice(paths)
        content = damaged = path.read_bytes()
        if path.suffix != ".toml" and chance.random() < 0.5:
            damaged = damaged_json(content, chance)
        else:
            for _ in range(times):
                damaged = damaged_bytes(damaged, chance)
        path.write_bytes(damaged)
        try:
            outcome(read, folder)
        finally:
            path.write_bytes(content)

    damage()
