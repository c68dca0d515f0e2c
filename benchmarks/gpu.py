"""What a GPU does with the library: `python benchmark.py gpu`, ten minutes on a machine with one.

Each step prints one line of JSON as it ends, and appends it to --lines; an error is a line too.
docs/performance.md says what each step measures.
"""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console

from minigrpo import Config
from minigrpo.build import Job
from minigrpo.memory import components_of, peak_of
from minigrpo.model.config_json import write_config
from minigrpo.model.delta import CHUNK, gated_delta, unit
from minigrpo.model.shape import AttentionShape, GatedDeltaShape, ModelShape, Rope
from minigrpo.model.transformer import Transformer
from minigrpo.runtime.device import memory_mib, pick_device, set_up_process
from minigrpo.types import Completion, Completions, Example, RolloutBatch

from .measure import Outputs, device_name, synchronize
from .work import RandomText, Step, Work, byte_tokenizer

T = TypeVar("T")
LAYER = (AttentionShape(rope=Rope()),)
SHAPES = {
    "0.5B": ModelShape(151936, 2048, 24 * LAYER, 896, 14, "qwen2", kv_heads=2, mlp_width=4864),
    "7B": ModelShape(151936, 2048, 28 * LAYER, 3584, 28, "qwen2", 4, mlp_width=18944, tied=False),
    "Qwen3.5-0.8B": ModelShape(
        vocab_size=248320,
        context=2048,
        layers=6 * (*3 * (GatedDeltaShape(),), AttentionShape(rope=Rope(1e7, fraction=0.25))),
        width=1024,
        family="qwen3_5_text",
        kv_heads=2,
        head_dim=256,
        mlp_width=3584,
    ),
    "dry": ModelShape(500, 256, 2 * LAYER, 64, 4, "qwen2", kv_heads=2, mlp_width=96),
}


@dataclass(frozen=True)
class Gpu(Outputs):
    """Decoding, updates and memory with the shapes of Qwen2.5 and 3.5; options; `pytest -m gpu`."""

    dry: bool = False
    """Tiny shapes on a CPU, to try the script itself."""
    minutes: float = 9.0
    """Later, no further step begins."""
    lines: Path = Path("gpu.jsonl")
    """Each step's line is appended here."""

    def run(self, console: Console) -> dict[str, Any]:
        device = pick_device("cpu" if self.dry else "cuda")
        card = Card(device, self.dry)
        whole: dict[str, Any] = {"micro_batch_size": 0, "gradient_checkpointing": False}
        steps: dict[str, Callable[[], Mapping[str, Any]]] = {
            "machine": card.machine,
            "rollout": partial(card.rollout, "0.5B"),
            "rollout, graphs": partial(card.rollout, "0.5B", cuda_graphs=True),
            "natural": partial(card.rollout, "0.5B", natural=True),
            "natural, graphs": partial(card.rollout, "0.5B", natural=True, cuda_graphs=True),
            "transformers": card.transformers,
            "update": partial(card.update, "0.5B"),
            "no checkpoints": partial(card.update, "0.5B", gradient_checkpointing=False),
            "all at once": partial(card.update, "0.5B", **whole),
        }
        for dtype in ("bfloat16", "NF4"):
            adapters: dict[str, Any] = {"lora_rank": 16, "base_dtype": dtype.lower()}
            steps[f"7B, {dtype}"] = partial(card.rollout, "7B", **adapters)
            steps[f"7B, {dtype}, graphs"] = partial(
                card.rollout, "7B", cuda_graphs=True, **adapters
            )
            steps[f"7B, {dtype}, update"] = partial(card.update, "7B", **adapters)
        hybrid = "Qwen3.5-0.8B"
        steps[hybrid] = partial(card.rollout, hybrid)
        steps[f"{hybrid}, graphs"] = partial(card.rollout, hybrid, cuda_graphs=True)
        steps[f"{hybrid}, update"] = partial(card.update, hybrid)
        steps["scan"] = card.scan
        steps["compiled"] = partial(card.update, "0.5B", compile_model=True, **whole)
        steps["tests"] = card.tests
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
    gc.collect()  # a `Step` refers to itself
    torch.cuda.empty_cache()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row: dict[str, Any] = {}
    try:
        row |= step()
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:600]
    return row | {f"{name}_mib": mib for name, mib in memory_mib(device).items()}


