"""The families of open models: how their config.json reads, and how their parameters are named.

A family is a row of FAMILIES. A model is rejected if transformer.py would compute another function
than the one that was trained: loading it anyway would give a model that runs but writes nonsense.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..runtime.text import one_line, parse_json, quoted
from .gpt2_config import PREFIX, read_gpt2, write_gpt2
from .llama_config import read_llama, read_smollm3, write_llama, write_smollm3
from .shape import ModelShape
from .unsupported import check_quantised, why_not_family
from .weight_files import CONFIG, Fields, Problems, Settings, WeightFiles

SHAPE = "shape"  # key of a file's header: the fields of ModelShape as JSON

LLAMA_NAMES = (  # a part of a name here -> in files
    ("wte.", "model.embed_tokens."),
    ("h.", "model.layers."),
    (".attn.", ".self_attn."),
    (".ln_1.", ".input_layernorm."),
    (".ln_2.", ".post_attention_layernorm."),
    ("ln_f.", "model.norm."),
    ("head.", "lm_head."),
)
LLAMA_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Family:
    """A kind of model: its files' names and settings."""

    architecture: str  # the class in transformers
    read: Callable[[WeightFiles], tuple[Fields, Problems]]
    write: Callable[[ModelShape], dict[str, Any]]  # config.json for an export
    names: tuple[tuple[str, str], ...] = LLAMA_NAMES
    prefix: str = ""  # that stored names may have
    transposed: tuple[str, ...] = ()  # ends of names whose weights are stored as [in, out]
    buffers: str = r".*\.rotary_emb\.inv_freq"  # stored by older versions, and not needed

    def theirs(self, name: str) -> str:
        """The stored name of a parameter."""
        return _renamed(name, self.names)

    def ours(self, name: str) -> str:
        """The name here of a stored parameter."""
        pairs = ((theirs, ours) for ours, theirs in self.names)
        return _renamed(name.removeprefix(self.prefix), pairs)


def _renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Replace parts of a name: those with a dot before them anywhere, others at its beginning."""
    for old, new in pairs:
        if old.startswith("."):
            name = name.replace(old, new)
        elif name.startswith(old):
            name = new + name.removeprefix(old)
    return name


FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        read_gpt2,
        write_gpt2,
        names=(("head.", "lm_head."),),
        prefix=PREFIX,
        transposed=("attn.c_attn.weight", "c_proj.weight", "mlp.c_fc.weight"),
        buffers=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    ),
    "llama": Family("LlamaForCausalLM", read_llama, write_llama),
    "qwen2": Family(
        "Qwen2ForCausalLM", lambda files: read_llama(files, qkv_bias=True), write_llama
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", lambda files: read_llama(files, head_norm=True), write_llama
    ),
    "smollm3": Family("SmolLM3ForCausalLM", read_smollm3, write_smollm3),
}


def check_settings(settings: Settings) -> str:
    """The row of FAMILIES that a config.json names.

    Raises ValueError for another family, and for quantised weights.
    """
    name = str(settings.get("model_type", "gpt2"))
    if name not in FAMILIES:
        why = why_not_family(name, settings)
        allowed = ", ".join(FAMILIES)
        raise ValueError(f"model_type in {CONFIG} is {quoted(name)}{why}; supported are {allowed}")
    check_quantised(settings, {})
    return name


def read_shape(files: WeightFiles) -> tuple[ModelShape, Problems]:
    """The shape of a model, and what does not fit.

    Raises ValueError, in one line with the path, if there is no shape to speak of.
    """
    try:
        if SHAPE in files.header:  # a file of our own
            return ModelShape(**parse_json(files.header[SHAPE])), []
        name = check_settings(files.settings)
        check_quantised({}, files.dtypes)
        if "model_type" not in files.settings and LLAMA_EMBEDDING in files.shapes:
            raise ValueError(f"{CONFIG} with its model_type is missing, and this is no GPT-2")
        fields, problems = FAMILIES[name].read(files)
        return ModelShape(**fields, family=name), problems
    except ValueError as error:
        raise ValueError(f"{files.path}: {error}") from None
    except (TypeError, AttributeError, KeyError, ArithmeticError) as error:
        # a list in place of a number, a field of another version and so on
        raise ValueError(f"{files.path}: malformed settings ({one_line(error)})") from None
