"""Attention of a packing by FlashAttention (Dao, arXiv 2307.08691), where torch has it.

It takes rows of any length, so there is no padding, no mask and no gather of queries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..types import PackedPrompt
from .logprobs import at_least_fp32

Upload = Callable[[np.ndarray], Tensor]  # to the device of a packing


@dataclass(frozen=True)
class VaryingRows:
    """Attention as one call, of C rows of any length: the packed tokens in their order."""

    query_starts: Tensor  # [C + 1] int32, where the queries of each row begin
    keys: Tensor  # [L] places of the packed tokens that each row attends to, row after row
    key_starts: Tensor  # [C + 1] int32, where those of each row begin
    longest: tuple[int, int]  # the most queries and keys of a row

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int,
        attention: Callable[..., Any],
    ) -> Tensor:
        """The last query of a row sees all of its keys, and each one before it a key less."""
        keys, values = (at_least_fp32(x).index_select(0, self.keys).to(q.dtype) for x in (k, v))
        before = window - 1 if window else -1  # -1 is no limit
        return attention(
            q,
            keys,
            values,
            self.query_starts,
            self.key_starts,
            *self.longest,
            window_size=(before, 0),
            enable_gqa=True,
        )


def varying_rows(joined: PackedPrompt, upload: Upload) -> VaryingRows:
    rows = [(row, row) for row in joined.causal_rows]
    rows += [(row.queries, row.keys) for row in joined.added_rows]
    rows.sort(key=lambda row: row[0][0])  # in the order of the packed tokens
    lengths = np.array([[len(queries), len(keys)] for queries, keys in rows])
    starts = np.pad(lengths.cumsum(axis=0, dtype=np.int32), ((1, 0), (0, 0)))
    return VaryingRows(
        query_starts=upload(starts[:, 0]),
        keys=upload(np.concatenate([keys for _, keys in rows])),
        key_starts=upload(starts[:, 1]),
        longest=tuple(lengths.max(axis=0).tolist()),
    )


def varying_attention(q: Tensor) -> Callable[..., Any] | None:
    """What attends to `q [N, H, E]` in rows of any length, if torch has FlashAttention for it."""
    fits = q.is_cuda and q.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return flash_attention(q.device) if fits else None


@lru_cache
def flash_attention(device: torch.device) -> Callable[..., Any] | None:
    from torch.nn.attention.varlen import varlen_attn  # takes a second, where few need it

    has_groups = "enable_gqa" in signature(varlen_attn).parameters  # torch 2.11 has not
    is_recent = torch.cuda.get_device_capability(device) >= (8, 0)
    return varlen_attn if has_groups and is_recent else None
