"""Open models: their files give transformers' logits (-m peer); what does not fit is refused."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minigrpo import Transformer
from minigrpo.model.families import FAMILIES
from minigrpo.model.shape import ModelShape, RopeScaling
from minigrpo.model.weights import export_model
from minigrpo.sampling.decoders import ReplicatedPrefixDecoder, SharedPrefixDecoder, UncachedDecoder
from minigrpo.sampling.generate import generate

from .conftest import SHAPES

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


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mixture of experts": ({"model_type": "qwen3_moe"}, "a mixture of experts"),
    "gemma": ({"model_type": "gemma3_text"}, "sliding windows"),
    "linear attention": ({"model_type": "qwen3_next"}, "linear attention"),
    "unknown": ({"model_type": "bloom"}, "supported are gpt2, llama, qwen2"),
    "rope": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn'"),
    "rope, half": (
        {"rope_parameters": {"rope_theta": 1.0, "rope_type": "llama3"}},
        "without factor",
    ),
    "window": ({"use_sliding_window": True}, "use_sliding_window"),
    "layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "partly rotated": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "no size": ({"hidden_size": "wide"}, "hidden_size in config.json is 'wide'"),
    "other size": ({"intermediate_size": 40}, r"gate_proj.weight is \[24, 16\], not \[40, 16\]"),
    "left over": ({"model_type": "llama"}, "q_norm.weight is unknown"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_computed_differently_is_refused_in_one_line(
    tmp_path: Path, name: str
) -> None:
    changes, words = REFUSED[name]
    shape = SHAPES["grouped-query"]
    export_model(Transformer(shape).state_dict(), tmp_path, shape=shape, eos=3)
    edit(tmp_path, lambda config: config.update(changes))
    with pytest.raises(ValueError, match=words) as error:
        Transformer.from_pretrained(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_a_lost_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=r"model-00001-of-00002.safetensors: there is no such file"
    ):
        Transformer.from_pretrained(tmp_path)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parameters_are_counted_without_a_model(shape: ModelShape) -> None:
    for changed in (shape, dataclasses.replace(shape, mlp_bias=not shape.mlp_bias)):
        parameters = Transformer.empty(changed, "meta").parameters()
        assert changed.num_parameters == sum(p.numel() for p in parameters)
