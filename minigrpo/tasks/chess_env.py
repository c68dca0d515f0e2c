"""Chess as a world model: given a position and a move, write the position after it.

    prompt       A: <FEN>+<uci move>+                    with history: A: <FEN>+<uci move>+<last moves, by commas>+
    completion   <next FEN>+<reward>+<terminated>+<truncated>

Positions come from seeded self-play, truth from python-chess, so both cost nothing and neither can
be wrong. Moves are random with a bias, because purely random play hardly ever castles, promotes or
mates. Example i of a split is one ply of game i // PLIES_PER_GAME; a game is played once and kept.
En passant follows `fen(en_passant="fen")`: the square behind every double step, whether or not a
pawn can capture there.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import chess
import numpy as np

from ..rewards import is_valid_fen, similarities
from ..runtime.rng import stream
from ..types import Example

PLIES_PER_GAME = 16  # examples that one game yields
GAMES_BETWEEN_SLOTS = 4  # how many games later the next example of a game is drawn
HELD_OUT_SHARE = 4  # one position in 4 is held out, chosen by a hash of the position alone
MAX_PLIES = 140
PLIES_TO_PICK_FROM = 40  # at least so many candidates, else the rare kinds could not be preferred
ILLEGAL_SHARE = 0.05
SPARSE_START_SHARE = (
    0.2  # games that begin in a random endgame, where promotions, mates and draws live
)

# how much likelier than a quiet one a move of that kind is played, and then picked as an example
PLAY_BIAS = {"quiet": 1.0, "capture": 1.5, "castling": 30.0, "promotion": 6.0, "en passant": 60.0}
PICK_BIAS = {
    "quiet": 1.0,
    "capture": 1.0,
    "castling": 6.0,
    "promotion": 5.0,
    "en passant": 20.0,
    "check": 1.5,
}
PICK_BIAS |= {"checkmate": 8.0, "draw": 12.0}
KINDS = (*PICK_BIAS, "illegal")


def render(board: chess.Board) -> str:
    return board.fen(en_passant="fen")


def ending_of(board: chess.Board) -> str:
    """What follows the FEN of a position that a legal move has led to. Forgets the moves before."""
    board.clear_stack()
    outcome = board.outcome()
    if outcome is None:
        return "0.001+0+0"
    return f"{'0.5' if outcome.winner is None else '1.0'}+1+0"


def transition(fen: str, uci: str) -> str:
    """The completion that is true for a position and a move; an illegal move leaves the position as
    it is.

    A function of the text alone: repetition, which a FEN does not tell, is not looked at.
    """
    board = chess.Board(fen)
    move = chess.Move.from_uci(uci)
    if not board.is_legal(move):
        return f"{fen}+0.0+0+1"
    board.push(move)
    return f"{render(board)}+{ending_of(board)}"


def prompt_of(fen: str, uci: str, before: str | None = None) -> str:
    """The question; `before` is what --history tells, the last moves by commas, None without it."""
    return f"A: {fen}+{uci}+" + (f"{before}+" if before is not None else "")


def move_kind(board: chess.Board, move: chess.Move) -> str:
    """What a legal move is by itself, before looking at where it leads."""
    if board.is_castling(move):
        return "castling"
    if move.promotion:
        return "promotion"
    if board.is_en_passant(move):
        return "en passant"
    return "capture" if board.is_capture(move) else "quiet"


def ply_kind(board: chess.Board, kind: str) -> str:
    """What a move of that kind is after all, by the position that it has led to."""
    if board.is_check():
        return "check" if any(board.legal_moves) else "checkmate"
    if (
        board.is_insufficient_material()
        or not any(board.legal_moves)
        or board.is_seventyfive_moves()
    ):
        return "draw"
    return kind


def is_held_out(fen: str) -> bool:
    """Whether a position belongs to evaluation, by a hash of placement, turn, castling and en
    passant.

    The clocks are left out: the same position a move later in the game is the same position.
    """
    position = " ".join(fen.split(" ")[:4])
    return hashlib.blake2b(position.encode(), digest_size=8).digest()[0] % HELD_OUT_SHARE == 0


def sparse_board(rng: np.random.Generator) -> chess.Board:
    """A random valid endgame: two kings and one to six other pieces, half of them pawns near
    promotion or not.
    """
    while True:
        board = chess.Board(None)
        squares = rng.permutation(64)
        board.set_piece_at(int(squares[0]), chess.Piece(chess.KING, chess.WHITE))
        board.set_piece_at(int(squares[1]), chess.Piece(chess.KING, chess.BLACK))
        for square in squares[2 : 3 + int(rng.integers(6))]:
            piece_type = (
                chess.PAWN
                if rng.random() < 0.5
                else int(rng.integers(chess.KNIGHT, chess.QUEEN + 1))
            )
            board.set_piece_at(int(square), chess.Piece(piece_type, bool(rng.random() < 0.5)))
        board.turn = bool(rng.random() < 0.5)
        board.halfmove_clock, board.fullmove_number = (
            int(rng.integers(40)),
            int(rng.integers(30, 110)),
        )
        if board.is_valid() and any(board.legal_moves):
            return board


def mating_move(board: chess.Board, moves: list[chess.Move]) -> chess.Move | None:
    for move in moves:
        if board.gives_check(move):
            board.push(move)
            mate = board.is_checkmate()
            board.pop()
            if mate:
                return move
    return None


def play(seed: int, split: str, game: int, attempt: int) -> list[tuple[str, str, str]]:
    """One self-play game as (FEN before, move, kind) a ply."""
    rng = stream(seed, f"game/{split}", game, attempt)
    board = sparse_board(rng) if rng.random() < SPARSE_START_SHARE else chess.Board()
    plies: list[tuple[str, str, str]] = []
    while (
        len(plies) < MAX_PLIES
        and (moves := list(board.legal_moves))
        and not board.is_insufficient_material()
    ):
        kinds = [move_kind(board, move) for move in moves]
        weights = np.cumsum([PLAY_BIAS[kind] for kind in kinds])
        pick = int(np.searchsorted(weights, rng.random() * weights[-1], side="right"))
        move, kind = moves[pick], kinds[pick]
        if rng.random() < 0.3 and (mate := mating_move(board, moves)):
            move = mate
        fen = render(board)
        board.push(move)
        plies.append((fen, move.uci(), ply_kind(board, kind)))
    return plies


def illegal_move(fen: str, rng: np.random.Generator) -> str:
    """A move that is not legal, mostly one that looks like a move: from a square of one's own, or
    leaving the king.
    """
    board = chess.Board(fen)
    pinned = [move for move in board.pseudo_legal_moves if not board.is_legal(move)]
    if pinned and rng.random() < 0.5:
        return pinned[int(rng.integers(len(pinned)))].uci()
    own = chess.SquareSet(board.occupied_co[board.turn])
    origins = list(own) if rng.random() < 0.8 else list(range(64))
    while True:
        move = chess.Move(origins[int(rng.integers(len(origins)))], int(rng.integers(64)))
        if move.from_square != move.to_square and not board.is_legal(move):
            return move.uci()


@dataclass(frozen=True)
class Positions:
    """The endless sequence of examples of one split, each a pure function of (seed, index)."""

    seed: int
    split: str  # train or held-out
    history: int = 0  # how many earlier moves the prompt tells

    def example(self, index: int) -> Example:
        """Example `index`, a ply of game `index // PLIES_PER_GAME`."""
        game, slot = divmod(index, PLIES_PER_GAME)
        return self.game(game)[slot]

    def draw(self, number: int) -> Example:
        """The same examples in another order, none twice: consecutive draws come from
        PLIES_PER_GAME different games.

        Staggered, so that every PLIES_PER_GAME draws need one new game: self-play never comes in
        bursts.
        """
        turn, slot = divmod(number, PLIES_PER_GAME)
        game = turn + (PLIES_PER_GAME - 1 - slot) * GAMES_BETWEEN_SLOTS
        return self.example(game * PLIES_PER_GAME + slot)

    @lru_cache(maxsize=2048)  # noqa: B019 - shared by equal Positions, which are values
    def game(self, game: int) -> tuple[Example, ...]:
        """The examples of one game; self-play takes some 17 ms, so it is remembered."""
        usable: list[
            tuple[str, str, str, str]
        ] = []  # from as many games as it takes: short ones have too few plies
        attempt = 0
        while len(usable) < PLIES_TO_PICK_FROM:
            plies = play(self.seed, self.split, game, attempt)
            for i, (fen, uci, kind) in enumerate(plies):
                if is_held_out(fen) == (self.split == "held-out"):
                    before = ",".join(uci for _, uci, _ in plies[max(0, i - self.history) : i])
                    usable.append((fen, uci, kind, before))
            attempt += 1
        rng = stream(self.seed, f"pick/{self.split}", game)
        weights = np.array([PICK_BIAS[kind] for _, _, kind, _ in usable])
        picks = rng.choice(len(usable), PLIES_PER_GAME, replace=False, p=weights / weights.sum())
        return tuple(
            self._example(game * PLIES_PER_GAME + i, usable[k], rng) for i, k in enumerate(picks)
        )

    def _example(
        self, index: int, ply: tuple[str, str, str, str], rng: np.random.Generator
    ) -> Example:
        fen, uci, kind, before = ply
        if rng.random() < ILLEGAL_SHARE:
            uci, kind = illegal_move(fen, rng), "illegal"
        prompt = prompt_of(fen, uci, before if self.history else None)
        return Example(prompt=prompt, answer=transition(fen, uci), index=index, kind=kind)


MAX_SCORED_CHARS = 200
ENDING = re.compile(
    r"(-?[01]\.[0-9]{1,3})\+([01])\+([01])"
)  # RookWorld's reward of an illegal move is -1.0


class ChessEnv:
    """The task: prompts from `Positions`, completions judged part by part against the truth.

    Reward parts, each in [0, 1]: format (four fields that parse), valid (a valid FEN), similarity
    (of the FEN to the true one), exact_fen (the FEN is the true one), reward_value (that field is
    right), flags (half for each flag).
    """

    num_held_out = None  # endless
    heads = ("A: ",)
    # what is to be learnt counts; the rest only has to break ties, or it drowns the signal where
    # nothing is exact yet
    parts: Mapping[str, float] = {
        "exact_fen": 1.0,
        "similarity": 1.0,
        "valid": 0.05,
        "format": 0.05,
        "reward_value": 0.05,
        "flags": 0.05,
    }

    def __init__(self, seed: int, history: int = 0) -> None:
        self._train, self._held_out = (
            Positions(seed, "train", history),
            Positions(seed, "held-out", history),
        )

    def train(self, number: int) -> Example:
        return self._train.draw(number)

    def held_out(self, number: int) -> Example:
        return self._held_out.example(number)

    def score_batch(
        self, examples: Sequence[Example], texts: Sequence[str]
    ) -> dict[str, np.ndarray]:
        rows, fens, true_fens = [], [], []
        for example, text in zip(examples, texts, strict=True):
            true_fen, truth = _truth(example.answer)
            fen, _, rest = text[:MAX_SCORED_CHARS].partition(
                "+"
            )  # no ending to read: what there is, is taken for the FEN
            ending = _ending(rest) if len(text) <= MAX_SCORED_CHARS else None
            exact = fen == true_fen  # and then it need not be parsed
            valid = exact or is_valid_fen(fen)
            if ending:
                flags = ((ending[1] == truth[1]) + (ending[2] == truth[2])) / 2
                rows.append((exact, valid, True, ending[0] == truth[0], flags))
            else:
                rows.append((exact, valid, False, False, 0.0))
            fens.append(fen)
            true_fens.append(true_fen)
        exact_fen, valid, well_formed, reward_value, flags = np.array(rows, dtype=np.float32).T
        return {
            "exact_fen": exact_fen,
            "similarity": similarities(fens, true_fens),
            "valid": valid,
            "format": well_formed,
            "reward_value": reward_value,
            "flags": flags,
        }

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        return {
            name: float(values[0]) for name, values in self.score_batch([example], [text]).items()
        }


@lru_cache(maxsize=1 << 12)
def _truth(answer: str) -> tuple[str, tuple[str, ...]]:
    """The true FEN, and what follows it."""
    fen, *ending = answer.split("+")
    return fen, tuple(ending)


@lru_cache(maxsize=1 << 12)
def _ending(text: str) -> tuple[str, ...] | None:
    """Reward, terminated and truncated, or None if they are not what stands there."""
    found = ENDING.fullmatch(text)
    return found and found.groups()
