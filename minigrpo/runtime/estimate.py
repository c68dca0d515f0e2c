"""Estimate a step before it is run: parameters, tokens, FLOPs and memory by kind; not time.

Completions are assumed to be as long as the true answers, and all different. Repetition makes the
actual step cheaper.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import tiktoken

from ..config import Config
from ..losses import LOSSES
from ..model.encoding import encode_answers, encode_prompts
from ..model.logprobs import chunk_size
from ..model.shape import ModelShape
from ..model.transformer import Transformer
from ..types import Task
from .accel import pick_device
from .build import make_model, make_task, make_tokenizer
from .flops import forward_flops

MIB = 2**20
# bytes that autograd keeps per token, layer and unit of width, measured with saved-tensor hooks;
# key: whether autocast is on
KEPT = {False: 66, True: 41}
# float32 copies of a logit that log-softmax, its gradient and the entropy hold at once
LOGIT_COPIES = 3.5
EXAMPLES_MEASURED = 64  # to find the mean lengths of prompts and answers


@dataclass(frozen=True)
class Estimate:
    """One process's share of a step."""

    parameters: int
    micro_batches: int
    tokens: Mapping[str, float]  # by phase
    flops: Mapping[str, float]  # by phase
    memory_mib: Mapping[str, float]  # by kind; not all of it at the same time
    peak_mib: float

    def rows(self) -> list[list[str]]:
        """Two columns, for a table."""
        rows = [
            ["parameters", f"{self.parameters / 1e6:.2f} M"],
            ["micro-batches", str(self.micro_batches)],
        ]
        rows += [[f"tokens: {name}", f"{count:,.0f}"] for name, count in self.tokens.items()]
        rows += [[f"GFLOP: {name}", f"{count / 1e9:,.1f}"] for name, count in self.flops.items()]
        rows += [[f"MiB: {name}", f"{size:,.1f}"] for name, size in self.memory_mib.items()]
        return [*rows, ["MiB: peak", f"{self.peak_mib:,.1f}"]]


def estimate_run(config: Config, world_size: int = 1) -> Estimate:
    """Build the model and the task of a config, and estimate a step. Raises ValueError."""
    tokenizer = make_tokenizer(config)
    device = pick_device(config.speed.device)
    return measure_lengths_and_estimate(
        config, make_model(config, tokenizer), make_task(config), tokenizer, device.type, world_size
    )


def measure_lengths_and_estimate(
    config: Config,
    model: Transformer,
    task: Task,
    tokenizer: tiktoken.Encoding,
    device: str,
    world_size: int,
) -> Estimate:
    """Estimate from the lengths of some examples. Raises ConfigError if a prompt is too long."""
    some = [task.train(0), *map(task.held_out, range(EXAMPLES_MEASURED))]
    longest = config.sampling.max_new_tokens
    prompt_len = encode_prompts(tokenizer, some, model.shape.context - longest)[1]
    answer_len = encode_answers(tokenizer, some)[1]
    return estimate_step(
        config,
        model.shape,
        prompt_len=float(prompt_len.float().mean()),
        answer_len=float(answer_len.float().mean().clamp(max=longest)),
        device=device,
        world_size=world_size,
    )


