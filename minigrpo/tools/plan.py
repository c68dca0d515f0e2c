"""Estimate the memory of one training step before it is run: `minigrpo plan [flags of train]`.

Every part is a closed form of the model's shape and of the tokens in a step. Of a model on the Hub
no weights are fetched. A small model that is here samples a few prompts, to see how much
completions share; otherwise they share nothing and are as long as --max-new-tokens allows.
`--device cuda` plans for a card that need not be here. The step is that of one process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..build import (
    RECORD,
    add_lora,
    base_dtype,
    config_of_run,
    make_model,
    make_task,
    make_tokenizer,
    with_own_tokenizer,
)
from ..config import Config
from ..model.encoding import encode_pairs, encode_prompts
from ..model.hf import hub_folder, read_model
from ..model.logprobs import MAX_LOGITS, SMALLEST_CHUNK
from ..model.packing import PACKINGS
from ..model.transformer import ModelShape, Transformer
from ..runtime.console import Console
from ..sampling.generate import Sampler
from ..tasks.base import shipped_model
from ..types import Completions
from .sample import complete

MIB = 2**20
FLOAT, LOW = 4, 2  # bytes of a number in float32, and under --use-amp
CARDS = 12, 24  # GB
CARD_SPARE = 1024  # MiB for CUDA itself, and for gaps between allocations
PROGRAM = 400  # MiB of Python and torch, which a process on a CPU takes besides
EXAMPLES = 16  # prompts that are sampled, at most
ASSUMED_PROMPT = 256  # tokens, where the model is not here
SMALL = 50_000_000  # parameters of a model that samples
LOGIT_COPIES = 3  # float32 numbers per logit: log-softmax, and its gradient or the entropy
DECODING_COPIES = 4  # of a round: logits, log-probs, and what tokens are drawn from
STAYS = ("weights", "AdamW's moments", "weights in low precision", "reference")


@dataclass(frozen=True)
class Counts:
    """What a micro-batch runs, and the lengths behind it."""

    prompt: float  # tokens, a mean
    longest: float  # completion, in tokens
    tokens: float  # that one forward of the update runs
    predictions: float  # tokens that go through the output head
    keys: float  # that attention gathers
    pairs: float  # of a query and a gathered key, in masks

    @classmethod
    def unshared(cls, config: Config, prompt: float) -> "Counts":
        """Of completions that share nothing and never end early."""
        sampling, length = config.sampling, float(config.sampling.max_new_tokens)
        prompts = float(config.memory.micro_batch_size or sampling.prompts_per_step)
        all_ = prompts * (1 if config.supervised else sampling.group_size)
        if config.speed.packing == "repeated":
            tokens = all_ * (prompt + length)
            return cls(prompt, length, tokens, all_ * length, tokens, 0.0)
        tokens = prompts * prompt + all_ * length
        keys = prompts * prompt + all_ * (prompt + length)
        pairs = all_ * length * (prompt + length)
        return cls(prompt, length, tokens, all_ * length, keys, pairs)

    @classmethod
    def of(cls, config: Config, completions: Completions) -> "Counts":
        """Of the largest micro-batch among these completions."""
        prompts = config.memory.micro_batch_size or config.sampling.prompts_per_step
        size = min(prompts, len(completions))
        starts = range(0, len(completions) - size + 1, size)
        parts = [completions.select(torch.arange(a, a + size)) for a in starts]
        packings = [PACKINGS[config.speed.packing](part) for part in parts]
        packing = max(packings, key=lambda packing: len(packing.ids))
        rows = packing.completion_rows
        keys = packing.causal_rows.numel() + sum(part.keys.numel() for part in rows)
        pairs = sum(part.visible.numel() for part in rows)
        found = (len(packing.ids), len(packing.targets), keys, pairs)
        lengths = completions.prompt_len.float(), completions.completion_mask.sum(-1)
        scaled = (prompts / size * number for number in found)
        return cls(float(lengths[0].mean()), float(lengths[1].max()), *scaled)


# --- closed forms ---------------------------------------------------------------------------------


def kept_by_block(shape: ModelShape, counts: Counts, *, low: bool, on_cpu: bool) -> float:
    """Bytes that autograd keeps of one block until its backward pass."""
    size, width, inner = (LOW if low else FLOAT), shape.width, shape.heads * shape.head_dim
    # LayerNorm keeps its input, RMSNorm its normalised input too; both in float32
    norms = 2 * FLOAT * width * (1 if shape.is_gpt2 else 2)
    norms += 2 * FLOAT * (inner + shape.kv_width) * shape.head_norm
    # linear layers keep their inputs; autocast makes a copy of a float32 input for each layer
    into_attention = 3 if low and not shape.is_gpt2 else 1
    into_mlp = 2 if low and not shape.is_gpt2 else 1
    # GELU keeps its input, SwiGLU the inputs of SiLU and of the product; then the last layer's
    inside_mlp = shape.mlp_width * (2 if shape.is_gpt2 else 4)
    linears = size * ((into_attention + into_mlp) * width + inner + inside_mlp)
    number = FLOAT if on_cpu else size  # on a CPU, attention runs in float32
    queries, keys = 2 * inner * number + FLOAT * shape.heads, 2 * shape.kv_width * number
    return counts.tokens * (norms + linears + queries) + counts.keys * keys


def logits_of(shape: ModelShape, counts: Counts, *, on_cpu: bool, trained: bool) -> float:
    """Bytes of logits, and of what is computed from them, in chunks or all at once."""
    chunk = max(SMALLEST_CHUNK, MAX_LOGITS["cpu" if on_cpu else "cuda"] // shape.vocab_size)
    rows = LOGIT_COPIES * counts.predictions
    if counts.predictions > chunk:  # two buffers, later one and the gradient of the head
        rows = chunk + max(chunk, shape.width * trained)
    return float(FLOAT * shape.vocab_size * rows)


def parts_of(config: Config, shape: ModelShape, counts: Counts, on_cpu: bool) -> dict[str, float]:
    """Bytes by part; not all of them are there at the same time, see `peak_of`."""
    model = Transformer.empty(shape, device="meta")
    for parameter in model.parameters():
        if parameter.dim() == 2 and config.model.lora_rank and base_dtype(config.model):
            parameter.data = parameter.data.to(base_dtype(config.model))
    base = float(sum(x.nbytes for x in model.parameters()))
    add_lora(model, config.model)
    trained = sum(x.numel() for x in model.parameters() if x.requires_grad)
    in_layers = sum(x.numel() for x in model.parameters() if x.dim() == 2 and x.itemsize == FLOAT)
    low, memory, sampling = config.speed.use_amp, config.memory, config.sampling
    in_attention = LOW if low and not on_cpu else FLOAT
    kept = kept_by_block(shape, counts, low=low, on_cpu=on_cpu)
    masks = counts.pairs * (1 + in_attention * shape.heads / shape.kv_heads)
    found = {
        "weights": float(sum(x.nbytes for x in model.parameters())),
        "gradients": float(FLOAT * trained),
        "AdamW's moments": 2.0 * FLOAT * trained * (on_cpu or not memory.offload_optimizer),
        "weights in low precision": float(LOW * in_layers * low),
        "activations": kept * shape.layers + masks,
        "logits": logits_of(shape, counts, on_cpu=on_cpu, trained=not config.model.lora_rank),
    }
    if memory.gradient_checkpointing:
        inputs = FLOAT * shape.width * shape.layers * counts.tokens
        found["activations"] = inputs + kept + masks
    if config.loss.kl_coef and not config.model.lora_rank:
        found["reference"] = base * (on_cpu or not memory.offload_reference)
    if not config.supervised:
        prompts = memory.rollout_batch_size or sampling.prompts_per_step
        slots = prompts * sampling.group_size
        cached = prompts * counts.prompt + slots * counts.longest
        found["KV cache"] = 2.0 * shape.layers * shape.kv_width * in_attention * cached
        found["decoding round"] = float(FLOAT * DECODING_COPIES * slots * shape.vocab_size)
    return found


def peak_of(config: Config, parts: Mapping[str, float]) -> float:
    """The most bytes at once: in the rollout, or when the backward pass begins, or ends."""
    sizes = config.memory.micro_batch_size, config.sampling.prompts_per_step
    rollout = parts.get("KV cache", 0.0) + parts.get("decoding round", 0.0)
    begins = parts["activations"] + parts["logits"]
    begins += parts["gradients"] * (0 < sizes[0] < sizes[1])  # of the micro-batches before
    most = max(rollout, begins, parts["gradients"])
    return sum(parts.get(part, 0.0) for part in STAYS) + most


# --- what is known of the job ---------------------------------------------------------------------


def shape_of(config: Config) -> ModelShape:
    """The shape of --model, without reading weights. Raises ConfigError."""
    name = config.model.name
    if name == "scratch":
        return ModelShape(make_tokenizer(config).n_vocab)
    if name == "shipped":
        return read_model(shipped_model(config.task.name))[0]
    path = Path(name)
    if (path / RECORD).is_file():
        weights = path / "model.safetensors"  # a run with adapters has none
        return read_model(weights)[0] if weights.exists() else shape_of(config_of_run(path))
    return read_model(hub_folder(name, weights=False))[0]


def counts_of(config: Config, shape: ModelShape, console: Console) -> Counts:
    """What a micro-batch runs: as sampled, as the true answers are, or as it is assumed."""
    is_here = config.model.name in ("shipped", "scratch") or Path(config.model.name).exists()
    if not is_here:
        console.say(f"assumed: prompts of {ASSUMED_PROMPT} tokens, completions that share nothing")
        return Counts.unshared(config, ASSUMED_PROMPT)
    config = with_own_tokenizer(config)
    tokenizer, task = make_tokenizer(config), make_task(config)
    number = min(EXAMPLES, config.sampling.prompts_per_step)
    examples = [task.train(i) for i in range(number)]
    if config.supervised:
        return Counts.of(config, encode_pairs(tokenizer, examples, shape.context))
    if sum(x.numel() for x in Transformer.empty(shape, "meta").parameters()) > SMALL:
        lengths = encode_prompts(tokenizer, examples, shape.context)[1]
        console.say("assumed: completions that share nothing, as long as --max-new-tokens allows")
        return Counts.unshared(config, float(lengths.float().mean()))
    model = make_model(config, tokenizer)
    sampler = Sampler(config, model, tokenizer, speculate=task.speculate)
    group = config.sampling.group_size
    return Counts.of(config, complete(sampler, examples, group, drafts=task.speculate))


def main(argv: Sequence[str], prog: str) -> None:
    config, console = Config.from_cli(argv, prog=prog), Console()
    device = config.speed.device
    on_cpu = not (torch.cuda.is_available() if device == "auto" else device.startswith("cuda"))
    shape = shape_of(config)
    parts = parts_of(config, shape, counts_of(config, shape, console), on_cpu)
    peak = peak_of(config, parts) / MIB
    rows = [[name, f"{size / MIB:,.0f}"] for name, size in parts.items() if size]
    console.table("memory of one step", ["", "MiB"], [*rows, ["peak", f"{peak:,.0f}"]])
    if on_cpu:
        console.say(f"with Python and torch themselves about {peak + PROGRAM:,.0f} MiB")
    fits = [f"{'fits' if peak + CARD_SPARE <= 1024 * x else 'does not fit'} {x} GB" for x in CARDS]
    console.say(f"on a card, with {CARD_SPARE} MiB for CUDA itself: {', '.join(fits)}")
