"""Open models: their files give transformers' logits; what does not fit is refused.

`-m peer` makes random models with transformers and compares; tests/golden/families.json holds what
it found, for the default suite. `MAKE_GOLDEN=1 pytest -m peer` writes that file.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from minigrpo import Config
from minigrpo.build import resolve
from minigrpo.model import hf
from minigrpo.model.config_json import read_shape
from minigrpo.model.hf import stored_name
from minigrpo.model.shape import AttentionShape, ModelShape, Rope
from minigrpo.model.source import ModelSource, fit_vocab
from minigrpo.model.transformer import Transformer
from minigrpo.text.tokenizer import load_tokenizer

from .steps import DELTA, SHAPES
from .test_packing import varied
from .tiny import ROOT, check_golden, golden, read_json, refused

State = dict[str, Tensor]
VOCAB = 97
IDS = torch.randint(0, VOCAB, (3, 50), generator=torch.Generator().manual_seed(1))
CLOSE = {"rtol": 0, "atol": 1e-4}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
GPT2_SIZES = {"vocab_size": VOCAB, "n_positions": 64, "n_layer": 2, "n_embd": 48, "n_head": 3}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
MULTIPLIERS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2}
MULTIPLIERS |= {"residual_multiplier": 0.3, "logits_scaling": 2.0}
GEMMA3_SIZES = {**SIZES, "tie_word_embeddings": True, "num_hidden_layers": 7, "head_dim": 16} | {
    "sliding_window": 5,
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
SMOLLM3 = {**SIZES, "num_hidden_layers": 5, "pad_token_id": 0}
LFM2 = {**SIZES, "tie_word_embeddings": True, "block_auto_adjust_ff_dim": False} | {
    "layer_types": ["conv", "full_attention", "conv"],
    "norm_eps": 1e-4,
}
LFM3 = {**SIZES, "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 5} | {
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 60,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
OLMO_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 3.0,
    "beta_slow": 0.5,
}
OLMO3 = {**SIZES, "pad_token_id": 0}
PHI3 = {
    **SIZES,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 96,
    "bos_token_id": 96,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 4.0, 9.0],
    "original_max_position_embeddings": 56,
}
QWEN3_5 = {**SIZES, "num_hidden_layers": 4, "head_dim": 16, "pad_token_id": 0} | {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "layer_types": [*3 * ["linear_attention"], "full_attention"],
}
# name -> (class of the config in transformers, its fields)
PUBLISHED = {
    "gpt2": ("GPT2Config", {"bos_token_id": 96, "eos_token_id": 96}),
    "gpt2, variants": (
        "GPT2Config",
        {"n_inner": 50, "layer_norm_epsilon": 1e-2, "tie_word_embeddings": False},
    ),
    "llama": ("LlamaConfig", SIZES),
    "llama, scaled and tied": (
        "LlamaConfig",
        {**SIZES, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "llama, biases": ("LlamaConfig", {**SIZES, **BIASES}),
    "exaone4": (
        "Exaone4Config",
        {**SIZES, "head_dim": 16, "sliding_window": None, "layer_types": 3 * ["full_attention"]},
    ),
    "gemma3": ("Gemma3TextConfig", GEMMA3_SIZES),
    "gemma3, every third layer full": (
        "Gemma3TextConfig",
        {**GEMMA3_SIZES, "num_hidden_layers": 4, "query_pre_attn_scalar": 24}
        | {"layer_types": [*2 * ["sliding_attention"], "full_attention", "sliding_attention"]},
    ),
    "granite": ("GraniteConfig", {**SIZES, **MULTIPLIERS}),
    "granite 4": (
        "GraniteMoeHybridConfig",
        {**SIZES, **MULTIPLIERS, "hidden_size": 64, "num_attention_heads": 4}
        | {"shared_intermediate_size": 80, "num_local_experts": 0}
        | {"layer_types": 3 * ["attention"], "position_embedding_type": "rope"},
    ),
    "lfm2": ("Lfm2Config", LFM2),
    "lfm2, adjusted and longer": (
        "Lfm2Config",
        {**LFM2, "block_auto_adjust_ff_dim": True, "conv_L_cache": 5, "block_multiple_of": 16},
    ),
    "lfm3": ("Lfm3Config", LFM3),
    "ministral3": (
        "Ministral3Config",
        {**SIZES, "head_dim": 16, "rope_parameters": YARN, "pad_token_id": 0},
    ),
    "mistral": (
        "MistralConfig",
        # it has no biases, whatever its file says
        {**SIZES, "sliding_window": None, "head_dim": 16, "attention_bias": True},
    ),
    "mistral, window": ("MistralConfig", {**SIZES, "sliding_window": 7}),
    "olmo2": ("Olmo2Config", {**SIZES, "rms_norm_eps": 1e-3, "pad_token_id": 0}),
    "olmo3": ("Olmo3Config", {**OLMO3, "num_hidden_layers": 4, "sliding_window": 5}),
    "olmo3, scaled": (
        "Olmo3Config",
        {**OLMO3, "layer_types": ["full_attention", *2 * ["sliding_attention"]]}
        | {"sliding_window": 6, "rope_parameters": {"full_attention": OLMO_YARN}},
    ),
    "phi3": ("Phi3Config", {**PHI3, "sliding_window": 7}),
    "phi3, long": ("Phi3Config", {**PHI3, "rope_parameters": LONGROPE}),
    "qwen2": (
        "Qwen2Config",
        {
            **SIZES,
            "tie_word_embeddings": True,
            "sliding_window": 8,  # not in force: use_sliding_window is false
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 16}),
    "qwen3, biases": ("Qwen3Config", {**SIZES, "head_dim": 16, "attention_bias": True}),
    "qwen3.5": ("Qwen3_5TextConfig", QWEN3_5),
    "qwen3.5, heads that differ": (
        "Qwen3_5TextConfig",
        {**QWEN3_5, "linear_num_value_heads": 6, "linear_value_head_dim": 12}
        | {"tie_word_embeddings": True, "linear_conv_kernel_dim": 3},
    ),
    "smollm3": ("SmolLM3Config", SMOLLM3),
    "smollm3, biases": ("SmolLM3Config", {**SMOLLM3, **BIASES}),
}
QWEN3 = varied("qwen3").shape
GEMMA3 = replace(SHAPES["grouped-query"], residual_multiplier=1.0, logits_divisor=1.0)
ADDS_ONE = ("gemma3_text", "qwen3_5_text")  # transformers' models add 1 to the weights of norms
SHARDED = ("llama, biases", "qwen2", "gemma3", "qwen3.5")  # written as several files


def values(shape: Sequence[int], seed: int) -> Tensor:
    """Numbers in +-1 that any version of any library computes alike, by a linear congruence."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * 7919 + seed * 104729 + 12345) * 16807 % 2147483647
    scaled = numbers.double() / 2147483647 * 2 - 1
    return scaled.float().view(shape)


