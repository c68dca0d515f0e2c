"""Have a chess engine annotate positions with its best moves, as data for --task best-move.

    minigrpo annotate --out annotated.jsonl --n 2000 --positions games.pgn
    minigrpo train --task best-move --data annotated.jsonl --init-from scratch --loss nll

Each worker runs one engine with one thread, and clears its memory before each position, so that an
annotation depends on the position and the limit alone. Positions that are already in the file are
not analysed a second time: an interrupted command continues where it stopped.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
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

from ..runtime.files import lock_file
from ..runtime.flags import ConfigError, parse
from ..runtime.logging import Screen
from ..runtime.outputs import check_is_not_read, check_output_file, one_line
from ..runtime.text import parse_json
from ..tasks.best_move import MATE, PROMPT_PREFIX, write
from ..tasks.chess_env import ChessEnv
from ..tasks.chess_files import read_file
from ..tasks.files import ExampleSource
from ..tasks.splits import POSITIONS_PER_HELD_OUT
from .messages import one_line_errors
from .uci import answers_uci

PLACES = ("stockfish", "/usr/games/stockfish")  # where to look for an engine
TRAIN_SHARE = POSITIONS_PER_HELD_OUT - 1  # training positions per held-out one
INSTALL = "apt-get install stockfish, or --engine PATH"
MOST_WORKERS = 256  # each is a process
BEGINNING = f'{{"prompt": "{PROMPT_PREFIX}'.encode()  # of each line of the file
AHEAD = 8  # positions per engine that are queued at a time


@dataclass(frozen=True, kw_only=True)
class Arguments:
    out: Path
    """The .jsonl file to write, or to continue."""
    n: int = 2000
    """Total number of positions in the file, including those that it already has."""
    positions: str = ""
    """A file of positions, as for --data (.pgn, .pgn.gz, .txt, .jsonl); empty: self-play."""
    nodes: int = 20_000
    """Nodes to search per position."""
    depth: int = 0
    """Search depth per position, instead of --nodes; 0: use --nodes."""
    multipv: int = 5
    """Moves to evaluate per position, at most."""
    workers: int = 1
    """Engines to run at once."""
    engine: str = ""
    """A UCI engine; empty: stockfish on the PATH, or /usr/games/stockfish."""
    seed: int = 0
    """Seed that selects the positions."""

    def check(self) -> None:
        """Raises ConfigError, in one line, for a value out of range."""
        least = {"n": 1, "nodes": 1, "depth": 0, "multipv": 1, "workers": 1, "seed": 0}
        for name, low in least.items():
            if (value := getattr(self, name)) < low:
                raise ConfigError(f"--{name} must be at least {low}, got {value}")
        if self.workers > MOST_WORKERS:
            raise ConfigError(f"--workers must be at most {MOST_WORKERS}, got {self.workers}")
        check_output_file("--out", self.out, (".jsonl",))
        check_is_not_read("--out", self.out, [self.positions])

    @property
    def limit(self) -> chess.engine.Limit:
        """The search limit for one position."""
        if self.depth:
            return chess.engine.Limit(depth=self.depth)
        return chess.engine.Limit(nodes=self.nodes)

    def made_by(self, engine: str) -> str:
        """What the annotations depend on, written into each line of the file."""
        limit = f"depth {self.depth}" if self.depth else f"nodes {self.nodes}"
        return f"{engine}, {limit}, multipv {self.multipv}"


def find_engine(path: str = "") -> str:
    """The engine's path. Raises ConfigError, with how to install one, if there is none."""
    found = next(filter(None, map(shutil.which, (path,) if path else PLACES)), None)
    if not found:
        missing = f"--engine {path}: no such program" if path else f"no Stockfish: {INSTALL}"
        raise ConfigError(missing)
    return found


class Engines:
    """A pool of engine processes; each serves one thread at a time."""

    def __init__(self, path: str, size: int, multipv: int) -> None:
        """Start `size` engines. Raises ConfigError for a program that is no UCI engine."""
        self.multipv = multipv
        self.all: list[chess.engine.SimpleEngine] = []
        self.idle: SimpleQueue[chess.engine.SimpleEngine] = SimpleQueue()
        try:
            if not answers_uci(path):
                raise ConfigError(f"--engine {path}: is no UCI engine (it does not answer uciok)")
        except OSError as error:
            raise ConfigError(f"--engine {path}: cannot be started ({error.strerror})") from None
        for _ in range(size):
            try:
                engine = chess.engine.SimpleEngine.popen_uci(path)
                engine.configure({"Threads": 1} if "Threads" in engine.options else {})
            except (chess.engine.EngineError, OSError, TimeoutError) as error:
                self.close()
                why = type(error).__name__
                raise ConfigError(f"--engine {path}: is no UCI engine ({why})") from None
            self.all.append(engine)
            self.idle.put(engine)
        self.name = self.all[0].id.get("name", path)

    def annotate(self, fen: str, limit: chess.engine.Limit) -> str:
        """The true completion for a position; "" if there is no legal move."""
        engine = self.idle.get()
        try:
            new_game = object()  # tells the engine to clear its memory
            infos = engine.analyse(chess.Board(fen), limit, multipv=self.multipv, game=new_game)
        finally:
            self.idle.put(engine)
        lines = [
            (info["pv"][0].uci(), pawns(info["score"].relative))
            for info in infos
            if info.get("pv") and "score" in info
        ]
        # The limit may end the search between two lines, which leaves them unsorted.
        return write(sorted(lines, key=lambda line: -line[1])) if lines else ""

    def close(self) -> None:
        for engine in self.all:
            engine.close()


