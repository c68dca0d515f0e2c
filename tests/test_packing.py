"""Packings: all give the log-probs of the plain forward, and each runs only the tokens it needs."""

import dataclasses
import doctest
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from minigrpo.model import attention, packed_attention
from minigrpo.model import packing as packing_module
from minigrpo.model.architectures import ARCHITECTURES
from minigrpo.model.families import FAMILIES
from minigrpo.model.linear import round_number
from minigrpo.model.logprobs import block_size, token_logprobs
from minigrpo.model.merged_attention import AttentionPart, merged_attention
from minigrpo.model.packed_attention import additive_mask, shared_rows_of
from minigrpo.model.packing import PACKINGS, prefix_tree, repeated, shared_prompt
from minigrpo.model.shape import ModelShape, RopeScaling
from minigrpo.model.transformer import Transformer
from minigrpo.runtime import accel
from minigrpo.types import Completions

from .conftest import EOS, SHAPES, SIZES, VOCAB, make_completions
from .pretend import pretend_cuda


def test_the_worked_example_in_the_docstring_is_what_the_code_computes() -> None:
    result = doctest.testmod(packing_module)
    assert result.attempted == 20 and not result.failed


def naive_logp(model: Transformer, c: Completions, temperature: float) -> torch.Tensor:
    """One completion at a time through the plain causal forward."""
    out = torch.zeros(c.completion_ids.shape, dtype=torch.float64)
    for (p, g), completion, predicted in _one_by_one(model, c, temperature):
        out[p, g, : len(completion)] = predicted.gather(1, completion[:, None])[:, 0]
    return out


def naive_entropy(model: Transformer, c: Completions, temperature: float) -> torch.Tensor:
    """Likewise, the entropy of the distribution that each token was predicted from."""
    out = torch.zeros(c.completion_ids.shape, dtype=torch.float64)
    for (p, g), completion, predicted in _one_by_one(model, c, temperature):
        out[p, g, : len(completion)] = torch.distributions.Categorical(logits=predicted).entropy()
    return out.detach()


def _one_by_one(
    model: Transformer, c: Completions, temperature: float
) -> Iterator[tuple[tuple[int, ...], torch.Tensor, torch.Tensor]]:
    """For each completion: its place, its tokens `[n]`, and the log-probs `[n, V]` for them."""
    for p, g in np.ndindex(c.completion_ids.shape[:2]):
        prompt = c.prompt_ids[p, : c.prompt_len[p]]
        completion = c.completion_ids[p, g][c.completion_mask[p, g]]
        logits = model.logits(torch.cat([prompt, completion])[None])[0] / temperature
        yield (p, g), completion, logits.log_softmax(-1)[len(prompt) - 1 : -1]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_plain_forward(
    model: Transformer, completions: Completions, packing: str, temperature: float
) -> None:
    built = PACKINGS[packing](completions)
    logp, entropy = model(built.tokens, built, temperature)
    torch.testing.assert_close(
        logp, naive_logp(model, completions, temperature), rtol=1e-10, atol=1e-12
    )
    mask = completions.completion_mask
    torch.testing.assert_close(
        entropy[mask], naive_entropy(model, completions, temperature)[mask], rtol=1e-10, atol=1e-12
    )
    assert (logp[~completions.completion_mask] == 0).all()


