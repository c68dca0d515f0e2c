"""LoRA: what is trained, what stays, and the same numbers as the formula and as PEFT (-m peer)."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from minigrpo.build import FrozenModels, Job
from minigrpo.config import Config
from minigrpo.model import lora
from minigrpo.model.frozen_model import InferenceCopy
from minigrpo.model.linear import NF4, dense, from_nf4, numbers_by_byte, to_nf4
from minigrpo.model.packing import Packing, pack
from minigrpo.model.shape import Size
from minigrpo.model.source import ModelSource
from minigrpo.model.transformer import Transformer
from minigrpo.run.console import Console
from minigrpo.runtime.device import autocast, product_dtype
from minigrpo.runtime.parallel import Parallel
from minigrpo.settings import INITIAL
from minigrpo.task import Task
from minigrpo.text.tokenizer import load_tokenizer
from minigrpo.types import Completions

from . import tiny
from .steps import SHAPES, VOCAB, make_completions
from .test_families import IDS, PUBLISHED, edit, make_theirs
from .tiny import read_json, refused

LAYERS = {
    "gpt2": ["c_attn", "c_fc", "c_proj"],
    "hybrid": [
        *("down_proj", "gate_proj", "in_proj", "in_proj_a", "in_proj_b", "in_proj_qkv"),
        *("in_proj_z", "k_proj", "o_proj", "out_proj", "q_proj", "up_proj", "v_proj"),
    ],
    "grouped-query": [f"{name}_proj" for name in ("down", "gate", *"koq", "up", "v")],
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


def frozen_models(model: Transformer, **settings: Any) -> FrozenModels:
    config = Config.of(**settings)
    job = Job(config, load_tokenizer("chess"), Task(), None, ())
    return FrozenModels(job, model, Parallel(model.device), Console(), {}, "")


def gradient(model: Transformer, completions: Completions) -> list[Tensor]:
    logp, _ = model(Packing(pack(completions)))
    weights = torch.arange(logp.numel(), dtype=torch.float64).view(logp.shape)
    trained = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad((logp * weights).sum(), trained))


def test_the_gradient_is_that_of_full_training_by_the_chain_rule(model: Transformer) -> None:
    """W + s B A: the gradient of B is s dW A', that of A is s B' dW."""
    full = lora.merge_adapters(copy.deepcopy(with_adapters(model)))
    completions = make_completions(0)
    names = [name for name, _ in full.named_parameters()]
    of_weights = dict(zip(names, gradient(full, completions), strict=True))
    expected = []
    for name, layer in lora.adapters(model).items():
        dw = of_weights[f"{name}.weight"]
        expected += [layer.scale * layer.lora_B.T @ dw, layer.scale * dw @ layer.lora_A.T]
    assert any(g.any() for g in expected)
    assert_close(gradient(model, completions), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kept", [False, True], ids=["new", "kept"])
def test_the_reference_is_the_start_and_shares_its_base(model: Transformer, kept: bool) -> None:
    packing = Packing(pack(make_completions(1)))
    lora.add_adapters(model, rank=2, alpha=4)
    if kept:
        randomise(model)
    before, _ = model.double()(packing)
    reference = frozen_models(model, lora_rank=2).of_flag("--reference", INITIAL).model
    with torch.no_grad():
        for layer in lora.adapters(model).values():  # as an optimizer does, and a resume
            layer.lora_B.add_(0.1)
    assert torch.equal(reference(packing)[0], before)
    assert not torch.equal(model(packing)[0], before)
    both = zip(model.named_parameters(), reference.parameters(), strict=True)
    assert all((a is b) != name.endswith(ADAPTERS) for (name, a), b in both)
    # without --lora-rank, although it has adapters
    reference = frozen_models(model).of_flag("--reference", INITIAL).model
    assert torch.equal(reference(packing)[0], model(packing)[0])


def test_the_values_of_nf4_are_quantiles_of_a_normal_distribution() -> None:
    """Eight above 0 and seven below, from 0.9677083 to the middle, as QLoRA's authors make them."""

    def quantiles(number: int) -> Tensor:
        places = torch.linspace(0.9677083, 0.5, number + 1, dtype=torch.float64)
        return torch.special.ndtri(places[:-1])

    above = quantiles(8)
    expected = torch.cat([-quantiles(7), torch.zeros(1), above.flip(0)]) / above[0]
    assert_close(NF4.double(), expected, rtol=0, atol=2e-7)


