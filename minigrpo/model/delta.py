"""The gated delta rule (Yang et al., arXiv 2412.06464), a recurrence with a matrix as its state.

A state `S [key size, value size]` of a text maps keys to values. A token lets it decay, and then
corrects what its key finds there:

    S = exp(log_decay) S
    S = S + strength k^T (v - k S)      k and v are rows, k of length 1
    output = q S
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Needs = Literal["both", "outputs", "states"]
CHUNK = 64  # tokens whose corrections are found by one triangular solve


def unit(heads: Tensor) -> Tensor:
    """Heads `[.., E]` of length 1; zeros stay zeros."""
    return heads * (heads.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def in_chunks(rows: Tensor, size: int) -> Tensor:
    """Rows `[C, H, T, E]` -> `[C, H, n, size, E]`; the last chunk is padded with zeros."""
    padding = -rows.shape[2] % size
    return F.pad(rows, (0, 0, 0, padding)).unflatten(2, (-1, size))


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    states: Tensor,
    needs: Needs = "both",
) -> tuple[Tensor, Tensor]:
    """Run the rule along C rows of T tokens, chunk by chunk.

    Args:
        q: queries `[C, H, T, K]`, and `k`, keys of the same shape.
        v: values `[C, H, T, V]`.
        log_decay: `[C, H, T]`, at most 0, and `strength`, in [0, 1].
        states: `[C, H, K, V]`, before the first tokens.
        needs: what of the results is computed; the other one is empty, or as it was.

    Returns:
        The outputs `[C, H, T, V]`, and the states after the last tokens.
    """
    # 1. Rows in n chunks of L tokens; padding changes no state.
    length = q.shape[2]
    size = min(CHUNK, length)
    q = in_chunks(q, size)
    k = in_chunks(k, size)
    v = in_chunks(v, size)
    log_decay = in_chunks(log_decay[..., None], size)[..., 0]
    strength = in_chunks(strength[..., None], size)  # [C, H, n, L, 1]

    # 2. Within chunks. With D[i, j] the decay between tokens j <= i, the corrections U of a chunk
    # that begins with the state S solve U = strength (V - decay K S - strictly lower(D K K^T) U).
    since_start = log_decay.cumsum(-1)  # [C, H, n, L]
    between = (since_start[..., :, None] - since_start[..., None, :]).tril().exp().tril()
    decay = since_start.exp()[..., None]
    weighted = k * strength
    corrections = (weighted @ k.mT) * between
    wanted = torch.cat([v * strength, weighted * decay], dim=-1)
    solved = wanted
    if size > 1:
        solved = torch.linalg.solve_triangular(corrections, wanted, upper=False, unitriangular=True)
    from_values, from_keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    attention = (q @ k.mT) * between
    to_end = (since_start[..., -1:] - since_start).exp()[..., None]
    k_at_end = k * to_end

    # 3. From chunk to chunk. A state is read once for both: it is larger than all else.
    readers = torch.cat([from_keys, q * decay], dim=3)  # [C, H, n, 2 L, K]
    if needs == "states":
        readers = from_keys
    outputs = [v[:, :, 0, :0]]
    for n in range(q.shape[2]):
        found = readers[:, :, n] @ states
        corrected = from_values[:, :, n] - found[:, :, :size]
        if needs != "states":
            outputs.append(found[:, :, size:] + attention[:, :, n] @ corrected)
        is_last = n + 1 == q.shape[2]
        if needs != "outputs" or not is_last:
            states = decay[:, :, n, -1:] * states
            in_place = states.view(-1, *states.shape[2:])  # [C * H, K, V]
            in_place.baddbmm_(k_at_end[:, :, n].mT.flatten(0, 1), corrected.flatten(0, 1))
    return torch.cat(outputs, dim=2)[:, :, :length], states