@pytest.mark.parametrize("packing", PACKINGS)
def test_gradients_are_those_of_the_plain_forward(
    model: Transformer, completions: Completions, packing: str
) -> None:
    weights = torch.randn(completions.completion_ids.shape, dtype=torch.float64)
    built = PACKINGS[packing](completions)
    found = torch.autograd.grad(
        (model(built.tokens, built)[0] * weights).sum(), list(model.parameters())
    )
    expected = torch.autograd.grad(
        (naive_logp(model, completions, 1.0) * weights).sum(), list(model.parameters())
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


LLAMA: dict[str, Any] = {**ARCHITECTURES["llama"], "heads": 4, "kv_heads": 2}
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "gpt2": {"heads": 2},
    "llama": {**LLAMA, "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 16)},
    "qwen2": {**LLAMA, "qkv_bias": True, "tied": False},
    "qwen3": {**LLAMA, "head_norm": True, "head_dim": 6},
    "smollm3": {**LLAMA, "unrotated": (1,), "kv_heads": 1},
}


@pytest.mark.parametrize("family", FAMILIES)  # a new one needs a row above
def test_every_family_has_the_naive_log_probs_with_all_packings_and_less_memory(
    family: str,
) -> None:
    """Log-probs and gradients, with and without checkpointing and chunked log-probs."""
    shape = ModelShape(**SIZES, family=family, **FAMILY_FIELDS[family])
    model, c = Transformer(shape, seed=1).double(), make_completions(0)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # biases begin at 0, norms at 1
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
    weights = torch.randn(c.completion_ids.shape, generator=noise, dtype=torch.float64)
    parameters = list(model.parameters())
    expected = naive_logp(model, c, 0.7)
    gradients = torch.autograd.grad((expected * weights).sum(), parameters)
    for build, recompute, chunk in itertools.product(
        PACKINGS.values(), (None, accel.recompute), (0, 5)
    ):
        model.checkpoint_blocks, model.logprob_chunk = recompute, chunk
        packing = build(c)
        logp, _ = model(packing.tokens, packing, 0.7)
        torch.testing.assert_close(logp, expected, rtol=1e-10, atol=1e-12)
        found = torch.autograd.grad((logp * weights).sum(), parameters)
        torch.testing.assert_close(found, gradients, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_have_the_log_probs_and_entropies_of_all_at_once(
    chunk: int, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    # blocks of 20 slopes, and one of 17, which is rounded up to 18
    assert [block_size(chunk, 80, 8, "cpu") for chunk in (1, 4, 7, 100)] == [20, 20, 14, 100]
    assert round_number(17) == 18
    hidden, head = (
        torch.randn(n, 80, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in (37, VOCAB)
    )
    targets = torch.randint(0, VOCAB, (37,), generator=generator)
    weights = torch.randn(37, generator=generator, dtype=torch.float64)
    found, gradients = [], []
    for size in (0, chunk):
        found.append(token_logprobs(hidden, head, targets, temperature, size))
        gradients.append(torch.autograd.grad((found[-1][0] * weights).sum(), (hidden, head)))
    for a, b in [*zip(*found, strict=True), *zip(*gradients, strict=True)]:
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("packing", PACKINGS)
def test_padding_changes_nothing(
    model: Transformer, completions: Completions, packing: str
) -> None:
    c = completions
    padded = Completions(
        torch.nn.functional.pad(c.prompt_ids, (0, 5), value=EOS),
        c.prompt_len,
        torch.nn.functional.pad(c.completion_ids, (0, 3), value=EOS),
        torch.nn.functional.pad(c.completion_mask, (0, 3)),
    )
    a, b = PACKINGS[packing](c), PACKINGS[packing](padded)
    torch.testing.assert_close(
        model(a.tokens, a)[0], model(b.tokens, b)[0][..., :-3], rtol=0, atol=0
    )


def test_shared_prompt_runs_each_prompt_and_each_distinct_completion_once(
    completions: Completions,
) -> None:
    c = completions
    distinct = {
        (p, tuple(c.completion_ids[p, g][c.completion_mask[p, g]].tolist()))
        for p, g in np.ndindex(c.completion_ids.shape[:2])
    }
    expected = int(c.prompt_len.sum()) + sum(len(tokens) - 1 for _, tokens in distinct)
    assert len(shared_prompt(c).tokens.ids) == expected
    every = int(c.prompt_len.sum()) * c.completion_ids.shape[1] + int(
        (c.completion_mask.sum(-1) - 1).sum()
    )
    assert len(repeated(c).tokens.ids) == every


def test_prefix_tree_runs_each_distinct_prefix_that_predicts_something_once(
    model: Transformer, completions: Completions
) -> None:
    c = completions
    texts = {
        (p, *c.completion_ids[p, g][c.completion_mask[p, g]].tolist())
        for p, g in np.ndindex(*c.completion_mask.shape[:2])
    }
    # prefixes of at least one token, with at least one token after them
    prefixes = {text[:n] for text in texts for n in range(2, len(text))}
    packing = prefix_tree(c)
    assert len(packing.tokens.ids) == int(c.prompt_len.sum()) + len(prefixes)
    assert len(packing.targets) == len(
        {text[:n] for text in texts for n in range(2, len(text) + 1)}
    )
    assert len(packing.tokens.ids) < len(shared_prompt(c).tokens.ids)
    logp, _ = model(packing.tokens, packing)
    torch.testing.assert_close(logp, naive_logp(model, c, 1.0), rtol=1e-10, atol=1e-12)


@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 2),
)
def test_a_prefix_tree_of_any_shape_has_the_log_probs_of_repeated_sequences(
    seed: int, prompts: int, samples: int, length: int, letters: int
) -> None:
    """With few distinct tokens, prefixes repeat in all ways.

    Some completions are empty, some are equal, and some are the beginning of another.
    """
    rng = np.random.default_rng(seed)
    model = Transformer(ModelShape(5, context=20, layers=1, width=8, heads=2), seed=1).double()
    lengths = rng.integers(0, length + 1, (prompts, samples))
    prompt_len = rng.integers(1, 4, prompts)
    prompt_ids = rng.integers(0, 5, (prompts, 4))
    ids = rng.integers(0, letters, (prompts, samples, length))
    mask = np.arange(length) < lengths[..., None]
    c = Completions(*map(torch.from_numpy, (prompt_ids, prompt_len, ids, mask)))
    built, plain = prefix_tree(c), repeated(c)
    torch.testing.assert_close(
        model(built.tokens, built)[0], model(plain.tokens, plain)[0], rtol=1e-9, atol=1e-11
    )


def test_where_nothing_repeats_the_prefix_tree_is_the_shared_prompt() -> None:
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, EOS, (2, 8, 60)))
    ids[:, :, 0] = torch.arange(8)
    c = Completions(
        torch.zeros(2, 30, dtype=torch.int64),
        torch.tensor([30, 30]),
        ids,
        torch.ones(2, 8, 60, dtype=torch.bool),
    )
    a, b = prefix_tree(c), shared_prompt(c)
    assert torch.equal(a.tokens.ids, b.tokens.ids)
    assert [part.visible.shape for part in a.completion_attention] == [
        part.visible.shape for part in b.completion_attention
    ]


