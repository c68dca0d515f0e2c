"""LoRA: what is trained, what stays, and the same numbers as the formula and as PEFT (-m peer)."""

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from minigrpo.config import Config
from minigrpo.defaults import Size, size_of
from minigrpo.model import lora
from minigrpo.model.linear import NF4, dense, pairs, to_nf4
from minigrpo.model.packing import pack
from minigrpo.model.transformer import Transformer
from minigrpo.parts import Parts, own_tokenizer, shape_by_name
from minigrpo.runtime.device import Precision, low_precision_copy
from minigrpo.runtime.guard import NonFiniteGuard
from minigrpo.types import Completions

from . import tiny
from .steps import SHAPES, VOCAB, make_completions
from .test_families import IDS, PUBLISHED, edit, make_theirs
from .test_sampling import generate
from .tiny import read_json, refused

LAYERS = {
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "grouped-query": {f"{name}_proj" for name in (*"qkvo", "gate", "up", "down")},
}
TOKENS = torch.arange(VOCAB).view(2, -1)
ADAPTERS = ("lora_A", "lora_B")  # ends of the names of trained tensors


def randomise(model: Transformer) -> None:
    """Adapters start without effect; give them one."""
    generator = torch.Generator().manual_seed(7)
    for layer in lora.adapters(model).values():
        layer.lora_B.data.normal_(0, 0.3, generator=generator)


def with_adapters(model: Transformer) -> Transformer:
    lora.add_adapters(model, rank=2, alpha=4)
    randomise(model.double())
    return model


def save(model: Transformer, folder: Path, base: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, write in lora.peft_files(model, base=base).items():
        write(folder / name)


def gradient(model: Transformer, c: Completions) -> list[Tensor]:
    logp, _ = model(pack(c))
    weights = torch.arange(logp.numel(), dtype=torch.float64).view(logp.shape)
    trained = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad((logp * weights).sum(), trained))


def test_adapters_start_without_effect_and_alone_have_a_gradient(model: Transformer) -> None:
    before = model.logits(TOKENS)
    lora.add_adapters(model, rank=2, alpha=4)
    assert torch.equal(model.double().logits(TOKENS), before)
    randomise(model)
    model.logits(TOKENS).square().sum().backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None) == name.endswith(ADAPTERS)


