"""LoRA: what is trained, what stays, and the same numbers as PEFT (-m peer)."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minigrpo import Transformer
from minigrpo.model import lora
from minigrpo.model.families import FAMILIES
from minigrpo.model.lora import weights_digest
from minigrpo.model.packing import PACKINGS
from minigrpo.model.weights import export_model
from minigrpo.types import Completions

from .conftest import EOS, make_completions
from .test_families import IDS, make_theirs

TARGETS: dict[str, tuple[str, ...]] = {"all": (), "two": ("q_proj", "down_proj")}


def randomise(model: Transformer) -> None:
    """Adapters start without effect; give them one."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in lora.adapters(model).values():
            layer.lora_B.normal_(0, 0.3, generator=generator)


def test_adapters_start_without_effect_and_alone_have_a_gradient(model: Transformer) -> None:
    ids = torch.arange(EOS).view(2, 11)
    before = model.logits(ids)
    lora.add_adapters(model, rank=2, alpha=4)
    assert torch.equal(model.logits(ids), before)
    randomise(model)
    model.double().logits(ids).square().sum().backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None) == name.endswith(lora.ADAPTERS)


def test_the_function_is_the_formula(model: Transformer) -> None:
    lora.add_adapters(model, rank=2, alpha=4)
    randomise(model)
    layer = next(iter(lora.adapters(model.double()).values()))
    x = torch.randn(5, layer.in_features, dtype=torch.float64)
    weight = layer.weight + 4 / 2 * layer.lora_B @ layer.lora_A
    expected = x @ weight.T + (0 if layer.bias is None else layer.bias)
    torch.testing.assert_close(layer(x), expected)


def test_without_adapters_the_model_is_the_initial_one_and_shares_its_memory(
    model: Transformer, completions: Completions
) -> None:
    packing = PACKINGS["prefix-tree"](completions)
    before, _ = model(packing.tokens, packing)
    lora.add_adapters(model, rank=2, alpha=4)
    randomise(model)
    shared = {id(p): p for p in model.parameters()}
    reference = copy.deepcopy(model.double(), shared)
    lora.disable_adapters(reference)
    assert torch.equal(reference(packing.tokens, packing)[0], before)
    assert not torch.equal(model(packing.tokens, packing)[0], before)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    assert all(a is b for a, b in pairs)


def test_merged_weights_compute_the_same(model: Transformer) -> None:
    lora.add_adapters(model, rank=2, alpha=4)
    randomise(model.double())
    ids = torch.arange(EOS).view(2, 11)
    expected = model.logits(ids)
    merged = lora.merge_adapters(model)
    assert not lora.adapters(merged) and all(p.requires_grad for p in merged.parameters())
    assert merged.state_dict().keys() == Transformer(model.shape).state_dict().keys()
    torch.testing.assert_close(merged.logits(ids), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("packing", PACKINGS)
def test_packings_give_adapters_the_gradient_of_the_plain_forward(
    model: Transformer, packing: str
) -> None:
    lora.add_adapters(model, rank=2, alpha=4)
    randomise(model.double())
    completions = make_completions(0)
    found = gradient(model, completions, packing)
    expected = gradient(model, completions, "repeated")
    assert any(g.any() for g in expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def gradient(model: Transformer, completions: Completions, packing: str) -> tuple[Tensor, ...]:
    built = PACKINGS[packing](completions)
    logp, _ = model(built.tokens, built)
    weights = torch.arange(logp.numel(), dtype=torch.float64).view(logp.shape)
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad((logp * weights).sum(), trained)


def test_frozen_weights_in_bfloat16_keep_their_memory_and_pass_gradients(
    model: Transformer,
) -> None:
    model = model.float()
    lora.add_adapters(model, rank=2, alpha=4)
    randomise(model)
    rounded = copy.deepcopy(model)
    for p in rounded.parameters():
        if not p.requires_grad and p.dim() >= 2:
            p.data = p.data.to(torch.bfloat16).float()
    lora.cast_frozen(model, torch.bfloat16)
    matrices = [p for p in model.parameters() if not p.requires_grad and p.dim() >= 2]
    assert matrices and all(p.dtype == torch.bfloat16 for p in matrices)
    completions = make_completions(1)
    for packing in PACKINGS:
        for a, b in zip(
            gradient(model, completions, packing),
            gradient(rounded, completions, packing),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_an_unknown_target_is_refused_with_those_that_there_are(model: Transformer) -> None:
    with pytest.raises(
        ValueError, match=r"no layer 'q_prj'; it has .*c_attn|no layer 'q_prj'; it has q_proj"
    ):
        lora.add_adapters(model, rank=2, alpha=4, targets=["q_prj"])
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.peer
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "smollm3", "gpt2"])
@pytest.mark.parametrize("targets", TARGETS)
def test_logits_and_gradients_are_pefts(tmp_path: Path, name: str, targets: str) -> None:
    import peft
    import transformers

    if name == "gpt2":
        from .test_weights import make_theirs as make_gpt2

        theirs, ids = make_gpt2(), IDS[:, :20] % 61
        chosen = ("c_attn",) if TARGETS[targets] else ()
    else:
        theirs, ids, chosen = make_theirs(name), IDS, TARGETS[targets]
    theirs.save_pretrained(tmp_path / "base")
    ours = Transformer.from_pretrained(tmp_path / "base")
    lora.add_adapters(ours, rank=4, alpha=8, targets=chosen)
    randomise(ours)
    (tmp_path / "adapters").mkdir()
    for file, write in lora.peft_files(ours, base=str(tmp_path / "base")).items():
        write(tmp_path / "adapters" / file)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters", is_trainable=True).eval()

    logits, expected = ours.logits(ids), theirs(ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    weights = torch.randn(logits.shape)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    family = FAMILIES[ours.shape.family]
    for layer_name, layer in lora.adapters(ours).items():
        stored = family.prefix + family.theirs(f"{layer_name}.").removesuffix(".")
        for part in lora.ADAPTERS:
            other = gradients.pop(f"base_model.model.{stored}.{part}.default.weight")
            torch.testing.assert_close(getattr(layer, part).grad, other, rtol=1e-3, atol=1e-3)
    assert not gradients

    merged_state = lora.merge_adapters(ours).state_dict()
    export_model(merged_state, tmp_path / "merged", shape=ours.shape, eos=3)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, logits, rtol=0, atol=1e-4)


def test_a_digest_knows_the_places_of_values() -> None:
    x = torch.arange(12.0).reshape(4, 3)
    shuffled = x[[1, 0, 2, 3]]
    assert weights_digest({"w": x}) == weights_digest({"w": x.clone()})
    assert weights_digest({"w": x}) != weights_digest({"w": shuffled})
    assert weights_digest({"w": x.bfloat16()}) != weights_digest({"w": shuffled.bfloat16()})
