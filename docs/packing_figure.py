"""Draw docs/packing.png: how a group's completions become packed tokens.

    python docs/packing_figure.py

Everything that is drawn is read off the arrays of `prefix_tree`: which tokens are run, what they
attend to, and where their log-probs go. It is the worked example of minigrpo/model/packing.py with
words for tokens. Needs matplotlib.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from minigrpo.model.packed_attention import SharedPrefixPacking
from minigrpo.model.packing import prefix_tree, repeated
from minigrpo.types import Completions

END = "<end>"
PROMPTS = ["cats like to", "dogs can"]
COMPLETIONS = [["eat mice", "eat mice", "eat fish"], ["run", "run fast", "bark"]]
TEXTS = [*PROMPTS, *(text for group in COMPLETIONS for text in group)]
WORDS = [*dict.fromkeys(word for text in TEXTS for word in text.split()), END]

SAMPLED = """Grey: a row above begins with the same tokens.
Dashed: predicted, but never run."""
RUN = """Every distinct prefix is run once. The small number
is a token's place in the packed sequence."""
ATTENTION = """The token of a row attends to the green columns:
its prompt, what precedes it, and itself."""
LOG_PROBS = """Right: which prediction each completion token uses.
Where several share one, gradients add up."""

# by prompt
PROMPT_COLOR, COMPLETION_COLOR = ["#9cc3e6", "#f6b98a"], ["#deebf7", "#fce4d3"]
GREY, PALE, LINE = "#f0f0f0", "#ababab", "#555555"
# lengths in inches; y grows downwards
WIDTH, HEIGHT = 0.68, 0.36  # of a token's box
STEP, LEADING = 0.80, 0.54  # from one box to the next, and from one line to the next
GAP = 0.25  # between prompts and completions, and between two groups
SIZE = (12.8, 10.1)


def make_completions() -> Completions:
    """The texts above as a rollout batch: P = 2, G = 3, S = 3."""

    def encode(text: str) -> torch.Tensor:
        return torch.tensor([WORDS.index(word) for word in text.split()])

    pad = torch.nn.utils.rnn.pad_sequence
    prompts = [encode(text) for text in PROMPTS]
    completions = [encode(f"{text} {END}") for group in COMPLETIONS for text in group]
    lengths = torch.tensor([len(ids) for ids in completions])
    ids, grid = pad(completions, batch_first=True), (len(PROMPTS), len(COMPLETIONS[0]))
    return Completions(
        prompt_ids=pad(prompts, batch_first=True),
        prompt_len=torch.tensor([len(ids) for ids in prompts]),
        completion_ids=ids.unflatten(0, grid),
        completion_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).unflatten(0, grid),
    )


def attention_mask(packing: SharedPrefixPacking) -> np.ndarray:
    """`[N, N]` bool: which packed tokens (columns) each packed token (row) attends to."""
    num_tokens = len(packing.tokens.ids)
    rows = np.zeros((0, num_tokens), dtype=bool)  # of all padded rows, joined
    for row in packing.causal_rows.numpy():
        causal = np.zeros((len(row), num_tokens), dtype=bool)
        for column in range(len(row)):
            causal[column, row[: column + 1]] = True
        rows = np.concatenate([rows, causal])
    for part in packing.completion_attention:
        for keys, visible in zip(part.key_rows.numpy(), part.visible[:, 0].numpy(), strict=True):
            seen = np.zeros((len(visible), num_tokens), dtype=bool)
            for column, some in enumerate(visible):
                seen[column, keys[some]] = True
            rows = np.concatenate([rows, seen])
    return rows[packing.unpad.numpy()]


def repeats(packing: SharedPrefixPacking) -> np.ndarray:
    """`[P, G, S]` bool: a completion further up in the group has the same prediction."""
    index, mask = packing.index.numpy(), packing.mask.numpy()
    out = np.zeros(index.shape, dtype=bool)
    for p, g, s in np.argwhere(mask):
        out[p, g, s] = (index[p, :g, s][mask[p, :g, s]] == index[p, g, s]).any()
    return out


