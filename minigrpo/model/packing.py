"""From completions to a flat sequence of tokens, and back to `[P, G, S]`.

A packing decides which tokens the model runs and how they attend. All are exact; they differ in what
they run twice:

    repeated   each prompt with each of its completions, P*G sequences: the textbook way, and the reference in tests
    shared     each prompt once, each distinct completion of its group once
    tree       each prompt once, each distinct prefix of its group's completions once

A completion's last token predicts nothing, so it is never run. Token 0 of a completion is predicted
by the prompt's last token. `index` leads back from the M predicted tokens to `[P, G, S]`; where two
completions were merged, both lead to the same entries, and autograd adds their gradients. Layouts
are built on the host, from lengths, once per micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..types import Completions
from .logprobs import at_least_fp32
from .transformer import Attend, PackedTokens


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """Tokens of a packed sequence as padded rows: `[N, H, E]` and `[R, T]` -> `[R, H, T, E]`.

    By index_select, whose backward adds in parallel; x[rows] would go through a serial index_put.
    """
    return x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)


def rows_that_share(x: Tensor, rows: Tensor) -> Tensor:
    """`rows_of` where tokens stand in several rows: their gradients add up in float32; bfloat16
    would lose some.
    """
    wide = at_least_fp32(x) if x.requires_grad else x
    return rows_of(wide, rows).to(x.dtype)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `visible [..., keys]`, else -inf. Rows begin at multiples of 8: CUDA's kernels want
    that, or copy the mask.
    """
    *shape, keys = visible.shape
    room = torch.zeros(*shape, -(-keys // 8) * 8, dtype=dtype, device=visible.device)
    return room[..., :keys].masked_fill_(~visible, -torch.inf)


@dataclass(frozen=True)
class Packing:
    """One micro-batch, ready for `Transformer.forward(packing.tokens, packing, temperature)`."""

    tokens: PackedTokens  # N tokens
    sources: Tensor  # [M] rows of the packed sequence whose next token is asked for
    targets: Tensor  # [M] that token
    index: Tensor  # [P, G, S] into M; 0 where masked
    mask: Tensor  # [P, G, S] bool
    # [R, T] into the packed sequence: rows that attend to themselves only; pads repeat the row's first token
    causal_rows: Tensor
    unpad: Tensor  # [N] from all padded rows, flattened and joined, back to the packed sequence

    def layer(self, number: int) -> Attend:
        return self.attend

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of each row; pads stand to the right, so no real token ever sees one."""
        q, k, v = (rows_of(x, self.causal_rows) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.unpad)

    def to(self, device: torch.device | str) -> "Packing":
        return replace(self, **{name: _to(x, device) for name, x in vars(self).items()})


@dataclass(frozen=True)
class Branches:
    """What completions add to the packed sequence, as padded rows: each goes on from its prompt, or from a
    token of another row.
    """

    query_rows: Tensor  # [R, T] into the packed sequence: the tokens that each row adds
    # [R, Lp + K] into the packed sequence: its prompt, and the whole completion, other rows' tokens included
    key_rows: Tensor
    visible: Tensor  # [R, 1, T, Lp + K] bool: which of these each of those tokens may see
    masks: dict[torch.dtype, Tensor] = field(
        default_factory=dict
    )  # `visible` as additive masks, made when first asked for

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (
            rows_of(q, self.query_rows),
            rows_that_share(k, self.key_rows),
            rows_that_share(v, self.key_rows),
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(q.dtype))

    def _mask(self, dtype: torch.dtype) -> Tensor:
        """Once for all layers, each of which would make it of `visible` and keep it for its
        backward pass.
        """
        if dtype not in self.masks:
            self.masks[dtype] = additive_mask(self.visible, dtype)
        return self.masks[dtype]

    def to(self, device: torch.device | str) -> "Branches":
        return Branches(
            self.query_rows.to(device), self.key_rows.to(device), self.visible.to(device)
        )


@dataclass(frozen=True)
class PrefixPacking(Packing):
    """Prompts are the causal rows; completions branch off."""

    branches: tuple[Branches, ...]  # of about the same length each, so that little is padded

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        prompt_q, prompt_k, prompt_v = (rows_of(x, self.causal_rows) for x in (q, k, v))
        outs = [F.scaled_dot_product_attention(prompt_q, prompt_k, prompt_v, is_causal=True)]
        outs += [branches.attend(q, k, v) for branches in self.branches]
        return torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outs]).index_select(
            0, self.unpad
        )


# two calls of attention instead of one, where together they have at most this share of its scores
SPLIT_AT = 0.8


def pad_rows(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each padded row finds its tokens in a packed sequence, and where in the padded rows each token
    is.

    Returns:
        `[R, T]` with T = lengths.max(), a pad repeating the row's first token (index 0 for an empty
        row), and `[sum(lengths)]` into the flattened rows.
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
    common: (
        np.ndarray
    )  # [R] how many tokens, from the first on, are the same as in the row before, and run there

    @classmethod
    def of_completions(cls, completions: Completions, *, distinct: bool) -> "_Rows":
        """A row for each completion, or for each that is distinct in its group."""
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
        return cls(ids[p, g], lengths[p, g], p, of, np.zeros_like(p))

    def merged(self) -> "_Rows":
        """Sorted, so that each row goes on from the one before: neighbours share their longest
        common prefix.
        """
        tokens = np.where(np.arange(self.tokens.shape[1]) < self.lengths[:, None], self.tokens, -1)
        order = np.lexsort((*tokens.T[::-1], self.prompt))
        tokens, prompt = tokens[order], self.prompt[order]
        same = (
            (tokens[1:] == tokens[:-1]) & (tokens[1:] >= 0) & (prompt[1:] == prompt[:-1])[:, None]
        )
        common = np.concatenate([[0], same.cumprod(1).sum(1)])
        return _Rows(tokens, self.lengths[order], prompt, order.argsort()[self.of], common)


def _assemble(
    kind: type[Packing],
    mask: Tensor,
    ids: np.ndarray,
    positions: np.ndarray,
    sources: np.ndarray,
    targets: np.ndarray,
    index: np.ndarray,
    **attention: np.ndarray | tuple[Branches, ...],
) -> Packing:
    if not len(
        sources
    ):  # nothing but empty completions: keep one entry for the masked index to point at
        sources, targets = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    fields = {
        "sources": sources,
        "targets": targets,
        "index": np.where(mask.numpy(), index, 0),
        **attention,
    }
    return kind(
        tokens=PackedTokens(torch.from_numpy(ids), torch.from_numpy(positions)),
        mask=mask,
        **_tensors(fields),
    )


def _tensors(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        n: torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x
        for n, x in fields.items()
    }


def _to(x: Any, device: torch.device | str) -> Any:
    return tuple(part.to(device) for part in x) if isinstance(x, tuple) else x.to(device)


def repeated(completions: Completions) -> Packing:
    """Each prompt with each of its completions."""
    rows = _Rows.of_completions(completions, distinct=False)
    prompt_len = completions.prompt_len.numpy()[rows.prompt]
    inputs = np.maximum(rows.lengths - 1, 0)
    lengths = prompt_len + inputs
    starts = np.cumsum(lengths) - lengths
    prompts = completions.prompt_ids.numpy()[rows.prompt]
    parts = [
        np.concatenate([a[:n], b[:m]])
        for a, n, b, m in zip(prompts, prompt_len, rows.tokens, inputs, strict=True)
    ]
    causal_rows, unpad = pad_rows(starts, lengths)
    columns = np.arange(rows.tokens.shape[1])
    predicted = columns < rows.lengths[:, None]  # [R, S]
    return _assemble(
        Packing,
        completions.completion_mask,
        np.concatenate(parts),
        np.concatenate([np.arange(n) for n in lengths]),
        sources=((starts + prompt_len - 1)[:, None] + columns)[predicted],
        targets=rows.tokens[predicted],
        index=(np.cumsum(rows.lengths) - rows.lengths)[rows.of][..., None] + columns,
        causal_rows=causal_rows,
        unpad=unpad,
    )


def shared_prompt(completions: Completions) -> Packing:
    """Each prompt once, each distinct completion of its group once."""
    return _share(completions, _Rows.of_completions(completions, distinct=True))


def prefix_tree(completions: Completions) -> Packing:
    """Each prompt once, each distinct prefix of its group's completions once."""
    return _share(completions, _Rows.of_completions(completions, distinct=True).merged())


def _share(completions: Completions, rows: _Rows) -> Packing:
    """Each prompt once, and of each row what it does not have in common with the row before."""
    prompt_len, columns = completions.prompt_len.numpy(), np.arange(rows.tokens.shape[1])
    prompt_ids = completions.prompt_ids.numpy()[:, : prompt_len.max()]
    in_prompt = np.arange(prompt_ids.shape[1]) < prompt_len[:, None]
    prompt_starts = np.cumsum(prompt_len) - prompt_len

    inputs = np.maximum(rows.lengths - 1, 0)
    known = np.minimum(
        rows.common, np.minimum(inputs, np.roll(inputs, 1))
    )  # a row's last token is not run: it predicts nothing
    new = inputs - known
    starts = prompt_len.sum() + np.cumsum(new) - new
    keys = _paths(starts, known, len(columns))  # [R, S] where in the packed sequence each token is
    run = (columns >= known[:, None]) & (columns < inputs[:, None])
    predicted = (columns >= rows.common[:, None]) & (columns < rows.lengths[:, None])
    first_prediction = np.cumsum(rows.lengths - rows.common) - (rows.lengths - rows.common)

    prompt_rows, unpad = pad_rows(prompt_starts, prompt_len)
    place, padded = (
        np.zeros(starts[-1] + new[-1], dtype=np.int64),
        prompt_rows.size,
    )  # where in all padded rows a token is
    place[: len(unpad)] = unpad
    branches = []
    for some in _alike(new, inputs, prompt_ids.shape[1]):
        query_rows, unpad = pad_rows(starts[some], new[some])
        place[query_rows.flat[unpad]] = padded + unpad
        padded += query_rows.size
        longest = inputs[some].max()
        steps = known[some, None] + np.arange(query_rows.shape[1])  # [R, T] columns of the queries
        of_prompt = in_prompt[rows.prompt[some], None].repeat(query_rows.shape[1], axis=1)
        of_own = columns[:longest] <= steps[..., None]
        own = np.where(columns < inputs[some, None], keys[some], keys[some, :1])[:, :longest]
        fields = {
            "query_rows": query_rows,
            "key_rows": np.concatenate([prompt_rows[rows.prompt[some]], own], axis=1),
            "visible": np.concatenate([of_prompt, of_own], axis=-1)[:, None],
        }
        branches.append(Branches(**_tensors(fields)))
    before = np.concatenate(
        [(prompt_starts + prompt_len - 1)[rows.prompt, None], keys[:, :-1]], axis=1
    )
    return _assemble(
        PrefixPacking,
        completions.completion_mask,
        np.concatenate([prompt_ids[in_prompt], rows.tokens[run]]),
        np.concatenate([np.nonzero(in_prompt)[1], (prompt_len[rows.prompt, None] + columns)[run]]),
        sources=before[predicted],
        targets=rows.tokens[predicted],
        index=_paths(first_prediction, rows.common, len(columns))[rows.of],
        causal_rows=prompt_rows,
        unpad=place,
        branches=tuple(branches),
    )


def _alike(new: np.ndarray, inputs: np.ndarray, prompt_width: int) -> list[np.ndarray]:
    """Rows that add tokens, as one or two lots of about the same length, whichever way pads less.

    What is compared are attention scores: rows * longest addition * (prompt + longest completion).
    """
    order = np.argsort(-new, kind="stable")[: np.count_nonzero(new)]  # the longest addition first
    if not len(order):
        return []
    number, longest = np.arange(1, len(order) + 1), np.maximum.accumulate(inputs[order])
    long = number * new[order[0]] * (prompt_width + longest)
    from_here = np.maximum.accumulate(inputs[order][::-1])[::-1]
    short = (number * new[order[::-1]])[::-1] * (prompt_width + from_here)  # of rows i and beyond
    together = long[:-1] + short[1:]
    if not len(together) or together.min() > SPLIT_AT * long[-1]:
        return [order]
    cut = int(together.argmin()) + 1
    return [order[:cut], order[cut:]]


def _paths(starts: np.ndarray, known: np.ndarray, width: int) -> np.ndarray:
    """`[R, width]`: entries numbered from `starts` on, but the first `known` of each row are those
    of the row before.
    """
    paths: np.ndarray = starts[:, None] + np.arange(width) - known[:, None]
    for r in np.flatnonzero(known):
        paths[r, : known[r]] = paths[r - 1, : known[r]]
    return paths


PACKINGS: dict[str, Callable[[Completions], Packing]] = {
    "repeated": repeated,
    "shared-prompt": shared_prompt,
    "prefix-tree": prefix_tree,
}
