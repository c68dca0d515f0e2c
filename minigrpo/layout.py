"""From completions to a stream of tokens, and back to `[P, G, S]`.

A layout decides which tokens the model runs and how they attend. All are exact; they differ in what they run twice:

    repeated   each prompt with each of its completions, P*G sequences: the textbook way, and the reference in tests
    shared     each prompt once, each distinct completion of its group once
    tree       each prompt once, each distinct prefix of its group's completions once

A completion's last token predicts nothing, so it is never run. Token 0 of a completion is predicted by the prompt's
last token. `index` leads back from the M predicted tokens to `[P, G, S]`; where two completions were merged, both lead to
the same entries, and autograd adds their gradients. Layouts are built on the host, from lengths, once per micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Attend, Stream
from .types import Completions


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """Tokens of a stream as padded rows: `[N, H, E]` and `[R, T]` -> `[R, H, T, E]`.

    By index_select, whose backward adds in parallel; x[rows] would go through a serial index_put.
    """
    return x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)


@dataclass(frozen=True)
class Layout:
    """One micro-batch, ready for `GPT.forward(layout.stream, layout, temperature)`."""

    stream: Stream  # N tokens
    sources: Tensor  # [M] rows of the stream whose next token is asked for
    targets: Tensor  # [M] that token
    index: Tensor  # [P, G, S] into M; 0 where masked
    mask: Tensor  # [P, G, S] bool
    causal_rows: Tensor  # [R, T] into the stream: rows that attend to themselves only; pads repeat the row's first token
    unpad: Tensor  # [N] from all padded rows, flattened and joined, back to the stream

    def layer(self, number: int) -> Attend:
        return self.attend

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of each row; pads stand to the right, so no real token ever sees one."""
        q, k, v = (rows_of(x, self.causal_rows) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.unpad)

    def to(self, device: torch.device | str) -> "Layout":
        return type(self)(**{name: x.to(device) for name, x in vars(self).items()})


@dataclass(frozen=True)
class SharedLayout(Layout):
    """Prompts are the causal rows; a completion, or a tree of them, attends to its prompt's keys and values and its own."""

    completion_rows: Tensor  # [R, T] into the stream
    prompt_of_row: Tensor  # [R]
    visible: Tensor  # [R, 1, T, Lp + T] bool: what each completion token may see of its prompt and of its own row

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        prompt_q, prompt_k, prompt_v = (rows_of(x, self.causal_rows) for x in (q, k, v))
        prompts = F.scaled_dot_product_attention(prompt_q, prompt_k, prompt_v, is_causal=True)
        out = prompts.transpose(1, 2).flatten(0, 1)
        if self.completion_rows.numel():
            q, k, v = (rows_of(x, self.completion_rows) for x in (q, k, v))
            k = torch.cat([prompt_k.index_select(0, self.prompt_of_row), k], dim=2)
            v = torch.cat([prompt_v.index_select(0, self.prompt_of_row), v], dim=2)
            own = F.scaled_dot_product_attention(q, k, v, attn_mask=self.visible)
            out = torch.cat([out, own.transpose(1, 2).flatten(0, 1)])
        return out.index_select(0, self.unpad)