def label(axes: Axes, x: float, y: float, text: str, **options: object) -> None:
    axes.text(x, y, text, **{"color": LINE, "va": "center", "fontsize": 10, **options})


def heading(axes: Axes, x: float, y: float, title: str, note: str) -> None:
    label(axes, x, y, title, weight="bold", fontsize=14, color="black")
    label(axes, x, y + 0.2, note, fontsize=11, va="top", linespacing=1.4)


def box(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    color: str,
    *,
    repeat: bool = False,
    run: bool = True,
    width: float = WIDTH,
) -> None:
    """One token, its left edge at x: grey if it is a repeat, dashed if it is not run."""
    patch = FancyBboxPatch(
        (x, y - HEIGHT / 2),
        width,
        HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.06",
        facecolor=GREY if repeat else color if run else "white",
        edgecolor=PALE if repeat else LINE,
        linestyle="-" if run else (0, (3, 2)),
    )
    axes.add_patch(patch)
    color = PALE if repeat else "black"
    label(axes, x + width / 2, y, text, ha="center", color=color, fontsize=11)


def line_of(p: int, line: int, leading: float = LEADING) -> float:
    """y of a line of prompt p, below the G lines of each prompt before it."""
    return (p * len(COMPLETIONS[0]) + line) * leading + p * GAP


def draw_samples(
    axes: Axes, x: float, y: float, completions: Completions, packing: SharedPrefixPacking
) -> None:
    """Every prompt with every completion, as they were sampled."""
    middle = x + 0.9 + completions.prompt_ids.shape[1] * STEP
    label(axes, middle - 0.12, y - 0.38, "prompt", ha="right")
    label(axes, middle + GAP, y - 0.38, "completion")
    repeated_tokens = repeats(packing)
    for p, g in np.ndindex(*packing.mask.shape[:2]):
        here = y + line_of(p, g)
        label(axes, x, here, f"p={p}, g={g}")
        ids = completions.prompt_ids[p, : completions.prompt_len[p]]
        for s, token in enumerate(ids):  # next to their completion
            left = middle - (len(ids) - s) * STEP
            box(axes, left, here, WORDS[token], PROMPT_COLOR[p], repeat=g > 0)
        for s, token in enumerate(completions.completion_ids[p, g][packing.mask[p, g]]):
            left, repeat = middle + GAP + s * STEP, bool(repeated_tokens[p, g, s])
            run = WORDS[token] != END
            box(axes, left, here, WORDS[token], COMPLETION_COLOR[p], repeat=repeat, run=run)


def draw_tree(
    axes: Axes, x: float, y: float, packing: SharedPrefixPacking, mask: np.ndarray
) -> None:
    """Packed tokens by position, each joined to the token before it."""
    left = x + packing.tokens.positions.numpy() * 0.95
    prompt_starts, prompt_end = packing.causal_rows[:, 0].tolist(), int(packing.causal_rows.max())
    lines_used = [0] * len(prompt_starts)
    height: dict[int, float] = {}  # y of each token that has been drawn

    def join(before: int, to_x: float, to_y: float) -> None:
        right = left[before] + WIDTH
        bend = right + 0.13
        ys = [height[before], height[before], to_y, to_y]
        axes.plot([right, bend, bend, to_x], ys, color=LINE, lw=1, zorder=0)

    # each distinct completion is a line, which ends with a prediction of <end>
    for last in packing.sources[packing.targets == WORDS.index(END)].tolist():
        path = np.flatnonzero(mask[last]).tolist()  # the text up to this token
        p = prompt_starts.index(path[0])
        here = y + line_of(p, lines_used[p])
        lines_used[p] += 1
        for before, n in zip([None, *path], path, strict=False):
            if n in height:
                continue
            height[n] = here
            if before is not None:
                join(before, left[n], here)
            color = PROMPT_COLOR[p] if n <= prompt_end else COMPLETION_COLOR[p]
            box(axes, left[n], here, WORDS[packing.tokens.ids[n]], color)
            label(axes, left[n] + 0.04, here - 0.25, str(n), fontsize=8.5)
        join(last, left[last] + 0.95, here)
        box(axes, left[last] + 0.95, here, END, "white", run=False)


