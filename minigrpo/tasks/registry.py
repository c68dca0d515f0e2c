"""Turns --task and --data into a task: a built-in one on self-play or files, or one of your own.

The protocol that a task implements is `minigrpo.types.Task`. own.py runs users' Python files.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from ..runtime.flags import ConfigError
from ..runtime.renamed import modern
from ..runtime.text import check_file_name
from ..types import Task
from . import best_move, transitions
from .best_move import BestMove
from .chess_env import ChessEnv
from .files import ExampleSource, Listener, SilentListener, check_readable
from .games import Games
from .lines import Lines, json_line, text_line
from .mixed import Mixed
from .own import load_own_task
from .own import load_rewards as load_rewards
from .pairs import Pairs

CHESS_ENV, BEST_MOVE, BOTH = "chess-env", "best-move", "chess-env+best-move"
NEXT_POSITION, WHAT_TO_PLAY = transitions.PROMPT_PREFIX, best_move.PROMPT_PREFIX
ALL_PREFIXES = (NEXT_POSITION, WHAT_TO_PLAY)
# which questions a task takes from a file; the kinds that are found decide the reward parts
WANTED = {CHESS_ENV: ALL_PREFIXES, BEST_MOVE: (WHAT_TO_PLAY,), BOTH: ALL_PREFIXES}
MAY_HAVE_BEST_MOVES = (".txt", ".jsonl")  # files that may hold best-move questions
ANNOTATE = "python -m minigrpo.tools.annotate"

# (path, seed, history, wanted prompt prefixes, listener) -> the examples of a file
Reader = Callable[[Path, int, int, Sequence[str], Listener], ExampleSource]
READERS: dict[str, Reader] = {  # by how the file's name ends
    ".pgn": lambda path, seed, history, wanted, told: Games(path, seed, history, told),
    ".pgn.gz": lambda path, seed, history, wanted, told: Games(path, seed, history, told),
    ".txt": lambda path, seed, history, wanted, told: Lines(path, seed, text_line, wanted, told),
    ".jsonl": lambda path, seed, history, wanted, told: Lines(path, seed, json_line, wanted, told),
}


def load_task(
    name: str, *, seed: int, history: int = 0, data: str = "", listener: Listener | None = None
) -> Task:
    """Return the task of --task and --data.

    Args:
        name: chess-env, best-move, chess-env+best-move (or one of their earlier names), or a Python
            file with one class that has `parts`, `train`, `held_out` and `score`; the class is
            called with the seed.
        history: how many earlier moves a chess-env prompt contains.
        data: files of questions, separated by commas, which take turns; "" for self-play. With
            chess-env, a single .jsonl file holds prompts and answers of any kind (`Pairs`).
        listener: receives reading progress and skipped records.

    Raises:
        ValueError: in one line that names the flag.
    """
    name = modern({"task": name})["task"]
    if name not in WANTED:
        if not name.endswith(".py"):
            allowed = ", ".join(WANTED)
            raise ValueError(f"--task must be {allowed} or a Python file (FILE.py), got {name}")
        if data:
            raise ValueError(f"--data goes with {', '.join(WANTED)}, got --task {name}")
        return load_own_task(name, seed, (listener or SilentListener()).warn)
    if not data and name == CHESS_ENV:
        return ChessEnv(seed, history)
    try:
        paths = _paths(data)
        if name == CHESS_ENV and len(paths) == 1 and paths[0].endswith(".jsonl"):
            return _pairs(paths[0], seed, listener)
        return _task_of_files(name, paths, seed, history, listener)
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith("--") else f"--data {error}") from None


def _paths(data: str) -> list[str]:
    """The files of --data. Raises ConfigError if there is none, or one is named twice."""
    paths = [path.strip() for path in data.split(",") if path.strip()]
    if data and not paths:
        raise ConfigError(f"--data must name a file, or several separated by commas, got {data!r}")
    for path in paths:
        check_file_name(path)
    files = [Path(path).resolve() for path in paths]
    for i, file in enumerate(files):
        if file in files[:i]:  # the same questions would fill two of the turns
            raise ConfigError(f"--data {data}: names {paths[i]} twice")
    return paths


def _pairs(data: str, seed: int, listener: Listener | None) -> Pairs:
    pairs = Pairs(Path(data), seed, listener)
    if pairs.train(0).prompt.startswith(WHAT_TO_PLAY) and listener:
        listener.warn(
            f"--data {data}: looks annotated; --task {BEST_MOVE} scores its moves one by one"
        )
    return pairs


def _task_of_files(
    name: str, paths: Sequence[str], seed: int, history: int, listener: Listener | None
) -> Task:
    for path in paths:  # check all paths first: reading one file may take minutes
        reader_of(path)
        check_readable(Path(path))
    if name != CHESS_ENV and not any(path.endswith(MAY_HAVE_BEST_MOVES) for path in paths):
        raise _not_annotated(name, paths)
    sources = [read_file(path, seed, history, WANTED[name], listener) for path in paths]
    found = {prefix for source in sources for prefix in source.prompt_prefixes}
    if name != CHESS_ENV and WHAT_TO_PLAY not in found:
        raise _not_annotated(name, paths)
    if name == BOTH and NEXT_POSITION not in found:
        sources, found = [ChessEnv(seed, history), *sources], {*found, NEXT_POSITION}
    scorers = {NEXT_POSITION: ChessEnv(seed), WHAT_TO_PLAY: BestMove()}
    return Mixed(sources, {prefix: scorers[prefix] for prefix in sorted(found)})


def _not_annotated(name: str, paths: Sequence[str]) -> ValueError:
    positions = " --positions FILE.pgn" if any(".pgn" in path for path in paths) else ""
    return ValueError(
        f"--task {name} needs annotated positions, --data FILE.jsonl or FILE.txt with P lines, got "
        f"{','.join(paths) or 'none'}; `{ANNOTATE} --out FILE.jsonl{positions}` makes them"
    )


def reader_of(path: str) -> Reader:
    """Return the reader for a file's name. Raises ValueError for an ending not in READERS."""
    for suffix, reader in READERS.items():
        if path.endswith(suffix):
            return reader
    raise ValueError(f"a file of questions must end with {', '.join(READERS)}, got {path}")


def read_file(
    path: str,
    seed: int,
    history: int = 0,
    prompt_prefixes: Sequence[str] = ALL_PREFIXES,
    listener: Listener | None = None,
) -> ExampleSource:
    """Return the examples of a file; its extension determines the format.

    Args:
        prompt_prefixes: how the wanted prompts begin; other questions in the file are ignored.

    Raises:
        ValueError: in one line that names the file.
    """
    reader = reader_of(path)
    return reader(Path(path), seed, history, prompt_prefixes, listener or SilentListener())
