"""Packings: both give the log-probs of the plain forward, and the tree runs each prefix once."""

import doctest
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from minigrpo.guard import OOMBackoff
from minigrpo.model import linear, logprobs
from minigrpo.model.families import FAMILIES
from minigrpo.model.frozen_model import FrozenModel
from minigrpo.model.logprobs import token_logprobs
from minigrpo.model.packing import CompletionRows, Packing, pack
from minigrpo.model.shape import AttentionShape, Llama3Scaling, ModelShape, Rope, ShortConvShape
from minigrpo.model.transformer import Transformer
from minigrpo.text.encoding import to_completions
from minigrpo.types import Completions

from .steps import DELTA, SIZES, VOCAB, attending, make_completions
from .tiny import ROOT, refused

CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def test_the_worked_example_on_the_page_is_what_the_code_computes() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text().replace("```", "")
    example = doctest.DocTestParser().get_doctest(page, {}, "CONTRIBUTING.md", None, 0)
    result = doctest.DocTestRunner().run(example)
    assert result.attempted > 10 and not result.failed


def naive(model: Transformer, c: Completions, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies `[P, G, S]`, one completion at a time."""
    logp = torch.zeros(c.completion_ids.shape, dtype=torch.float64)
    entropy = torch.zeros_like(logp)
    for p, g in np.ndindex(c.completion_ids.shape[:2]):
        prompt = c.prompt_ids[p, : c.prompt_len[p]]
        n = c.completion_len[p, g]
        completion = c.completion_ids[p, g, :n]
        logits = model.logits(torch.cat([prompt, completion])[None])[0] / temperature
        predicted = logits.log_softmax(-1)[len(prompt) - 1 : -1]  # [n, V]
        logp[p, g, :n] = predicted.gather(1, completion[:, None])[:, 0]
        entropy[p, g, :n] = -(predicted.exp() * predicted).sum(-1)
    return logp.where(c.completion_mask, 0), entropy.where(c.completion_mask, 0)


LLAMA = {"heads": 4, "kv_heads": 2, "layers": attending(2, rope=Rope())}
NARROW = AttentionShape(window=3, rope=Rope(50.0))
ROTATING = AttentionShape(rope=Rope())
# family -> what differs from LLAMA
FAMILY_FIELDS = {
    "gpt2": {"kv_heads": 0, "layers": attending(2)},
    "llama": {
        "layers": attending(2, rope=Rope(scaling=Llama3Scaling(8.0, 1.0, 4.0, 16))),
        "attention_bias": True,
        "mlp_bias": True,
    },
    "exaone4": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "layers": (NARROW, ROTATING), "attention_size": 5},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.3,
        "logits_divisor": 2.0,
    },
    "lfm2": {"layers": (ShortConvShape(taps=4), ROTATING, ShortConvShape())},
    "lfm3": {"layers": (ROTATING, ShortConvShape()), "head_dim": 8},
    "mistral": {"head_dim": 8, "layers": (NARROW, ROTATING), "tied": False},
    "qwen3": {"head_dim": 6, "tied": False},
    "qwen3_5_text": {"layers": (DELTA, DELTA, NARROW), "head_dim": 8},
    "smollm3": {"layers": (ROTATING, AttentionShape()), "kv_heads": 1},
}


def varied(family: str) -> Transformer:
    """A model of a family in which every parameter matters: biases begin at 0, norms at 1."""
    fields = FAMILY_FIELDS.get(family, {})
    shape = ModelShape(**{**SIZES, **LLAMA, "family": family, **fields})
    model = Transformer(shape, seed=1).double()
    noise = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=noise))
    return model


@pytest.mark.parametrize("family", FAMILIES)  # a new one may need a row above
def test_every_family_is_as_the_naive_forward(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = varied(family)
    completions = make_completions(0)
    parameters = list(model.parameters())
    expected, entropy = naive(model, completions, 0.7)
    weights = torch.arange(expected.numel(), dtype=torch.float64).view(expected.shape).cos()
    gradients = torch.autograd.grad((expected * weights).sum(), parameters)
    monkeypatch.setattr(logprobs, "SMALLEST_CHUNK", 5)
    for chunked in (False, True):
        monkeypatch.setattr(logprobs, "MAX_LOGITS", {"cpu": 1 if chunked else 1 << 22})
        model.checkpointing = chunked
        for name in ("repeated", "prefix-tree"):
            packing = Packing(pack(completions, name))
            found = model(packing, 0.7, "measured")
            assert_close(found.logp, expected, **CLOSE)
            assert_close(found.entropy, entropy, **CLOSE)
            assert not found.entropy.requires_grad
            slopes = torch.autograd.grad((found.logp * weights).sum(), parameters)
            assert_close(slopes, gradients, **CLOSE)


def test_the_tree_runs_and_predicts_each_distinct_prefix_once(completions: Completions) -> None:
    texts = [
        (p, *completions.completion_ids[p, g][completions.completion_mask[p, g]].tolist())
        for p, g in np.ndindex(completions.completion_ids.shape[:2])
    ]
    num_prompt = int(completions.prompt_len.sum())
    # prefixes of at least one token; the last token of a completion predicts nothing
    run = {text[:n] for text in texts for n in range(2, len(text))}
    predicted = {text[:n] for text in texts for n in range(2, len(text) + 1)}
    tree, plain = (Packing(pack(completions, name)) for name in ("prefix-tree", "repeated"))
    assert len(tree.ids) == num_prompt + len(run)
    assert len(tree.targets) == len(predicted)
    every = sum(len(text) - 2 for text in texts)
    assert len(plain.ids) == num_prompt * completions.completion_ids.shape[1] + every


def test_a_batch_of_empty_texts_runs_its_prompts_once() -> None:
    (packed,) = pack(to_completions([[1, 2]], [[[], []]]))
    assert packed.ids.tolist() == [1, 2] and not packed.mask.any()


def test_rows_are_split_by_length_only_where_that_saves_padding() -> None:
    """One completion of 40 tokens beside 20 of 5, and 21 of equal lengths."""
    for lengths, sizes in (([40] + [5] * 20, [1, 20]), ([30] * 21, [21])):
        rows = [[number] * length for number, length in enumerate(lengths)]
        packing = Packing(pack(to_completions([[1, 2]], [rows])))
        assert [len(part.queries) for part in packing.padded_rows.added] == sizes


def test_gradients_of_shared_tokens_add_up_in_float32() -> None:
    """512 gradients of 1 add up to 512; in bfloat16 the sum would stay at 256."""
    one = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    value = one.clone().requires_grad_()
    places = torch.zeros(512, 1, dtype=torch.int64)
    rows = CompletionRows(places, places, last=places)
    rows.attend(0, one, one, value).sum().backward()
    assert value.grad.item() == 512
    # rows of masks begin at multiples of eight, or CUDA's attention would copy it in every layer
    for mask in rows.masks.values():
        assert all(stride % 8 == 0 for stride in mask.stride()[:-1])


def test_a_frozen_model_has_the_naive_log_probs_within_its_context(model: Transformer) -> None:
    """Positions beyond it have no embedding, or were never trained; the last token needs none."""
    backoff = OOMBackoff("frozen", "--micro-batch-size", 2, print)  # two prompts at a time
    others = (backoff.run, nullcontext, False)
    frozen = FrozenModel(model, None, "prefix-tree", "the reference", *others)
    completions = make_completions(0)
    assert len(completions) == 3
    found = frozen.logp(completions, 0.7)
    expected, _ = naive(model, completions, 0.7)
    assert not found.requires_grad
    assert_close(found, expected.detach(), **CLOSE)
    longest, longer = (to_completions([[1] * 5], [[[2] * n, [3]]]) for n in (36, 37))
    assert frozen.logp(longest, 1.0).shape == (1, 2, 36)
    refused(frozen.logp, longer, 1.0)


def test_chunks_under_autocast_sum_gradients_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64: as close as without chunks, whatever their number."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(600, 16, generator=rng)
    weight = torch.randn(VOCAB, 16, generator=rng)
    targets = torch.randint(0, VOCAB, (600,), generator=rng)

    def gradients(low: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            logp, _ = token_logprobs(*inputs, targets, 1.0, "measured")
        assert logp.dtype == dtype
        return torch.autograd.grad(logp.sum(), inputs)

    exact = gradients(False, torch.float64)
    whole = gradients(True, torch.float32)
    monkeypatch.setattr(logprobs, "SMALLEST_CHUNK", 4)
    monkeypatch.setattr(logprobs, "MAX_LOGITS", {"cpu": 1})
    chunked = gradients(True, torch.float32)
    for a, b, c in zip(exact, whole, chunked, strict=True):
        assert (c - a).norm() <= 1.2 * (b - a).norm() + 1e-3 * a.norm()


def test_large_products_without_gradients_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 8)
    weight = torch.randn(5, 8)
    bias = torch.randn(5)
    exact = linear.linear(x.double(), weight.double(), bias.double()).float()
    monkeypatch.setattr(linear, "LARGE_WEIGHT", 1)
    with torch.no_grad():
        assert_close(linear.linear(x, weight, bias), exact)
        assert_close(linear.linear(x, weight), exact - bias)


def test_keys_have_the_precision_of_values_under_autocast(model: Transformer) -> None:
    """Norms of each head compute in float32; a cache of such keys would take twice the memory."""
    x = torch.ones(3, model.shape.width)
    with torch.autocast("cpu", torch.bfloat16):
        attention = next(block.attn for block in model.float().h if block.mixer_name == "attn")
        dtypes = {part.dtype for part in attention.project_in(x)}
    assert dtypes == {torch.bfloat16}


def test_chunks_are_larger_where_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 2**20)
    for free, most in ((2**30, 2**26), (2**32, 2**27), (2**36, 2**28)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, free))
        assert logprobs.most_logits(torch.device("cuda")) == most
