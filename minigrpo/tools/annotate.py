r"""Have an engine say what to play: positions with its best moves and their evaluations, as data for --task policy.

    python -m minigrpo.tools.annotate --out annotated.jsonl --n 2000 --positions games.pgn
    python train.py --task policy --data annotated.jsonl --init-from scratch --loss nll

One engine a worker, each with one thread and an empty memory for each position, so that what it says depends on the position
and the limit alone. Positions that the file has already are not asked again: the same command goes on where it was stopped.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from queue import SimpleQueue

import chess
import chess.engine
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..runtime.flags import ConfigError, exit_with, parse
from ..runtime.logging import Screen
from ..tasks.best_move import MATE, PROMPT_PREFIX, write
from ..tasks.chess_env import ChessEnv
from ..tasks.files import ExampleSource
from ..tasks.registry import read_file
from ..tasks.splits import POSITIONS_PER_HELD_OUT

PLACES = ("stockfish", "/usr/games/stockfish")  # where it is looked for
TRAIN_SHARE = POSITIONS_PER_HELD_OUT - 1
INSTALL = "apt-get install stockfish, or --engine PATH"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    out: Path
    """The .jsonl file to write, or to go on with."""
    n: int = 2000
    """Positions that the file should have in the end."""
    positions: str = ""
    """Where positions come from: a file as for --data (.pgn, .pgn.gz, .txt, .jsonl); empty:
    self-play.
    """
    nodes: int = 20_000
    """Nodes that the engine looks at for a position."""
    depth: int = 0
    """Depth to search to, instead of --nodes; 0: --nodes."""
    multipv: int = 5
    """Moves that are evaluated, at most."""
    workers: int = 1
    """Engines that run at once."""
    engine: str = ""
    """A UCI engine; empty: stockfish on the PATH, or /usr/games/stockfish."""
    seed: int = 0
    """ModelSelection positions are taken."""

    def check(self) -> None:
        """Raises ConfigError for a value that cannot be."""
        for name, least in (
            ("n", 1),
            ("nodes", 1),
            ("depth", 0),
            ("multipv", 1),
            ("workers", 1),
            ("seed", 0),
        ):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"--{name} must be at least {least}, got {value}")
        if self.out.suffix != ".jsonl":
            raise ConfigError(f"--out must be a .jsonl file, got {self.out}")

    @property
    def limit(self) -> chess.engine.Limit:
        return (
            chess.engine.Limit(depth=self.depth)
            if self.depth
            else chess.engine.Limit(nodes=self.nodes)
        )


def find_engine(path: str = "") -> str:
    """The engine's path. Raises ConfigError, with how to get one."""
    found = next(filter(None, map(shutil.which, (path,) if path else PLACES)), None)
    if not found:
        raise ConfigError(
            f"--engine {path}: no such program" if path else f"no Stockfish: {INSTALL}"
        )
    return found


class Engines:
    """Engines that run, each asked by one thread at a time."""

    def __init__(self, path: str, size: int, multipv: int) -> None:
        """Raises ConfigError for a program that is no UCI engine."""
        self.multipv = multipv
        self.all: list[chess.engine.SimpleEngine] = []
        self.idle: SimpleQueue[chess.engine.SimpleEngine] = SimpleQueue()
        for _ in range(size):
            try:
                engine = chess.engine.SimpleEngine.popen_uci(path)
                engine.configure({"Threads": 1} if "Threads" in engine.options else {})
            except (chess.engine.EngineError, OSError, TimeoutError) as error:
                self.close()
                raise ConfigError(
                    f"--engine {path}: is no UCI engine ({type(error).__name__})"
                ) from None
            self.all.append(engine)
            self.idle.put(engine)
        self.name = self.all[0].id.get("name", path)

    def annotate(self, fen: str, limit: chess.engine.Limit) -> str:
        """The completion that is true for a position, "" if the engine has no move for it."""
        engine = self.idle.get()
        try:
            infos = engine.analyse(
                chess.Board(fen), limit, multipv=self.multipv, game=object()
            )  # a new game: empty memory
        finally:
            self.idle.put(engine)
        lines = [
            (info["pv"][0].uci(), pawns(info["score"].relative))
            for info in infos
            if info.get("pv") and "score" in info
        ]
        # a limit may end a search between two of its lines, which then are not in order
        return write(sorted(lines, key=lambda line: -line[1])) if lines else ""

    def close(self) -> None:
        for engine in self.all:
            engine.close()