def pad_rows(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each padded row finds its tokens in a stream, and where in the padded rows each token is.

    Returns:
        `[R, T]` with T = lengths.max(), a pad repeating the row's first token (index 0 for an empty row), and
        `[sum(lengths)]` into the flattened rows.
    """
    columns = np.arange(lengths.max(initial=0))
    real = columns < lengths[:, None]
    rows = np.where(real, starts[:, None] + columns, np.where(lengths > 0, starts, 0)[:, None])
    return rows, np.flatnonzero(real)


@dataclass(frozen=True)
class _Rows:
    """Completions as ragged rows on the host, each with the prompt that it continues."""

    tokens: np.ndarray  # [R, S]
    lengths: np.ndarray  # [R], EOS included
    prompt: np.ndarray  # [R]
    of: np.ndarray  # [P, G] which row is completion g of prompt p

    @classmethod
    def of_completions(cls, completions: Completions, *, distinct: bool) -> "_Rows":
        ids, mask = completions.completion_ids.numpy(), completions.completion_mask.numpy()
        lengths = mask.sum(-1)
        seen: dict[tuple[int, ...] | tuple[int, int, bytes], int] = {}
        first: list[tuple[int, int]] = []
        of = np.empty(lengths.shape, dtype=np.int64)
        for p, g in np.ndindex(lengths.shape):
            key = (p, lengths[p, g], ids[p, g, : lengths[p, g]].tobytes()) if distinct else (p, g)
            if key not in seen:
                seen[key] = len(first)
                first.append((p, g))
            of[p, g] = seen[key]
        p, g = np.array(first).T
        return cls(ids[p, g], lengths[p, g], p, of)


def _assemble(
    kind: type[Layout],
    completions: Completions,
    rows: _Rows,
    ids: np.ndarray,
    positions: np.ndarray,
    last_prompt_token: np.ndarray,
    completion_starts: np.ndarray,
    **attention: np.ndarray,
) -> Layout:
    """What all layouts share: who predicts what, and the way back to [P, G, S]."""
    columns = np.arange(rows.tokens.shape[1])
    predicted = columns < rows.lengths[:, None]  # [R, S]
    sources = np.where(columns == 0, last_prompt_token[:, None], completion_starts[:, None] + columns - 1)[predicted]
    targets = rows.tokens[predicted]
    if not len(sources):  # nothing but empty completions: keep one entry for the masked index to point at
        sources, targets = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    starts = np.cumsum(rows.lengths) - rows.lengths
    index = np.where(completions.completion_mask.numpy(), starts[rows.of][..., None] + columns, 0)
    fields = {"sources": sources, "targets": targets, "index": index, **attention}
    return kind(
        stream=Stream(torch.from_numpy(ids), torch.from_numpy(positions)),
        mask=completions.completion_mask,
        **{name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in fields.items()},
    )


def repeated(completions: Completions) -> Layout:
    """Each prompt with each of its completions."""
    rows = _Rows.of_completions(completions, distinct=False)
    prompt_len = completions.prompt_len.numpy()[rows.prompt]
    inputs = np.maximum(rows.lengths - 1, 0)
    lengths = prompt_len + inputs
    starts = np.cumsum(lengths) - lengths
    prompts = completions.prompt_ids.numpy()[rows.prompt]
    parts = [np.concatenate([a[:n], b[:m]]) for a, n, b, m in zip(prompts, prompt_len, rows.tokens, inputs, strict=True)]
    causal_rows, unpad = pad_rows(starts, lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    attention = {"causal_rows": causal_rows, "unpad": unpad}
    after_prompt = starts + prompt_len
    return _assemble(Layout, completions, rows, np.concatenate(parts), positions, after_prompt - 1, after_prompt, **attention)


def shared(completions: Completions) -> Layout:
    """Each prompt once, each distinct completion of its group once."""
    rows = _Rows.of_completions(completions, distinct=True)
    prompt_len = completions.prompt_len.numpy()
    prompt_ids = completions.prompt_ids.numpy()[:, : prompt_len.max()]
    inputs = np.maximum(rows.lengths - 1, 0)
    prompt_starts = np.cumsum(prompt_len) - prompt_len
    starts = prompt_len.sum() + np.cumsum(inputs) - inputs
    prompt_rows, prompt_unpad = pad_rows(prompt_starts, prompt_len)
    completion_rows, completion_unpad = pad_rows(starts, inputs)

    columns, steps = np.arange(prompt_rows.shape[1]), np.arange(completion_rows.shape[1])
    of_prompt = np.broadcast_to(
        (columns < prompt_len[rows.prompt][:, None])[:, None], (len(rows.prompt), len(steps), len(columns))
    )
    of_own = np.broadcast_to(steps[None, :] <= steps[:, None], (len(rows.prompt), len(steps), len(steps)))
    own_columns = np.arange(rows.tokens.shape[1])
    ids = np.concatenate([prompt_ids[columns < prompt_len[:, None]], rows.tokens[own_columns < inputs[:, None]]])
    positions = np.concatenate([np.arange(n) for n in prompt_len])
    own_positions = (prompt_len[rows.prompt][:, None] + own_columns)[own_columns < inputs[:, None]]
    return _assemble(
        SharedLayout,
        completions,
        rows,
        ids,
        np.concatenate([positions, own_positions]),
        (prompt_starts + prompt_len - 1)[rows.prompt],
        starts,
        causal_rows=prompt_rows,
        unpad=np.concatenate([prompt_unpad, prompt_rows.size + completion_unpad]),
        completion_rows=completion_rows,
        prompt_of_row=rows.prompt,
        visible=np.concatenate([of_prompt, of_own], axis=-1)[:, None],
    )


SCORES_PER_TOKEN = 400  # attention scores that cost what a token costs elsewhere in the model: measured at width 128


@dataclass(frozen=True)
class _Prefixes:
    """The distinct prefixes of each group's rows, as trees: a node is the last token of one, and its parent all before it."""

    path: np.ndarray  # [R, S] the nodes that a row goes through; what is beyond its length means nothing
    token: np.ndarray  # [nodes], ordered by prompt
    prompt: np.ndarray  # [nodes]
    depth: np.ndarray  # [nodes] its column
    parent: np.ndarray  # [nodes], -1 for a first token
    runs: np.ndarray  # [nodes] whether somebody goes on from it; the others predict nothing

    @classmethod
    def of_rows(cls, rows: _Rows) -> "_Prefixes":
        """Neighbours in lexicographic order share their longest common prefix; what is beyond it are nodes of their own."""
        columns = np.arange(rows.tokens.shape[1])
        tokens = np.where(columns < rows.lengths[:, None], rows.tokens, -1)
        order = np.lexsort((*tokens.T[::-1], rows.prompt))
        tokens, lengths, prompt = tokens[order], rows.lengths[order], rows.prompt[order]
        same = (tokens[1:] == tokens[:-1]) & (tokens[1:] >= 0) & (prompt[1:] == prompt[:-1])[:, None]
        common = np.concatenate([[0], same.cumprod(1).sum(1)])
        new = lengths - common
        first = np.cumsum(new) - new
        path = first[:, None] + columns - common[:, None]
        for r in range(1, len(path)):
            path[r, : common[r]] = path[r - 1, : common[r]]
        row = np.repeat(np.arange(len(new)), new)
        depth = np.arange(len(row)) - first[row] + common[row]
        parent = np.where(depth > 0, path[row, depth - 1], -1)
        runs = np.zeros(len(row), dtype=bool)
        runs[parent[parent >= 0]] = True
        path_of_row = np.empty_like(path)
        path_of_row[order] = path
        return cls(path_of_row, tokens[row, depth], prompt[row], depth, parent, runs)


def tree(completions: Completions) -> Layout:
    """Each prompt once, each distinct prefix of its group's completions once: a token's ancestors are all it attends to.

    A group is one padded row with a dense mask, so where little repeats it is dearer than `shared`, and that is returned.
    """
    rows = _Rows.of_completions(completions, distinct=True)
    nodes, inputs = _Prefixes.of_rows(rows), np.maximum(rows.lengths - 1, 0)
    prompt_len = completions.prompt_len.numpy()
    num_prompts, prompt_width, longest = len(prompt_len), int(prompt_len.max()), int(inputs.max(initial=0))
    sizes = np.bincount(nodes.prompt[nodes.runs], minlength=num_prompts)
    width = int(sizes.max(initial=0))
    more_scores = num_prompts * width * (prompt_width + width) - len(inputs) * longest * (prompt_width + longest)
    if not width or more_scores > SCORES_PER_TOKEN * (inputs.sum() - nodes.runs.sum()):
        return shared(completions)

    prompt_starts = np.cumsum(prompt_len) - prompt_len
    starts = prompt_len.sum() + np.cumsum(sizes) - sizes
    place = prompt_len.sum() + np.cumsum(nodes.runs) - 1  # [nodes] in the stream, of those that run
    in_prompt = np.arange(prompt_width) < prompt_len[:, None]
    visible = np.zeros((num_prompts, 1, width, prompt_width + width), dtype=bool)
    visible[..., :prompt_width] = in_prompt[:, None, None]
    for p, path, length in zip(rows.prompt, nodes.path, inputs, strict=True):
        own = place[path[:length]] - starts[p]
        visible[p, 0, own[:, None], prompt_width + own] = np.tri(length, dtype=bool)
    prompt_rows, prompt_unpad = pad_rows(prompt_starts, prompt_len)
    tree_rows, tree_unpad = pad_rows(starts, sizes)
    fields = {
        "sources": np.where(nodes.parent < 0, (prompt_starts + prompt_len - 1)[nodes.prompt], place[nodes.parent]),
        "targets": nodes.token,
        "index": np.where(completions.completion_mask.numpy(), nodes.path[rows.of], 0),
        "causal_rows": prompt_rows,
        "unpad": np.concatenate([prompt_unpad, prompt_rows.size + tree_unpad]),
        "completion_rows": tree_rows,
        "prompt_of_row": np.arange(num_prompts),
        "visible": visible,
    }
    ids = np.concatenate([completions.prompt_ids.numpy()[:, :prompt_width][in_prompt], nodes.token[nodes.runs]])
    positions = np.concatenate([*map(np.arange, prompt_len), (prompt_len[nodes.prompt] + nodes.depth)[nodes.runs]])
    return SharedLayout(
        stream=Stream(torch.from_numpy(ids), torch.from_numpy(positions)),
        mask=completions.completion_mask,
        **{name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in fields.items()},
    )


LAYOUTS: dict[str, Callable[[Completions], Layout]] = {"repeated": repeated, "shared": shared, "tree": tree}
