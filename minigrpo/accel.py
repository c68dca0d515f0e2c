"""The speed layers: one function and one flag each. Each can be deleted without touching the maths."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .config import Config, ConfigError
from .logprobs import CHUNK
from .model import GPT, Attend, Block


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """--device; of several processes on a machine each gets a CUDA device of its own.

    Raises ConfigError for a device that is not here.
    """
    if name == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    if name in ("auto", "cuda"):
        name = f"cuda:{local_rank}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, got {name}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices; cpu is allowed")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, got {name}")
    return device


def autocast(config: Config, device: torch.device) -> AbstractContextManager[object]:
    """--use-amp: matrix products in --amp-dtype; parameters, moments and log-softmax stay in float32."""
    if not config.use_amp:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, config.amp_dtype))


def grad_scaler(config: Config, device: torch.device) -> torch.amp.GradScaler:
    """--amp-dtype float16 needs its loss scaled; bfloat16 has float32's range, and the scaler does nothing."""
    half = config.use_amp and config.amp_dtype == "float16"
    if half and device.type != "cuda":
        raise ConfigError("--amp-dtype float16 needs a CUDA device; bfloat16 is allowed everywhere")
    return torch.amp.GradScaler(device.type, enabled=half)


def use_tf32(config: Config) -> None:
    """--use-tf32: float32 products on tensor cores with 10 bits of mantissa. Process-wide, as torch has it."""
    torch.set_float32_matmul_precision("high" if config.use_tf32 else "highest")


def recompute(block: Block, x: Tensor, attend: Attend) -> Tensor:
    return checkpoint(block, x, attend, use_reentrant=False)


def checkpoint_blocks(config: Config, model: GPT) -> None:
    """--gradient-checkpointing: keep only the input of each block, run the block again in the backward pass."""
    if config.gradient_checkpointing:
        model.checkpoint_blocks = recompute


def chunk_logprobs(config: Config, model: GPT) -> None:
    """--chunked-logprobs: the logits of a batch never exist at once, and are computed again in the backward pass."""
    model.logprob_chunk = CHUNK if config.chunked_logprobs else 0


def compile_blocks(config: Config, model: GPT) -> None:
    """--compile-model: torch.compile each block in place; names in the state dict stay as they are."""
    if config.compile_model:
        for block in model.h:
            block.compile(dynamic=True)