def pawns(score: chess.engine.Score) -> float:
    """What a score is worth to the side to move, a mate by the rule in policy.py."""
    return score.score(mate_score=round(MATE * 100)) / 100


def key(fen: str) -> str:
    """A position without its clocks: it is asked once."""
    return " ".join(fen.split(" ")[:4])


def positions(source: ExampleSource) -> Iterator[str]:
    """FENs of both splits in the shares that they have, each position once, for as long as there
    are any.
    """
    seen: set[str] = set()
    num_train = getattr(source, "num_train", None)
    for turn in count():
        places = [(source.train, turn * TRAIN_SHARE + i, num_train) for i in range(TRAIN_SHARE)]
        places.append((source.held_out, turn, source.num_held_out))
        left = [(ask, index) for ask, index, size in places if size is None or index < size]
        if not left:
            return
        for ask, index in left:
            fen = ask(index).prompt[len(PROMPT_PREFIX) :].split("+")[0]
            if key(fen) not in seen:
                seen.add(key(fen))
                yield fen


def read_done(path: Path, made_by: str) -> set[str]:
    """The positions that a file has; a last line that was cut off is removed. Raises ConfigError if
    it was made otherwise.
    """
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    done: set[str] = set()
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
            fen, by = record["prompt"].removeprefix(PROMPT_PREFIX), record["made_by"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"--out {path}, line {number}: was not written by this tool; take another file"
            ) from None
        if by != made_by:
            raise ConfigError(
                f"--out {path}: was made by {by}, this would be {made_by}; take another file, or "
                "the same flags"
            )
        done.add(key(fen))
    if len(whole) < len(data):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    return done


def run(arguments: Arguments) -> None:
    """Annotate until the file has `n` positions, or there are no more."""
    arguments.check()
    console = Console(highlight=False, soft_wrap=True)
    with closing(
        Engines(find_engine(arguments.engine), arguments.workers, arguments.multipv)
    ) as engines:
        limit = f"depth {arguments.depth}" if arguments.depth else f"nodes {arguments.nodes}"
        made_by = f"{engines.name}, {limit}, multipv {arguments.multipv}"
        done = read_done(arguments.out, made_by)
        source: ExampleSource = ChessEnv(arguments.seed)
        if arguments.positions:
            source = read_file(arguments.positions, arguments.seed, listener=Screen())
        had, wanted = len(done), arguments.n
        columns = (
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        progress = Progress(*columns, console=console)
        task = progress.add_task("", total=wanted, completed=had)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        pool = ThreadPoolExecutor(arguments.workers)
        try:
            with progress, open(arguments.out, "a", encoding="utf-8") as file:
                new = (fen for fen in positions(source) if key(fen) not in done)
                while len(done) < wanted and (
                    some := list(islice(new, min(wanted - len(done), 8 * arguments.workers)))
                ):
                    asked = [
                        (fen, pool.submit(engines.annotate, fen, arguments.limit)) for fen in some
                    ]
                    for fen, answer in asked:
                        if text := _result(answer):
                            file.write(
                                json.dumps(
                                    {
                                        "prompt": PROMPT_PREFIX + fen,
                                        "answer": text,
                                        "made_by": made_by,
                                    }
                                )
                                + "\n"
                            )
                            done.add(key(fen))
                        progress.update(task, completed=len(done))
                    file.flush()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    if len(done) < wanted:
        console.print(
            f"there are no more positions in {arguments.positions}: {len(done)} of {wanted}"
        )
    console.print(
        f"{arguments.out}: {len(done)} positions, {len(done) - had} of them new, by {made_by}"
    )


def _result(answer: "Future[str]") -> str:
    try:
        return answer.result()
    except (chess.engine.EngineError, CancelledError) as error:
        sys.exit(
            f"error: the engine failed ({error or type(error).__name__}); the same command goes on "
            "from here"
        )


def main() -> None:
    try:
        run(parse(Arguments, description=__doc__, prog="python -m minigrpo.tools.annotate"))
    except (ValueError, OSError) as error:
        exit_with(error)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")


if __name__ == "__main__":
    main()
