"""`is_valid_fen` against its definition, written with python-chess, on texts made to hit each
condition: 40,000 of them, or a million with --hypothesis-profile=thorough.
"""

import itertools
from collections import Counter
from collections.abc import Iterator

import chess
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from minigrpo.rewards import is_valid_fen
from minigrpo.tasks.chess_env import ChessEnv

FENS = [ChessEnv(0).train(i).answer.split("+")[0] for i in range(256)]
ALPHABET = "KQRBNPkqrbnp12345678/ -wabcdefgh0+9_~\u0663\u00a0\t"
CASTLING = ["".join(x) for n in range(5) for x in itertools.permutations("KQkq", n)] + [
    "-",
    "HA",
    "KK",
    "--",
    "AHah",
    "kQ",
]
PASSANT = ["-", "", "e", "e9", "z3", *(file + rank for file in "abcdefgh" for rank in "2346")]
CLOCKS = [
    "0",
    "1",
    "00",
    "-1",
    "+5",
    "1_0",
    "007",
    "99",
    "9999",
    "10000",
    "\u0663",
    "1.0",
    "",
    " 1",
    "0x1",
    "9" * 5000,
]


def contract(text: str) -> bool:
    """The definition, without regard to speed."""
    if not text.isascii() or len(text) > 100:
        return False
    try:
        board = chess.Board(text)
    except ValueError:
        return False
    clocks = text.split(" ")[4:]
    short = all(len(clock) <= 4 for clock in clocks)
    return board.status() == chess.STATUS_VALID and short and board.fen(en_passant="fen") == text


def edited(rng: np.random.Generator, fen: str) -> str:
    """One to three characters replaced, inserted, removed or swapped."""
    text = list(fen)
    for _ in range(rng.integers(1, 4)):
        place, kind = rng.integers(len(text)), rng.integers(4)
        if kind == 3:
            other = rng.integers(len(text))
            text[place], text[other] = text[other], text[place]
        else:
            text[place : place + (kind != 1)] = (
                [ALPHABET[rng.integers(len(ALPHABET))]] if kind < 2 else []
            )
    return "".join(text)


def spliced(rng: np.random.Generator, fen: str) -> str:
    """One or two fields replaced by those of other positions, or by malformed ones."""
    fields = fen.split(" ")
    for _ in range(rng.integers(1, 3)):
        place = int(rng.integers(6))
        choices = (FENS, ["w", "b", "", "W"], CASTLING, PASSANT, CLOCKS, CLOCKS)[place]
        value = choices[rng.integers(len(choices))]
        fields[place] = value.split(" ")[0] if place == 0 else value
    return " ".join(fields[: rng.integers(1, 7)] if rng.random() < 0.05 else fields)


def moved(rng: np.random.Generator, fen: str) -> str:
    """A piece removed, and mostly put elsewhere: well-formed, often not legal."""
    board = chess.Board(fen)
    pieces = list(board.piece_map())
    piece = board.remove_piece_at(pieces[rng.integers(len(pieces))])
    if rng.random() < 0.8:
        board.set_piece_at(int(rng.integers(64)), piece)
    return " ".join([board.board_fen(), *fen.split(" ")[1:]])


def combined() -> Iterator[str]:
    """Every castling field with every en passant field, on boards with and without the rooks and
    pawns that they need.
    """
    boards = [
        "r3k2r/pppp1ppp/8/4p3/4P3/8/PPPP1PPP/R3K2R",
        "4k3/8/8/8/8/8/8/4K3",
        "1r2k1r1/8/8/3pPp2/2PpP3/8/8/1R2K1R1",
    ]
    for board, side, castling, passant in itertools.product(boards, "wb", CASTLING, PASSANT):
        yield f"{board} {side} {castling} {passant} 0 1"


def texts(n: int) -> Iterator[str]:
    rng = np.random.default_rng(0)
    yield from combined()
    for kind, size in itertools.product(
        ("8/" * 5000, "9" * 10**6, " " * 10**6, "K" * 101, FENS[0] + " " * 10**6), (1, 2)
    ):
        yield kind * size
    for i in range(n):
        kind = (edited, spliced, moved)[i % 3]
        yield kind(rng, FENS[rng.integers(len(FENS))])


def test_is_valid_fen_is_its_contract() -> None:
    verdicts: Counter[bool] = Counter()
    for text in texts(40_000 if settings().max_examples <= 100 else 1_000_000):
        expected = contract(text)
        assert is_valid_fen(text) == expected, text[:200]
        verdicts[expected] += 1
    assert min(verdicts.values()) > 5_000


@given(st.text(st.sampled_from("KQRBNPkqrbnp12345678/ -wabcdefgh0"), max_size=110) | st.text())
def test_any_text_has_the_verdict_of_the_contract(text: str) -> None:
    assert is_valid_fen(text) == contract(text)


def test_the_queen_side_hole_is_closed() -> None:
    # a castling right without its rook, which python-chess accepts
    hole = "4k3/8/8/8/8/8/8/4K3 w Q - 0 1"
    assert chess.Board(hole).is_valid()
    assert not is_valid_fen(hole)