def draw_mask(
    axes: Axes, x: float, y: float, packing: SharedPrefixPacking, mask: np.ndarray
) -> None:
    size = 0.27
    for n, token in enumerate(packing.tokens.ids):
        middle = (n + 0.5) * size
        label(axes, x - 0.40, y + middle, WORDS[token], ha="right", color="black")
        label(axes, x - 0.12, y + middle, str(n), ha="right")
        label(axes, x + middle, y - 0.14, str(n), ha="center")
    for query, key in np.ndindex(*mask.shape):
        color = "#74b27c" if mask[query, key] else "white"
        corner = (x + key * size, y + query * size)
        axes.add_patch(Rectangle(corner, size, size, facecolor=color, edgecolor="#cccccc", lw=0.7))


def draw_predictions(axes: Axes, x: float, y: float, packing: SharedPrefixPacking) -> None:
    """The list of predictions, and to its right which of them each completion token has."""
    ids = packing.tokens.ids
    label(axes, x, y - 0.14, "no.")
    label(axes, x + 0.45, y - 0.14, "prediction")
    label(axes, x + 2.2, y - 0.14, "at place")
    for m, (source, target) in enumerate(zip(packing.sources, packing.targets, strict=True)):
        here = y + (m + 0.5) * 0.27
        label(axes, x + 0.22, here, str(m), ha="right", weight="bold", color="black")
        text = f"log p({WORDS[target]} | .. {WORDS[ids[source]]})"
        label(axes, x + 0.45, here, text, color="black")
        label(axes, x + 2.55, here, str(int(source)), ha="center")
    grid = x + 3.15
    repeated_tokens = repeats(packing)
    for s in range(packing.mask.shape[2]):
        label(axes, grid + 0.85 + s * 0.58 + 0.24, y - 0.14, f"s={s}", ha="center")
    for p, g in np.ndindex(*packing.mask.shape[:2]):
        here = y + 0.3 + line_of(p, g, leading=0.46)
        label(axes, grid, here, f"p={p}, g={g}")
        for s in np.flatnonzero(packing.mask[p, g]):
            number, repeat = str(int(packing.index[p, g, s])), bool(repeated_tokens[p, g, s])
            left = grid + 0.85 + s * 0.58
            box(axes, left, here, number, COMPLETION_COLOR[p], repeat=repeat, width=0.48)


def main() -> None:
    completions = make_completions()
    packing = prefix_tree(completions)
    assert isinstance(packing, SharedPrefixPacking)
    mask, num_repeated = attention_mask(packing), len(repeated(completions).tokens.ids)

    figure = plt.figure(figsize=SIZE)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, SIZE[0]), ylim=(SIZE[1], 0))
    axes.axis("off")
    left, right, top, bottom = 0.35, 7.0, 0.4, 5.65
    title = "1  Sampled: P = 2 prompts, G = 3 completions each"
    heading(axes, left, top, title, SAMPLED)
    draw_samples(axes, left, top + 1.4, completions, packing)
    title = f"2  Run: {len(mask)} packed tokens instead of {num_repeated}"
    heading(axes, right, top, title, RUN)
    draw_tree(axes, right, top + 1.4, packing, mask)
    heading(axes, left, bottom, "3  Attention: each token sees its own text only", ATTENTION)
    draw_mask(axes, left + 1.4, bottom + 1.2, packing, mask)
    heading(axes, right, bottom, "4  Log-probs lead back to [P, G, S]", LOG_PROBS)
    draw_predictions(axes, right, bottom + 1.2, packing)
    figure.savefig(Path(__file__).parent / "packing.png", dpi=110)


if __name__ == "__main__":
    main()
