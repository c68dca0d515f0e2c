"""Layers with a state: the gated delta rule in chunks, and texts that share a state."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from minigrpo.model import delta
from minigrpo.model.delta import gated_delta, unit
from minigrpo.model.packing import Packing, pack
from minigrpo.model.transformer import Transformer
from minigrpo.types import Completions

from .steps import SHAPES

EXACT = {"rtol": 1e-12, "atol": 1e-12}
CHUNKS = (1, 3, 64)


def token_by_token(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule as it is written, one token after another."""
    outputs = []
    for t in range(q.shape[2]):
        states = log_decay[:, :, t, None, None].exp() * states
        key = k[:, :, t, :, None]
        error = v[:, :, t, None] - key.mT @ states
        states = states + strength[:, :, t, None, None] * key * error
        outputs.append(q[:, :, t, None] @ states)
    return torch.cat(outputs, dim=2), states


def made_up(length: int) -> tuple[Tensor, ...]:
    """Inputs of two rows with three heads; keys of four numbers, values of five."""
    draw = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, 3, length, n, generator=draw).double() for n in (4, 4, 5))
    log_decay = -torch.rand(2, 3, length, generator=draw).double()
    strength = torch.rand(2, 3, length, generator=draw).double()
    states = torch.randn(2, 3, 4, 5, generator=draw).double()
    return unit(q), unit(k), v, log_decay, strength, states


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("length", [1, 3, 7, 65])
def test_chunks_compute_the_rule(chunk: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "CHUNK", chunk)
    inputs = [x.requires_grad_() for x in made_up(length)]
    expected = token_by_token(*inputs)
    found = gated_delta(*inputs)
    gradients = []
    for outputs, states in (expected, found):
        assert_close((outputs, states), expected, **EXACT)
        total = outputs.cos().sum() + states.sin().sum()
        gradients.append(torch.autograd.grad(total, inputs))
    assert_close(gradients[1], gradients[0], **EXACT)


@pytest.mark.parametrize(("shape", "chunk"), [("gpt2", 64), *(("hybrid", n) for n in CHUNKS)])
@given(
    seed=st.integers(0, 10**6),
    prompts=st.integers(1, 3),
    samples=st.integers(1, 6),
    length=st.integers(1, 7),
    letters=st.integers(1, 2),
)
def test_a_tree_of_any_shape_computes_what_its_rows_do(
    shape: str, chunk: int, seed: int, prompts: int, samples: int, length: int, letters: int
) -> None:
    """In windows, convolutions and states; chunks end in prompts, in completions and between.

    Some completions are empty, some are equal, and some are the beginning of another.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, length + 1, (prompts, samples))
    completions = Completions(
        torch.from_numpy(rng.integers(0, 5, (prompts, 6))),
        torch.from_numpy(rng.integers(1, 6, prompts)),
        torch.from_numpy(rng.integers(0, letters, (prompts, samples, length))),
        torch.from_numpy(np.arange(length) < lengths[..., None]),
    )
    model = Transformer(SHAPES[shape], seed=seed).double()
    results: list[Any] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(delta, "CHUNK", chunk)
        for name in ("prefix-tree", "repeated"):
            logp, _ = model(Packing(pack(completions, name)))
            weights = torch.arange(logp.numel()).view(logp.shape).cos()
            gradients = torch.autograd.grad((logp * weights).sum(), [*model.parameters()])
            results.append((logp, gradients))
    assert_close(results[0], results[1], **EXACT)
