"""Open models: their files give transformers' logits (-m peer); what does not fit is refused."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minigrpo import Transformer
from minigrpo.model.families import FAMILIES
from minigrpo.model.shape import ModelShape, RopeScaling
from minigrpo.model.weights import export_model
from minigrpo.sampling.decoders import ReplicatedPrefixDecoder, SharedPrefixDecoder, UncachedDecoder
from minigrpo.sampling.generate import generate
from minigrpo.tools import train

from .conftest import SHAPES

ROOT = Path(__file__).parent.parent
MARGIN = 16.0  # MiB; a shard of the test has more
State = dict[str, Tensor]
VOCAB = 97
IDS = torch.randint(0, VOCAB, (3, 50), generator=torch.Generator().manual_seed(1))
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
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# name -> (class of the config in transformers, its fields)
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama, scaled and tied": (
        "LlamaConfig",
        {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "llama, biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "qwen2": (
        "Qwen2Config",
        {
            "tie_word_embeddings": True,
            "sliding_window": 8,  # not in force: use_sliding_window is false
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 5, "pad_token_id": 0}),
}


def make_theirs(name: str, **changes: Any) -> Any:
    """A random model of transformers, with weights so large that every part matters."""
    import transformers

    kind, fields = PUBLISHED[name]
    torch.manual_seed(5)
    config = getattr(transformers, kind)(**{**SIZES, **fields, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return model


def as_version_4_writes(config: dict[str, Any]) -> None:
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype", "float32")


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


@pytest.mark.peer
@pytest.mark.parametrize("shards", ["whole", "sharded"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_are_theirs_in_both_styles_of_config_and_back(
    tmp_path: Path, name: str, shards: str
) -> None:
    import transformers

    theirs = make_theirs(name)
    theirs.save_pretrained(tmp_path, max_shard_size="50KB" if shards == "sharded" else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards == "sharded")
    with torch.no_grad():
        expected = theirs(IDS).logits
        ours = Transformer.from_pretrained(tmp_path)
        torch.testing.assert_close(ours.logits(IDS), expected, rtol=0, atol=1e-4)
        edit(tmp_path, as_version_4_writes)
        again = Transformer.from_pretrained(tmp_path)
        assert again.shape == ours.shape
        torch.testing.assert_close(again.logits(IDS), expected, rtol=0, atol=1e-4)

        export_model(ours.state_dict(), tmp_path / "out", shape=ours.shape, eos=3)
        back, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", output_loading_info=True
        )
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert type(back) is type(theirs)
        torch.testing.assert_close(back(IDS).logits, expected, rtol=0, atol=1e-4)


@pytest.mark.peer
@pytest.mark.parametrize("name", PUBLISHED)
def test_bfloat16_files_are_read_as_float32(tmp_path: Path, name: str) -> None:
    import transformers

    make_theirs(name).to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = Transformer.from_pretrained(tmp_path)
    assert all(p.dtype == torch.float32 for p in ours.parameters())
    with torch.no_grad():
        expected = theirs(IDS).logits
        torch.testing.assert_close(ours.logits(IDS), expected, rtol=0, atol=1e-4)


@pytest.mark.peer
@pytest.mark.parametrize("decoder", [ReplicatedPrefixDecoder, SharedPrefixDecoder, UncachedDecoder])
@pytest.mark.parametrize("name", PUBLISHED)
def test_greedy_generation_is_theirs_token_for_token(
    tmp_path: Path, name: str, decoder: type
) -> None:
    theirs = make_theirs(name)
    theirs.save_pretrained(tmp_path)
    ours = Transformer.from_pretrained(tmp_path)
    lengths = torch.arange(2, 8)
    new = generate(
        ours, IDS[:1, :8].expand(6, -1), lengths, stops=[3], max_new_tokens=12, decoder=decoder
    )
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 3, "eos_token_id": 3}
    for i, length in enumerate(lengths):
        alone = IDS[:1, :length]
        expected = theirs.generate(alone, attention_mask=torch.ones_like(alone), **options)
        found = new.completion_ids[i, 0][new.completion_mask[i, 0]].tolist()
        assert found == expected[0, length:].tolist()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_model_comes_back_from_its_own_file_and_from_its_export(
    tmp_path: Path, shape: ModelShape
) -> None:
    model = Transformer(shape, seed=2)
    model.save_pretrained(tmp_path / "own.safetensors")
    export_model(model.state_dict(), tmp_path / "out", shape=shape, eos=3)
    for path in (tmp_path / "own.safetensors", tmp_path / "out"):
        back = Transformer.from_pretrained(path)
        assert back.shape == shape
        assert all(
            torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters(), strict=True)
        )


def test_names_are_translated_there_and_back() -> None:
    for name, family in FAMILIES.items():
        shape = SHAPES["gpt2" if name == "gpt2" else "grouped-query"]
        for parameter in Transformer.empty(shape, "meta").state_dict():
            assert family.ours(family.theirs(parameter)) == parameter
    assert (
        FAMILIES["qwen3"].theirs("h.1.attn.q_norm.weight")
        == "model.layers.1.self_attn.q_norm.weight"
    )
    assert (
        FAMILIES["llama"].theirs("h.0.mlp.down_proj.weight")
        == "model.layers.0.mlp.down_proj.weight"
    )


def test_llama3_frequencies_stay_shrink_or_lie_between() -> None:
    from minigrpo.model.attention import frequencies

    plain = ModelShape(9, heads=2, width=128, rope_theta=1e4)
    scaled = ModelShape(
        9, heads=2, width=128, rope_theta=1e4, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64)
    )
    ratio = frequencies(scaled) / frequencies(plain)
    wavelength = 2 * torch.pi / frequencies(plain)
    torch.testing.assert_close(ratio[wavelength < 16], torch.ones_like(ratio[wavelength < 16]))
    torch.testing.assert_close(
        ratio[wavelength > 64], torch.full_like(ratio[wavelength > 64], 1 / 8)
    )
    between = ratio[(wavelength > 16) & (wavelength < 64)]
    assert len(between) and ((between > 1 / 8) & (between < 1)).all()


MOE = "mixture of experts"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    MOE: ({"model_type": "qwen3_moe"}, "a mixture of experts"),
    f"{MOE}, unknown": ({"model_type": "new", "num_experts": 64}, "a mixture of experts"),
    "gemma": ({"model_type": "gemma3_text"}, "sliding windows"),
    "linear attention": ({"model_type": "qwen3_next"}, "linear attention"),
    "qwen3.5": ({"model_type": "qwen3_5_text"}, "linear attention"),
    "recurrent": ({"model_type": "falcon_mamba"}, "a recurrent state"),
    "images": ({"model_type": "qwen2_5_vl"}, "it reads more than text"),
    "unknown": ({"model_type": "bloom"}, "supported are gpt2, llama, qwen2, qwen3, smollm3"),
    "no name": ({"model_type": ["llama"]}, "model_type in config.json is"),
    "rope": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn'"),
    "rope, version 4": ({"rope_parameters": None, "rope_scaling": {"type": "su"}}, "type 'su'"),
    "rope, half": (
        {"rope_parameters": {"rope_theta": 1.0, "rope_type": "llama3"}},
        "without factor",
    ),
    "rope, two": (
        {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
        "rotary positions of 'sliding_attention' layers differ",
    ),
    "rope, a text": ({"rope_parameters": "yarn"}, "malformed settings"),
    "theta": ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta in config.json is '1e4', no"),
    "theta, two": ({"rope_theta": 5}, "rope_theta in config.json is both 100.0 and 5; keep one"),
    "epsilon": ({"rms_norm_eps": 0}, "rms_norm_eps in config.json is 0, not a positive number"),
    "window": ({"use_sliding_window": True}, "use_sliding_window in config.json is True"),
    "layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "has 'sliding_attention'"),
    "layers, linear": ({"layer_types": ["linear_attention"]}, "'linear_attention', not full_att"),
    "quantised": ({"quantization_config": {"bits": 4}}, "is quantised (quantization_config"),
    "gptq": ({"quantization_config": {"quant_method": "gptq"}}, "in config.json is 'gptq'); take"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "partly rotated": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "no size": ({"hidden_size": "wide"}, "hidden_size in config.json is 'wide'"),
    "other size": ({"intermediate_size": 40}, "gate_proj.weight is [24, 16], not [40, 16]"),
    "left over": ({"model_type": "llama"}, "q_norm.weight is unknown"),
}


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What train.py says about --init-from FOLDER, after that."""
    with pytest.raises(SystemExit) as stop:
        train.main(["--init-from", str(folder)])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    assert said.startswith(f"error: --init-from {folder}")
    return said.removeprefix(f"error: --init-from {folder}")