class Card:
    def __init__(self, device: torch.device, dry: bool) -> None:
        self.device = device
        self.dry = dry
        self.prompts, self.group, self.prompt_len = (2, 4, 20) if dry else (8, 8, 256)
        self.new_tokens = 24 if dry else 512
        self.task = RandomText(0, self.prompt_len, 1)
        self.config = Config.of(
            use_amp=True,
            use_tf32=True,
            gradient_checkpointing=True,
            micro_batch_size=1,
            prompts_per_step=self.prompts,
            group_size=self.group,
            max_new_tokens=self.new_tokens,
        )
        set_up_process(self.config.speed, device)

    def machine(self) -> dict[str, Any]:
        size = 1 << (20 if self.dry else 28)
        numbers = torch.zeros(size, device=self.device)  # 1 GiB
        matrix = torch.zeros(size >> 15, size >> 15, dtype=torch.bfloat16, device=self.device)
        for _ in range(3):  # all but the last warm up
            copy_s, _ = self.seconds_of(lambda: numbers.add_(1))
            product_s, _ = self.seconds_of(lambda: matrix @ matrix)
        figures: dict[str, Any] = {
            "torch": torch.__version__,
            "GB_per_s": 2 * numbers.nbytes / copy_s / 1e9,  # read and written
            "TFLOP_per_s": 2 * len(matrix) ** 3 / product_s / 1e12,
        }
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            figures["total_mib"] = total / 2**20
            figures["context_mib"] = (total - free - torch.cuda.memory_reserved()) / 2**20
        return figures

    def seconds_of(self, action: Callable[[], T]) -> tuple[float, T]:
        synchronize(self.device)
        start = time.perf_counter()
        result = action()
        synchronize(self.device)
        return time.perf_counter() - start, result

    def step(self, name: str, *, natural: bool = False, **settings: Any) -> Step:
        """A step with random weights; if `natural`, tokens end completions at odds of 1/256."""
        shape = SHAPES["dry" if self.dry else name]
        with torch.device(self.device):
            model = Transformer(shape, seed=None).to_empty(device=self.device)
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter.data, 0, 0.02)
        stops = frozenset(range(shape.vocab_size // 256))
        tokenizer = replace(byte_tokenizer(shape.vocab_size), stops=stops)
        job = Job(self.config, tokenizer, self.task, None, ())
        work = Work(job, model, not natural, self.device)
        step = Step(self.config.replace(**settings), work, model=model)
        if self.device.type == "cuda":  # frozen weights were in float32 until here
            torch.cuda.reset_peak_memory_stats()
        return step

    def rollout(self, name: str, *, natural: bool = False, **settings: Any) -> dict[str, Any]:
        step = self.step(name, natural=natural, **settings)
        sampler, sampling = step.sampler, step.config.sampling
        examples = [self.task.train(number) for number in range(self.prompts)]
        for tokens in (16, sampling.max_new_tokens // (8 if name == "7B" else 1)):  # 16 warm up
            shorter = replace(sampler, config=step.config.replace(max_new_tokens=tokens))
            size = self.prompts, self.group, tokens
            complete = partial(
                shorter.complete,
                examples,
                num_samples=self.group,
                uniforms=np.random.default_rng(0).random(size, np.float32),
                sampling=sampling,
                batch_size=0,
            )
            seconds, sampled = self.seconds_of(complete)
        return {
            "s": seconds,
            "ms_per_round": 1e3 * seconds / sampled.rounds,
            "tokens_per_s": int(sampled.completions.completion_mask.sum()) / seconds,
        }

    def transformers(self) -> dict[str, float]:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        shape = SHAPES["dry" if self.dry else "0.5B"]
        with torch.device(self.device):
            model = Qwen2ForCausalLM(Qwen2Config(**write_config(shape))).bfloat16().eval()
        rows = self.prompts * self.group
        prompts = torch.randint(
            1, 400, (rows, self.prompt_len), device=self.device
        )  # 0 is the padding
        # By default it samples from the 50 most likely tokens. The first call warms up.
        generate = partial(model.generate, prompts, do_sample=True, pad_token_id=0)
        seconds = {n: self.seconds_of(partial(generate, max_new_tokens=n))[0] for n in (4, 8, 72)}
        per_round = (seconds[72] - seconds[8]) / 64
        return {"ms_per_round": 1e3 * per_round, "tokens_per_s": rows / per_round}

    def update(self, name: str, **settings: Any) -> dict[str, Any]:
        """Seconds of the third of three updates."""
        step = self.step(name, **settings)
        size = self.prompts, self.group, self.new_tokens
        completions = Completions(
            torch.randint(0, 400, (self.prompts, self.prompt_len)),
            torch.full((self.prompts,), self.prompt_len),
            torch.randint(0, 400, size),
            torch.ones(size, dtype=torch.bool),
            torch.zeros(size),
        )
        examples = [Example("")] * self.prompts
        texts = [[Completion("")] * self.group] * self.prompts
        batch = RolloutBatch(examples, completions, texts, advantages=torch.randn(size[:2]))
        for number in range(3):
            seconds, _ = self.seconds_of(partial(step.learner.learn, batch, number))
        components = components_of(step.config, step.model.shape, self.prompt_len)
        return {"s": seconds, "planned_mib": peak_of(components) / 2**20}

    def scan(self) -> dict[str, float]:
        """The recurrence of a layer of Qwen3.5-0.8B along all completions, and its solve alone."""
        rows, heads, size = self.prompts * self.group, 2 if self.dry else 16, 128
        like = torch.rand(rows, heads, self.new_tokens, size, device=self.device)
        q, k, v = (unit(torch.randn_like(like)).requires_grad_() for _ in range(3))
        strength = torch.rand_like(like[..., 0])
        states = torch.zeros(rows, heads, size, size, device=self.device)
        system = torch.rand(rows * heads * -(-self.new_tokens // CHUNK), CHUNK, CHUNK)
        system = system.to(self.device).tril(-1)
        wanted = torch.rand(len(system), CHUNK, 2 * size, device=self.device)
        solve = partial(torch.linalg.solve_triangular, upper=False, unitriangular=True)
        for _ in range(2):  # the first one warms up
            forward_s, (outputs, _) = self.seconds_of(
                lambda: gated_delta(q, k, v, -strength, strength, states)
            )
            backward_s, _ = self.seconds_of(outputs.sum().backward)
            solve_s, _ = self.seconds_of(lambda: solve(system, wanted))
        return {"forward_s": forward_s, "backward_s": backward_s, "solve_s": solve_s}

    def tests(self) -> dict[str, Any]:
        words = f"-m pytest -q -m gpu -o addopts= {'--co' * self.dry}"  # in one process
        done = subprocess.run([sys.executable, *words.split()], capture_output=True, text=True)
        return {"exit_code": done.returncode, "last": done.stdout.splitlines()[-6:]}
