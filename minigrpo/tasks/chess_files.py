"""The chess tasks: on self-play, or on files of games and questions, which take turns."""

from collections.abc import Callable, Sequence
from pathlib import Path

from . import best_move, pairs, transitions
from .best_move import BestMove
from .chess_env import ChessEnv
from .files import ExampleSource, Listener, SilentListener
from .games import Games
from .lines import Lines, json_line, text_line
from .mixed import Mixed
from .pairs import Pairs
from .task_request import TaskRequest

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


def self_play(request: TaskRequest) -> ChessEnv:
    """chess-env on positions of seeded self-play."""
    return ChessEnv(request.seed, request.history)


def chess_env(request: TaskRequest) -> Pairs | Mixed:
    """chess-env on files; a single .jsonl file holds prompts and answers of any kind."""
    if len(request.paths) == 1 and request.paths[0].suffix == ".jsonl":
        return _pairs(request)
    return of_files(request)


def _pairs(request: TaskRequest) -> Pairs:
    found = pairs.of_files(request)
    if found.train(0).prompt.startswith(WHAT_TO_PLAY):
        request.listener.warn(
            f"--data {request.data}: looks annotated; --task {BEST_MOVE} scores its moves one by "
            "one"
        )
    return found


def of_files(request: TaskRequest) -> Mixed:
    """A chess task on files. Raises ValueError, in one line, if they lack what it asks for."""
    name, paths = request.name, request.paths
    if name != CHESS_ENV and not any(str(x).endswith(MAY_HAVE_BEST_MOVES) for x in paths):
        raise _not_annotated(name, paths)
    seed, history = request.seed, request.history
    sources: list[ExampleSource] = [
        read_file(str(path), seed, history, WANTED[name], request.listener) for path in paths
    ]
    found = {prefix for source in sources for prefix in source.prompt_prefixes}
    if name != CHESS_ENV and WHAT_TO_PLAY not in found:
        raise _not_annotated(name, paths)
    if name == BOTH and NEXT_POSITION not in found:
        sources, found = [ChessEnv(seed, history), *sources], {*found, NEXT_POSITION}
    scorers = {NEXT_POSITION: ChessEnv(seed), WHAT_TO_PLAY: BestMove()}
    return Mixed(sources, {prefix: scorers[prefix] for prefix in sorted(found)})


def _not_annotated(name: str, paths: Sequence[Path]) -> ValueError:
    positions = " --positions FILE.pgn" if any(".pgn" in path.name for path in paths) else ""
    return ValueError(
        f"--task {name} needs annotated positions, --data FILE.jsonl or FILE.txt with P lines, got "
        f"{','.join(map(str, paths)) or 'none'}; `{ANNOTATE} --out FILE.jsonl{positions}` makes "
        "them"
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
