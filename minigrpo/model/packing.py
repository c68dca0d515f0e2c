"""Pack completions for the model, and map the log-probs back to `[P, G, S]`.

A packing decides which tokens the model runs, and which of them attend to which. Both packings give
the same log-probs:

    prefix-tree  each prompt once, and each distinct prefix of its group's completions once
    repeated     each completion with its own copy of the prompt, as usual; the reference

The prompt's last token predicts a completion's first. A completion's last token predicts nothing,
so it is not run. Packings are built on the host, once per micro-batch.

A worked example: two prompts with three completions each. 9 is EOS, 0 padding.

>>> prompt_ids = torch.tensor([[10, 11, 12], [20, 21, 0]])
>>> completion_ids = torch.tensor([[[1, 2, 9], [1, 2, 9], [1, 3, 9]],
...                                [[4, 5, 9], [4, 9, 0], [6, 9, 0]]])
>>> completions = Completions(prompt_ids, torch.tensor([3, 2]), completion_ids, completion_ids > 0)

A prompt and its completions are a tree. Its nodes, the packed tokens, are 11 instead of the 25 that
`repeated` runs. A token's place is its index in the packed sequence, its position the index in its
own text. In each group the prompt comes first, then what each completion adds to the tree: of the
first group [1, 2], nothing, [3]; of the second [4, 5], nothing, [6].

    place        0   1   2    3   4   5     6   7    8   9   10
    token       10  11  12    1   2   3    20  21    4   5    6
    position     0   1   2    3   4   4     0   1    2   3    2

>>> packing = pack(completions)
>>> packing.ids.tolist()
[10, 11, 12, 1, 2, 3, 20, 21, 4, 5, 6]
>>> packing.positions.tolist()
[0, 1, 2, 3, 4, 4, 0, 1, 2, 3, 2]
>>> len(pack(completions, share=False).ids)
25

Prediction m is the log-prob of `targets[m]` after the packed token at `sources[m]`, and `index`
maps each sampled token to its prediction. Where completions share a prefix, they point to
the same predictions, and autograd sums their gradients.

>>> packing.sources.tolist()
[2, 3, 4, 3, 5, 7, 8, 9, 8, 7, 10]
>>> packing.targets.tolist()
[1, 2, 9, 3, 9, 4, 5, 9, 9, 6, 9]
>>> packing.index.tolist()
[[[0, 1, 2], [0, 1, 2], [0, 3, 4]], [[5, 6, 7], [5, 8, 0], [9, 10, 0]]]

Attention runs on padded rows. The prompts are causal rows. The tokens that a completion adds are
the queries of another row, whose keys are the prompt and the whole completion. These rows are split
by length if that saves padding: here into those that add two tokens, and those that add one.

>>> packing.causal_rows.tolist()
[[0, 1, 2], [6, 7, 6]]
>>> for part in packing.completion_rows:
...     print(part.queries.tolist(), part.keys.tolist())
[[3, 4], [8, 9]] [[0, 1, 2, 3, 4], [6, 7, 6, 8, 9]]
[[5], [10]] [[0, 1, 2, 3, 5], [6, 7, 6, 10, 10]]
>>> packing.completion_rows[0].visible[1, 0].int().tolist()  # padding is the third key
[[1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
>>> packing.unpad.tolist()  # place of each packed token in all of these padded rows, joined
[0, 1, 2, 6, 7, 10, 3, 4, 8, 9, 11]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..types import Completions
from .logprobs import at_least_fp32

# Two attention calls replace one only if together they compute at most this share of its scores.
SPLIT_AT = 0.8


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """Gather packed tokens into padded rows: `[N, H, E]` and `[B, T]` -> `[B, H, T, E]`.

    index_select has a parallel backward; the backward of `x[rows]` is a serial index_put.
    """
    return x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Attention of `q [B, H, T, E]` to `k` and `v`, `[B, K, T', E]`; causal without a mask.

    Query head h attends to head h // R of the keys, where R = H / K (Ainslie et al., arXiv
    2305.13245). Left to torch, that would store the scores of all heads in most cases. So with a
    mask, the R queries of a token become rows of the attention to their shared head; without one,
    keys and values are repeated.

    Args:
        mask: `[B, 1, R * T, T']`, 0 or -inf.
    """
    share = q.shape[1] // k.shape[1]
    compute = plain_attention if q.device.type == "mps" else F.scaled_dot_product_attention
    if mask is None:
        k, v = (x.repeat_interleave(share, dim=1) if share > 1 else x for x in (k, v))
        return compute(q, k, v, is_causal=True)
    rows = q.unflatten(1, (-1, share)).flatten(2, 3)  # [B, K, R * T, E]
    return compute(rows, k, v, attn_mask=mask).unflatten(2, (share, -1)).flatten(1, 2)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """F.scaled_dot_product_attention without torch's kernels, causal unless there is a mask.

    On Apple GPUs these were wrong without an error: of transposed tensors, and of causal attention
    in bfloat16 (pytorch/pytorch, issues 181133 and 195910).
    """
    scores = q @ k.mT * q.shape[-1] ** -0.5
    mask = torch.full_like(scores, -torch.inf).triu(1) if attn_mask is None else attn_mask
    return (scores + mask).softmax(-1) @ v


