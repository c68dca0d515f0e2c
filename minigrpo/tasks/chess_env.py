"""Chess as a world model: given a position and a move, write the position after the move.

    prompt       A: <FEN>+<uci move>+
    completion   <next FEN>+<reward>+<terminated>+<truncated>

A completion ends in `0.001+0+0` while the game goes on, `1.0+1+0` for checkmate, `0.5+1+0` for a
draw, and `0.0+0+1` for an illegal move, which leaves the position as it is. The true answers come
from python-chess (`fen.transition`).

Positions come from self-play. Its moves are random with a bias, because purely random play hardly
ever castles, promotes or mates. examples/chess_games.py takes them from files of games.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from operator import eq
from typing import NamedTuple

import chess
import numpy as np
from numpy.random import Generator

from ..fen import is_valid_fen, move_kind, position_key, push, transition, write_fen
from ..rewards.functions import similarity
from ..rng import stream
from ..types import Example
from .base import Generated, hash64

# the reward may have a sign, because RookWorld's files give an illegal move -1.0
ENDING = re.compile(r"(-?[01]\.[0-9]{1,3})\+([01])\+([01])")

# self-play
PLIES_PER_GAME = 16  # examples of a game
GAMES_BETWEEN_SLOTS = 4  # distance in games between two draws from the same game
MAX_PLIES = 140
ILLEGAL_FRACTION = 0.05  # fraction of the examples with an illegal move
MATE_IF_POSSIBLE = 0.3  # probability that a mating move is played if there is one
# fraction of the games that start from an endgame: it brings promotions, mates and draws
SPARSE_START_FRACTION = 0.2

# weight of a move of each kind in the choice of the next move; a quiet move has 1
PLAY_BIAS = {"capture": 1.5, "castling": 30.0, "promotion": 6.0, "en passant": 60.0}
# weight of a move of each kind in the choice of examples; any other has 1
PICK_BIAS = {
    "castling": 6.0,
    "promotion": 5.0,
    "en passant": 20.0,
    "check": 1.5,
    "checkmate": 8.0,
    "draw": 12.0,
}


class ChessEnv(Generated):
    """Prompts from self-play; completions are scored part by part against the truth."""

    # Each reward is in [0, 1]. The first two are the objective. The others only break ties: with
    # more weight they would drown the signal as long as no completion is exact.
    reward_weights: Mapping[str, float] = {
        "exact_fen": 1.0,  # the FEN is the true one
        "similarity": 1.0,  # 1 - normalized edit distance between the FEN and the true one
        "valid": 0.05,  # the FEN is valid
        "format": 0.05,  # the text has four fields that parse
        "reward_value": 0.05,  # the reward field is right
        "flags": 0.05,  # half a point for each flag that is right
    }

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.game = lru_cache(maxsize=2048)(self._game)  # self-play takes about 17 ms
        super().__init__(self._example, "positions of self-play, answers by python-chess")

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        true_fen, true_reward, *true_flags = example.answer.split("+")
        fen, _, rest = text[:200].partition("+")  # the true text is shorter
        ending = ENDING.fullmatch(rest)
        reward, *flags = ending.groups() if ending else ("", "", "")
        exact = fen == true_fen
        return {
            "exact_fen": exact,
            "similarity": similarity(fen, true_fen),
            "valid": exact or is_valid_fen(fen),  # the true FEN need not be parsed
            "format": ending is not None,
            "reward_value": reward == true_reward,
            "flags": sum(map(eq, flags, true_flags)) / 2,
        }

    def _example(self, number: int, split: str) -> Example:
        """Held-out examples come game by game, others staggered, so that steps cost the same."""
        game, slot = divmod(number, PLIES_PER_GAME)
        if split == "train":
            game += (PLIES_PER_GAME - 1 - slot) * GAMES_BETWEEN_SLOTS
        return self.game(game, split)[slot]

    def _game(self, game: int, split: str) -> list[Example]:
        # 1. Play until there are enough plies of this split to prefer rare kinds.
        held_out = split == "held-out"
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

        # 3. Ask about the move of each, or for a few about an illegal move.
        examples = []
        for index, pick in enumerate(picks, game * PLIES_PER_GAME):
            ply = candidates[pick]
            uci = ply.uci
            if rng.random() < ILLEGAL_FRACTION:
                uci = illegal_move(ply.fen, rng)
            examples.append(question_about(ply.fen, uci, index))
        return examples


def position_is_held_out(fen: str) -> bool:
    """Whether a position is held out, as one in four is: the shipped model has not seen these."""
    return (hash64(position_key(fen)) >> 56) % 4 == 0


def question_about(fen: str, uci: str, index: int = 0) -> Example:
    answer, kind = transition(fen, uci)
    return Example(f"A: {fen}+{uci}+", answer, index, kind)


class Ply(NamedTuple):
    fen: str  # before the move
    uci: str
    kind: str


def play(rng: Generator) -> list[Ply]:
    is_sparse = rng.random() < SPARSE_START_FRACTION
    board = sparse_board(rng) if is_sparse else chess.Board()
    plies = list[Ply]()
    while len(plies) < MAX_PLIES and not board.is_insufficient_material():
        moves = list(board.legal_moves)
        if not moves:
            break
        move = random_move(rng, board, moves)
        fen = write_fen(board)
        kind, _ = push(board, move)
        plies.append(Ply(fen, move.uci(), kind))
    return plies


def random_move(rng: Generator, board: chess.Board, moves: list[chess.Move]) -> chess.Move:
    """Draw one of the legal moves by PLAY_BIAS, or sometimes a move that mates."""
    bias = [PLAY_BIAS.get(move_kind(board, move), 1.0) for move in moves]
    drawn = rng.random() * sum(bias)
    place = np.searchsorted(np.cumsum(bias), drawn, side="right")
    if rng.random() < MATE_IF_POSSIBLE:
        for move in moves:
            if board.gives_check(move) and board.lan(move).endswith("#"):
                return move
    return moves[place]


def sparse_board(rng: Generator) -> chess.Board:
    """Draw a valid endgame: two kings and one to six other pieces, about half of them pawns."""
    while True:
        board = chess.Board(None)
        white, black, *others = rng.permutation(64).tolist()
        board.set_piece_at(white, chess.Piece.from_symbol("K"))
        board.set_piece_at(black, chess.Piece.from_symbol("k"))
        for square in others[: 1 + rng.integers(6)]:
            if rng.random() < 0.5:
                piece_type = chess.PAWN
            else:
                piece_type = int(rng.integers(chess.KNIGHT, chess.KING))
            color = rng.random() < 0.5
            board.set_piece_at(square, chess.Piece(piece_type, color))
        board.turn = rng.random() < 0.5
        board.halfmove_clock = int(rng.integers(40))
        board.fullmove_number = int(rng.integers(30, 110))
        if board.is_valid() and any(board.legal_moves):
            return board


def illegal_move(fen: str, rng: Generator) -> str:
    """Draw an illegal move. Most leave the king in check, or move a piece of the right side."""
    board = chess.Board(fen)
    pinned = [move for move in board.pseudo_legal_moves if not board.is_legal(move)]
    if pinned and rng.random() < 0.5:
        return pinned[rng.integers(len(pinned))].uci()
    own = chess.SquareSet(board.occupied_co[board.turn])
    origins = list(own) if rng.random() < 0.8 else chess.SQUARES
    while True:
        origin = origins[rng.integers(len(origins))]
        move = chess.Move(origin, int(rng.integers(64)))
        if move.from_square != move.to_square and not board.is_legal(move):
            return move.uci()
