"""Where packed tokens meet: the contexts in which a model's layers mix them.

A model computes most of itself token by token. Where a layer mixes tokens, it asks its context, and
the context knows which tokens come before which. `TextRows` are texts by themselves; packing.py has
the trees of a training step, and decoder.py the slots of a rollout.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .delta import Needs

# A recurrence along rows: (the states [C, ..] before them, or None at the start of texts; inputs
# [C, T, F]; which results are needed) -> (outputs [C, T, ..], the states after them). Inputs of
# zeros leave a state as it is.
Scan = Callable[[Tensor | None, Tensor, Needs], tuple[Tensor, Tensor]]


class Context:
    """What N packed tokens see. `layer` is the number of the layer that asks."""

    def attend(self, layer: int, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of `q [N, H, E]` to `k` and `v`, `[N, K, E]` -> `[N, H, E]`; K divides H.

        A token sees itself and those before it: the last `window` of them, or all if it is 0.
        """
        raise NotImplementedError

    def previous(self, layer: int, inputs: Tensor, count: int) -> Tensor:
        """The inputs of the tokens before each, `[N, C]` -> `[N, count, C]`, zeros if none."""
        raise NotImplementedError

    def recur(self, layer: int, scan: Scan, inputs: Tensor) -> Tensor:
        """Run a scan along each text, `[N, F]` -> `[N, ..]`."""
        raise NotImplementedError


def take_rows(packed: Tensor, rows: Tensor) -> Tensor:
    """Gather packed tokens into padded rows: `[N, ..]` and `[C, T]` -> `[C, T, ..]`."""
    # the backward pass of index_select is parallel; that of packed[rows] is a serial index_put
    return packed.index_select(0, rows.flatten()).unflatten(0, rows.shape)


def attend_in_rows(
    rows: Tensor,
    window: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Attention within rows `[C, T]` of packed tokens, padded on the right -> `[C, T, H, E]`."""
    queries = take_rows(q, rows).transpose(1, 2)
    keys = take_rows(k, rows).transpose(1, 2)
    values = take_rows(v, rows).transpose(1, 2)
    # padding is on the right, so causality hides it
    return causal(window, queries, keys, values).transpose(1, 2)


def scan_rows(
    scan: Scan,
    states: Tensor | None,
    inputs: Tensor,
    rows: Tensor,
    positions: Tensor,
    needs: Needs = "both",
) -> tuple[Tensor, Tensor]:
    """Run a scan along rows `[C, T]` of packed tokens that lie at `positions [N]`."""
    in_row = positions[rows]
    steps = torch.arange(rows.shape[1], device=rows.device)
    is_token = in_row == in_row[:, :1] + steps  # padding repeats a token
    return scan(states, take_rows(inputs, rows) * is_token[..., None], needs)


def take_previous(inputs: Tensor, parents: Tensor, count: int) -> Tensor:
    """The inputs of the tokens before each, `[N, C]` -> `[N, count, C]`; a parent of -1: none."""
    none = len(inputs)  # the place of a token of zeros, which has no parent either
    with_zeros = F.pad(inputs, (0, 0, 0, 1))
    nearest = F.pad(parents.where(parents >= 0, none), (0, 1), value=none)
    places = [nearest]
    while len(places) < count:
        places.insert(0, nearest[places[0]])
    return take_rows(with_zeros, torch.stack(places, dim=1)[:none])


class TextRows(Context):
    """Texts by themselves, one after another among the packed tokens."""

    def __init__(self, rows: Tensor, places: Tensor, positions: Tensor) -> None:
        """The texts as rows `[C, T]`, padded on the right, and the `places [N]` of tokens there."""
        self.rows = rows
        self.places = places
        self.positions = positions

    def attend(self, layer: int, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = attend_in_rows(self.rows, window, q, k, v)
        return attended.flatten(0, 1).index_select(0, self.places)

    def previous(self, layer: int, inputs: Tensor, count: int) -> Tensor:
        before = torch.arange(-1, len(inputs) - 1, device=inputs.device)
        parents = before.where(self.positions > 0, -1)
        return take_previous(inputs, parents, count)

    def recur(self, layer: int, scan: Scan, inputs: Tensor) -> Tensor:
        outputs, _ = scan_rows(scan, None, inputs, self.rows, self.positions, "outputs")
        return outputs.flatten(0, 1).index_select(0, self.places)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of `q [B, H, T, E]` to `k` and `v`, `[B, K, T', E]`, with a mask of 0 and -inf.

    Query heads that share a key head (arXiv 2305.13245) become R = H / K times the rows, as in the
    mask `[B, 1, R * T, T']`: else torch may store all scores.
    """
    queries_per_key = q.shape[1] // k.shape[1]
    rows = q.unflatten(1, (-1, queries_per_key)).flatten(2, 3)  # [B, K, R * T, E]
    attended = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
    return attended.unflatten(2, (queries_per_key, -1)).flatten(1, 2)


def causal(window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of rows `[B, H or K, T, E]` to the last `window` tokens, or to all if 0."""
    length = q.shape[2]
    queries_per_key = q.shape[1] // k.shape[1]
    if 0 < window < length:
        mask = causal_mask(length, window, queries_per_key, q.dtype, q.device)
        return sdpa(q, k, v, mask)
    if queries_per_key > 1:  # without a mask, keys and values are repeated
        k = k.repeat_interleave(queries_per_key, dim=1)
        v = v.repeat_interleave(queries_per_key, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@lru_cache(maxsize=4)  # the layers share a mask, because autograd would keep one for each
def causal_mask(
    length: int,
    window: int,
    queries_per_key: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The mask `[1, 1, queries_per_key * T, T]` of causal rows with a window."""
    last = torch.arange(length, device=device)[None]
    return make_mask(last, length, window, queries_per_key, dtype)


def make_mask(
    last: Tensor,
    num_keys: int,
    window: int,
    queries_per_key: int,
    dtype: torch.dtype,
) -> Tensor:
    """The mask `[C, 1, queries_per_key * T, L]` of L keys, up to each query's `last [C, T]`."""
    last = last.repeat(1, queries_per_key)[:, None, :, None]
    padding = -num_keys % 8  # CUDA's attention would copy rows of other lengths
    age = last - torch.arange(num_keys + padding, device=last.device)
    unseen = (age < 0) | (age >= (window or torch.inf))
    mask = unseen.to(dtype).masked_fill_(unseen, -torch.inf)
    return mask[..., :num_keys]