@dataclass(frozen=True)
class CompletionRows:
    """Attention of the tokens that completions add, as padded rows.

    A row's keys include the shared prefix, which another row has added.
    """

    queries: Tensor  # [C, T] places of packed tokens: C rows
    keys: Tensor  # [C, Lp + I] places: of the prompt, then of the completion's I inputs
    visible: Tensor  # [C, 1, T, Lp + I] bool: which keys each query may attend to
    # `visible` as additive masks, by dtype and by how many query heads share a head of keys
    masks: dict[tuple[torch.dtype, int], Tensor] = field(default_factory=dict, init=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [N, H, E]`, k and v `[N, K, E]` -> `[C, H, T, E]`."""
        share = q.shape[1] // k.shape[1]
        # gradients of tokens in several rows are summed: in bfloat16, small terms would be lost
        wide = (at_least_fp32(x) if x.requires_grad else x for x in (k, v))
        k, v = (rows_of(x, self.keys).to(q.dtype) for x in wide)
        return sdpa(rows_of(q, self.queries), k, v, mask=self._mask(q.dtype, share))

    def _mask(self, dtype: torch.dtype, share: int) -> Tensor:
        """`visible` as 0 or -inf, for each of R queries of a key head: `[C, 1, R * T, Lp + I]`.

        One mask for all layers; else autograd would keep one of each. Rows are padded in memory to
        a multiple of 8, because CUDA's attention would copy others.
        """
        if (dtype, share) not in self.masks:
            keys = self.visible.shape[-1]
            hidden = ~F.pad(self.visible.repeat(1, 1, share, 1), (0, -keys % 8))
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self.masks[dtype, share] = mask.masked_fill_(hidden, -torch.inf)[..., :keys]
        return self.masks[dtype, share]

    def to(self, device: torch.device | str) -> "CompletionRows":
        return CompletionRows(*(x.to(device) for x in (self.queries, self.keys, self.visible)))


@dataclass(frozen=True)
class Packing:
    """One micro-batch, ready for `Transformer.forward`."""

    ids: Tensor  # [N] int64, the packed tokens
    positions: Tensor  # [N] int64, the position of each in its own text
    sources: Tensor  # [M] packed tokens whose next token is predicted
    targets: Tensor  # [M] that next token
    index: Tensor  # [P, G, S] into the M predictions; 0 where no token was sampled
    mask: Tensor  # [P, G, S] bool
    causal_rows: Tensor  # [C, T] into the packed tokens; padding repeats the row's first token
    completion_rows: tuple[CompletionRows, ...]  # up to two sets, of rows of similar lengths
    unpad: Tensor  # [N] place of each packed token in the flattened and concatenated padded rows

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [N, H, E]`, k and v `[N, K, E]` -> `[N, H, E]`, the same in every layer."""
        # padding is on the right, so causality hides it
        outs = [sdpa(*(rows_of(x, self.causal_rows) for x in (q, k, v)))]
        outs += [rows.attend(q, k, v) for rows in self.completion_rows]
        flat = torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outs])
        return flat.index_select(0, self.unpad)

    def to(self, device: torch.device | str) -> "Packing":
        rows = tuple(part.to(device) for part in self.completion_rows)
        moved = {name: x.to(device) for name, x in vars(self).items() if name != "completion_rows"}
        return replace(self, completion_rows=rows, **moved)


@dataclass(frozen=True)
class _AddedRow:
    """The tokens that a completion adds to the tree."""

    prompt: range  # places of its prompt
    path: Sequence[int]  # places of its inputs, those that it shares with others included
    num_new: int  # how many of them, at the end, it adds


def pack(completions: Completions, share: bool = True) -> Packing:
    """The packing `prefix-tree`, or without sharing `repeated`."""
    ids: list[int] = []  # of the packed tokens
    positions: list[int] = []
    child: dict[tuple[int, int], int] = {}  # (place, next token) -> place of that token
    predictions: dict[tuple[int, int], int] = {}  # (place, next token) -> number
    causal: list[range] = []
    added: list[_AddedRow] = []
    mask, lengths = completions.completion_mask.numpy(), completions.completion_len.tolist()
    index = np.zeros(mask.shape, dtype=np.int64)
    prompts = zip(completions.prompt_ids.tolist(), completions.prompt_len.tolist(), strict=True)
    for p, (prompt_ids, prompt_len) in enumerate(prompts):
        for g, padded in enumerate(completions.completion_ids[p].tolist()):
            completion = padded[: lengths[p][g]]
            if g == 0 or not share:
                prompt = range(len(ids), len(ids) + prompt_len)
                ids += prompt_ids[:prompt_len]
                positions += range(prompt_len)
            num_before, path = len(ids), [prompt[-1]]
            for position, token in enumerate(completion[:-1], start=prompt_len):
                place = child.setdefault((path[-1], token), len(ids))
                if place == len(ids):  # a new node
                    ids.append(token)
                    positions.append(position)
                path.append(place)
            for s in np.flatnonzero(mask[p, g]).tolist():
                key = path[s], completion[s]
                index[p, g, s] = predictions.setdefault(key, len(predictions))
            if not share:
                causal.append(range(prompt[0], len(ids)))
            elif len(ids) > num_before:
                added.append(_AddedRow(prompt, path[1:], len(ids) - num_before))
        if share:
            causal.append(prompt)
    # if all completions are empty, the masked index still needs a valid entry
    sources, targets = zip(*predictions or [(0, 0)], strict=True)
    causal_rows = _padded(causal)[0]
    parts = [_completion_rows(part) for part in _split_by_length(added)]
    return Packing(
        ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        sources=torch.tensor(sources),
        targets=torch.tensor(targets),
        index=torch.from_numpy(index),
        mask=completions.completion_mask,
        causal_rows=causal_rows,
        completion_rows=tuple(parts),
        unpad=_unpad(len(ids), [causal_rows, *(part.queries for part in parts)]),
    )


PACKINGS: dict[str, Callable[[Completions], Packing]] = {
    "repeated": partial(pack, share=False),
    "prefix-tree": pack,
}


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Rows padded on the right with their first entry, `[C, T]`; and `[C]`, their lengths."""
    width = max(map(len, rows))
    padded = [[*row, *[row[0]] * (width - len(row))] for row in rows]
    # NumPy reads nested lists several times as fast as torch
    return torch.from_numpy(np.array(padded)), torch.tensor([len(row) for row in rows])


def _unpad(num_tokens: int, padded: Sequence[Tensor]) -> Tensor:
    """`[N]`, a place of each packed token in padded rows, flattened and concatenated.

    Padding repeats the first token of its row, so the first place of a token is its own.
    """
    flat = torch.cat([rows.flatten() for rows in padded]).numpy()
    unpad = np.empty(num_tokens, dtype=np.int64)
    unpad[flat[::-1]] = np.arange(len(flat))[::-1]
    return torch.from_numpy(unpad)


def _completion_rows(added: Sequence[_AddedRow]) -> CompletionRows:
    prompts, prompt_len = _padded([row.prompt for row in added])
    paths, num_inputs = _padded([row.path for row in added])
    queries, num_new = _padded([row.path[-row.num_new :] for row in added])
    # a completion's column 0 follows its prompt; its first query is at this column
    first = num_inputs - num_new
    columns = first[:, None] + torch.arange(queries.shape[1])  # [C, T] of the queries
    sees_prompt = (torch.arange(prompts.shape[1]) < prompt_len[:, None])[:, None]
    sees_own = torch.arange(paths.shape[1]) <= columns[..., None]
    visible = torch.cat([sees_prompt.expand(-1, queries.shape[1], -1), sees_own], dim=-1)
    return CompletionRows(queries, torch.cat([prompts, paths], dim=1), visible[:, None])


def _split_by_length(added: Sequence[_AddedRow]) -> list[Sequence[_AddedRow]]:
    """Split rows into two sets of similar lengths, if that saves padding.

    The cost of a set is the number of attention scores that it computes: rows * most tokens added *
    (longest prompt + most inputs).
    """
    if not added:
        return []
    rows = sorted(added, key=lambda row: -row.num_new)
    num_rows, num_new = np.arange(1, len(rows) + 1), np.array([row.num_new for row in rows])
    inputs, width = np.array([len(row.path) for row in rows]), max(len(row.prompt) for row in rows)
    # scores of the set rows[:i + 1], whose first row adds the most tokens
    head = num_rows * num_new[0] * (width + np.maximum.accumulate(inputs))
    # scores of the set rows[i:], in which row i adds the most tokens
    tail = num_rows[::-1] * num_new * (width + np.maximum.accumulate(inputs[::-1])[::-1])
    both = head[:-1] + tail[1:]
    if not len(both) or both.min() > SPLIT_AT * head[-1]:
        return [rows]
    cut = int(both.argmin()) + 1
    return [rows[:cut], rows[cut:]]
