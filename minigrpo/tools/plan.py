"""Does a training step fit my card? `minigrpo plan [flags of train]`.

Every part is a closed form of the model's shape and of the tokens in a step, so no weights are
read. It is the worst case, for one process on a GPU: completions share nothing but their prompt,
and are as long as --max-new-tokens allows. Where more memory is free, chunks of logits grow by up
to 2 GiB. Not counted: models that rewards ask, and on a CPU Python and torch themselves (some 400
MiB) and what offloading moves there.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from ..config import Config, read_flags, settle
from ..defaults import size_of
from ..model.encoding import encode_prompt
from ..model.logprobs import MAX_LOGITS, SMALLEST_CHUNK
from ..model.lora import add_adapters
from ..model.transformer import ModelShape, Transformer
from ..parts import INITIAL, SELF, Parts, shape_by_name
from ..resolve import resolve
from ..run.console import Console

MIB = 2**20
FLOAT, LOW = 4, 2  # bytes of a number in float32, and under --use-amp
CARD_SPARE = 2**30  # bytes for CUDA's context, about half of it, and gaps between allocations


def kept_by_block(shape: ModelShape, size: int, tokens: float, keys: float) -> float:
    """Bytes that autograd keeps of one block until its backward pass.

    `size`: bytes of a number in activations; `keys`: that attention gathers for the tokens.
    """
    width, inner = shape.width, shape.heads * shape.head_dim
    # LayerNorm keeps its input, RMSNorm its normalised input too; both in float32
    norms = 2 * FLOAT * width * (1 if shape.kind.is_gpt2 else 2)
    norms *= 2 if shape.kind.norms == "both" else 1
    norms += 2 * FLOAT * (inner + shape.kv_width) * (shape.kind.qk_norm != "none")
    # linear layers keep their inputs; GELU keeps its own, SwiGLU those of SiLU and of the product
    inside_mlp = shape.mlp_width * (2 if shape.kind.is_gpt2 else 4)
    linears = size * (2 * width + inner + inside_mlp)
    queries = 2 * size * inner + FLOAT * shape.heads
    return tokens * (norms + linears + queries) + keys * 2 * size * shape.kv_width


def parts_of(config: Config, shape: ModelShape, prompt: float) -> dict[str, float]:
    """Bytes by part, not all at the same time: see `peak_of`. `prompt`: its mean tokens."""
    memory = config.memory
    sampling = config.sampling
    size = LOW if config.speed.use_amp else FLOAT  # of a number in activations and the cache
    group = 1 if config.supervised else sampling.group_size
    length = sampling.max_new_tokens
    # what a micro-batch runs
    prompts = memory.micro_batch_size or sampling.prompts_per_step
    predictions = prompts * group * length
    tokens = prompts * prompt + predictions
    keys = tokens + prompts * group * prompt
    longest = prompt + length
    windows = {min(shape.window_of(layer) or longest, longest) for layer in range(shape.layers)}
    masks = predictions * longest * (1 + size * shape.heads / shape.kv_heads) * len(windows)
    kept = kept_by_block(shape, size, tokens, keys)
    kept_by_all = kept * shape.layers
    if memory.gradient_checkpointing:
        kept_by_all = kept + FLOAT * shape.width * shape.layers * tokens  # and the blocks' inputs
    chunk = max(SMALLEST_CHUNK, MAX_LOGITS["cuda"] // shape.vocab_size)
    rows = 3 * predictions  # log-softmax, and its gradient or the entropy
    if predictions > chunk:  # two buffers, later one and the gradient of the head
        rows = chunk + max(chunk, 0 if config.model.lora_rank else shape.width)

    lora = config.model
    model = Transformer(shape, seed=None)
    if lora.lora_rank:
        model.store(lora.base_dtype)
    add_adapters(model, lora.lora_rank, targets=lora.lora_targets)
    weights = list(model.parameters())
    trained = FLOAT * sum(x.numel() for x in weights if x.requires_grad)
    matrices = sum(x.numel() for x in weights if x.dim() == 2 and x.itemsize == FLOAT)
    coded = max((x.nbytes for x in weights if not x.is_floating_point()), default=0)
    parts = {
        "weights": sum(x.nbytes for x in weights),
        "decoded": 2 * (size + 2) * coded,  # a matrix of NF4, and its codes of pairs as int32
        "gradients": trained,
        "AdamW's moments": 2 * trained * (not memory.offload_optimizer),
        "weights in low precision": LOW * matrices * config.speed.use_amp,
        "activations": kept_by_all + masks,
        "logits": FLOAT * shape.vocab_size * rows,
    }
    if not config.supervised:
        loss = config.loss
        if loss.kl_coef and not memory.offload_reference:
            parts["reference"] = copy_of(config, parts["weights"], loss.reference or INITIAL)
        if loss.teacher not in ("", SELF) and not memory.offload_reference:
            parts["teacher"] = copy_of(config, parts["weights"], loss.teacher)
        prompts = memory.rollout_batch_size or sampling.prompts_per_step
        cached = prompts * (prompt + group * length)
        parts["KV cache"] = 2 * shape.layers * shape.kv_width * size * cached
        # logits, log-probs, and what tokens are drawn from; top-p sorts them, with int64 indices
        numbers = 9 if sampling.top_p < 1 else 4
        parts["decoding round"] = FLOAT * numbers * prompts * group * shape.vocab_size
    return parts


def copy_of(config: Config, base: float, name: str) -> float:
    """Bytes of a frozen model; `base`: of the weights of --model, without adapters."""
    if name == INITIAL:
        return 0 if config.model.lora_rank else base  # with adapters it shares these weights
    model = Transformer(shape_by_name(name, config.task.name), seed=None)
    model.store(config.model.base_dtype)
    return sum(x.nbytes for x in model.parameters())


def peak_of(parts: Mapping[str, float]) -> float:
    """The most bytes at once: in the rollout, or in the backward pass of a micro-batch."""
    rollout = parts.get("KV cache", 0) + parts.get("decoding round", 0)
    update = parts["gradients"] + parts["activations"] + parts["logits"]
    return sum(parts.values()) - min(rollout, update)


def shape_of(config: Config) -> ModelShape:
    """The shape of --model, without reading weights. Raises ConfigError."""
    name = config.model.name
    if name == "scratch":
        return ModelShape(Parts(resolve(config)).tokenizer.n_vocab)
    return shape_by_name(name, config.task.name)


def prompt_length(config: Config) -> float:
    """The mean tokens of the first prompts; 256 of a published model whose data is not here."""
    files = config.task.data.split(",")
    if size_of(config.model.name) and not all(Path(file).is_file() for file in files):
        return 256
    parts = Parts(resolve(config))
    return mean(len(encode_prompt(parts.tokenizer, parts.task.train(i))) for i in range(64))


def main(argv: Sequence[str], prog: str) -> None:
    config, why = settle(read_flags(argv, prog))
    console = Console()
    prompt = prompt_length(config)
    parts = parts_of(config, shape_of(config), prompt)
    peak = peak_of(parts)
    parts |= {"peak": peak, "on a card, with CUDA itself": peak + CARD_SPARE}
    if why:
        console.say(why)
    rows = [[name, f"{size / MIB:,.0f}"] for name, size in parts.items() if size]
    console.table(f"memory of one step, with prompts of {prompt:.0f} tokens", ["", "MiB"], rows)
