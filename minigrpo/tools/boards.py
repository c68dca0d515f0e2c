"""Draw the true board beside the one that a model wrote, and say in words what differs.

Wrong squares are coloured, and also bracketed, because a log file has no colours.
"""

from rich.table import Table
from rich.text import Text

NO_PIECE, NO_SQUARE = ".", "?"
WRONG = "bold white on red"
FIELDS = (
    "side to move",
    "castling",
    "en passant",
    "halfmove clock",
    "move number",
    "reward",
    "terminated",
    "truncated",
    "beyond that",
)

Squares = list[list[str]]  # ranks, the eighth first


def ranks(text: str) -> Squares:
    """The ranks at the start of a completion, with its own number of ranks and widths."""
    placement = text.split("+")[0].split(" ")[0].split("/")
    return [
        [square for c in rank for square in (NO_PIECE * int(c) if c in "12345678" else c)]
        for rank in placement
    ]


def squares(text: str) -> Squares:
    """The same as eight ranks of eight squares, truncated or padded with NO_SQUARE."""
    rows = [row[:8] for row in ranks(text)[:8]]
    return [row + [NO_SQUARE] * (8 - len(row)) for row in rows + [[]] * (8 - len(rows))]


def draw(board: Squares, truth: Squares) -> Text:
    """A board with three columns per square, `[n]` where it differs from the truth."""
    out = Text()
    for rank, (row, true_row) in zip("87654321", zip(board, truth, strict=True), strict=True):
        out.append(f"{rank} ", style="dim")
        for square, true_square in zip(row, true_row, strict=True):
            wrong = square != true_square
            out.append(f"[{square}]" if wrong else f" {square} ", style=WRONG if wrong else "")
        out.append("\n")
    return out.append("   a  b  c  d  e  f  g  h", style="dim")


def side_by_side(truth: str, text: str) -> Table:
    """The true board and the completion's; a wrong square is marked on both."""
    true_board, board = squares(truth), squares(text)
    table = Table.grid(padding=(0, 4))
    table.add_row(Text("  truth"), Text("  completion"))
    table.add_row(draw(true_board, board), draw(board, true_board))
    return table


def differences(truth: str, text: str) -> list[str]:
    """What is wrong in a completion, in words."""
    found = []
    pairs = zip(squares(truth), squares(text), strict=True)
    if count := sum(a != b for true_row, row in pairs for a, b in zip(true_row, row, strict=True)):
        found.append(f"{count} square{'s' if count > 1 else ''}")
    widths = [len(row) for row in ranks(text)]
    if len(widths) == 8:
        found += [f"rank {8 - i} is {width} wide" for i, width in enumerate(widths) if width != 8]
    else:
        found.append(f"not 8 ranks but {len(widths)}")
    for name, true_field, field in zip(FIELDS, fields(truth), fields(text), strict=True):
        if field != true_field:
            found.append(f"{name} {field!r} instead of {true_field!r}")
    if not found and text != truth:
        found.append("how the board is written")
    return found


def fields(text: str) -> list[str]:
    """The parts of a completion after the board, one per name in FIELDS; "" for a missing one."""
    fen, *ending = text.split("+", 4)
    rest = fen.split(" ", 5)[1:]
    return [*rest, *[""] * (5 - len(rest)), *ending, *[""] * (4 - len(ending))]