def test_the_gradient_is_that_of_full_training_by_the_chain_rule(model: Transformer) -> None:
    """W + s B A: the gradient of B is s dW A', that of A is s B' dW."""
    full = lora.merge_adapters(copy.deepcopy(with_adapters(model)))
    c, names = make_completions(0), [name for name, _ in full.named_parameters()]
    of_weights = dict(zip(names, gradient(full, c), strict=True))
    expected = []
    for name, layer in lora.adapters(model).items():
        dw = of_weights[f"{name}.weight"]
        expected += [layer.scale * layer.lora_B.T @ dw, layer.scale * dw @ layer.lora_A.T]
    assert any(g.any() for g in expected)
    assert_close(gradient(model, c), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kept", [False, True], ids=["new", "kept"])
def test_the_reference_is_the_start_and_shares_its_base(model: Transformer, kept: bool) -> None:
    packing = pack(make_completions(1))
    lora.add_adapters(model, rank=2, alpha=4)
    if kept:
        randomise(model)
    before, _ = model.double()(packing)
    tokenizer = SimpleNamespace(n_vocab=model.shape.vocab_size, special={}, fingerprint="")
    parts = Parts(Config.of(lora_rank=2, kl_coef=0.1))
    parts.model, parts.tokenizer = model, tokenizer
    reference = parts.reference.model
    with torch.no_grad():
        for layer in lora.adapters(model).values():  # as an optimizer does, and a resume
            layer.lora_B.add_(0.1)
    assert torch.equal(reference(packing)[0], before)
    assert not torch.equal(model(packing)[0], before)
    both = zip(model.named_parameters(), reference.parameters(), strict=True)
    assert all((a is b) != name.endswith(ADAPTERS) for (name, a), b in both)
    parts = Parts(Config.of(kl_coef=0.1))  # without --lora-rank, although it has adapters
    parts.model, parts.tokenizer = model, tokenizer
    assert torch.equal(parts.reference.model(packing)[0], model(packing)[0])


def test_frozen_weights_in_bfloat16_keep_memory_and_pass_gradients(model: Transformer) -> None:
    with_adapters(model).float()
    rounded = copy.deepcopy(model)
    for ours, other in zip(model.parameters(), rounded.parameters(), strict=True):
        if not ours.requires_grad and ours.dim() >= 2:
            ours.data = ours.data.bfloat16()  # as from_pretrained(matrices=) stores them
            other.data = other.data.bfloat16().float()
    c = make_completions(1)
    for a, b in zip(gradient(model, c), gradient(rounded, c), strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_the_values_of_nf4_are_quantiles_of_a_normal_distribution() -> None:
    """Eight above 0 and seven below, from 0.9677083 to the middle, as QLoRA's authors make them."""
    ends = torch.tensor(0.9677083, dtype=torch.float64)
    above, below = (
        torch.special.ndtri(torch.linspace(float(ends), 0.5, n, dtype=torch.float64)[:-1])
        for n in (9, 8)
    )
    expected = torch.cat([-below, torch.zeros(1), above.flip(0)]) / torch.special.ndtri(ends)
    assert_close(NF4.double(), expected, rtol=0, atol=2e-7)


@pytest.mark.parametrize("width", [64, 96, 192, 4])
def test_a_number_in_nf4_is_the_nearest_value_times_the_largest_of_its_block(width: int) -> None:
    weight = torch.randn(7, width, generator=torch.Generator().manual_seed(0))
    weight[1], weight[2, 1], weight[3, 0], weight[4] = 0, 3e38, -3e38, 1e-42
    weight[5], weight[6, :2] = 3.0, torch.tensor([1e-30, -1e4])
    found = dense(to_nf4(weight), torch.float64)
    block = {96: 32}.get(width, min(width, 64))
    for numbers, same in zip(weight.view(-1, block), found.view(-1, block), strict=True):
        scale = float(numbers.abs().max().bfloat16())
        table = NF4.double().numpy() * scale
        nearest = np.abs(numbers.double().numpy()[:, None] - table).argmin(1)
        assert same.tolist() == table[nearest].tolist()
    assert to_nf4(weight).nbytes == weight.numel() // 2 + 2 * weight.numel() // block


def test_frozen_weights_in_nf4_compute_what_their_numbers_compute(model: Transformer) -> None:
    model.store("nf4")
    with_adapters(model)
    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        parameter.data = dense(parameter.data, torch.float64)
    pairs.cache_clear()
    model.logits(TOKENS)
    assert pairs.cache_info().misses == 1  # the table is made once for all products
    coded = [p for p in model.parameters() if not p.is_floating_point()]
    assert len(coded) == len(lora.adapters(model))
    assert not torch.equal(plain.logits(TOKENS), Transformer(model.shape, seed=1).logits(TOKENS))
    assert_close(model.logits(TOKENS), plain.logits(TOKENS), rtol=1e-12, atol=1e-12)
    c = make_completions(1)
    gradients = gradient(model, c), gradient(plain, c)
    assert_close(*gradients, rtol=1e-9, atol=1e-10)
    u = torch.rand(len(c), 4, 9, generator=torch.Generator().manual_seed(0))
    given = {"stops": (), "num_samples": 4, "max_new_tokens": 9, "u": u}
    drawn = [generate(x, c.prompt_ids, c.prompt_len, **given) for x in (model, plain)]
    assert torch.equal(drawn[0].completion_ids, drawn[1].completion_ids)
    merged = lora.merge_adapters(model).logits(TOKENS)
    assert_close(merged, plain.logits(TOKENS), rtol=1e-5, atol=1e-5)


def test_nf4_is_cast_to_the_type_of_autocast(model: Transformer) -> None:
    model.float().store("nf4")
    with_adapters(model).float()
    speed, c = Config.of(use_amp=True).speed, make_completions(1)
    exact = gradient(model, c)
    with Precision(speed, model.device, NonFiniteGuard()).autocast():
        low = low_precision_copy(speed, model)
        assert torch.equal(low.logits(TOKENS), model.logits(TOKENS))
        rounded = gradient(model, c)
    for a, b in zip(exact, rounded, strict=True):
        assert 0 < (a - b).norm() < 0.1 * a.norm()


@pytest.mark.parametrize("kind", SHAPES)
def test_targets_are_names_of_layers(kind: str) -> None:
    model, names = Transformer(SHAPES[kind]), sorted(LAYERS[kind])
    refused(lora.add_adapters, model, rank=1, targets=f"{names[0]},q_prj")
    assert all(p.requires_grad for p in model.parameters())
    lora.add_adapters(model, rank=1, targets=names[0])
    assert lora.layer_names(model, lora.adapters(model)) == names[:1]
    every = Transformer(SHAPES[kind])
    lora.add_adapters(every, rank=1)
    assert {*lora.layer_names(every, lora.adapters(every))} == LAYERS[kind]


def test_a_checkpoint_holds_adapters_and_fits_its_own_model_alone(model: Transformer) -> None:
    state = copy.deepcopy(lora.trained_state(with_adapters(model)))
    assert state and all(name.endswith(ADAPTERS) for name in state)
    expected = model.logits(TOKENS)
    lora.load_trained(model, {name: torch.zeros_like(x) for name, x in state.items()})
    assert not torch.equal(model.logits(TOKENS), expected)
    lora.load_trained(model, state)
    assert torch.equal(model.logits(TOKENS), expected)
    (name, x), *others = state.items()
    for other in (dict(others), {**state, "head.lora_A": x}, {**state, name: x[:1]}):
        with pytest.raises(RuntimeError):
            lora.load_trained(model, other)


def test_a_file_has_the_names_and_settings_of_peft(tmp_path: Path) -> None:
    model = Transformer(SHAPES["grouped-query"])
    lora.add_adapters(model, rank=2, alpha=6, targets="q_proj")
    save(model, tmp_path, base="org/name@v1")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers"
    assert tensors.keys() == {
        f"{prefix}.{n}.self_attn.q_proj.lora_{x}.weight" for n in (0, 1) for x in "AB"
    }
    config = read_json(tmp_path / "adapter_config.json")
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 6, ["q_proj"])
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/name", "v1")


@pytest.mark.peer
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("few", [False, True], ids=["all", "some"])
def test_logits_and_gradients_are_pefts(tmp_path: Path, name: str, few: bool) -> None:
    import peft
    import transformers

    make_theirs(name).save_pretrained(tmp_path / "base")
    ours = Transformer.from_pretrained(tmp_path / "base")
    of_family = {"gpt2": "c_attn", "granite 4": "q_proj,input_linear"}
    targets = of_family.get(name.split(",")[0], "q_proj,down_proj")
    lora.add_adapters(ours, rank=4, alpha=8, targets=targets if few else "")
    randomise(ours)
    save(ours, tmp_path / "adapters", base=str(tmp_path / "base"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters", is_trainable=True).eval()

    logits, expected = ours.logits(IDS), theirs(IDS).logits
    assert_close(logits, expected, rtol=0, atol=1e-4)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    for name, stored in lora.peft_names(ours).items():
        other = gradients.pop(stored.replace(".weight", ".default.weight"))
        assert (ours.get_parameter(name).grad - other).norm() < 1e-4 * other.norm()
    assert not gradients

    lora.merge_adapters(ours).export(tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert_close(merged(IDS).logits, logits, rtol=0, atol=1e-4)


def parts_of(folder: Path, vocab: int = VOCAB, **settings: Any) -> Parts:
    parts = Parts(Config.of(model=str(folder), **settings))
    parts.tokenizer = SimpleNamespace(n_vocab=vocab, name="", special={}, fingerprint="")
    return parts


@pytest.fixture(params=LAYERS)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of PEFT's, with adapters of rank 2 and alpha 4, beside its base."""
    base = Transformer(SHAPES[request.param])
    base.export(tmp_path / "its-base")
    lora.add_adapters(base, rank=2, alpha=4)
    randomise(base)
    save(base, tmp_path / "adapters", base="../its-base")
    return tmp_path / "adapters"


@pytest.mark.parametrize("kind", [{}, {"lora_rank": 3}, {"lora_rank": 2, "lora_alpha": 8}])
def test_adapters_are_merged_unless_they_are_asked_for(start: Path, kind: dict[str, Any]) -> None:
    base = Transformer.from_pretrained(start.parent / "its-base")
    lora.attach_peft(base, start)
    expected = base.logits(TOKENS)
    kept = parts_of(start, lora_rank=2)
    assert torch.equal(kept.model.logits(TOKENS), expected)
    assert {*lora.trained_state(kept.model)} == {*lora.trained_state(base)}
    assert kept.base == str(start / "../its-base")
    other = parts_of(start, **kind)
    assert_close(other.model.logits(TOKENS), expected, rtol=0, atol=1e-5)
    assert other.base == str(start)
    assert bool(lora.adapters(other.model)) == bool(kind)
    assert all(not layer.lora_B.any() for layer in lora.adapters(other.model).values())


@pytest.mark.parametrize("stored", [{"bfloat16": torch.bfloat16}, {"nf4": torch.uint8}], ids=str)
@pytest.mark.parametrize("alpha", [4, 5], ids=["kept", "new"])
def test_adapters_are_in_float32(start: Path, stored: dict[str, torch.dtype], alpha: float) -> None:
    ((name, dtype),) = stored.items()
    model = parts_of(start, lora_rank=2, lora_alpha=alpha, base_dtype=name).model
    kinds = {name: x.dtype for name, x in model.h.named_parameters() if x.dim() > 1}
    assert {x for n, x in kinds.items() if n.endswith(ADAPTERS)} == {torch.float32}
    assert {x for n, x in kinds.items() if not n.endswith(ADAPTERS)} == {dtype}
    assert {x.dtype for x in lora.merge_adapters(model).parameters()} == {torch.float32}


def test_what_is_known_of_the_base_is_known_of_its_adapters(start: Path) -> None:
    base = start.parent / "its-base"
    assert size_of(str(start)) == Size.of(Transformer.from_pretrained(base))
    assert shape_by_name(str(start), "") == shape_by_name(str(base), "")
    assert own_tokenizer(str(start)) == own_tokenizer(str(base))
    tiny.tiny_tokenizer_folder(base)
    assert own_tokenizer(str(start)) == {"tokenizer": str(start / "../its-base")}
    tiny.tiny_tokenizer_folder(start)
    assert own_tokenizer(str(start)) == {"tokenizer": str(start)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_dora", True),
        ("rank_pattern", {"q_proj": 4}),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("peft_type", "LOHA"),
        ("a_setting_of_tomorrow", 1),
        ("r", 3),
        ("lora_alpha", 0),
        ("lora_alpha", float("nan")),
        ("use_rslora", "x"),
        ("revision", 1),
        ("base_model_name_or_path", "nowhere/./at/all"),
        ("base_model_name_or_path", 1),
        ("base_model_name_or_path", None),
        ("base_model_name_or_path", "a\0b"),
    ],
)
def test_adapters_of_another_kind_are_refused(start: Path, name: str, value: Any) -> None:
    edit(start, lambda settings: settings.update({name: value}), "adapter_config.json")
    refused(lambda: parts_of(start, lora_rank=2).model)


@pytest.mark.parametrize("base", ["{}", "{}/", ".", "../adapters", "../others"])
def test_adapters_have_a_base_that_is_not_themselves(
    start: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = start.parent / "others"
    shutil.copytree(start, others)
    for folder, name in [(start, base.format(start)), (others, "../adapters")]:
        changes = {"base_model_name_or_path": name}
        edit(folder, lambda settings, new=changes: settings.update(new), "adapter_config.json")
    monkeypatch.chdir(start)
    calls = [
        lambda: size_of(str(start)),
        lambda: shape_by_name(str(start), ""),
        lambda: own_tokenizer(str(start)),
        lambda: parts_of(start).model,
        lambda: parts_of(start, lora_rank=2).model,
    ]
    for call in calls:
        refused(call)


def damaged(tensors: dict[str, Tensor], how: Any) -> dict[str, Tensor]:
    """All are of another type, one is not finite, or the last has other names or is missing."""
    if isinstance(how, torch.dtype):
        return {name: x.to(how) for name, x in tensors.items()}
    if isinstance(how, float):
        next(iter(tensors.values()))[0] = how
        return tensors
    last = tensors.popitem()[1]
    return tensors | {f"base_model.model.{name}.weight": last for name in how}


WITHOUT_SCALE = [torch.float8_e4m3fn, torch.complex64, torch.int8, torch.bool]
OTHER_NAMES = [{"lora_magnitude_vector"}, {"lm_head.lora_A"}, {}]


@pytest.mark.parametrize("how", [*WITHOUT_SCALE, torch.nan, torch.inf, *OTHER_NAMES], ids=str)
def test_tensors_that_are_no_adapters_are_refused(start: Path, how: Any) -> None:
    file = start / "adapter_model.safetensors"
    save_file(damaged(load_file(file), how), file)
    refused(lambda: parts_of(start).model)
    refused(lambda: parts_of(start, lora_rank=2).model)


@pytest.mark.peer
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "qwen3"])
@pytest.mark.parametrize("stabilised", [False, True])
def test_adapters_of_peft_have_its_logits(tmp_path: Path, name: str, stabilised: bool) -> None:
    import peft
    import transformers

    make_theirs(name).save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    targets = "all-linear" if stabilised else ["c_attn" if name == "gpt2" else "q_proj"]
    kind = {"r": 4, "lora_alpha": 8, "target_modules": targets, "use_rslora": stabilised}
    torch.manual_seed(0)
    settings = peft.LoraConfig(**kind, init_lora_weights=False, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, settings).eval()
    theirs.save_pretrained(tmp_path / "adapters")
    expected = theirs.double()(IDS).logits  # or rounding alone may be 1e-5
    alpha = 8 * (2 if stabilised else 1)
    same = {"lora_rank": 4, "lora_alpha": alpha}
    same |= {} if stabilised else {"lora_targets": targets[0]}
    for settings in ({}, same):
        parts = parts_of(tmp_path / "adapters", 97, **settings)
        assert (parts.base == str(tmp_path / "base")) == bool(settings)
        found = parts.model.double().logits(IDS)
        assert_close(found, expected, rtol=0, atol=1e-5)
