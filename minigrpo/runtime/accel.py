"""Device and speed layers: one function per flag, kept apart from the mathematics.

Decoding has its own in sampling/, packing is in model/; what --fast turns on is in fast.py.
"""

import copy
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import Config, MemoryConfig, RunConfig, SpeedConfig
from ..model.attention import Attend, attention
from ..model.linear import onednn_is_faster, use_onednn
from ..model.logprobs import chunk_size
from ..model.transformer import Block, Transformer
from .combinations import FIRST_PROFILED, LAST_PROFILED
from .flags import ConfigError
from .freed_memory import keep_freed_memory

Say = Callable[[str], object]


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of --device. With auto or cuda, each local process gets a CUDA device of its own.

    Raises ConfigError for a device that this machine does not have.
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
        torch.cuda.set_device(device)  # the default for code that names no device
        # cuDNN's attention builds a plan for each new length, and lengths differ in every batch
        torch.backends.cuda.enable_cudnn_sdp(False)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, got {name}")
    return device


def autocast(speed: SpeedConfig, device: torch.device) -> AbstractContextManager[object]:
    """--use-amp: matrix products in --amp-dtype; parameters, moments, log-softmax in float32."""
    if not speed.use_amp:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, speed.amp_dtype))


def grad_scaler(speed: SpeedConfig, device: torch.device) -> torch.amp.GradScaler:
    """The loss scaler for --amp-dtype float16; disabled otherwise.

    bfloat16 has the range of float32, so it needs none. Raises ConfigError for float16 off CUDA.
    """
    half = speed.use_amp and speed.amp_dtype == "float16"
    if half and device.type != "cuda":
        raise ConfigError("--amp-dtype float16 needs a CUDA device; bfloat16 is allowed everywhere")
    return torch.amp.GradScaler(device.type, enabled=half)


def check_compiler(speed: SpeedConfig, device: torch.device) -> None:
    """Raise ConfigError if --compile-model finds no compiler: C++ for CPU, C for CUDA."""
    kind, names = "C", ["gcc", "clang"]
    if device.type == "cpu":
        kind, names = "C++", [os.environ.get("CXX", "g++")]
    elif "CC" in os.environ:
        names = [os.environ["CC"]]
    if speed.compile_model and not any(map(shutil.which, names)):
        raise ConfigError(
            f"--compile-model needs a {kind} compiler, {' or '.join(names)}; "
            "--no-compile-model needs none"
        )


def set_up_process(speed: SpeedConfig, device: torch.device) -> None:
    """What holds for the whole process: --use-tf32, --onednn and --keep-freed-memory.

    TF32 has 10 bits of mantissa.
    """
    torch.set_float32_matmul_precision("high" if speed.use_tf32 else "highest")
    use_onednn(speed.onednn and onednn_is_faster())
    if speed.keep_freed_memory and device.type == "cpu":
        keep_freed_memory()


def recompute(block: Block, x: Tensor, attend: Attend) -> Tensor:
    """Run a block, and recompute its activations in backward. Nothing in it is random."""
    return checkpoint(block, x, attend, use_reentrant=False, preserve_rng_state=False)


def logprob_chunk(memory: MemoryConfig, model: Transformer) -> int:
    """--chunked-logprobs: how many tokens' logits are in memory at once; 0: all."""
    if not memory.chunked_logprobs:
        return 0
    return chunk_size(model.shape.vocab_size, model.device.type)


def with_training_layers(config: Config, model: Transformer) -> Transformer:
    """A model that shares `model`'s parameters, with --gradient-checkpointing and --compile-model.
    `model` itself is left alone, for the sampler.
    """
    trained = sharing_weights(model)
    if config.memory.gradient_checkpointing:
        trained.checkpoint_blocks = recompute
    if config.speed.compile_model:
        compile_blocks(trained)
    return trained


def low_precision_copy(speed: SpeedConfig, model: Transformer) -> Transformer:
    """--low-precision-weights: a copy with the linear layers of the blocks in --amp-dtype.

    It shares all other parameters, and frozen ones that are stored like that. The results are those
    of autocast, which would cast these weights again in every forward. Without the flag, return the
    model itself.
    """
    if not speed.low_precision_weights:
        return model
    linears = [module for module in model.h.modules() if isinstance(module, nn.Linear)]
    dtype = getattr(torch, speed.amp_dtype)
    cast = {
        id(p): nn.Parameter(p.detach().to(dtype), requires_grad=False)
        for linear in linears
        for p in linear.parameters()
        if p.dtype != dtype
    }
    return sharing_weights(model, cast)


def sharing_weights(
    model: Transformer, replaced: dict[int, nn.Parameter] | None = None
) -> Transformer:
    """A copy of the modules that shares their parameters, except those in `replaced`, by id."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, shared | (replaced or {}))


@torch.no_grad()
def refresh(low: Transformer, model: Transformer) -> None:
    """Copy the current weights into a low-precision copy, in place. Frozen ones never change."""
    pairs = zip(low.parameters(), model.parameters(), strict=True)
    stale = [(a, b) for a, b in pairs if a is not b and b.requires_grad]
    if stale:
        torch._foreach_copy_([a for a, _ in stale], [b for _, b in stale])


def graphs_compiled() -> int:
    """Graphs that torch.compile has made in this process; more after the warm-up: recompiles."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # importing it would take a second or two
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


class NoProfiler(nullcontext[Any]):
    def __enter__(self) -> "NoProfiler":
        return self

    def step(self) -> None: ...


def profiler(
    run: RunConfig, folder: Path, device: torch.device, is_main: bool, steps_left: int, warn: Say
) -> "NoProfiler | torch.profiler.profile":
    """--profile: a trace of a few steps of the main process, in the run's folder."""
    if not (run.profile and is_main):
        return NoProfiler()
    if steps_left < LAST_PROFILED:  # of a run that is resumed near its end
        warn(f"--profile: only {max(0, steps_left)} steps are left, {LAST_PROFILED} are needed")
        return NoProfiler()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    active = LAST_PROFILED - FIRST_PROFILED + 1
    steps = {"wait": FIRST_PROFILED - 2, "warmup": 1, "active": active, "repeat": 1}
    return torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(**steps),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(str(folder / "profile")),
    )


def uncompiled_attention() -> Callable[..., Tensor]:
    """Attention excluded from torch.compile.

    Its shapes differ from batch to batch, so a block compiled with it would be recompiled over and
    over. A function, not a constant, because `torch.compiler.disable` imports torch._dynamo.
    """
    return torch.compiler.disable(attention)


def compile_blocks(model: Transformer) -> None:
    """torch.compile each block in place, which keeps the names in the state dict."""
    from torch import _dynamo

    # it splits graphs to overlap communication, which compiling block by block allows already
    _dynamo.config.optimize_ddp = False
    for block in model.h:
        assert isinstance(block, Block)
        block.attention = uncompiled_attention()
        block.compile(dynamic=True)