@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(2, 5),
    st.integers(1, 6),
    st.integers(2, 6),
)
def test_index_leads_each_completion_back_to_its_own_tokens(
    seed: int, prompts: int, samples: int, width: int, length: int
) -> None:
    c = make_completions(seed, prompts, max(samples, 3), width, length)
    for build in PACKINGS.values():
        packing = build(c)
        assert torch.equal(
            packing.targets[packing.index][c.completion_mask], c.completion_ids[c.completion_mask]
        )
        assert packing.tokens.positions.max() < width + length


def test_empty_completions_and_those_of_one_token_add_no_packed_tokens(model: Transformer) -> None:
    c = make_completions(0)
    short = dataclasses.replace(c, completion_mask=c.completion_mask & (torch.arange(9) < 1))
    short.completion_mask[0] = False
    for build in PACKINGS.values():
        packing = build(short)
        torch.testing.assert_close(
            model(packing.tokens, packing)[0], naive_logp(model, short, 1.0), rtol=1e-10, atol=1e-12
        )
    empty = dataclasses.replace(c, completion_mask=torch.zeros_like(c.completion_mask))
    for build in PACKINGS.values():
        packing = build(empty)
        assert (model(packing.tokens, packing)[0] == 0).all()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_fp32_packings_are_equal_on_this_device(device: str, shape: ModelShape) -> None:
    c = make_completions(3)
    model = Transformer(shape).to(device)
    one, *others = (build(c).to(device) for build in PACKINGS.values())
    for other in others:
        torch.testing.assert_close(
            model(one.tokens, one)[0], model(other.tokens, other)[0], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("packing", PACKINGS)
def test_joined_keys_have_the_log_probs_and_gradients_of_merged_parts(
    model: Transformer, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first as on a device for which there is no kernel that returns the log-sum-exp."""
    built = PACKINGS[packing](make_completions(2))
    weights = torch.randn(built.mask.shape, generator=torch.Generator().manual_seed(0)).double()

    def run() -> tuple[torch.Tensor, ...]:
        logp, _ = model(built.tokens, built)
        return logp, *torch.autograd.grad((logp * weights).sum(), list(model.parameters()))

    merged = run()
    monkeypatch.setattr(packed_attention, "KERNELS", {})
    torch.testing.assert_close(merged, run(), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_gradient_of_merged_attention_is_that_of_finite_differences(kv_heads: int) -> None:
    parts = prefix_tree(make_completions(0, prompts=2, samples=3, width=4, length=5)).parts
    assert [part.visible is None for part in parts[:3]] == [True, False, False]
    assert any(len(part.real) < part.query_rows.numel() for part in parts)  # some have padding
    tokens = int(parts[0].real.numel() + parts[1].real.numel())
    rng = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(tokens, heads, 3, generator=rng, dtype=torch.float64, requires_grad=True)
        for heads in (2, kv_heads, kv_heads)
    )
    assert torch.autograd.gradcheck(lambda *qkv: merged_attention(*qkv, parts), (q, k, v))


@pytest.mark.parametrize("seed", range(3))
def test_padding_has_no_weights_however_large_the_scores_are(seed: int) -> None:
    """It sees keys that its token does not, with weights that overflowed: 0 times infinity."""
    c = make_completions(seed)
    short = dataclasses.replace(c, completion_mask=c.completion_mask.clone())
    short.completion_mask[0] = False  # a prompt without tokens of completions
    for build in PACKINGS.values():
        packing = build(short)
        rng = torch.Generator().manual_seed(seed)
        shape = len(packing.tokens.ids), 2, 8
        q, k, v, weights = (torch.randn(shape, generator=rng).double() for _ in range(4))
        inputs = [x.requires_grad_() for x in (30 * q, 30 * k, v)]
        found, expected = (
            torch.autograd.grad((attend(*inputs) * weights).sum(), inputs)
            for attend in (packing.attend, packing.attend_joined)
        )
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_bfloat16_attention_adds_up_in_float32() -> None:
    """512 queries have the same key; in bfloat16 the sum of their gradients would stay at 256."""
    rows = torch.arange(512)
    part = AttentionPart(rows[:, None], rows, torch.zeros_like(rows)[:, None], None)
    q, k, v = (torch.ones(512, 1, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    merged_attention(q, k, v, (part,)).sum().backward()
    assert v.grad is not None and v.grad[0].tolist() == [[512.0] * 8]


def test_gradients_of_shared_tokens_add_up_in_float32() -> None:
    """512 gradients of 1 add up to 512; in bfloat16 the sum would stay at 256."""
    prompt = torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    shared_rows_of(prompt, torch.zeros(512, 1, dtype=torch.int64)).sum().backward()
    assert prompt.grad is not None and prompt.grad.item() == 512


@pytest.mark.parametrize("share", [1, 3])
def test_rows_of_an_additive_mask_begin_at_multiples_of_eight(share: int) -> None:
    visible = torch.rand(3, 1, 5, 13, generator=torch.Generator().manual_seed(0)) > 0.5
    mask = additive_mask(visible, torch.float64, share)
    visible = torch.cat([visible] * share, dim=2)
    assert torch.equal(mask == 0, visible) and torch.equal(mask == -torch.inf, ~visible)
    assert all(stride % 8 == 0 for stride in mask.stride()[:-1])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_queries_are_left_to_torch_only_where_cuda_has_a_fused_kernel_for_them(
    dtype: torch.dtype, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flash attention: half precision, no mask. The numbers are those of repeated keys."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 8, generator=rng).to(dtype) for heads in (6, 2, 2))
    visible = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    mask = additive_mask(visible, dtype, 3) if masked else None
    k6, v6 = (x.repeat_interleave(3, dim=1) for x in (k, v))
    expected = scaled_dot_product_attention(q, k6, v6, is_causal=True)
    grouped = list[bool]()

    def recorded(*args: torch.Tensor, enable_gqa: bool = False, **options: Any) -> torch.Tensor:
        grouped.append(enable_gqa)
        return scaled_dot_product_attention(*args, enable_gqa=enable_gqa, **options)

    with pretend_cuda(monkeypatch):
        monkeypatch.setattr(attention.F, "scaled_dot_product_attention", recorded)
        there = [x.to("cuda") for x in (q, k, v)]
        found = attention.sdpa(*there, mask=None if mask is None else mask.to("cuda"))
    assert grouped == [dtype == torch.bfloat16 and not masked]
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=tolerance)


def test_keys_have_the_precision_of_values_under_autocast(model: Transformer) -> None:
    """Norms of each head compute in float32; a cache of such keys would take twice the memory."""
    x = torch.ones(3, model.shape.width)
    with torch.autocast("cpu", torch.bfloat16):
        dtypes = {part.dtype for part in model.float().h[0].attn.qkv(x)}
    assert dtypes == {torch.bfloat16}
