"""What a GPU does with the library: `python benchmark.py gpu`, ten minutes on a machine with one.

Each step prints one line of JSON as it ends, and appends it to --lines; an error is a line too.

    machine      the card, its bandwidth and speed, and what CUDA itself takes of its memory
    rollout      decoding with the shape of Qwen2.5-0.5B, all completions of the greatest length
    natural      the same where completions end one after another
    update       a step of all weights of 0.5B; peak memory beside `minigrpo plan`
    7B           a rollout and a step of LoRA with the shape of Qwen2.5-7B
    transformers its `generate`, with the shape of Qwen2.5-0.5B
    tests        `pytest -m gpu`: among others, runs under each option, beside a CPU
"""

import json
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from minigrpo import Config
from minigrpo.learner import Learner
from minigrpo.losses import loss_spec
from minigrpo.model.hf import write_config
from minigrpo.model.lora import add_adapters
from minigrpo.model.transformer import ModelShape, Transformer
from minigrpo.runtime.device import (
    Precision,
    low_precision_copy,
    memory_mib,
    pick_device,
    set_up_process,
)
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.graphs import RoundGraphs, capturing
from minigrpo.runtime.guard import NonFiniteGuard
from minigrpo.sampling.generate import PLAIN, Generation
from minigrpo.tools.plan import parts_of, peak_of
from minigrpo.types import Completions, Example, RolloutBatch

from .measure import Outputs, device_name, synchronize

MIB = 2**20
SHAPES = {
    "0.5B": ModelShape(151936, 2048, 24, 896, 14, "qwen2", kv_heads=2, mlp_width=4864),
    "7B": ModelShape(151936, 2048, 28, 3584, 28, "qwen2", 4, mlp_width=18944, tied=False),
    "dry": ModelShape(500, 256, 2, 64, 4, "qwen2", kv_heads=2, mlp_width=96),
}


@dataclass(frozen=True)
class Gpu(Outputs):
    """Decoding, updates and memory with the shapes of Qwen2.5; every option; `pytest -m gpu`."""

    dry: bool = False
    """Tiny shapes on a CPU, to try the script itself."""
    minutes: float = 9.0
    """Later, no further step begins."""
    lines: Path = Path("gpu.jsonl")
    """Each step's line is appended here."""

    def run(self, console: Console) -> dict[str, Any]:
        device = pick_device("cpu" if self.dry else "cuda")
        work = Work(device, self.dry)
        steps: dict[str, Callable[[], Mapping[str, Any]]] = {
            "machine": work.machine,
            "rollout": lambda: work.rollout(work.model("0.5B"), graphs=False),
            "rollout, graphs": lambda: work.rollout(work.model("0.5B"), graphs=True),
            "natural": lambda: work.rollout(work.model("0.5B"), graphs=False, natural=True),
            "natural, graphs": lambda: work.rollout(work.model("0.5B"), graphs=True, natural=True),
            "transformers": work.transformers,
            "update": lambda: work.update(work.model("0.5B")),
            "no checkpoints": lambda: work.update(work.model("0.5B"), gradient_checkpointing=False),
            "7B, bfloat16": lambda: work.large("bfloat16"),
            "7B, NF4": lambda: work.large("nf4"),
            "compiled": lambda: work.update(work.model("0.5B"), compile_model=True),
            "tests": work.tests,
        }
        end = time.monotonic() + 60 * self.minutes
        rows = []
        for name, step in steps.items():
            start = time.monotonic()
            figures = attempt(step, device) if start < end else {"skipped": "no time left"}
            seconds = round(time.monotonic() - start, 1)
            row = {"step": name, "device": device_name(device), **figures, "seconds": seconds}
            rows.append(row)
            console.print(json.dumps(row), markup=False, soft_wrap=True)
            with self.lines.open("a") as file:
                print(json.dumps(row), file=file)
        return {"device": device_name(device), "tables": [], "steps": rows}


def attempt(step: Callable[[], Mapping[str, Any]], device: torch.device) -> dict[str, Any]:
    """A step's figures, or its error, with the peaks of memory; the other steps may work."""
    row: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        row |= step()
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:600]
    return row | {f"{name}_mib": mib for name, mib in memory_mib(device).items()}


