"""Models' files as Hugging Face lays them out, and models on its Hub.

A model is refused if transformer.py would compute another function than the one that was trained:
loading it anyway would give a model that runs but writes nonsense.
"""

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import ConfigError, refusing
from .shape import ModelShape

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
# what PEFT writes
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
FOR_TRANSFORMERS = {"format": "pt"}  # the header that transformers expects
SHAPE = "shape"  # key of the header of a file of our own: the fields of ModelShape as JSON


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file."""
    with refusing(file):
        return dict(json.loads(file.read_bytes())) if file.is_file() else {}


# model_type in config.json -> the class in transformers; those after GPT-2 differ in settings alone
FAMILIES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# the parts of a parameter's name here -> in files, where they differ
LLAMA_NAMES = {
    "wte": "model.embed_tokens",
    "h": "model.layers",
    "ln_1": "input_layernorm",
    "attn": "self_attn",
    "ln_2": "post_attention_layernorm",
    "ln_f": "model.norm",
    "head": "lm_head",
}
GPT2_PREFIX = "transformer."  # of names in files, but for the head's; it may be missing
# ends of names whose weights are stored as [in, out]; only GPT-2 has them
TRANSPOSED = ("attn.c_attn.weight", "c_proj.weight", "mlp.c_fc.weight")
# stored by older versions, and not needed
BUFFERS = re.compile(r".*(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)")


def stored_name(shape: ModelShape, name: str) -> str:
    """The name in files of a parameter here."""
    names = {"head": "lm_head"} if shape.is_gpt2 else LLAMA_NAMES
    return ".".join(names.get(part, part) for part in name.split("."))


# the fields of ModelShape -> their names in config.json
GPT2_FIELDS = {
    "vocab_size": "vocab_size",
    "context": "n_positions",
    "layers": "n_layer",
    "width": "n_embd",
    "heads": "n_head",
    "mlp_width": "n_inner",
    "norm_eps": "layer_norm_epsilon",
    "tied": "tie_word_embeddings",
}
LLAMA_FIELDS = {
    "vocab_size": "vocab_size",
    "context": "max_position_embeddings",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "mlp_width": "intermediate_size",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tied": "tie_word_embeddings",
}
# more of them, with the same names there -> the families whose classes in transformers read them
BIASES = {"attention_bias": ("llama", "qwen3", "smollm3"), "mlp_bias": ("llama", "smollm3")}
SHAPES = TypeAdapter(ModelShape)  # refuses values that no model has, and ignores other names
# settings, and their values for which transformer.py computes the same; most may be missing
SUPPORTED: dict[str, Sequence[object]] = {
    "model_type": [*FAMILIES],
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "scale_attn_weights": [True],
    "scale_attn_by_inverse_layer_idx": [False],
    "rope_type": ("default", "llama3"),
    "hidden_act": ["silu"],
    "use_sliding_window": [False],
}


def config_names(family: str) -> dict[str, str]:
    """The fields of ModelShape -> their names in a family's config.json."""
    if family == "gpt2":
        return GPT2_FIELDS
    return LLAMA_FIELDS | {bias: bias for bias in BIASES if family in BIASES[bias]}


@refusing(CONFIG)
def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape of the model that a config.json describes. Raises ConfigError."""
    family = config["model_type"]
    defaults = {
        "layer_norm_epsilon": 1e-5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2e6 if family == "smollm3" else 1e4,
        "tie_word_embeddings": family in ("gpt2", "smollm3"),
    }
    supported = dict(SUPPORTED)
    if family == "smollm3":  # every fourth layer does not rotate: see ModelShape.rotates
        layers = config["num_hidden_layers"]
        supported["no_rope_layers"] = None, ([1, 1, 1, 0] * layers)[:layers]
    if family == "mistral":  # it has a window, and no field that says whether it is used
        supported["sliding_window"] = [None]
    # transformers 5 writes `rope_parameters`, version 4 two fields
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    config = {**defaults, **config, "rope_type": rope.get("type", "default"), **rope}
    for name, values in supported.items():
        if name in config and config[name] not in values:
            raise ValueError(f"{name} is {config[name]!r}, not {' or '.join(map(str, values))}")
    fields = {ours: config.get(theirs) or 0 for ours, theirs in config_names(family).items()}
    scaling = rope if config["rope_type"] == "llama3" else None
    return SHAPES.validate_python({**fields, "family": family, "rope_scaling": scaling})


def write_config(shape: ModelShape) -> dict[str, Any]:
    """The contents of config.json, in words that versions 4 and 5 of transformers read."""
    written = {
        "architectures": [FAMILIES[shape.family]],
        "model_type": shape.family,
        **{theirs: getattr(shape, ours) for ours, theirs in config_names(shape.family).items()},
        # some families have defaults beyond the vocabulary
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if shape.is_gpt2:
        # transformers would train with its default of 0.1
        return {**written, **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)}
    scaling = shape.rope_scaling and {"rope_type": "llama3", **asdict(shape.rope_scaling)}
    return {**written, "rope_scaling": scaling, "sliding_window": None}


def read_model(path: Path) -> tuple[ModelShape, dict[str, Tensor]]:
    """The shape of a model, and its tensors by their names in files. Raises ConfigError."""
    tensors: dict[str, Tensor] = {}
    for part in _weight_files(path / WEIGHTS if path.is_dir() else path):
        tensors |= read_tensors(part)[1]
    return read_model_shape(path), tensors


def read_model_shape(path: Path) -> ModelShape:
    """The shape alone, by a safetensors file's header, else by config.json. Raises ConfigError."""
    file = path / WEIGHTS if path.is_dir() else path
    header = read_tensors(file)[0] if file.is_file() else {}
    if SHAPE in header:
        return SHAPES.validate_json(header[SHAPE])
    return read_shape(read_json(file.with_name(CONFIG)))