def write(folder: Path, change: Callable[[State], Any] = lambda state: None) -> Path:
    """A folder of a Qwen3-shaped model, whose tensors are changed."""
    shape = SHAPES["grouped-query"]
    export_model(Transformer(shape).state_dict(), folder, shape=shape, eos=3)
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_computed_differently_is_refused_in_one_line(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, words = REFUSED[name]
    edit(write(tmp_path), lambda config: config.update(changes))
    assert words in refused(tmp_path, capsys)


Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


def gptq(state: State) -> None:
    weight = state.pop(f"{Q}.weight")
    state[f"{Q}.qweight"] = weight.to(torch.int32)
    state[f"{Q}.g_idx"] = torch.zeros(16, dtype=torch.int32)


def bitsandbytes(state: State) -> None:
    state[f"{Q}.weight"] = state[f"{Q}.weight"].to(torch.uint8)
    state[f"{Q}.weight.absmax"] = torch.ones(3)


def fp8(state: State) -> None:
    state[f"{DOWN}.weight"] = state[f"{DOWN}.weight"].to(torch.float8_e4m3fn)


def bytes_only(state: State) -> None:
    state[f"{DOWN}.weight"] = state[f"{DOWN}.weight"].to(torch.int8)


def lose_some(state: State) -> None:
    for name in ("layers.1.post_attention_layernorm", "layers.0.self_attn.k_proj", "embed_tokens"):
        del state[f"model.{name}.weight"]


def adapters(state: State) -> None:
    state["base_model.model.lora_A.weight"] = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (gptq, f"is quantised ({Q}.g_idx is I32); take the float32, bfloat16 or float16"),
        (bitsandbytes, f"is quantised ({Q}.weight.absmax is F32)"),
        (fp8, f"is quantised ({DOWN}.weight is F8_E4M3)"),
        (bytes_only, f"{DOWN}.weight is I8, not a float"),
        (adapters, "base_model.model.lora_A.weight is unknown"),
        (lose_some, "model.layers.1.post_attention_layernorm.weight is missing"),
        (lose_some, "model.layers.0.self_attn.k_proj.weight is missing"),
        (lose_some, "model.embed_tokens.weight is missing"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_tensors_that_are_no_plain_weights_are_refused_in_one_line(
    tmp_path: Path, change: Callable[[State], Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(write(tmp_path, change), capsys)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("pytorch_model.bin", "pytorch_model.bin holds pickled weights"),
        ("pytorch_model-00001-of-00002.bin", "AutoModelForCausalLM.from_pretrained(FOLDER).save_p"),
        ("consolidated.00.pth", "consolidated.00.pth holds pickled weights"),
        ("adapter_model.safetensors", "holds adapters without their base model"),
        ("qwen-q4.gguf", "qwen-q4.gguf holds weights for llama.cpp"),
        ("training_args.bin", "no model.safetensors)\n"),
    ],
)
def test_weights_in_another_format_are_named(
    tmp_path: Path, file: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / file).write_bytes(b"weights")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    said = refused(tmp_path, capsys)
    assert ": neither a run (no config.toml) nor a model (no model.safetensors)" in said
    assert words in said
    if file != "training_args.bin":
        assert words in refused(tmp_path / file, capsys)  # by itself


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("sharded", [False, True])
def test_adapters_beside_weights_are_not_left_out(
    tmp_path: Path, file: str, sharded: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = write(tmp_path) / "model.safetensors"
    if sharded:
        weights.rename(tmp_path / "model-00001-of-00001.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (tmp_path / file).write_text("{}")
    assert f"has adapters ({file}) beside its weights" in refused(tmp_path, capsys)


def test_without_its_config_a_llama_is_not_taken_for_a_gpt2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (write(tmp_path) / "config.json").unlink()
    assert "config.json with its model_type is missing, and this is no" in refused(tmp_path, capsys)


def test_a_file_of_a_newer_version_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.safetensors"
    header = {"shape": json.dumps({"vocab_size": 9, "rings": 3})}
    save_file({"wte.weight": torch.ones(9, 4)}, file, metadata=header)
    assert "malformed settings (TypeError: " in refused(file, capsys)


def test_a_lost_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=r"model-00001-of-00002.safetensors: there is no such file"
    ):
        Transformer.from_pretrained(tmp_path)
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        save_file({"model.norm.weight": torch.ones(4)}, tmp_path / name)
    index = {"weight_map": {"model.norm.weight": names[0], "lm_head.weight": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{names[1]}: model.norm.weight is also in {names[0]}"):
        Transformer.from_pretrained(tmp_path)
    index = {"weight_map": {"model.norm.weight": "../elsewhere/model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"'../elsewhere/model.safetensors' is no file beside it"):
        Transformer.from_pretrained(tmp_path)


MEASURE = """
import sys, types
from minigrpo import Config, Transformer
from minigrpo.learner import Learner
from minigrpo.model.shape import ModelShape
from minigrpo.runtime.build import make_model

def mib(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024

config = Config.of(max_new_tokens=8, init_from=sys.argv[1])
Learner(config, Transformer(ModelShape(9)))  # for what torch imports late
before = mib("VmRSS")
model = make_model(config, types.SimpleNamespace(n_vocab=4096, name="made-up", unknown_stops=()))
Learner(config, model)
print(mib("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures as Linux does")
def test_loading_holds_the_model_and_one_tensor_of_a_shard(tmp_path: Path) -> None:
    """From the files to what is trained: no second copy, and never a whole shard."""
    shape = dataclasses.replace(
        SHAPES["grouped-query"],
        vocab_size=4096,
        layers=4,
        width=768,
        mlp_width=3072,
        heads=12,
        kv_heads=12,
        head_dim=64,
        tied=True,
    )
    family, state = FAMILIES[shape.family], Transformer.empty(shape, "meta").state_dict()
    shards: list[State] = [{}, {}, {}, {}]
    for number, (name, x) in enumerate(state.items()):
        tensor = torch.full(x.shape, 0.01, dtype=torch.bfloat16)
        shards[number * len(shards) // len(state)][family.theirs(name)] = tensor
    index = {}
    for number, shard in enumerate(shards):
        save_file(shard, tmp_path / f"{number}.safetensors")
        index.update(dict.fromkeys(shard, f"{number}.safetensors"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text(json.dumps(family.write(shape)))

    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sizes = [tensor.nbytes / 2**20 for shard in shards for tensor in shard.values()]
    whole = 2 * sum(sizes)  # in float32
    assert whole > 140 and max(sizes) < 7
    assert whole < float(done.stdout) < whole + max(sizes) + MARGIN


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parameters_are_counted_without_a_model(shape: ModelShape) -> None:
    for changed in (shape, dataclasses.replace(shape, mlp_bias=not shape.mlp_bias)):
        parameters = Transformer.empty(changed, "meta").parameters()
        assert changed.num_parameters == sum(p.numel() for p in parameters)
