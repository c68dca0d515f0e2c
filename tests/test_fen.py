"""FENs and moves against python-chess: `is_valid_fen` is its definition, on 40,000 texts made to
hit each condition (a million with --hypothesis-profile=thorough).
"""

import itertools
from collections import Counter
from collections.abc import Iterator

import chess
import numpy as np
import pytest
from hypothesis import settings

from minigrpo.fen import is_valid_fen, transition
from minigrpo.tasks.chess_env import ChessEnv

START = chess.STARTING_FEN
ALPHABET = "KQRBNPkqrbnp12345678/ -wabcdefgh0+9_~\u0663\u00a0\t"
CASTLING = ["".join(x) for n in range(5) for x in itertools.permutations("KQkq", n)]
CASTLING += ["-", "HA", "KK", "--", "AHah", "kQ"]
PASSANT = ["-", "", "e", "e9", "z3", *(file + rank for file in "abcdefgh" for rank in "2346")]
CLOCKS = ["0", "1", "00", "-1", "+5", "1_0", "007", "99", "9999", "10000", "\u0663", "1.0", ""]
CLOCKS += [" 1", "0x1", "9" * 5000]


def contract(text: str) -> bool:
    """The definition, without regard to speed."""
    if not text.isascii() or len(text) > 100:
        return False
    try:
        board = chess.Board(text)
    except ValueError:
        return False
    has_short_clocks = all(len(clock) <= 4 for clock in text.split(" ")[4:])
    is_canonical = board.fen(en_passant="fen") == text
    return board.status() == chess.STATUS_VALID and has_short_clocks and is_canonical


def edited(rng: np.random.Generator, fen: str, fens: list[str]) -> str:
    """One to three characters replaced, inserted, removed or swapped."""
    text = list(fen)
    for _ in range(rng.integers(1, 4)):
        place, other = rng.integers(len(text), size=2)
        new = ALPHABET[rng.integers(len(ALPHABET))]
        match rng.integers(4):
            case 0:
                text[place] = new
            case 1:
                text.insert(place, new)
            case 2:
                del text[place]
            case _:
                text[place], text[other] = text[other], text[place]
    return "".join(text)


def spliced(rng: np.random.Generator, fen: str, fens: list[str]) -> str:
    """One or two fields replaced by those of other positions, or by malformed ones."""
    choices = (fens, ["w", "b", "", "W"], CASTLING, PASSANT, CLOCKS, CLOCKS)
    fields = fen.split(" ")
    for place in rng.integers(6, size=rng.integers(1, 3)):
        value = choices[place][rng.integers(len(choices[place]))]
        fields[place] = value.split(" ")[0] if place == 0 else value
    if rng.random() < 0.05:
        fields = fields[: rng.integers(1, 6)]
    return " ".join(fields)


def moved(rng: np.random.Generator, fen: str, fens: list[str]) -> str:
    """A piece removed, and mostly put elsewhere: well-formed, often not legal."""
    board = chess.Board(fen)
    pieces = list(board.piece_map())
    piece = board.remove_piece_at(pieces[rng.integers(len(pieces))])
    if rng.random() < 0.8:
        board.set_piece_at(int(rng.integers(64)), piece)
    return " ".join([board.board_fen(), *fen.split(" ")[1:]])


BOARDS = [
    "r3k2r/pppp1ppp/8/4p3/4P3/8/PPPP1PPP/R3K2R",
    "4k3/8/8/8/8/8/8/4K3",
    "1r2k1r1/8/8/3pPp2/2PpP3/8/8/1R2K1R1",
]
LONG = ["8/" * 5000, "9" * 10**6, " " * 10**6, "K" * 101, START + " " * 10**6]


def texts(number: int, fens: list[str]) -> Iterator[str]:
    for board, side, castling, passant in itertools.product(BOARDS, "wb", CASTLING, PASSANT):
        yield f"{board} {side} {castling} {passant} 0 1"
    yield from LONG
    rng = np.random.default_rng(0)
    for i in range(number):
        change = (edited, spliced, moved)[i % 3]
        yield change(rng, fens[rng.integers(len(fens))], fens)


def test_is_valid_fen_is_its_contract() -> None:
    positions = ChessEnv(0)
    fens = [positions.train(i).answer.split("+")[0] for i in range(256)]
    verdicts = Counter()
    for text in texts(20_000 if settings().max_examples <= 100 else 1_000_000, fens):
        expected = contract(text)
        assert is_valid_fen(text) == expected, text[:200]
        verdicts[expected] += 1
    assert min(verdicts.values()) > 5_000
    assert not any(map(is_valid_fen, (None, 3, b"", START.encode(), [START])))


MOVES = [
    (START, "e2e4", "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq e3 0 1", "quiet"),
    (START, "e2e5", START, "illegal"),
    ("6k1/5ppp/8/8/8/8/8/R5K1 w - - 0 1", "a1a8", "R5k1/5ppp/8/8/8/8/8/6K1 b - - 1 1", "checkmate"),
    ("7k/8/6K1/8/8/8/8/5Q2 w - - 0 1", "f1f7", "7k/5Q2/6K1/8/8/8/8/8 b - - 1 1", "draw"),
    ("8/8/8/8/8/k7/p7/K7 b - - 0 1", "a3b3", "8/8/8/8/8/1k6/p7/K7 w - - 1 2", "draw"),
    ("8/8/8/8/8/1k6/p7/K7 b - - 149 99", "b3c3", "8/8/8/8/8/2k5/p7/K7 w - - 150 100", "draw"),
    ("r3k3/8/8/8/8/8/8/4K2R w Kq - 3 9", "e1g1", "r3k3/8/8/8/8/8/8/5RK1 b q - 4 9", "castling"),
    ("4k3/8/8/3pP3/8/8/8/4K3 w - d6 0 2", "e5d6", "4k3/8/3P4/8/8/8/8/4K3 b - - 0 2", "en passant"),
    ("4k3/P7/8/8/8/8/8/4K3 w - - 0 2", "a7a8n", "N3k3/8/8/8/8/8/8/4K3 b - - 0 2", "draw"),
    ("3k4/P7/8/8/8/8/8/4K3 w - - 0 2", "a7a8q", "Q2k4/8/8/8/8/8/8/4K3 b - - 0 2", "check"),
    ("8/P1k5/8/8/8/8/8/4K3 w - - 0 2", "a7a8r", "R7/2k5/8/8/8/8/8/4K3 b - - 0 2", "promotion"),
]
ENDINGS = {"illegal": "0.0+0+1", "checkmate": "1.0+1+0", "draw": "0.5+1+0"}


@pytest.mark.parametrize(("fen", "move", "answer", "kind"), MOVES)
def test_a_move_leads_to_a_position_and_has_a_kind(
    fen: str, move: str, answer: str, kind: str
) -> None:
    ending = ENDINGS.get(kind, "0.001+0+0")
    assert transition(fen, move) == (f"{answer}+{ending}", kind)