def read_tensors(file: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header of a safetensors file, and its tensors, which are read where they are used."""
    with refusing(file), safe_open(file, framework="pt") as opened:
        return opened.metadata() or {}, load_file(file)


def _weight_files(file: Path) -> list[Path]:
    """One file or the shards that the index lists; none beside a config.json alone."""
    folder = file.parent
    if file.exists() or file.name != WEIGHTS:
        return [file]
    index = read_json(folder / "model.safetensors.index.json")  # tensor -> shard
    if index:
        return [folder / Path(name).name for name in sorted({*index["weight_map"].values()})]
    # random weights, unless there are others that are not read
    kinds = (".safetensors", ".bin", ".gguf")
    others = [other.name for other in folder.glob("*") if other.suffix in kinds]
    if others or not (folder / CONFIG).exists():
        raise ConfigError(f"{folder}: has no {WEIGHTS}, only {', '.join(others) or 'other files'}")
    return []


def to_state(
    shape: ModelShape, names: Collection[str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of `read_model` as a state dict with the parameters' `names`; others stay."""
    ours = {stored_name(shape, name): name for name in names}
    state: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        name = stored.removeprefix(GPT2_PREFIX)
        if not BUFFERS.fullmatch(name):
            state[ours.get(name, name)] = tensor.t() if name.endswith(TRANSPOSED) else tensor
    head, embedding = state.get("lm_head.weight"), state.get("wte.weight")
    if head is not None and embedding is not None and torch.equal(head, embedding):
        del state["lm_head.weight"]  # some store the head although it is tied
    return state


def write_tensors(
    tensors: Mapping[str, Tensor], path: Path, header: Mapping[str, str] = FOR_TRANSFORMERS
) -> None:
    """Write float32 tensors, and one header entry: the package writes more in changing order."""
    path.touch()
    mode = path.stat().st_mode  # by the umask; the package's own lets nobody else read the file
    plain = {name: x.detach().float().cpu().contiguous() for name, x in tensors.items()}
    save_file(plain, path, metadata=dict(header))
    path.chmod(mode)


# ORG/NAME or ORG/NAME@REVISION
HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?", re.ASCII)


def hub_folder(name: str | Path, *, weights: bool = True) -> Path:
    """The file or folder that a name stands for; ORG/NAME[@REVISION] is fetched from the Hub.

    An existing path comes first. The name of a folder from the Hub is the commit. Without `weights`
    it has only settings and the tokenizer. Raises ConfigError.
    """
    on_hub = HUB_NAME.fullmatch(str(name))
    if Path(name).exists() or on_hub is None:
        return Path(name)
    with refusing(f"{name}: no such folder, nor on the Hub (which needs minigrpo[hub])"):
        from huggingface_hub import snapshot_download

        fetch = partial(snapshot_download, on_hub[1], ignore_patterns="*/*")
        folder = Path(fetch(revision=on_hub[2], allow_patterns=["*.json", "*.jinja"]))
    if weights and base_of(folder):
        fetch(revision=folder.name, allow_patterns=ADAPTER_FILE)
    elif weights:
        read_shape(read_json(folder / CONFIG))  # a model that is refused costs no gigabytes
        fetch(revision=folder.name, allow_patterns="model*.safetensors")
        if not _weight_files(folder / WEIGHTS):
            raise ConfigError(f"{name}: has no safetensors, or they are not here")
    return folder


def base_of(folder: Path) -> str:
    """The name of the model that PEFT's adapters in a folder belong to; "" if it has none."""
    settings = read_json(folder / ADAPTER_CONFIG)
    name = os.path.expanduser(settings.get("base_model_name_or_path") or "")
    for path in (Path(name), folder / name):  # a relative one may begin in the adapters' folder
        if path.exists():
            return str(path) if name else ""
    return f"{name}@{settings['revision']}" if settings.get("revision") else name