def pawns(score: chess.engine.Score) -> float:
    """A score in pawns for the side to move; a mate counts as in `tasks.best_move`."""
    return score.score(mate_score=round(MATE * 100)) / 100


def key(fen: str) -> str:
    """A position without its two move counters, used to recognise repeats."""
    return " ".join(fen.split(" ")[:4])


def positions(source: ExampleSource) -> Iterator[str]:
    """Distinct FENs from both splits of a source, in the splits' own proportion.

    Ends when a finite source is exhausted.
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
    """The positions that a file already has. An incomplete last line of this tool is cut off.

    Raises ConfigError if another tool wrote the file, or if it was made with other flags.
    """
    if not path.exists():
        return set()
    data = path.read_bytes()
    *lines, last = data.split(b"\n")
    if last and not _is_cut_off(last):  # a file of somebody who writes no line break at the end
        lines.append(last)
    done: set[str] = set()
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
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
    if last:
        with open(path, "r+b") as file:
            if _is_cut_off(last):
                file.truncate(len(data) - len(last))
            else:
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
    return done


def _is_cut_off(line: bytes) -> bool:
    """Whether a last line is the beginning of a line of this tool, which died while it wrote."""
    start = BEGINNING[: len(line)]
    return line.startswith(start) and not line.endswith(b"}")


def run(arguments: Arguments) -> None:
    """Annotate until the file has `n` positions or the source is exhausted."""
    arguments.check()
    console = Console(highlight=False, soft_wrap=True)
    path = find_engine(arguments.engine)
    with closing(Engines(path, arguments.workers, arguments.multipv)) as engines:
        made_by = arguments.made_by(engines.name)
        with one_line("--out", arguments.out):
            done = read_done(arguments.out, made_by)
        had = len(done)
        source: ExampleSource = ChessEnv(arguments.seed)
        if arguments.positions:
            source = read_file(arguments.positions, arguments.seed, listener=Screen())
        with one_line("--out", arguments.out):
            _annotate(arguments, engines, source, done, console)
    if len(done) < arguments.n:
        missing = f"{len(done)} of {arguments.n}"
        console.print(f"there are no more positions in {arguments.positions}: {missing}")
    new = f"{len(done)} positions, {len(done) - had} of them new, by {made_by}"
    console.print(f"{arguments.out}: {new}")


def _annotate(
    arguments: Arguments, engines: Engines, source: ExampleSource, done: set[str], console: Console
) -> None:
    """Append a line per new position to the file, and add its key to `done`.

    Lines are written in the order of the source, so the file does not depend on the number of
    workers.
    """
    times = TimeElapsedColumn(), TimeRemainingColumn()
    progress = Progress(BarColumn(bar_width=None), MofNCompleteColumn(), *times, console=console)
    bar = progress.add_task("", total=arguments.n, completed=len(done))
    made_by = arguments.made_by(engines.name)
    new = (fen for fen in positions(source) if key(fen) not in done)
    pool = ThreadPoolExecutor(arguments.workers)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with progress, open(arguments.out, "a", encoding="utf-8") as file:
            if not lock_file(file):
                raise ConfigError(f"--out {arguments.out}: another program is writing to it")
            done |= read_done(arguments.out, made_by)  # written while the positions were read
            while left := max(0, arguments.n - len(done)):
                fens = list(islice(new, min(left, AHEAD * arguments.workers)))
                if not fens:
                    break
                answers = [pool.submit(engines.annotate, fen, arguments.limit) for fen in fens]
                for fen, answer in zip(fens, answers, strict=True):
                    if text := _result(answer):
                        record = {"prompt": PROMPT_PREFIX + fen, "answer": text, "made_by": made_by}
                        file.write(json.dumps(record) + "\n")
                        done.add(key(fen))
                    progress.update(bar, completed=len(done))
                file.flush()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _result(answer: "Future[str]") -> str:
    """An annotation; a failed engine ends the program, and what is in the file stays."""
    try:
        return answer.result()
    except (chess.engine.EngineError, CancelledError) as error:
        why = error or type(error).__name__
        sys.exit(f"error: the engine failed ({why}); the same command continues from here")


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    with one_line_errors("stopped; the same command continues from here"):
        run(parse(Arguments, argv, description=__doc__, prog=prog or "minigrpo annotate"))


if __name__ == "__main__":
    main()