class Work:
    def __init__(self, device: torch.device, dry: bool) -> None:
        self.device, self.dry = device, dry
        self.prompts, self.group, self.prompt_len = (2, 4, 20) if dry else (8, 8, 256)
        self.new_tokens = 24 if dry else 512
        self.speed = Config.of(use_amp=True, use_tf32=True).speed
        set_up_process(self.speed, device)

    def machine(self) -> dict[str, Any]:
        size = 1 << (20 if self.dry else 28)
        numbers = torch.zeros(size, device=self.device)  # 1 GiB
        matrix = torch.zeros(size >> 15, size >> 15, dtype=torch.bfloat16, device=self.device)
        for _ in range(3):  # the first ones warm up
            copy_s = self.seconds_of(lambda: numbers.add_(1))
            product_s = self.seconds_of(lambda: matrix @ matrix)
        found: dict[str, Any] = {
            "torch": torch.__version__,
            "GB_per_s": 2 * numbers.nbytes / copy_s / 1e9,  # read and written
            "TFLOP_per_s": 2 * len(matrix) ** 3 / product_s / 1e12,
        }
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            of_torch = torch.cuda.memory_reserved()
            found["total_mib"] = total / MIB
            found["context_mib"] = (total - free - of_torch) / MIB  # if nobody else uses it
        return found

    def seconds_of(self, action: Callable[[], object]) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        action()
        synchronize(self.device)
        return time.perf_counter() - start

    def model(self, name: str, base_dtype: str = "") -> Transformer:
        """Random weights on the device; with `base_dtype` frozen ones with adapters."""
        shape = SHAPES["dry" if self.dry else name]
        with torch.device(self.device):
            model = Transformer(shape, seed=None).to_empty(device=self.device)
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter.data, 0, 0.02)
        if base_dtype:
            model.store(base_dtype)
            add_adapters(model, 16)
        return model.to(self.device)

    def generation(
        self, model: Transformer, new_tokens: int, *, graphs: bool, stops: Sequence[int] = ()
    ) -> Generation:
        rng = np.random.default_rng(0)
        return Generation(
            model,
            torch.from_numpy(rng.integers(0, 400, (self.prompts, self.prompt_len))),
            torch.full((self.prompts,), self.prompt_len),
            stops=stops,
            max_new_tokens=new_tokens,
            num_samples=self.group,
            prompts_at_once=self.prompts,
            u=rng.random((self.prompts, self.group, new_tokens), dtype=np.float32),
            sampling=PLAIN,
            drafts=None,
            num_speculative_tokens=0,
            work=Counter(),
            answers=None,
            graphs=RoundGraphs(capturing()) if graphs and not self.dry else None,
        )

    def rollout(
        self, model: Transformer, *, graphs: bool, new_tokens: int = 0, natural: bool = False
    ) -> dict[str, Any]:
        """`natural`: one token in 256 ends a completion, after some 220 tokens in the mean."""
        stops = range(model.shape.vocab_size // 256 if natural else 0)
        low = low_precision_copy(self.speed, model)
        begin = partial(self.generation, low, graphs=graphs, stops=stops)
        with Precision(self.speed, self.device, NonFiniteGuard()).autocast():
            short, long = (self.observed(begin(tokens)) for tokens in (8, 16))  # which warms up
            generation = begin(new_tokens or self.new_tokens)
            seconds = self.seconds_of(generation.run)
        return {
            "s": seconds,
            "ms_per_round": 1e3 * seconds / generation.work["rounds"],
            "tokens_per_s": float(generation.lengths[:-1].sum()) / seconds,
            "graphs": len(generation.graphs.replays) if generation.graphs else 0,
            # what 8 rounds more bring
            **{name: (long[name] - short[name]) / 8 for name in short},
        }

    def observed(self, generation: Generation) -> dict[str, float]:
        """Kernels, their milliseconds, and times at which the host waits, of a whole rollout."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities = [torch.profiler.ProfilerActivity.CUDA]
            torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            try:
                with torch.profiler.profile(activities=activities) as profile:
                    generation.run()
                    synchronize(self.device)
            finally:
                if self.device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        kernels = [e for e in profile.events() or [] if str(e.device_type).endswith("CUDA")]
        return {
            "kernels_per_round": len(kernels),
            "kernel_ms_per_round": sum(e.time_range.elapsed_us() for e in kernels) / 1e3,
            "waits_per_round": len(waits),
        }

    def transformers(self) -> dict[str, float]:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        shape = SHAPES["dry" if self.dry else "0.5B"]
        with torch.device(self.device):
            model = Qwen2ForCausalLM(Qwen2Config(**write_config(shape))).bfloat16().eval()
        rows = self.prompts * self.group
        prompts = torch.randint(1, 400, (rows, self.prompt_len), device=self.device)  # 0 pads
        # its own defaults: from the 50 most likely tokens, without an end; the first warms up
        generate = partial(model.generate, prompts, do_sample=True, pad_token_id=0)
        seconds = {n: self.seconds_of(partial(generate, max_new_tokens=n)) for n in (4, 8, 72)}
        per_round = (seconds[72] - seconds[8]) / 64
        return {"ms_per_round": 1e3 * per_round, "tokens_per_s": rows / per_round}

    def update(self, model: Transformer, **settings: Any) -> dict[str, Any]:
        """Seconds of the third of three steps."""
        config = Config.of(
            use_amp=True,
            use_tf32=True,
            micro_batch_size=1,
            prompts_per_step=self.prompts,
            group_size=self.group,
            max_new_tokens=self.new_tokens,
            **{"gradient_checkpointing": True, **settings},
        )
        size = self.prompts, self.group, self.new_tokens
        completions = Completions(
            torch.randint(0, 400, (self.prompts, self.prompt_len)),
            torch.full((self.prompts,), self.prompt_len),
            torch.randint(0, 400, size),
            torch.ones(size, dtype=torch.bool),
            torch.zeros(size),
        )
        examples, texts = [Example("")] * self.prompts, [[""] * self.group] * self.prompts
        batch = RolloutBatch(examples, completions, texts, advantages=torch.randn(size[:2]))
        precision = Precision(config.speed, self.device, NonFiniteGuard())
        learner = Learner(config, model, loss_spec("grpo"), precision, DistContext(), print)
        for step in range(3):
            seconds = self.seconds_of(partial(learner.learn, batch, step))
        planned = peak_of(parts_of(config, model.shape, self.prompt_len)) / MIB
        return {"s": seconds, "planned_mib": planned}

    def large(self, base_dtype: str) -> dict[str, Any]:
        model = self.model("7B", base_dtype)
        new_tokens = 24 if self.dry else 64
        return {
            "rollout": self.rollout(model, graphs=False, new_tokens=new_tokens),
            "rollout, graphs": self.rollout(model, graphs=True, new_tokens=new_tokens),
            "update": self.update(model, lora_rank=16, base_dtype=base_dtype),
        }

    def tests(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *["--co"] * self.dry]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return {"exit_code": done.returncode, "last": done.stdout.splitlines()[-6:]}
