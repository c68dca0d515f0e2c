"""The speed layers: one flag each. Each can be deleted without touching the maths."""

import copy
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import PROFILED, Config
from ..model.logprobs import chunk_size
from ..model.transformer import Attend, Block, Transformer, attention
from .flags import ConfigError


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
        raise ConfigError(
            f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices; cpu is "
            "allowed"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)  # what does not name one means this one
        torch.backends.cuda.enable_cudnn_sdp(
            False
        )  # it makes a plan for every new length, and ours are all new
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, got {name}")
    return device


def autocast(config: Config, device: torch.device) -> AbstractContextManager[object]:
    """--use-amp: matrix products in --amp-dtype; parameters, moments and log-softmax stay in
    float32.
    """
    if not config.speed.use_amp:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, config.speed.amp_dtype))


def grad_scaler(config: Config, device: torch.device) -> torch.amp.GradScaler:
    """--amp-dtype float16 needs its loss scaled; bfloat16 has float32's range, and the scaler does
    nothing.
    """
    half = config.speed.use_amp and config.speed.amp_dtype == "float16"
    if half and device.type != "cuda":
        raise ConfigError("--amp-dtype float16 needs a CUDA device; bfloat16 is allowed everywhere")
    return torch.amp.GradScaler(device.type, enabled=half)


def check_compiler(config: Config, device: torch.device) -> None:
    """--compile-model makes C++ on CPU, and C on CUDA to launch its kernels. Raises ConfigError if
    nothing here can.
    """
    kind, names = (
        ("C++", [os.environ.get("CXX", "g++")]) if device.type == "cpu" else ("C", ["gcc", "clang"])
    )
    if device.type == "cuda" and "CC" in os.environ:
        names = [os.environ["CC"]]
    if config.speed.compile_model and not any(map(shutil.which, names)):
        raise ConfigError(
            f"--compile-model needs a {kind} compiler, {' or '.join(names)}; --no-compile-model "
            "goes without"
        )


def use_tf32(config: Config) -> None:
    """--use-tf32: float32 products on tensor cores with 10 bits of mantissa. Process-wide, as torch
    has it.
    """
    torch.set_float32_matmul_precision("high" if config.speed.use_tf32 else "highest")


def recompute(block: Block, x: Tensor, attend: Attend) -> Tensor:
    return checkpoint(
        block, x, attend, use_reentrant=False, preserve_rng_state=False
    )  # nothing is random in there


def checkpoint_blocks(config: Config, model: Transformer) -> None:
    """--gradient-checkpointing: keep only the input of each block, run the block again in the
    backward pass.
    """
    if config.memory.gradient_checkpointing:
        model.checkpoint_blocks = recompute


def chunk_logprobs(config: Config, model: Transformer) -> None:
    """--chunked-logprobs: the logits of a batch never exist at once, and are computed again in the
    backward pass.
    """
    model.logprob_chunk = (
        chunk_size(model.shape.vocab_size, model.device.type)
        if config.memory.chunked_logprobs
        else 0
    )


def low_precision_copy(config: Config, model: Transformer) -> Transformer:
    """--low-precision-weights: a model that shares all but the linear maps of its blocks, which are
    in --amp-dtype.

    Autocast would cast them in every forward, to the same numbers. Without that flag the model
    itself.
    """
    if not config.speed.low_precision_weights:
        return model
    linears = [module for module in model.h.modules() if isinstance(module, nn.Linear)]
    parameters = [parameter for linear in linears for parameter in linear.parameters()]
    dtype = getattr(torch, config.speed.amp_dtype)
    return sharing_weights(
        model, {id(p): nn.Parameter(p.detach().to(dtype), requires_grad=False) for p in parameters}
    )


def sharing_weights(model: Transformer, but: dict[int, nn.Parameter] | None = None) -> Transformer:
    """The same parameters, `but` those of some ids, in modules of their own: compiling one leaves
    the other.
    """
    return copy.deepcopy(
        model, {id(parameter): parameter for parameter in model.parameters()} | (but or {})
    )


@torch.no_grad()
def refresh(low: Transformer, model: Transformer) -> None:
    """Bring such a copy up to date, in place."""
    pairs = [
        (a, b) for a, b in zip(low.parameters(), model.parameters(), strict=True) if a is not b
    ]
    if pairs:
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


def graphs_compiled() -> int:
    """How many graphs torch.compile has made in this process; one more after the warm-up is a
    recompile.
    """
    dynamo = sys.modules.get(
        "torch._dynamo.utils"
    )  # which takes a second or two to import: not for this
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


class NoProfiler(nullcontext[Any]):
    def __enter__(self) -> "NoProfiler":
        return self

    def step(self) -> None: ...


def profiler(
    config: Config, folder: Path, device: torch.device, here: bool
) -> "NoProfiler | torch.profiler.profile":
    """--profile: a trace of a few steps, its phases named, in the run's folder, of the process that
    is `here`.
    """
    if not (config.run.profile and here):
        return NoProfiler()
    first, last = PROFILED
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(
            wait=first - 2, warmup=1, active=last - first + 1, repeat=1
        ),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(str(folder / "profile")),
    )


@cache
def uncompiled_attention() -> Callable[..., Tensor]:
    """Attention as torch.compile leaves it alone; one object, so that all blocks share one graph.

    The shapes of attention differ from batch to batch: compiled with it, a block would be compiled
    over and over. It is made on demand, because `torch.compiler.disable` imports torch._dynamo.
    """
    return torch.compiler.disable(attention)


def compile_blocks(config: Config, model: Transformer) -> None:
    """--compile-model: torch.compile each block in place; names in the state dict stay as they
    are."""
    if config.speed.compile_model:
        from torch import _dynamo

        _dynamo.config.optimize_ddp = (
            False  # which would cut blocks up to overlap what whole blocks overlap already
        )
        for block in model.h:
            assert isinstance(block, Block)
            block.attention = uncompiled_attention()
            block.compile(dynamic=True)
