"""Pack completions for the model, and map the log-probs back to `[P, G, S]`.

A packing decides which tokens the model runs, and which of them attend to which. Both packings give
the same log-probs:

    prefix-tree  each prompt once, and each distinct prefix of its group's completions once
    repeated     each completion with its own copy of the prompt, as usual; the reference

The prompt's last token predicts a completion's first. A completion's last token predicts nothing,
so it is not run. Packings are built on the host, once per forward pass.

A worked example: two prompts with three completions each. 9 is EOS, 0 padding.

>>> prompt_ids = torch.tensor([[10, 11, 12], [20, 21, 0]])
>>> completion_ids = torch.tensor([[[1, 2, 9], [1, 2, 9], [1, 3, 9]],
...                                [[4, 5, 9], [4, 9, 0], [6, 9, 0]]])
>>> completions = Completions(prompt_ids, torch.tensor([3, 2]), completion_ids, completion_ids > 0)

A prompt and its completions are a tree. Its nodes, the packed tokens, are 11 instead of the 25 that
`repeated` runs. A token's place is its index in the packed sequence, its position the index in its
own text. In each group the prompt comes first, then what each completion adds to the tree: of the
first group [1, 2], nothing, [3]; of the second [4, 5], nothing, [6].

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
the queries of another row, whose keys are the prompt and the whole completion; `last` is the last
key that each query attends to. These rows are split by length if that saves padding: here into
those that add two tokens, and those that add one.

>>> packing.causal_rows.tolist()
[[0, 1, 2], [6, 7, 6]]
>>> for part in packing.completion_rows:
...     print(part.queries.tolist(), part.keys.tolist(), part.last.tolist())
[[3, 4], [8, 9]] [[0, 1, 2, 3, 4], [6, 7, 8, 9, 6]] [[3, 4], [2, 3]]
[[5], [10]] [[0, 1, 2, 3, 5], [6, 7, 10, 6, 6]] [[4], [2]]
>>> packing.unpad.tolist()  # place of each packed token in all of these padded rows, joined
[0, 1, 2, 6, 7, 10, 3, 4, 8, 9, 11]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, tensor

from ..types import Completions
from .logprobs import at_least_fp32

# The places of the tokens that a completion adds to the tree, and of its prompt and all its inputs.
AddedRow = tuple[Sequence[int], Sequence[int]]


def rows_of(packed: Tensor, rows: Tensor) -> Tensor:
    """Gather packed tokens into padded rows: `[N, H, E]` and `[B, T]` -> `[B, H, T, E]`."""
    # its backward is parallel; that of packed[rows] is a serial index_put
    return packed.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of `q [B, H, T, E]` to `k` and `v`, `[B, K, T', E]`.

    Query head h attends to head h // R of the keys, where R = H / K (Ainslie et al., arXiv
    2305.13245). Left to torch, that would store the scores of all heads in most cases. So with the
    `mask` `[B, 1, R * T, T']`, 0 or -inf, the R queries of a token become rows of the attention to
    their shared head.
    """
    share = q.shape[1] // k.shape[1]
    rows = q.unflatten(1, (-1, share)).flatten(2, 3)  # [B, K, R * T, E]
    attended = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
    return attended.unflatten(2, (share, -1)).flatten(1, 2)


def causal(window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of rows `[B, H or K, T, E]`; each token sees the last `window`, 0: all."""
    length = q.shape[2]
    share = q.shape[1] // k.shape[1]
    if not 0 < window < length:  # without a mask, keys and values are repeated
        k, v = (x.repeat_interleave(share, dim=1) if share > 1 else x for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return sdpa(q, k, v, window_mask(window, length, share, q.dtype, q.device))


@lru_cache(maxsize=4)  # not one for each layer, which autograd would keep
def window_mask(
    window: int, length: int, share: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The mask `[1, 1, share * T, T]` of causal rows with a window."""
    places = torch.arange(length, device=device)
    age = places[:, None] - places  # of a key, when a query sees it
    unseen = ((age < 0) | (age >= window)).repeat(share, 1)[None, None]
    return unseen.to(dtype).masked_fill_(unseen, -torch.inf)


@dataclass(frozen=True)
class CompletionRows:
    """Attention of the tokens that completions add, as padded rows.

    A row's keys include the shared prefix, whose queries are in other rows. They are in the order
    of the text, so padding, on the right, is after the last key of every query.
    """

    queries: Tensor  # [C, T] places of packed tokens: C rows
    keys: Tensor  # [C, L] places: of the prompt and the completion's inputs
    last: Tensor  # [C, T] up to which of the L keys each query attends
    masks: dict[int, Tensor] = field(default_factory=dict, init=False)  # once run, by window

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """`q [N, H, E]`, k and v `[N, K, E]` -> `[C, H, T, E]`."""
        num_keys = self.keys.shape[1]
        window = window if window < num_keys else 0
        if window not in self.masks:  # not one for each layer, which autograd would keep
            share = q.shape[1] // k.shape[1]
            last = self.last.repeat(1, share)[:, None, :, None]
            # rows of a multiple of 8 in memory, because CUDA's attention would copy others
            age = last - torch.arange(num_keys + -num_keys % 8, device=last.device)
            unseen = (age < 0) | (age >= (window or torch.inf))
            mask = unseen.to(q.dtype).masked_fill_(unseen, -torch.inf)
            self.masks[window] = mask[..., :num_keys]
        # gradients of tokens in several rows are summed: in bfloat16, small terms would be lost
        wide = (at_least_fp32(x) if x.requires_grad else x for x in (k, v))
        k, v = (rows_of(x, self.keys).to(q.dtype) for x in wide)
        return sdpa(rows_of(q, self.queries), k, v, self.masks[window])


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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
        """`q [N, H, E]`, k and v `[N, K, E]` -> `[N, H, E]`; `window`: see `ModelShape`."""
        # padding is on the right, so causality hides it
        outs = [causal(window, *(rows_of(x, self.causal_rows) for x in (q, k, v)))]
        outs += [rows.attend(q, k, v, window) for rows in self.completion_rows]
        flat = torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outs])
        return flat.index_select(0, self.unpad)


