"""Attention over packed tokens: the tensors of a packing, and how each layer uses them.

packing.py builds these tensors on the host. In each layer, q arrives as `[N, H, E]`, k and v as
`[N, K, E]`, one row per packed token. They are gathered into padded rows for attention, and the
result is gathered back into packed order. Where a kernel for it is at hand, a row's prompt and its
own tokens are two parts (merged_attention.py); elsewhere they are joined, under one dense mask.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .attention import Attend, rows_of, sdpa
from .logprobs import at_least_fp32
from .merged_attention import KERNELS, AttentionPart, merged_attention
from .transformer import PackedTokens


def shared_rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """`rows_of` for tokens that appear in several rows.

    Their gradients are summed in float32 or wider; a bfloat16 sum would lose small terms.
    """
    wide = at_least_fp32(x) if x.requires_grad else x
    return rows_of(wide, rows).to(x.dtype)


def additive_mask(visible: Tensor, dtype: torch.dtype, share: int = 1) -> Tensor:
    """0 where `visible [B, 1, T, keys]` is true, else -inf, `share` times: `[B, 1, R * T, keys]`.

    Rows are padded in memory to a multiple of 8; otherwise CUDA's attention kernels copy the mask.

    Args:
        share: R, the query heads that share a head of keys.
    """
    *batch, tokens, keys = visible.shape
    shape = *batch, share, tokens, -(-keys // 8) * 8
    padded = torch.zeros(shape, dtype=dtype, device=visible.device)
    padded[..., :keys].masked_fill_(~visible.unsqueeze(-3), -torch.inf)
    return padded.flatten(-3, -2)[..., :keys]


@dataclass(frozen=True)
class Packing:
    """One micro-batch, ready for `Transformer.forward(packing.tokens, packing, temperature)`.

    Without other parts, tokens attend causally within their row.
    """

    tokens: PackedTokens  # N tokens
    sources: Tensor  # [M] packed tokens whose next token is predicted
    targets: Tensor  # [M] that next token
    index: Tensor  # [P, G, S] into the M predictions; 0 where masked
    mask: Tensor  # [P, G, S] bool
    parts: tuple[AttentionPart, ...]  # the first one is causal
    unpad: Tensor  # [N] place of each packed token in the flattened and concatenated padded rows

    @property
    def causal_rows(self) -> Tensor:
        """`[R, T]` into the packed tokens; padding repeats the row's first token."""
        return self.parts[0].query_rows

    def layer(self, number: int) -> Attend:
        return self.attend

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `Attend` has it."""
        if q.device.type in KERNELS:
            return merged_attention(q, k, v, self.parts)
        return self.attend_joined(q, k, v)

    def attend_joined(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same, on any device. Padding is on the right, so causality hides it."""
        q, k, v = (rows_of(x, self.causal_rows) for x in (q, k, v))
        out = sdpa(q, k, v)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.unpad)

    def to(self, device: torch.device | str) -> "Packing":
        return replace(self, **{name: _to(x, device) for name, x in vars(self).items()})


@dataclass(frozen=True)
class CompletionAttention:
    """Attention of the completions' tokens, as padded rows whose keys are joined.

    The queries of a row are only the tokens that it adds. Its keys are its prompt and its whole
    completion, including the shared prefix that another row has added.
    """

    query_rows: Tensor  # [R, T] into the packed tokens
    real: Tensor  # [n] places in the flattened query rows that are not padding
    key_rows: Tensor  # [R, Lp + K] into the packed tokens: prompt, then completion
    visible: Tensor  # [R, 1, T, Lp + K] bool: which keys each query may attend to
    # `visible` as additive masks, by dtype and by how many query heads share a head of keys
    masks: dict[tuple[torch.dtype, int], Tensor] = field(default_factory=dict, init=False)

    def own_part(self, prompt_width: int) -> AttentionPart:
        """The same without the prompts, which are the first `prompt_width` keys."""
        keys, visible = self.key_rows[:, prompt_width:], self.visible[..., prompt_width:]
        return AttentionPart(self.query_rows, self.real, keys, visible)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [N, H, E]`, k and v `[N, K, E]` -> `[R, H, T, E]`."""
        share = q.shape[1] // k.shape[1]
        q = rows_of(q, self.query_rows)
        k, v = shared_rows_of(k, self.key_rows), shared_rows_of(v, self.key_rows)
        return sdpa(q, k, v, mask=self._mask(q.dtype, share))

    def _mask(self, dtype: torch.dtype, share: int) -> Tensor:
        """One mask for all layers. Otherwise each layer would make its own, and autograd would keep
        all of them for the backward pass.
        """
        if (dtype, share) not in self.masks:
            self.masks[dtype, share] = additive_mask(self.visible, dtype, share)
        return self.masks[dtype, share]

    def to(self, device: torch.device | str) -> "CompletionAttention":
        tensors = (self.query_rows, self.real, self.key_rows, self.visible)
        return CompletionAttention(*(x.to(device) for x in tensors))


@dataclass(frozen=True)
class SharedPrefixPacking(Packing):
    """The causal rows are prompts; completions attend to them and to each other's tokens.

    The other parts are completions by prompt, then by row.
    """

    # one or two sets of rows; rows of a set have similar lengths, so there is little padding
    completion_attention: tuple[CompletionAttention, ...]

    def attend_joined(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        prompt_q, prompt_k, prompt_v = (rows_of(x, self.causal_rows) for x in (q, k, v))
        outs = [sdpa(prompt_q, prompt_k, prompt_v)]
        outs += [rows.attend(q, k, v) for rows in self.completion_attention]
        flat = torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outs])
        return flat.index_select(0, self.unpad)


def _to(x: Any, device: torch.device | str) -> Any:
    return tuple(part.to(device) for part in x) if isinstance(x, tuple) else x.to(device)
