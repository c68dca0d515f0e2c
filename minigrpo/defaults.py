"""Settings that fit a published model, by its size and by which weights are trained.

The other defaults, in config.py, fit the small models that ship, and so do the settings of the
tasks. docs/models.md says where these values come from.
"""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

NOT_PUBLISHED = ("shipped", "scratch")
MEDIUM, LARGE, HUGE = 50e6, 300e6, 3e9  # parameters; a smaller model keeps the other defaults
# peak learning rates: of all weights, of LoRA
RATES = {MEDIUM: (1e-5, 1e-4), LARGE: (1e-6, 1e-5)}
SFT_RATES = (2e-5, 2e-4)
LONGEST = 512  # new tokens, or half of a shorter context
ALL = {"prompts_per_step": 8, "group_size": 8}
SAVING = {"micro_batch_size": 1, "rollout_batch_size": 8, "gradient_checkpointing": True}


class Size(NamedTuple):
    """What is known of a published model before its weights are read."""

    parameters: int
    context: int

    @classmethod
    def of(cls, model: Any) -> "Size":
        """That of a Transformer."""
        return cls(sum(x.numel() for x in model.parameters()), model.shape.context)


def size_of(model: str) -> Size | None:
    """The size of a published model.

    None for models that ship, for random weights, for runs that began with these, and for a model
    that cannot be read: then loading it says why.
    """
    if model in NOT_PUBLISHED:
        return None
    try:
        path = Path(model)
        folder = path if path.is_dir() else path.parent
        if (record := folder / "config.toml").is_file():  # a run, or its model.safetensors
            return size_of(tomllib.loads(record.read_text("utf-8"))["model"]["name"])
        if path.is_dir() and not any(folder.glob("*.safetensors")):
            return None
        # these import torch, which --help must not wait for
        from .model.hf import hub_folder, read_model_shape
        from .model.transformer import Transformer

        shape = read_model_shape(hub_folder(model, weights=False))
        return Size.of(Transformer(shape, seed=None))
    except Exception:
        return None


def settings_for(size: Size, config: Any) -> dict[str, Any]:
    """The settings that fit, by flat name, to what else is in a `Config`."""
    lora, device = config.model.lora_rank > 0, config.speed.device
    settings: dict[str, Any] = {**ALL, "max_new_tokens": min(LONGEST, size.context // 2)}
    if size.parameters >= MEDIUM:
        rates = RATES[LARGE if size.parameters >= LARGE else MEDIUM]
        settings["learning_rate"] = (SFT_RATES if config.supervised else rates)[lora]
    if size.parameters >= LARGE:
        settings |= {**SAVING, **({"use_amp": True} if has_bfloat16(device) else {})}
    if size.parameters >= HUGE and lora:
        settings["base_dtype"] = "bfloat16"
    return settings


def has_bfloat16(device: str) -> bool:
    """Whether --device stands for a CUDA device that computes in bfloat16."""
    import torch

    return (
        device != "cpu"
        and torch.cuda.is_available()
        and torch.cuda.is_bf16_supported(including_emulation=False)
    )