class _Stream:
    """The packed tokens of a micro-batch while they are collected, prompt by prompt."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []  # of each token in its own text
        self.child: dict[tuple[int, int], int] = {}  # (place, next token) -> that token's place
        # (place, next token) -> the number of the prediction
        self.predictions: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def add_prompt(self, prompt: Sequence[int]) -> range:
        """Add the tokens of a prompt; return their places."""
        places = range(len(self), len(self) + len(prompt))
        self.ids += prompt
        self.positions += range(len(prompt))
        return places

    def add_completion(self, prompt: range, inputs: Sequence[int]) -> list[int]:
        """Add what is new of a completion's inputs; return the places of prompt and inputs."""
        path = [*prompt]
        for token in inputs:
            place = self.child.setdefault((path[-1], token), len(self))
            if place == len(self):
                self.ids.append(token)
                self.positions.append(len(path))
            path.append(place)
        return path

    def predict(self, place: int, token: int) -> int:
        """The number of the prediction of `token` after the token at a place."""
        return self.predictions.setdefault((place, token), len(self.predictions))


def pack(
    completions: Completions, device: torch.device | str = "cpu", *, share: bool = True
) -> Packing:
    """The packing `prefix-tree`, or without sharing `repeated`, of completions on the host."""
    # 1. The packed tokens, and what is attended to.
    stream = _Stream()
    causal: list[Sequence[int]] = []
    added: list[AddedRow] = []
    mask = completions.completion_mask.numpy()
    lengths = completions.completion_len.tolist()
    index = np.zeros(mask.shape, dtype=np.int64)
    for p, prompt_len in enumerate(completions.prompt_len.tolist()):
        prompt_ids = completions.prompt_ids[p, :prompt_len].tolist()
        for g, padded in enumerate(completions.completion_ids[p].tolist()):
            if g == 0 or not share:
                prompt = stream.add_prompt(prompt_ids)
            completion = padded[: lengths[p][g]]
            num_before = len(stream)
            path = stream.add_completion(prompt, completion[:-1])
            for s in np.flatnonzero(mask[p, g]).tolist():
                index[p, g, s] = stream.predict(path[prompt_len - 1 + s], completion[s])
            if not share:
                causal.append(path)
            elif len(stream) > num_before:
                added.append((range(num_before, len(stream)), path))
        if share:
            causal.append(prompt)
    if not stream.predictions:  # all completions are empty, and `index` needs a valid entry
        stream.predict(0, 0)
    sources, targets = zip(*stream.predictions, strict=True)

    # 2. Attention's padded rows, and the place of each token in them.
    depth = np.array(stream.positions)
    causal_rows = _padded(causal)
    added_rows = []
    places = [causal_rows.ravel()]
    for part in _split_by_length(added):
        queries, keys = map(_padded, zip(*part, strict=True))
        added_rows.append((queries, keys, depth[queries]))
        places.append(queries.ravel())
    # padding repeats the first token of its row, so the first place of a token is its own
    first_places = np.unique(np.concatenate(places), return_index=True)[1]

    # 3. All of it on the device.
    with torch.device(device):
        return Packing(
            ids=tensor(stream.ids),
            positions=tensor(stream.positions),
            sources=tensor(sources),
            targets=tensor(targets),
            index=tensor(index),
            mask=tensor(mask),
            causal_rows=tensor(causal_rows),
            completion_rows=tuple(CompletionRows(*map(tensor, rows)) for rows in added_rows),
            unpad=tensor(first_places),
        )


# by the values of --packing; both take completions on the host, and a device
Pack = Callable[[Completions, torch.device], Packing]
PACKINGS: dict[str, Pack] = {"repeated": partial(pack, share=False), "prefix-tree": pack}


def _padded(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Rows padded on the right with their first entry, `[C, T]`."""
    width = max(map(len, rows))
    return np.array([[*row, *[row[0]] * (width - len(row))] for row in rows])


def _split_by_length(added: list[AddedRow]) -> list[list[AddedRow]]:
    """Split rows into two sets of similar lengths, if that saves padding."""
    if not added:
        return []
    rows = sorted(added, key=lambda row: -len(row[0]))
    best = [rows]
    fewest = 0.8 * _num_scores(rows)  # a second call costs something too
    for cut in range(1, len(rows), 1 + len(rows) // 32):  # of many, 32 are tried
        parts = [rows[:cut], rows[cut:]]
        number = sum(map(_num_scores, parts))
        if number <= fewest:
            best = parts
            fewest = number
    return best


def _num_scores(rows: list[AddedRow]) -> int:
    """The attention scores that a set of rows computes: rows * most queries * most keys."""
    queries, keys = zip(*rows, strict=True)
    return len(rows) * max(map(len, queries)) * max(map(len, keys))
