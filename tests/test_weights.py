"""GPT-2 files: which are loaded and which rejected.

Against transformers (-m peer): both compute the same function.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minigrpo import Config, Transformer
from minigrpo.model.shape import ModelShape
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.model.weights import export_model
from minigrpo.runtime.build import make_model
from minigrpo.runtime.flags import ConfigError
from minigrpo.sampling.decoders import ReplicatedPrefixDecoder, SharedPrefixDecoder, UncachedDecoder
from minigrpo.sampling.generate import generate

from .gradients import TINY

State = dict[str, Tensor]
SHAPE = {"vocab_size": 61, "context": 32, "layers": 2, "width": 24, "heads": 3}
IDS = torch.arange(40).view(2, 20)


@pytest.fixture
def ours() -> Transformer:
    model = Transformer(ModelShape(**SHAPE), seed=3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:  # biases of 0 and norms of 1 would hide a mix-up of names
                generator = torch.Generator().manual_seed(len(name))
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def write(
    folder: Path,
    model: Transformer,
    change: Callable[[State], Any] = lambda state: None,
    **settings: Any,
) -> Path:
    """Write a model's folder as Hugging Face does, after changes to its tensors (as stored) and to
    its config.json.
    """
    export_model(model.state_dict(), folder, shape=ModelShape(**SHAPE), eos=60)
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_equal_weights_make_equal_files(ours: Transformer, tmp_path: Path) -> None:
    """safetensors orders the entries of its header differently from call to call."""
    file, contents = tmp_path / "model.safetensors", set()
    for _ in range(20):
        ours.save_pretrained(file)
        contents.add(file.read_bytes())
    assert len(contents) == 1 and load_file(file)
    (tmp_path / "another").touch()
    assert file.stat().st_mode == (tmp_path / "another").stat().st_mode


def test_heads_come_from_the_header_then_from_config_json_then_from_the_width(
    tmp_path: Path, ours: Transformer
) -> None:
    ours.save_pretrained(tmp_path / "own.safetensors")
    assert Transformer.from_pretrained(tmp_path / "own.safetensors").shape.heads == 3
    folder = write(tmp_path / "folder", ours, n_head=4)
    assert (
        Transformer.from_pretrained(folder).shape.heads
        == Transformer.from_pretrained(folder / "model.safetensors").shape.heads
        == 4
    )
    (folder / "config.json").unlink()
    assert Transformer.from_pretrained(folder).shape.heads == 1  # a width of 24 has no head of 64


def test_prefix_masks_tied_head_and_half_precision_are_read(
    tmp_path: Path, ours: Transformer
) -> None:
    def as_old_versions_do(state: State) -> None:
        state["lm_head.weight"] = state["wte.weight"].clone()
        for i in range(2):
            state[f"h.{i}.attn.bias"] = torch.ones(32, 32).tril().bool()[None, None]
            state[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        for name in list(state):
            if name != "lm_head.weight":
                state["transformer." + name] = state.pop(name)

    read = Transformer.from_pretrained(write(tmp_path / "a", ours, as_old_versions_do))
    assert torch.equal(read.logits(IDS), ours.logits(IDS))

    def halved(state: State) -> None:
        state.update({name: x.to(torch.bfloat16) for name, x in state.items()})

    read = Transformer.from_pretrained(write(tmp_path / "b", ours, halved))
    assert all(p.dtype == torch.float32 for p in read.parameters())
    assert torch.equal(read.wte.weight, ours.wte.weight.to(torch.bfloat16).float())


def drop_and_misshape(state: State) -> None:
    del state["h.1.ln_2.weight"]
    state["extra"] = torch.ones(3)
    state["h.0.mlp.c_fc.weight"] = state["h.0.mlp.c_fc.weight"].t().contiguous()


def lose_positions(state: State) -> None:
    del state["wpe.weight"]


def untie(state: State) -> None:
    state["lm_head.weight"] = state["wte.weight"] + 1e-3


def quantize(state: State) -> None:
    state["h.0.attn.c_attn.weight"] = state["h.0.attn.c_attn.weight"].to(torch.int8)


def store_twice(state: State) -> None:
    state["transformer.wte.weight"] = state["wte.weight"] + 1


def no_tokens(state: State) -> None:
    state["wte.weight"] = state["wte.weight"][:0].clone()


def nothing(state: State) -> None: ...


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (
            drop_and_misshape,
            {},
            [
                "h.1.ln_2.weight is missing",
                "extra is unknown",
                "c_fc.weight is [96, 24], not [24, 96]",
            ],
        ),
        (lose_positions, {}, ["wte.weight [V, D] and wpe.weight [T, D] expected"]),
        (untie, {}, ["lm_head.weight is not wte.weight"]),
        (quantize, {}, ["h.0.attn.c_attn.weight is I8"]),
        (
            nothing,
            {"activation_function": "relu"},
            ["activation_function in config.json is 'relu', not 'gelu_new'"],
        ),
        (
            nothing,
            {"layer_norm_epsilon": 1e-6},
            ["layer_norm_epsilon in config.json is 1e-06, not 1e-05"],
        ),
        (nothing, {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        (
            nothing,
            {"scale_attn_weights": False, "add_cross_attention": True},
            ["scale_attn_weights", "add_cross_attention"],
        ),
        (nothing, {"tie_word_embeddings": False}, ["lm_head.weight is missing, and not tied"]),
        (
            nothing,
            {"n_layer": 3, "n_embd": 16},
            ["n_layer in config.json is 3, in model.safetensors 2", "n_embd"],
        ),
        (store_twice, {}, ["transformer.wte.weight and wte.weight are the same parameter"]),
        (no_tokens, {}, ["vocab_size must be at least 1, got 0"]),
        (nothing, {"n_head": int("9" * 4000)}, ["heads do not divide a width of 24"]),
        (nothing, {"n_head": 5}, ["5 heads do not divide a width of 24"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_does_not_fit_is_listed_in_one_line(
    tmp_path: Path,
    ours: Transformer,
    change: Callable[[State], Any],
    settings: dict[str, Any],
    words: list[str],
) -> None:
    folder = write(tmp_path / "model", ours, change, **settings)
    with pytest.raises(ValueError, match=str(folder)) as error:
        Transformer.from_pretrained(folder)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_missing_tensor_has_the_name_that_it_has_in_such_files(
    tmp_path: Path, ours: Transformer
) -> None:
    def lose_one(state: State) -> None:
        for name in [name for name in state if name != "h.1.ln_2.weight"]:
            state[f"transformer.{name}"] = state.pop(name)
        del state["h.1.ln_2.weight"]

    with pytest.raises(ValueError, match=r": transformer\.h\.1\.ln_2\.weight is missing$"):
        Transformer.from_pretrained(write(tmp_path / "model", ours, lose_one))


def test_a_long_list_is_cut(tmp_path: Path, ours: Transformer) -> None:
    def rename(state: State) -> None:
        for name in [name for name in state if name.startswith("h.")]:
            state["block." + name] = state.pop(name)

    with pytest.raises(ValueError, match=r"block\.h.*; and 17 more$"):
        Transformer.from_pretrained(write(tmp_path / "model", ours, rename))


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_truncated_file_is_named(tmp_path: Path, ours: Transformer, file: str) -> None:
    folder = write(tmp_path / "model", ours)
    os.truncate(folder / file, (folder / file).stat().st_size // 2)
    with pytest.raises(ValueError, match=file) as error:
        Transformer.from_pretrained(folder)
    assert "\n" not in str(error.value)


def test_a_padded_vocabulary_loses_its_padding_and_another_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, said = load_tokenizer("chess"), list[str]()

    def start(vocab_size: int) -> Transformer:
        model = Transformer(ModelShape(vocab_size, layers=1, width=16, heads=2))
        with torch.no_grad():
            model.wte.weight[tokenizer.n_vocab :] = 9.0  # the likeliest tokens, if they stayed
            model.ln_f.bias.fill_(1.0)
        path = tmp_path / f"{vocab_size}.safetensors"
        model.save_pretrained(path)
        return make_model(Config.of(**{**TINY, "init_from": str(path)}), tokenizer, say=said.append)

    model = start(384)  # 360 tokens, padded to a multiple of 128
    assert "24 tokens more than --tokenizer chess has are padding" in said[0]
    prompts = torch.arange(30).view(3, 10)
    sampled = generate(
        model, prompts, torch.full((3,), 10), stops=tokenizer.stops, max_new_tokens=8
    )
    assert sampled.completion_ids.max() < tokenizer.n_vocab
    with pytest.raises(ConfigError, match="has 512 tokens, --tokenizer chess has 360"):
        start(512)
    monkeypatch.setattr(tokenizer, "unknown_stops", {-1, 383, 384})
    with pytest.raises(ConfigError, match=r"its token 383 ends a text \(eos_token_id\), but --tok"):
        start(384)
    assert start(383).shape.vocab_size == 360


# --- against transformers -------------------------------------------------------------------------


def make_theirs(**changes: Any) -> Any:
    """A random GPT-2 of transformers, with weights so large that every part matters."""
    import transformers

    torch.manual_seed(5)
    sizes = {
        theirs: SHAPE[name]
        for name, theirs in [("context", "n_positions"), ("layers", "n_layer"), ("width", "n_embd")]
    }
    config = transformers.GPT2Config(
        vocab_size=61, n_head=3, bos_token_id=60, eos_token_id=60, **{**sizes, **changes}
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    return model


@pytest.mark.peer
@pytest.mark.parametrize("prefix", [True, False])
def test_logits_are_theirs(tmp_path: Path, prefix: bool) -> None:
    theirs = make_theirs()
    (theirs if prefix else theirs.transformer).save_pretrained(tmp_path)
    assert all(
        name.startswith("transformer.") == prefix
        for name in load_file(tmp_path / "model.safetensors")
    )
    ours = Transformer.from_pretrained(tmp_path)
    assert ours.shape == ModelShape(**SHAPE)
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(IDS), theirs(IDS).logits, rtol=0, atol=1e-4)


@pytest.mark.peer
def test_an_export_gives_them_our_logits(tmp_path: Path, ours: Transformer) -> None:
    import transformers

    export_model(ours.state_dict(), tmp_path, shape=ModelShape(**SHAPE), eos=60)
    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(IDS).logits, ours.logits(IDS), rtol=0, atol=1e-4)
    assert theirs.config.eos_token_id == 60


@pytest.mark.peer
@pytest.mark.parametrize("decoder", [ReplicatedPrefixDecoder, SharedPrefixDecoder, UncachedDecoder])
def test_greedy_generation_is_theirs_token_for_token(tmp_path: Path, decoder: type) -> None:
    theirs = make_theirs()
    theirs.save_pretrained(tmp_path)
    ours = Transformer.from_pretrained(tmp_path)
    prompts, lengths = (
        torch.randint(0, 60, (8, 9), generator=torch.Generator().manual_seed(1)),
        torch.arange(2, 10),
    )
    new = generate(ours, prompts, lengths, stops=[60], max_new_tokens=20, decoder=decoder)
    for i, length in enumerate(lengths):
        alone = prompts[i : i + 1, :length]
        options = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 60}
        expected = theirs.generate(alone, attention_mask=torch.ones_like(alone), **options)[
            0, length:
        ]
        assert new.completion_ids[i, 0][new.completion_mask[i, 0]].tolist() == expected.tolist()
    assert len({tuple(row.tolist()) for row in new.completion_ids[:, 0]}) > 1


@pytest.mark.peer
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"activation_function": "relu"}, "activation_function"),
        ({"layer_norm_epsilon": 1e-3}, "layer_norm_epsilon"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"n_inner": 50}, "mlp.c_fc.weight"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"tie_word_embeddings": False}, "lm_head.weight is not wte.weight"),
    ],
    ids=str,
)
def test_variants_that_they_can_write_and_we_cannot_compute_are_refused(
    tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    make_theirs(**changes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=word) as error:
        Transformer.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)
