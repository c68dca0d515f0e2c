r"""Have a chess engine annotate positions with its best moves, as data for best_move.py.

    python examples/annotate.py --out annotated.txt --n 2000 --positions-from games.pgn

It needs a UCI engine, such as Stockfish (apt-get install stockfish). The engine's memory is cleared
before each position, so an annotation depends on the position and the limit alone. Positions that
are in the file already are not analysed a second time: an interrupted command goes on where it
stopped.
"""

from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import chess.engine
import tyro
from rich.progress import track

from minigrpo.fen import position_key
from minigrpo.tasks.chess_env import ChessEnv
from minigrpo.tasks.chess_files import position_of

MATE = 100_000  # centipawns; a mate in n moves is worth 1000 - n / 100 pawns
MOST_REPEATS = 10_000  # so many positions in a row that were seen before: there are no others


def positions(task: ChessEnv) -> Iterator[str]:
    """Distinct positions of both splits."""
    seen, repeats = set[str](), 0
    for number in count():
        for example in (task.train(number), task.held_out(number)):
            fen = position_of(example)
            repeats = repeats + 1 if position_key(fen) in seen else 0
            if repeats == MOST_REPEATS:
                return
            if not repeats:
                seen.add(position_key(fen))
                yield fen


def annotate(
    engine: chess.engine.SimpleEngine, fen: str, limit: chess.engine.Limit, multipv: int
) -> str:
    """The line of a position; "" if there is no legal move."""
    board = chess.Board(fen)
    infos = engine.analyse(board, limit, multipv=multipv, game=object())  # a new game: no memory
    lines = [
        (info["pv"][0].uci(), info["score"].relative.score(mate_score=MATE) / 100)
        for info in infos
        if info.get("pv") and "score" in info
    ]
    # the limit may end the search between two lines, which leaves them unsorted
    lines.sort(key=lambda line: -line[1])
    moves, values = [move for move, _ in lines], [str(round(pawns, 2)) for _, pawns in lines]
    return f"P: {fen} M: {' '.join(moves)} E: {' '.join(values)} B: {moves[0]}" if lines else ""


def done_before(out: Path) -> set[str]:
    """The positions that the file has already. An incomplete last line is cut off."""
    if not out.exists():
        return set()
    data = out.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with open(out, "r+b") as file:
            file.truncate(len(whole))
    fens = [line.removeprefix("P: ").split(" M: ")[0] for line in whole.decode().splitlines()]
    return set(map(position_key, fens))


def main(
    out: Path,
    positions_from: Path | None = None,
    n: int = 2000,
    nodes: int = 20_000,
    multipv: int = 5,
    engine: str = "stockfish",
    seed: int = 0,
) -> None:
    """Annotate until the file has n positions.

    Args:
        out: the .txt file to write, or to continue.
        positions_from: games (.pgn, .pgn.gz) or lines of text; without it, self-play.
        n: positions in the file, those included that it has.
        nodes: nodes to search per position.
        multipv: moves to evaluate per position, at most.
        engine: a UCI engine.
        seed: selects the positions.
    """
    task, done = ChessEnv(seed, [positions_from] if positions_from else []), done_before(out)
    new = (fen for fen in positions(task) if position_key(fen) not in done)
    limit = chess.engine.Limit(nodes=nodes)
    with chess.engine.SimpleEngine.popen_uci(engine) as running, open(out, "a") as file:
        missing = max(0, n - len(done))
        for fen in track(islice(new, missing), description="", total=missing):
            if line := annotate(running, fen, limit, multipv):
                file.write(line + "\n")
                file.flush()


if __name__ == "__main__":
    tyro.cli(main)