def is_transposed(model: Transformer, name: str) -> bool:
    """Whether files have the transpose of a parameter."""
    matrix = torch.eye(2)[:1]
    return hf.converted(model.shape, name, matrix).shape == (2, 1)


def fill(model: torch.nn.Module) -> None:
    """Weights so large that every part matters, by the name that a parameter has in files."""
    ours = isinstance(model, Transformer)
    for name, p in model.named_parameters():
        stored = stored_name(model.shape, name) if ours else name.removeprefix("transformer.")
        transposed = ours and is_transposed(model, name)
        made = values(p.shape[::-1] if transposed else p.shape, seed=sum(stored.encode()))
        scale = 0.3 if p.dim() == 2 else 0.2
        p.data.copy_((made.t() if transposed else made) * scale)
        adds_one = not ours and model.config.model_type in ADDS_ONE and "attn.norm" not in stored
        is_norm = p.dim() == 1 and not stored.endswith(("bias", "A_log"))
        if is_norm and not adds_one:
            p.data.add_(1.0)


def make_theirs(name: str) -> Any:
    """A model of transformers."""
    import transformers

    kind, fields = PUBLISHED[name]
    sizes = GPT2_SIZES if kind == "GPT2Config" else {}
    config = getattr(transformers, kind)(**{**sizes, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    fill(model)
    return model


def as_version_4_writes(config: dict[str, Any]) -> None:
    if "rope_parameters" not in config:
        return
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype", "float32")


def edit(folder: Path, change: Callable[[dict[str, Any]], Any], name: str = "config.json") -> None:
    file = folder / name
    config = read_json(file)
    change(config)
    file.write_text(json.dumps(config))


def summary(logits: Tensor) -> list[float]:
    """Some logits, and the mean of all squares."""
    some = logits.detach()[:, ::7, ::13].flatten().tolist()
    mean_square = float(logits.square().mean())
    return [round(x, 3) for x in [*some, mean_square]]


@pytest.mark.peer
@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_are_theirs(tmp_path: Path, name: str) -> None:
    """In both styles of config.json, and back."""
    import transformers

    theirs = make_theirs(name)
    theirs.save_pretrained(tmp_path, max_shard_size="50KB" if name in SHARDED else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (name in SHARDED)
    expected = theirs(IDS).logits.detach()
    ours = Transformer.from_pretrained(tmp_path)
    assert_close(ours.logits(IDS).detach(), expected, **CLOSE)
    if os.environ.get("MAKE_GOLDEN"):
        config = read_json(tmp_path / "config.json")
        check_golden("families", name, {"config": config, "logits": summary(expected)})
    assert summary(expected) == pytest.approx(golden("families")[name]["logits"], abs=2e-3)

    ours.export(tmp_path / "out")
    back, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(back) is type(theirs)
    assert_close(back(IDS).logits.detach(), expected, **CLOSE)


@pytest.mark.peer
@pytest.mark.parametrize("name", PUBLISHED)
def test_gradients_are_theirs(tmp_path: Path, name: str) -> None:
    theirs = make_theirs(name)
    theirs.save_pretrained(tmp_path)
    ours = Transformer.from_pretrained(tmp_path)
    weights = torch.randn((*IDS.shape, VOCAB), generator=torch.Generator().manual_seed(0))
    for logits in (theirs(IDS).logits, ours.logits(IDS)):
        (logits * weights).sum().backward()
    gradients = {n.removeprefix("transformer."): p.grad for n, p in theirs.named_parameters()}
    total = torch.nn.utils.get_total_norm(gradients.values())
    for own, p in ours.named_parameters():
        expected = gradients.pop(stored_name(ours.shape, own))
        found = p.grad.t() if is_transposed(ours, own) else p.grad
        # without rotation, a bias of keys changes nothing: its gradient is rounding alone
        assert (found - expected).norm() < 1e-4 * expected.norm() + 1e-7 * total
    assert not gradients


@pytest.mark.peer
def test_files_in_bfloat16_are_read_exactly(tmp_path: Path) -> None:
    import transformers

    make_theirs("gemma3").bfloat16().save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        logits = Transformer.from_pretrained(tmp_path).logits(IDS)
        assert_close(logits, theirs(IDS).logits, **CLOSE)


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_are_those_that_transformers_had(name: str) -> None:
    found = golden("families")[name]
    shape = read_shape(found["config"])
    as_version_4_writes(found["config"])
    assert read_shape(found["config"]) == shape
    model = Transformer(shape)
    fill(model)
    with torch.no_grad():
        assert summary(model.logits(IDS)) == pytest.approx(found["logits"], abs=2e-3)


@pytest.mark.parametrize(
    "shape", [SHAPES["gpt2"], QWEN3, GEMMA3, replace(QWEN3, family="llama", **BIASES)]
)
def test_a_model_comes_back_from_its_file_and_its_export(tmp_path: Path, shape: ModelShape) -> None:
    model = Transformer(shape, seed=2)
    model.save_pretrained(tmp_path / "own.safetensors")
    model.export(tmp_path / "out")
    for path in (tmp_path / "own.safetensors", tmp_path / "out"):
        back = Transformer.from_pretrained(path)
        assert back.shape == shape
        for a, b in zip(back.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_equal_weights_make_equal_files_that_others_may_read(tmp_path: Path) -> None:
    model = Transformer(SHAPES["gpt2"])
    file = tmp_path / "model.safetensors"
    contents = set()
    for _ in range(8):
        model.save_pretrained(file)
        contents.add(file.read_bytes())
    assert len(contents) == 1
    (tmp_path / "another").touch()
    assert file.stat().st_mode == (tmp_path / "another").stat().st_mode


@pytest.mark.parametrize("name", ["gpt2-small", "qwen3-small"])
def test_a_config_alone_is_random_weights_from_a_seed(name: str) -> None:
    folder = ROOT / "configs" / name
    one, same, other = (Transformer.from_pretrained(folder, seed=seed) for seed in (0, 0, 1))
    assert one.shape.vocab_size == load_tokenizer("chess").n_vocab
    assert torch.equal(one.wte.weight, same.wte.weight)
    assert not torch.equal(one.wte.weight, other.wte.weight)


@pytest.mark.parametrize("shape", SHAPES.values())
def test_a_trimmed_vocabulary_has_the_same_logits_for_what_is_left(shape: ModelShape) -> None:
    model = Transformer(shape, seed=1)
    ids = torch.arange(8).view(2, 4)
    before = model.logits(ids)
    model.trim_vocab(9)
    assert model.shape.vocab_size == 9
    assert_close(model.logits(ids), before[..., :9])


@pytest.mark.parametrize(
    ("known", "special", "left"),
    [(12, [], 12), (11, [], 11), (13, [12], 12)],
    ids=["equal", "padded", "a special token without a row"],
)
def test_a_vocabulary_has_rows_for_plain_tokens(known: int, special: list[int], left: int) -> None:
    model = Transformer(QWEN3)
    fit_vocab(model, "m", sized(known, special))
    assert len(model.head_weight) == left


@pytest.mark.parametrize(("known", "special"), [(14, [13]), (5, [])])
def test_a_model_without_rows_for_tokens_or_with_far_more_is_refused(
    known: int, special: list[int]
) -> None:
    refused(fit_vocab, Transformer(QWEN3), "m", sized(known, special))


def sized(known: int, special: list[int]) -> Any:
    """A tokenizer, as far as its size goes."""
    return SimpleNamespace(name="t", n_vocab=known, special=dict(enumerate(special)))


def write(folder: Path, change: Callable[[State], Any] = lambda state: None) -> Path:
    """A folder of a Qwen3, whose tensors are changed."""
    Transformer(QWEN3).export(folder)
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_of_a_model_with_images_is_read(tmp_path: Path, prefix: str) -> None:
    """Its settings are inside others, and its files also have a vision tower and a further head."""
    shape = replace(SHAPES["hybrid"], layers=(DELTA, AttentionShape(rope=Rope(fraction=0.25))))
    model = Transformer(shape, seed=3)
    model.export(tmp_path)
    config = read_json(tmp_path / "config.json")
    outer = {"model_type": "qwen3_5", "text_config": config, "vision_config": {"depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    file = tmp_path / "model.safetensors"
    stored = {name.replace("model.", prefix, 1): x for name, x in load_file(file).items()}
    for name in ("model.visual.blocks.0.norm1.weight", "mtp.fc.weight"):
        stored[name] = torch.ones(2)
    save_file(stored, file, metadata={"format": "pt"})
    found = Transformer.from_pretrained(tmp_path)
    assert found.shape == shape
    assert torch.equal(found.logits(IDS % 12), model.logits(IDS % 12))


REFUSED = {
    "gpt2": [
        {"activation_function": "relu"},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
    ],
    "qwen3": [
        {"model_type": "qwen3_moe"},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0}},
        {"rope_parameters": None, "rope_scaling": {"type": "su"}},  # version 4
        {"use_sliding_window": True},
        {"hidden_act": "gelu"},
        {"quantization_config": {"quant_method": "fp8"}},
        {"attention_bias": True},
        {"num_key_value_heads": 3},
        {"intermediate_size": 40},
        {"model_type": "llama"},  # norms are left over
        {"tie_word_embeddings": True},
        {"rope_theta": []},
        {"rms_norm_eps": float("nan")},
        {"tie_word_embeddings": []},
        {"hidden_size": 10**30},
    ],
    "gemma3": [
        {"attn_logit_softcapping": 50.0},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "chunked_attention"]},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
}


@pytest.mark.parametrize("family", REFUSED)
def test_other_computations_are_refused(tmp_path: Path, family: str) -> None:
    shape = {"gpt2": SHAPES["gpt2"], "gemma3": GEMMA3, "qwen3": QWEN3}[family]
    Transformer(shape).export(tmp_path)
    config = read_json(tmp_path / "config.json")
    for changes in REFUSED[family]:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        refused(Transformer.from_pretrained, tmp_path)


Q, QUANTISED = (f"model.layers.0.self_attn.q_proj.{kind}" for kind in ("weight", "qweight"))
CHANGES = {
    "as GPTQ": lambda state: state.update({QUANTISED: state.pop(Q).to(torch.int32)}),
    "transposed": lambda state: state.update({Q: state[Q].t().contiguous()}),
    "missing": lambda state: state.pop(Q),
    "not finite": lambda state: state[Q][3].fill_(torch.nan),
    "8 bits": lambda state: state.update({Q: state[Q].to(torch.float8_e4m3fn)}),
    "complex": lambda state: state.update({Q: state[Q].to(torch.complex64)}),
    "integers": lambda state: state.update({Q: state[Q].to(torch.int8)}),
    "none": lambda state: state.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_tensors_that_are_not_the_models_weights_are_refused(tmp_path: Path, change: str) -> None:
    refused(Transformer.from_pretrained, write(tmp_path, CHANGES[change]))


def test_a_stored_head_that_is_tied_must_not_differ(tmp_path: Path) -> None:
    """And names and masks of early GPT-2 files are read."""
    model = Transformer(SHAPES["gpt2"], seed=3)
    model.export(tmp_path)
    file = tmp_path / "model.safetensors"
    state = {f"transformer.{name}": x for name, x in load_file(file).items()}
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4).bool()
    head = state["transformer.wte.weight"]
    save_file({**state, "lm_head.weight": head.clone()}, file)
    ids = IDS[:, :20] % 12
    assert torch.equal(Transformer.from_pretrained(tmp_path).logits(ids), model.logits(ids))
    save_file({**state, "lm_head.weight": head + 1e-3}, file)
    refused(Transformer.from_pretrained, tmp_path)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "adapter_model.safetensors"])
def test_weights_that_are_not_read_never_become_random_ones(tmp_path: Path, file: str) -> None:
    refused(Transformer.from_pretrained, tmp_path)  # an empty folder
    (write(tmp_path) / "model.safetensors").rename(tmp_path / file)
    refused(Transformer.from_pretrained, tmp_path)


def test_a_shard_that_is_missing_is_refused(tmp_path: Path) -> None:
    (write(tmp_path) / "model.safetensors").rename(tmp_path / SHARD)
    state = load_file(tmp_path / SHARD)
    index = {"weight_map": dict.fromkeys(state, SHARD) | {Q: "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(Transformer.from_pretrained, tmp_path)
    save_file({Q: state.pop(Q)}, tmp_path / "2.safetensors")
    save_file(state, tmp_path / SHARD)
    Transformer.from_pretrained(tmp_path)
    os.truncate(tmp_path / SHARD, 5_000)
    refused(Transformer.from_pretrained, tmp_path)


SHARD = "1.safetensors"
MAPS = [{}, None, [SHARD], {Q: SHARD, "other": 1}, {Q: [SHARD]}, {Q: "empty.safetensors"}]
MAPS += [{Q: f"/elsewhere/{SHARD}"}]
INDICES = [[], {}, [["weight_map", {}]], *({"weight_map": files} for files in MAPS)]


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("beside", [SHARD, "generation_config.json"], ids=["shard", "alone"])
def test_an_index_names_the_files_beside_it(tmp_path: Path, index: Any, beside: str) -> None:
    (write(tmp_path) / "model.safetensors").rename(tmp_path / beside)
    save_file({}, tmp_path / "empty.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(Transformer.from_pretrained, tmp_path)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What huggingface_hub, which is made up, is asked for; it has one model, of one commit."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    calls = []
    folder = write(tmp_path / "snapshots" / ("0a" * 20))

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        if name != "org/model":
            raise FileNotFoundError("no\nsuch model")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return calls


def test_weights_are_of_the_settings_commit(asked: list[dict[str, Any]]) -> None:
    source = ModelSource.of("org/model@v1.0")
    source.load("float32", 0, print)
    assert [call["revision"] for call in asked] == ["v1.0", source.commit]
    assert "tokenizer.model" in asked[0]["allow_patterns"]  # an export keeps it
    config = resolve(Config.of(model="org/model", data="rows.jsonl"))  # a run names the commit
    assert config.model.name == f"org/model@{source.commit}"
    assert resolve(config) == config


def test_an_existing_path_comes_before_a_name(asked: list[dict[str, Any]]) -> None:
    ModelSource.of("org/model")  # without its weights
    assert [call["revision"] for call in asked] == [None]
    Path("org/model").mkdir(parents=True)
    for name in ("org/model", "./nowhere/at/all"):
        assert ModelSource.of(name).path == Path(name)
    assert len(asked) == 1


def test_a_model_that_cannot_be_used_is_refused(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> Transformer:
        return ModelSource.of("org/model").load("float32", 0, print)

    folder = ModelSource.of("org/model").path
    (folder / hf.WEIGHTS).unlink()  # it must not become a random one
    refused(load)
    edit(folder, lambda config: config.update(model_type="qwen3_moe"))
    asked.clear()
    refused(load)
    assert len(asked) == 1  # it costs no gigabytes
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # not installed
    refused(load)


def test_of_a_repository_of_adapters_nothing_else_is_fetched(
    asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    folder = ModelSource.of("org/model").path
    adapters = {"base_model_name_or_path": str(write(tmp_path / "base"))}
    (folder / hf.ADAPTER_CONFIG).write_text(json.dumps(adapters))
    asked.clear()
    ModelSource.of("org/model").fetch_weights()
    assert [call["allow_patterns"] for call in asked][1:] == [hf.ADAPTER_FILE]
    adapters = {"base_model_name_or_path": "org/base", "revision": "b"}
    (folder / hf.ADAPTER_CONFIG).write_text(json.dumps(adapters))
    assert hf.base_of(folder) == "org/base@b"
