"""What a GPU does with the library: `python benchmark.py gpu`, some minutes on a machine with one.

Each step prints one line of JSON as it ends, and appends it to --lines; an error is a line too.

    rollout   decoding with the shape of Qwen2.5-0.5B
    update    a step of all weights of 0.5B, in three ways; peak memory beside `minigrpo plan`
    7B        a rollout and a step of LoRA with the shape of Qwen2.5-7B, in bfloat16 and in NF4
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from minigrpo import Config
from minigrpo.learner import Learner
from minigrpo.losses import loss_spec
from minigrpo.model.lora import add_adapters
from minigrpo.model.transformer import ModelShape, Transformer
from minigrpo.runtime.device import Precision, low_precision_copy, pick_device, set_up_process
from minigrpo.runtime.distributed import DistContext
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
    dry: bool = False
    """Tiny shapes on a CPU, to try the script itself."""
    lines: Path = Path("gpu.jsonl")
    """Each step's line is appended here."""

    def run(self, console: Console) -> dict[str, Any]:
        device = pick_device("cpu" if self.dry else "cuda")
        work = Work(device, self.dry)
        steps: dict[str, Callable[[], Mapping[str, Any]]] = {
            "rollout": lambda: work.rollout(work.model("0.5B"), work.new_tokens),
            "update": lambda: work.update(work.model("0.5B")),
            "no checkpoints": lambda: work.update(work.model("0.5B"), gradient_checkpointing=False),
            "7B, bfloat16": lambda: work.large("bfloat16"),
            "7B, NF4": lambda: work.large("nf4"),
            "compiled": lambda: work.update(work.model("0.5B"), compile_model=True),
        }
        rows = []
        for name, step in steps.items():
            row: dict[str, Any] = {"step": name, "device": device_name(device)}
            try:
                row |= step()
            except Exception as error:  # the other steps may work
                row["error"] = f"{type(error).__name__}: {error}"[:600]
            rows.append(row)
            console.print(json.dumps(row), markup=False, soft_wrap=True)
            with self.lines.open("a") as file:
                print(json.dumps(row), file=file)
        return {"device": device_name(device), "tables": [], "steps": rows}


class Work:
    def __init__(self, device: torch.device, dry: bool) -> None:
        self.device, self.dry = device, dry
        self.prompts, self.group, self.prompt_len = (2, 4, 20) if dry else (8, 8, 256)
        self.new_tokens = 24 if dry else 512
        self.speed = Config.of(use_amp=True, use_tf32=True).speed
        set_up_process(self.speed, device)

    def model(self, name: str, base_dtype: str = "") -> Transformer:
        """Random weights on the device; with `base_dtype` frozen ones with adapters."""
        shape = SHAPES["dry" if self.dry else name]
        with torch.device(self.device):
            model = Transformer(shape, seed=None).to_empty(device=self.device)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter.data, 0, 0.02)
        if base_dtype:
            model.store(base_dtype)
            add_adapters(model, 16)
        return model.to(self.device)

    def _generation(self, model: Transformer, new_tokens: int) -> Generation:
        rng = np.random.default_rng(0)
        return Generation(
            low_precision_copy(self.speed, model),
            torch.from_numpy(rng.integers(0, 400, (self.prompts, self.prompt_len))),
            torch.full((self.prompts,), self.prompt_len),
            stops=[],
            max_new_tokens=new_tokens,
            num_samples=self.group,
            prompts_at_once=self.prompts,
            u=rng.random((self.prompts, self.group, new_tokens), dtype=np.float32),
            sampling=PLAIN,
            drafts=None,
            num_speculative_tokens=0,
            work=Counter(),
            answers=None,
        )

    def rollout(self, model: Transformer, new_tokens: int) -> dict[str, float]:
        precision = Precision(self.speed, self.device, NonFiniteGuard())
        with precision.autocast():
            self._generation(model, 8).run()
            generation = self._generation(model, new_tokens)
            synchronize(self.device)
            start = time.perf_counter()
            generation.run()
            synchronize(self.device)
            seconds = time.perf_counter() - start
        tokens_per_s = self.prompts * self.group * new_tokens / seconds
        return {
            "ms_per_round": 1e3 * seconds / generation.work["rounds"],
            "tokens_per_s": tokens_per_s,
        }

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
            if step == 1 and self.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            synchronize(self.device)
            start = time.perf_counter()
            learner.learn(batch, step)
            synchronize(self.device)
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() / MIB  # 0 without CUDA
        planned = peak_of(parts_of(config, model.shape, self.prompt_len)) / MIB
        return {"s": seconds, "peak_mib": peak, "planned_mib": planned}

    def large(self, base_dtype: str) -> dict[str, Any]:
        model = self.model("7B", base_dtype)
        rollout = self.rollout(model, 16 if self.dry else 64)
        update = self.update(model, lora_rank=16, base_dtype=base_dtype)
        return {"rollout": rollout, "update": update}