def estimate_step(
    config: Config,
    shape: ModelShape,
    *,
    prompt_len: float,
    answer_len: float,
    device: str,
    world_size: int = 1,
) -> Estimate:
    """`prompt_len` and `answer_len` are means, in tokens; `device` is a type, such as cuda."""
    job = _Job.of(config, shape, prompt_len, answer_len, device, world_size)
    memory = _memory(job)
    speed, stays = config.speed, ["weights", "Adam", "weights in low precision"]
    if not config.memory.offload_reference:
        stays.append("reference")
    updating = memory["gradients"] + memory["activations"] + memory["logits"]
    kv = memory["KV cache"]
    # with CUDA graphs, the KV cache outlives the rollout
    peak = updating + kv if speed.cuda_graphs else max(updating, kv)
    peak += sum(memory[name] for name in stays)
    tokens, flops = _work(job)
    return Estimate(
        parameters=job.parameters,
        micro_batches=-(-job.prompts // job.micro),
        tokens=tokens,
        flops=flops,
        memory_mib={name: amount / MIB for name, amount in memory.items() if amount},
        peak_mib=peak / MIB,
    )


@dataclass(frozen=True)
class _Job:
    """The numbers that the estimates share."""

    config: Config
    shape: ModelShape
    prompt_len: float
    answer_len: float
    device: str
    prompts: int  # of this process
    samples: int  # per prompt
    micro: int  # prompts per micro-batch
    prompts_once: bool  # whether the packing runs a prompt once per group
    blocks: int  # parameters of the blocks' linear maps
    head: int  # parameters of the output head

    @classmethod
    def of(
        cls,
        config: Config,
        shape: ModelShape,
        prompt_len: float,
        answer_len: float,
        device: str,
        world_size: int,
    ) -> "_Job":
        prompts = config.sampling.prompts_per_step // world_size
        return cls(
            config=config,
            shape=shape,
            prompt_len=prompt_len,
            answer_len=answer_len,
            device=device,
            prompts=prompts,
            samples=1 if config.supervised else config.sampling.group_size,
            micro=min(config.memory.micro_batch_size or prompts, prompts),
            prompts_once=config.speed.packing != "repeated",
            blocks=12 * shape.layers * shape.width**2,
            head=shape.vocab_size * shape.width,
        )

    @property
    def parameters(self) -> int:
        shape = self.shape
        others = (shape.context + 13 * shape.layers + 2) * shape.width  # positions, biases, norms
        return self.blocks + self.head + others

    @property
    def completion_tokens(self) -> float:
        return self.prompts * self.samples * self.answer_len

    @property
    def update_tokens(self) -> float:
        copies = 1 if self.prompts_once else self.samples
        return self.prompts * self.prompt_len * copies + self.completion_tokens


def _work(job: _Job) -> tuple[dict[str, float], dict[str, float]]:
    """Tokens and FLOPs by phase."""
    config = job.config
    forward = forward_flops(
        job.shape,
        tokens=job.update_tokens,
        attended=job.prompt_len + job.answer_len / 2,  # roughly
        head_tokens=job.completion_tokens,
    )
    updates = config.optimizer.num_iterations
    tokens = {"update": job.update_tokens * updates}
    flops = {"update": 3 * forward * updates}
    if updates > 1:
        tokens["old log-probs"], flops["old log-probs"] = job.update_tokens, forward
    if config.loss.kl_coef:
        tokens["reference"], flops["reference"] = job.update_tokens, forward
    if LOSSES[config.loss.name].needs_group:
        prompt_tokens = job.prompts * job.prompt_len
        tokens["rollout"] = prompt_tokens + job.completion_tokens
        flops["rollout"] = forward
        if not job.prompts_once:
            flops["rollout"] += 2 * job.head * prompt_tokens
    return tokens, flops


def _memory(job: _Job) -> dict[str, float]:
    """Bytes by kind."""
    config = job.config
    low, low_weights = config.speed.use_amp, config.speed.low_precision_weights
    samples_anything = LOSSES[config.loss.name].needs_group
    frozen = 4.0 * job.parameters - (2.0 * job.blocks if low_weights else 0)
    return {
        "weights": 4.0 * job.parameters,
        "gradients": 4.0 * job.parameters,
        "Adam": 8.0 * job.parameters,
        "reference": frozen * bool(config.loss.kl_coef),
        "weights in low precision": 2.0 * job.blocks * low * (1 + low_weights),
        "KV cache": _kv_cache(job) * samples_anything,
        "activations": _activations(job),
        "logits": _logits(job),
    }


def _bytes_per_key(job: _Job) -> int:
    return 2 if job.config.speed.use_amp and job.device != "cpu" else 4


def _kv_cache(job: _Job) -> float:
    config, shape = job.config, job.shape
    at_once = min(config.memory.rollout_batch_size or job.prompts, job.prompts)
    slots = at_once * job.samples
    window = config.sampling.max_new_tokens + config.speed.num_speculative_tokens + 1
    prompts = at_once if config.memory.share_prompt_kv else slots
    return (
        2.0
        * shape.layers
        * shape.width
        * _bytes_per_key(job)
        * (prompts * job.prompt_len + slots * window)
    )


def _activations(job: _Job) -> float:
    low, shape = job.config.speed.use_amp, job.shape
    update = job.update_tokens * (job.micro / job.prompts)
    branches = 0.0  # gathered keys and values of completions and their prompts
    if job.prompts_once:
        gathered = job.micro * job.samples * (job.prompt_len + job.answer_len)
        branches = gathered * 2 * _bytes_per_key(job)
    kept = KEPT[low]
    if low and job.device == "cpu":
        # attention runs in float32: queries, outputs, and keys and values unless in `branches`
        kept += 2 * (2 if job.prompts_once else 4)
    per_layer = (update * kept + branches) * shape.width
    if job.config.memory.gradient_checkpointing:
        return per_layer + 4 * update * shape.width * shape.layers
    return per_layer * shape.layers


def _logits(job: _Job) -> float:
    tokens = job.completion_tokens * (job.micro / job.prompts)
    copies = tokens * LOGIT_COPIES
    if job.config.memory.chunked_logprobs:
        copies = min(chunk_size(job.shape.vocab_size, job.device), tokens) * 2
    return 4.0 * copies * job.shape.vocab_size


class MeasuredSteps:
    """Sums of what steps actually took, to compare with the estimate."""

    NAMES = ("tokens/run", "rollout/tokens", "rollout/rounds", "step_time", "memory/peak_mib")

    def __init__(self) -> None:
        self.steps, self.sums = 0, dict.fromkeys(self.NAMES, 0.0)

    def add(self, values: Mapping[str, float]) -> None:
        self.steps += 1
        for name in self.NAMES[:-1]:
            self.sums[name] += values.get(name, 0.0)
        self.sums["memory/peak_mib"] = values["memory/peak_mib"]  # the largest so far

    def means(self) -> dict[str, float]:
        """Means per step, except for the peak memory, which is the run's."""
        peak = "memory/peak_mib"
        steps = max(1, self.steps)
        return {name: x if name == peak else x / steps for name, x in self.sums.items()}

    def beside(self, estimate: Estimate, device: str, world_size: int) -> list[list[str]]:
        """Three columns for a table: what, estimated, measured."""
        means, tokens = self.means(), estimate.tokens
        for name in ("tokens/run", "rollout/tokens"):  # counted over all processes
            means[name] /= world_size
        rows = [["tokens: update", f"{tokens['update']:,.0f}", f"{means['tokens/run']:,.0f}"]]
        if "rollout" in tokens:
            ran = f"{means['rollout/tokens']:,.0f}"
            rows.append(["tokens: rollout", f"{tokens['rollout']:,.0f}", ran])
            rows.append(["rounds of decoding", "", f"{means['rollout/rounds']:,.1f}"])
        of_what = "allocated" if device == "cuda" else "measured: the whole process"
        peak = f"{means['memory/peak_mib']:,.0f}"
        rows.append([f"peak MiB ({of_what})", f"{estimate.peak_mib:,.0f}", peak])
        return [*rows, ["seconds", "", f"{means['step_time']:.2f}"]]
