"""Positions and moves from seeded self-play: an endless supply of chess-env examples.

python-chess computes their answers. Moves are random with a bias, because purely random play hardly
ever castles, promotes or mates. A game yields `PLIES_PER_GAME` examples; it is played once.
"""

from functools import lru_cache
from typing import NamedTuple

import chess
import numpy as np
from numpy.random import Generator

from ..fen import move_kind, position_key, push, render, transition
from ..runtime.rng import stream
from ..types import Example
from .base import Generated, fingerprint

PLIES_PER_GAME = 16  # examples per game
GAMES_BETWEEN_SLOTS = 4  # distance in games between two draws from the same game
MAX_PLIES = 140
ILLEGAL_SHARE = 0.05  # of the examples
MATE_IF_POSSIBLE = 0.3  # how often a mating move is played if there is one
SPARSE_START_SHARE = 0.2  # of the games: endgames, the source of promotions, mates and draws

# how much likelier than a quiet move a move of each kind is played ...
PLAY_BIAS = {"capture": 1.5, "castling": 30.0, "promotion": 6.0, "en passant": 60.0}
# ... and how much likelier it is then picked as an example
PICK_BIAS = {
    "castling": 6.0,
    "promotion": 5.0,
    "en passant": 20.0,
    "check": 1.5,
    "checkmate": 8.0,
    "draw": 12.0,
}


def position_is_held_out(fen: str) -> bool:
    """Whether a position, one in four, is held out, by its hash alone; clocks do not matter."""
    return (fingerprint(position_key(fen)) >> 56) % 4 == 0


def question_about(fen: str, uci: str, index: int = 0) -> Example:
    """What a move makes of a position."""
    answer, kind = transition(fen, uci)
    return Example(f"A: {fen}+{uci}+", answer, index, kind)


class Ply(NamedTuple):
    fen: str  # before the move
    uci: str
    kind: str


def play(rng: Generator) -> list[Ply]:
    """A random game, to its end or to MAX_PLIES."""
    board = sparse_board(rng) if rng.random() < SPARSE_START_SHARE else chess.Board()
    plies = list[Ply]()
    while len(plies) < MAX_PLIES and not board.is_insufficient_material():
        moves = list(board.legal_moves)
        if not moves:
            break
        move = random_move(rng, board, moves)
        fen = render(board)
        kind, _ = push(board, move)
        plies.append(Ply(fen, move.uci(), kind))
    return plies


def random_move(rng: Generator, board: chess.Board, moves: list[chess.Move]) -> chess.Move:
    """One of the legal moves, by PLAY_BIAS; now and then a move that mates instead."""
    bias = [PLAY_BIAS.get(move_kind(board, move), 1.0) for move in moves]
    place = np.searchsorted(np.cumsum(bias), rng.random() * sum(bias), side="right")
    if rng.random() < MATE_IF_POSSIBLE:
        for move in moves:
            if board.gives_check(move) and board.lan(move).endswith("#"):
                return move
    return moves[place]


def sparse_board(rng: Generator) -> chess.Board:
    """A random valid endgame: two kings and one to six other pieces, about half of them pawns."""
    while True:
        board = chess.Board(None)
        white, black, *others = rng.permutation(64).tolist()
        board.set_piece_at(white, chess.Piece.from_symbol("K"))
        board.set_piece_at(black, chess.Piece.from_symbol("k"))
        for square in others[: 1 + rng.integers(6)]:
            kind = chess.PAWN if rng.random() < 0.5 else int(rng.integers(chess.KNIGHT, chess.KING))
            board.set_piece_at(square, chess.Piece(kind, rng.random() < 0.5))
        board.turn = rng.random() < 0.5
        board.halfmove_clock = int(rng.integers(40))
        board.fullmove_number = int(rng.integers(30, 110))
        if board.is_valid() and any(board.legal_moves):
            return board


def illegal_move(fen: str, rng: Generator) -> str:
    """An illegal move. Most leave the king in check, or move a piece of the right side."""
    board = chess.Board(fen)
    pinned = [move for move in board.pseudo_legal_moves if not board.is_legal(move)]
    if pinned and rng.random() < 0.5:
        return pinned[rng.integers(len(pinned))].uci()
    own = chess.SquareSet(board.occupied_co[board.turn])
    origins = list(own) if rng.random() < 0.8 else chess.SQUARES
    while True:
        move = chess.Move(origins[rng.integers(len(origins))], int(rng.integers(64)))
        if move.from_square != move.to_square and not board.is_legal(move):
            return move.uci()


class SelfPlay(Generated):
    """Endless examples, each a pure function of the seed, the split and its number."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.game = lru_cache(maxsize=2048)(self._game)  # self-play takes about 17 ms
        super().__init__(self._example, "positions of self-play, answers by python-chess")

    def _example(self, number: int, held_out: bool) -> Example:
        """Held-out examples come game by game; others staggered, so that games cost evenly."""
        game, slot = divmod(number, PLIES_PER_GAME)
        if not held_out:
            game += (PLIES_PER_GAME - 1 - slot) * GAMES_BETWEEN_SLOTS
        return self.game(game, held_out)[slot]

    def _game(self, game: int, held_out: bool) -> list[Example]:
        # 1. Play until rare kinds can be preferred: of a short game, few plies are of this split.
        split = "held-out" if held_out else "train"
        candidates = list[Ply]()
        attempt = 0
        while len(candidates) < 40:
            plies = play(stream(self.seed, f"game/{split}", game, attempt))
            candidates += [ply for ply in plies if position_is_held_out(ply.fen) == held_out]
            attempt += 1

        # 2. Pick some of the plies, rare kinds more often.
        rng = stream(self.seed, f"pick/{split}", game)
        bias = np.array([PICK_BIAS.get(ply.kind, 1.0) for ply in candidates])
        picks = rng.choice(len(candidates), PLIES_PER_GAME, replace=False, p=bias / bias.sum())

        # 3. Make a question of each, a few of them about an illegal move instead.
        examples = []
        for index, pick in enumerate(picks, game * PLIES_PER_GAME):
            ply = candidates[pick]
            uci = illegal_move(ply.fen, rng) if rng.random() < ILLEGAL_SHARE else ply.uci
            examples.append(question_about(ply.fen, uci, index))
        return examples