@pytest.mark.parametrize("width", [64, 96, 192, 4])
def test_a_number_in_nf4_is_the_nearest_value_times_the_largest_of_its_block(width: int) -> None:
    weight = torch.randn(6, width, generator=torch.Generator().manual_seed(0))
    weight[1] = 0
    weight[2, 1] = 3e38
    weight[3] = 1e-42
    weight[4] = 3.0
    weight[5, :2] = torch.tensor([1e-30, -1e4])
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
    numbers_by_byte.cache_clear()
    model.logits(TOKENS)
    assert numbers_by_byte.cache_info().misses == 1  # the table is made once for all products
    coded = [p for p in model.parameters() if not p.is_floating_point()]
    assert len(coded) == len(lora.adapters(model))
    assert not torch.equal(plain.logits(TOKENS), Transformer(model.shape, seed=1).logits(TOKENS))
    assert_close(model.logits(TOKENS), plain.logits(TOKENS), rtol=1e-12, atol=1e-12)
    completions = make_completions(1)
    expected = gradient(plain, completions)
    assert_close(gradient(model, completions), expected, rtol=1e-9, atol=1e-10)
    merged = lora.merge_adapters(model).logits(TOKENS)
    assert_close(merged, plain.logits(TOKENS), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_compiled_code_unpacks_nf4_to_the_same_bits(dtype: torch.dtype) -> None:
    unpack = torch.compile(from_nf4, dynamic=True)
    table = numbers_by_byte(torch.device("cpu"), dtype)
    for shape in ((256, 896), (512, 128), (384, 640)):
        coded = to_nf4(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        expected = from_nf4(coded, table)
        found = unpack(coded, table)
        assert found.dtype == expected.dtype == dtype
        assert torch.equal(found, expected)


def test_nf4_is_cast_to_the_type_of_autocast(model: Transformer) -> None:
    model.float().store("nf4")
    with_adapters(model).float()
    speed = Config.of(use_amp=True).speed
    completions = make_completions(1)
    exact = gradient(model, completions)
    with autocast(speed, model.device):
        low = InferenceCopy(model, product_dtype(speed)).model
        assert torch.equal(low.logits(TOKENS), model.logits(TOKENS))
        rounded = gradient(model, completions)
    for a, b in zip(exact, rounded, strict=True):
        assert 0 < (a - b).norm() < 0.3 * a.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_targets_are_names_of_layers(shape: str) -> None:
    names = LAYERS[shape]
    model = Transformer(SHAPES[shape])
    refused(lora.add_adapters, model, rank=1, targets=f"{names[0]},q_prj")
    assert all(p.requires_grad for p in model.parameters())
    every = copy.deepcopy(model)
    lora.add_adapters(model, rank=1, targets=names[0])
    assert lora.layer_names(model, lora.adapters(model)) == names[:1]
    lora.add_adapters(every, rank=1)
    assert lora.layer_names(every, lora.adapters(every)) == names


def test_a_file_has_the_names_and_settings_of_peft(tmp_path: Path) -> None:
    model = Transformer(SHAPES["grouped-query"])
    lora.add_adapters(model, rank=2, alpha=6, targets="q_proj")
    save(model, tmp_path, base="org/name@v1")
    name, *_ = load_file(tmp_path / "adapter_model.safetensors")
    assert name == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    config = read_json(tmp_path / "adapter_config.json")
    expected = {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "org/name",
        "revision": "v1",
    }
    assert config.items() >= expected.items()


@pytest.mark.peer
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("few", [False, True], ids=["all", "some"])
def test_logits_and_gradients_are_pefts(tmp_path: Path, name: str, few: bool) -> None:
    import peft
    import transformers

    make_theirs(name).save_pretrained(tmp_path / "base")
    ours = Transformer.from_pretrained(tmp_path / "base")
    of_family = {"gpt2": "c_attn", "granite 4": "q_proj,input_linear", "lfm2": "in_proj,w2"}
    of_family |= {"lfm3": "g_proj,w2", "phi3": "qkv_proj,down_proj"}
    targets = of_family.get(name.split(",")[0], "q_proj,down_proj")
    lora.add_adapters(ours, rank=4, alpha=8, targets=targets if few else "")
    randomise(ours)
    save(ours, tmp_path / "adapters", base=str(tmp_path / "base"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters", is_trainable=True).eval()

    logits, expected = ours.logits(IDS), theirs(IDS).logits
    assert_close(logits, expected, rtol=1e-4, atol=2e-4)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    for name in lora.trained_state(ours):
        stored = lora.peft_name(ours.shape, name)
        other = gradients.pop(stored.replace(".weight", ".default.weight"))
        assert (ours.get_parameter(name).grad - other).norm() < 3e-4 * other.norm()
    assert not gradients

    lora.merge_adapters(ours).export(tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert_close(merged(IDS).logits, logits, rtol=1e-4, atol=2e-4)


def started(
    folder: Path, vocab: int = VOCAB, checksums: dict[str, str] | None = None, **settings: Any
) -> Transformer:
    """The model in a folder as a run begins with it."""
    tokenizer = SimpleNamespace(n_vocab=vocab, name="", special={})
    config = Config.of(task="chess-env", **settings)
    known = {} if checksums is None else checksums
    return ModelSource.of(str(folder)).start(config, tokenizer, print, known)


@pytest.fixture(params=["gpt2", "grouped-query"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of PEFT's, with adapters of rank 2 and alpha 5, beside its base."""
    base = Transformer(SHAPES[request.param])
    base.export(tmp_path / "its-base")
    lora.add_adapters(base, rank=2, alpha=5)
    randomise(base)
    save(base, tmp_path / "adapters", base="../its-base")
    return tmp_path / "adapters"


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 3}, {"lora_rank": 2, "lora_alpha": 8}])
def test_adapters_are_merged_unless_they_are_asked_for(
    start: Path, settings: dict[str, Any]
) -> None:
    base = Transformer.from_pretrained(start.parent / "its-base")
    lora.attach_peft(base, start)
    expected = base.logits(TOKENS)
    kept = started(start, lora_rank=2)
    assert torch.equal(kept.logits(TOKENS), expected)
    assert {*lora.trained_state(kept)} == {*lora.trained_state(base)}
    other = started(start, **settings)
    assert_close(other.logits(TOKENS), expected, rtol=0, atol=1e-5)
    assert bool(lora.adapters(other)) == bool(settings)
    scale = settings.get("lora_alpha", 6) / settings.get("lora_rank", 3)  # twice the rank
    assert all(layer.scale == scale for layer in lora.adapters(other).values())
    assert all(not layer.lora_B.any() for layer in lora.adapters(other).values())


@pytest.mark.parametrize(
    ("base_dtype", "stored", "alpha"),
    [("bfloat16", torch.bfloat16, 0), ("bfloat16", torch.bfloat16, 5), ("nf4", torch.uint8, 0)],
)
def test_adapters_are_in_float32(
    start: Path, base_dtype: str, stored: torch.dtype, alpha: float
) -> None:
    for folder in (start, Path("scratch")):
        model = started(folder, lora_rank=2, lora_alpha=alpha, base_dtype=base_dtype)
        for name, parameter in model.h.named_parameters():
            if parameter.dim() > 1:
                assert parameter.dtype == (torch.float32 if name.endswith(ADAPTERS) else stored)
        assert {x.dtype for x in lora.merge_adapters(model).parameters()} == {torch.float32}
    refused(started, start, lora_rank=2, lora_alpha=5, base_dtype="nf4")  # it would round them away


def test_a_resume_refuses_another_scale_of_the_adapters(start: Path) -> None:
    checksums: dict[str, str] = {}
    for _ in range(2):
        started(start, checksums=checksums, lora_rank=2)
    edit(start, lambda settings: settings.update(lora_alpha=1), "adapter_config.json")
    refused(started, start, checksums=checksums, lora_rank=2)


def test_runs_of_other_seeds_have_one_checksum(start: Path) -> None:
    """Also beside a copy of the start: new adapters are random, and add nothing to it."""
    base = start.parent / "its-base"
    kept: list[dict[str, str]] = [{}, {}]
    for seed, checksums in enumerate(kept):
        started(base, checksums=checksums, lora_rank=2, kl_coef=0.1, seed=seed)
    assert kept[0] == kept[1] != {}


def test_what_is_known_of_the_base_is_known_of_its_adapters(start: Path) -> None:
    base = start.parent / "its-base"
    source = ModelSource.of(str(start))
    assert source.size == Size.of(Transformer.from_pretrained(base))
    assert source.shape == ModelSource.of(str(base)).shape
    assert source.tokenizer_settings == {"tokenizer": "chess"}
    tiny.tiny_tokenizer_folder(base)
    assert source.tokenizer_settings == {"tokenizer": str(start / "../its-base")}
    tiny.tiny_tokenizer_folder(start)
    assert source.tokenizer_settings == {"tokenizer": str(start)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_dora", True),
        ("rank_pattern", {"q_proj": 4}),
        ("bias", "all"),
        ("r", 3),
        ("lora_alpha", 0),
        ("lora_alpha", float("nan")),
        ("use_rslora", "x"),
        ("base_model_name_or_path", "nowhere/./at/all"),
        ("base_model_name_or_path", None),
    ],
)
def test_adapters_of_another_kind_are_refused(start: Path, name: str, value: Any) -> None:
    edit(start, lambda settings: settings.update({name: value}), "adapter_config.json")
    refused(started, start, lora_rank=2)


@pytest.mark.parametrize("how", ["float8", "int8", "nan", "missing", "renamed"])
def test_tensors_that_are_no_adapters_are_refused(start: Path, how: str) -> None:
    """`float8` and `int8` are numbers without the scale that belongs to them."""
    file = start / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    tensor = tensors.pop(name)
    if how == "renamed":
        name = "base_model.model.lora_magnitude_vector.weight"
    elif how == "nan":
        tensor[0] = torch.nan
    elif how != "missing":
        tensor = tensor.to({"float8": torch.float8_e4m3fn, "int8": torch.int8}[how])
    if how != "missing":
        tensors[name] = tensor
    save_file(tensors, file)
    refused(started, start)
    refused(started, start, lora_rank=2)


@pytest.mark.peer
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
@pytest.mark.parametrize("target", ["", "query"])
def test_adapters_of_peft_have_its_logits(tmp_path: Path, name: str, target: str) -> None:
    """In all layers, with PEFT's other scale; and in the layers of the queries."""
    import peft
    import transformers

    make_theirs(name).save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    target = target and ("c_attn" if name == "gpt2" else "q_proj")
    torch.manual_seed(0)
    their_settings = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=[target] if target else "all-linear",
        use_rslora=not target,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    theirs = peft.get_peft_model(base, their_settings).eval()
    theirs.save_pretrained(tmp_path / "adapters")
    expected = theirs.double()(IDS).logits  # or rounding alone may be 1e-5
    for settings in ({}, {"lora_rank": 4}):
        ours = started(tmp_path / "adapters", 97, **settings)
        assert bool(lora.adapters(ours)) == bool(settings)
        found = ours.double().logits(IDS)
        assert_close(found, expected, rtol=0, atol=1e-5)
