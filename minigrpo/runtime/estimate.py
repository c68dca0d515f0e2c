"""What a step will take, before anything is run: parameters, tokens, FLOPs, and memory by kind.

Tokens are those of completions as long as true answers of which no two are alike: what repeats
costs less. FLOPs are 2 a parameter and token (6 with a backward pass), and 4 * width for each pair
of tokens that attend, in each layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..config import Config
from ..losses import LOSSES
from ..model.logprobs import chunk_size
from ..model.transformer import ModelShape

MIB = 2**20
# bytes that autograd keeps of a token, a layer and a unit of width, counted with saved-tensor
# hooks: float32, autocast
KEPT = {False: 66, True: 41}
LOGIT_COPIES = (
    3.5  # float32 copies of a logit that log-softmax, its gradient and the entropy have at once
)


@dataclass(frozen=True)
class Plan:
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


def forward_flops(
    shape: ModelShape, *, tokens: float, attended: float, head_tokens: float
) -> float:
    """FLOPs of a forward over `tokens` tokens, each attending to `attended` tokens on average.

    2 per parameter and token, and 4 * width per layer and pair of tokens that attend. Of the
    tokens, `head_tokens` go through the output head.
    """
    blocks, head = 12 * shape.layers * shape.width**2, shape.vocab_size * shape.width
    per_token = 2 * blocks + 4 * shape.layers * shape.width * attended
    return per_token * tokens + 2 * head * head_tokens


def plan(
    config: Config,
    shape: ModelShape,
    *,
    prompt_len: float,
    answer_len: float,
    device: str,
    world_size: int = 1,
) -> Plan:
    """`prompt_len` and `answer_len` are means, in tokens; `device` is a type, as cuda."""
    prompts = config.sampling.prompts_per_step // world_size
    samples = 1 if config.supervised else config.sampling.group_size
    micro = min(config.memory.micro_batch_size or prompts, prompts)
    at_once = min(config.memory.rollout_batch_size or prompts, prompts)
    once = config.speed.packing != "repeated"
    completions = prompts * samples * answer_len
    update = prompts * prompt_len * (1 if once else samples) + completions
    low = config.speed.use_amp
    attends_in_float32 = low and device == "cpu"
    size = 2 if low and not attends_in_float32 else 4  # bytes of a key or a value
    blocks, head = 12 * shape.layers * shape.width**2, shape.vocab_size * shape.width
    parameters = blocks + head + (shape.context + 13 * shape.layers + 2) * shape.width

    tokens = {"update": update * config.optimizer.num_iterations}
    attended = prompt_len + answer_len / 2
    forward = forward_flops(shape, tokens=update, attended=attended, head_tokens=completions)
    flops = {"update": 3 * forward * config.optimizer.num_iterations}
    if config.optimizer.num_iterations > 1:
        tokens["old log-probs"], flops["old log-probs"] = update, forward
    if config.loss.kl_coef:
        tokens["reference"], flops["reference"] = update, forward
    if LOSSES[config.loss.name].needs_group:
        tokens["rollout"] = prompts * prompt_len + completions
        flops["rollout"] = forward + 2 * head * (prompts * prompt_len if not once else 0)

    part = micro / prompts
    branches = (
        micro * samples * (prompt_len + answer_len) * 2 * size if once else 0
    )  # keys and values, the prompt's included
    kept = KEPT[low]
    if (
        attends_in_float32
    ):  # queries and outputs, and keys and values where they are not in `branches`
        kept += 2 * (2 if once else 4)
    a_layer = (update * part * kept + branches) * shape.width
    activations = a_layer * shape.layers
    if config.memory.gradient_checkpointing:
        activations = a_layer + 4 * update * part * shape.width * shape.layers
    logits = completions * part * LOGIT_COPIES
    if config.memory.chunked_logprobs:
        logits = min(chunk_size(shape.vocab_size, device), completions * part) * 2
    slots = at_once * samples
    kv = (at_once if config.memory.share_prompt_kv else slots) * prompt_len + slots * (
        config.sampling.max_new_tokens + config.speed.num_speculative_tokens + 1
    )
    frozen = 4.0 * parameters - (2.0 * blocks if config.speed.low_precision_weights else 0)
    memory = {
        "weights": 4.0 * parameters,
        "gradients": 4.0 * parameters,
        "Adam": 8.0 * parameters,
        "reference": frozen * bool(config.loss.kl_coef),
        "weights in low precision": 2.0 * blocks * low * (1 + config.speed.low_precision_weights),
        "KV cache": 2.0
        * shape.layers
        * shape.width
        * size
        * kv
        * LOSSES[config.loss.name].needs_group,
        "activations": activations,
        "logits": 4.0 * logits * shape.vocab_size,
    }
    stays = ["weights", "Adam", "weights in low precision"] + ["reference"] * (
        not config.memory.offload_reference
    )
    updating = memory["gradients"] + memory["activations"] + memory["logits"]
    peak = sum(memory[name] for name in stays)
    peak += (
        updating + memory["KV cache"]
        if config.speed.cuda_graphs
        else max(updating, memory["KV cache"])
    )  # recorded: it stays
    return Plan(
        parameters=parameters,
        micro_batches=-(-prompts // micro),
        tokens=tokens,
        flops=flops,
        memory_mib={name: amount / MIB for name, amount in memory.items() if amount},
        peak_mib=peak / MIB,
    )


class Measured:
    """What steps took in the end, to be held against their plan."""

    NAMES = ("tokens/run", "rollout/tokens", "rollout/rounds", "step_time", "memory/peak_mib")

    def __init__(self) -> None:
        self.steps, self.sums = 0, dict.fromkeys(self.NAMES, 0.0)

    def see(self, values: Mapping[str, float]) -> None:
        self.steps += 1
        for name in self.NAMES[:-1]:
            self.sums[name] += values.get(name, 0.0)
        self.sums["memory/peak_mib"] = values["memory/peak_mib"]  # the largest so far

    def means(self) -> dict[str, float]:
        """Of a step; the peak is that of the run."""
        return {
            name: total / (1 if name == "memory/peak_mib" else max(1, self.steps))
            for name, total in self.sums.items()
        }

    def beside(self, planned: Plan, device: str, world_size: int) -> list[list[str]]:
        """Three columns, for a table."""
        means = self.means()
        for name in ("tokens/run", "rollout/tokens"):  # which are of all processes
            means[name] /= world_size
        rows = [
            ["tokens: update", f"{planned.tokens['update']:,.0f}", f"{means['tokens/run']:,.0f}"]
        ]
        if "rollout" in planned.tokens:
            rows.append(
                [
                    "tokens: rollout",
                    f"{planned.tokens['rollout']:,.0f}",
                    f"{means['rollout/tokens']:,.0f}",
                ]
            )
            rows.append(["rounds of decoding", "", f"{means['rollout/rounds']:,.1f}"])
        of_what = "allocated" if device == "cuda" else "measured: the whole process"
        rows.append(
            [
                f"peak MiB ({of_what})",
                f"{planned.peak_mib:,.0f}",
                f"{means['memory/peak_mib']:,.0f}",
            ]
        )
        return [*rows, ["seconds", "", f"{means['step_time']:.2f}"]]
