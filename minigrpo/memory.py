"""The memory of a training step on a GPU, and the batch sizes that fit into it.

Components follow from the model's shape and from the tokens in a step, so no weights are read. It
is the worst case, on the GPU of each process: completions share nothing but their prompt, and are
as long as --max-new-tokens allows. Where more memory is free, chunks of logits grow by up to 2 GiB.
The models that rewards ask are not counted, nor what lies in the memory of a CPU.
"""

from collections.abc import Mapping
from statistics import mean

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from .config import Config
from .model.context import TextRows
from .model.logprobs import MAX_LOGITS, SMALLEST_CHUNK
from .model.lora import add_adapters
from .model.mixers import MIXERS
from .model.shape import AttentionShape, GatedDeltaShape, LayerShape, ShortConvShape
from .model.source import ModelSource
from .model.transformer import ModelShape, Transformer
from .model.weights import LARGE, roles
from .runtime.device import product_dtype
from .settings import INITIAL, SELF
from .task import Task
from .text.encoding import encode_prompt
from .text.tokenizer import Tokenizer

MIB = 2**20
FLOAT = 4  # bytes of a number in float32
LOW = 2  # and under --use-amp
# components
IN_UPDATE = ("gradients", "casts of weights", "gathered weights", "activations", "logits")
IN_ROLLOUT = ("sampler's copy", "KV cache", "states", "decoding round")
MOST_KEPT = 3  # generations: of rollouts, and of greedy and sampled evaluations
CARD_SPARE = 2**29  # bytes for gaps between allocations


def kept_by_block(
    shape: ModelShape,
    layer: LayerShape,
    size: int,
    tokens: float,
    keys: float,
    length: int,
) -> float:
    """Bytes that autograd keeps of a block, of `size` bytes per number in activations.

    Attention gathers `keys` for the tokens; a recurrence runs completions of a `length`.
    """
    width = shape.width
    inner = shape.heads * shape.head_dim
    family = shape.family_row
    # LayerNorm keeps its input, RMSNorm its normalised input too; both in float32
    norms = 2 * FLOAT * width * (1 if family.norm == "layer" else 2)
    norms *= 2 if family.norms == "both" else 1
    # linear layers keep their inputs; GELU keeps its own, SwiGLU those of SiLU and of the product
    inside_mlp = shape.mlp_width * (2 if family.gate == "none" else 4)
    linears = size * (2 * width + inside_mlp)
    if not isinstance(layer, AttentionShape):
        return tokens * (norms + linears + kept_by_state(shape, layer, length))
    norms += 2 * FLOAT * (inner + shape.kv_width) * (family.qk_norm != "none")
    queries = (5 if family.attention_gate == "query" else 3) * size * inner + FLOAT * shape.heads
    return tokens * (norms + linears + queries) + keys * 2 * size * shape.kv_width


def kept_by_state(
    shape: ModelShape,
    layer: ShortConvShape | GatedDeltaShape,
    length: int,
) -> float:
    """Bytes per token that autograd keeps of a mixer with a state, for a text of a `length`."""
    kept: dict[int, UntypedStorage] = {}

    def keep(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage

    with FakeTensorMode():  # tensors have no memory
        _, make_mixer = MIXERS[layer.mixer]
        mixer = make_mixer(shape, layer, 0)
        hidden = torch.empty(length, shape.width, requires_grad=True)
        places = torch.arange(len(hidden))
        context = TextRows(places[None], places, places)
        with saved_tensors_hooks(keep, lambda nothing: hidden):
            mixer.project_out(mixer.mix(context, {}, *mixer.project_in(hidden)))
        for tensor in (hidden, *mixer.parameters()):
            kept.pop(tensor.untyped_storage()._cdata, None)
        return sum(storage.nbytes() for storage in kept.values()) / len(hidden)


def components_of(
    config: Config,
    shape: ModelShape,
    prompt: float,
    processes: int = 1,
) -> dict[str, float]:
    """Bytes by component, not all at the same time: see `peak_of`. `prompt`: its mean tokens."""
    return weights_of(config, shape, processes) | work_of(config, shape, prompt, processes)


def weights_of(config: Config, shape: ModelShape, processes: int) -> dict[str, float]:
    """Bytes of the weights and of what belongs to them, by component."""
    shards = processes if config.memory.fsdp else 1
    low = product_dtype(config.speed).itemsize
    model = Transformer(shape, seed=None)
    if config.model.lora_rank:
        model.store(config.model.base_dtype)
    add_adapters(model, config.model.lora_rank, targets=config.model.lora_targets)
    named = dict(model.named_parameters())
    role = roles(model)
    weights = named.values()
    trained = FLOAT * sum(x.numel() for x in weights if x.requires_grad)
    # 1. What passes with gradients cast and gather: all, or the ends of the model and a block.
    cast = sum(x.numel() for name, x in named.items() if x.requires_grad and role[name] in LARGE)
    of_block = max(sum(x.numel() for x in block.parameters()) for block in model.h)
    of_ends = sum(x.numel() for name, x in named.items() if not name.startswith("h."))
    if config.memory.gradient_checkpointing:
        cast = min(cast, of_block + of_ends)

    # 2. What sampling copies: matrices and the head in 16 bits.
    large = [x for name, x in named.items() if role[name] in LARGE and x.itemsize == FLOAT]
    copied = LOW * sum(x.numel() for x in large) * config.speed.use_amp
    gathered = 0
    if shards > 1:
        # Two blocks, as the next is on its way; and gradients, which are copied to be shared out.
        gathered = FLOAT * (4 * of_block + 3 * of_ends)
        # Sampling gathers all else too. Embeddings stay in float32, also one that is the head.
        size = {name: FLOAT if role[name] == "embedding" else low for name in named}
        copied = sum(size[name] * x.numel() for name, x in named.items())
        copied += LOW * shape.vocab_size * shape.width * (shape.tied and config.speed.use_amp)
    coded = max((x.nbytes for x in weights if not x.is_floating_point()), default=0)
    return {
        "weights": sum(x.nbytes for x in weights) / shards,
        # a matrix of NF4, and its codes of pairs as int32
        "decoded": 2 * (low + 2) * coded,
        "gradients": trained / shards,
        "AdamW's moments": 2 * trained / shards * (not config.memory.offload_optimizer),
        "casts of weights": LOW * cast * config.speed.use_amp,
        "gathered weights": gathered,
        "sampler's copy": copied,
        "reference": frozen_bytes(config, model, config.loss.reference_model) / shards,
        "teacher": frozen_bytes(config, model, config.loss.teacher) / shards,
    }


def work_of(
    config: Config,
    shape: ModelShape,
    prompt: float,
    processes: int,
) -> dict[str, float]:
    """Bytes of a micro-batch and of a rollout, by component."""
    memory = config.memory
    sampling = config.sampling
    size = product_dtype(config.speed).itemsize  # of a number in activations and in the cache
    group = 1 if config.supervised else sampling.group_size
    length = sampling.max_new_tokens
    share = -(-sampling.prompts_per_step // processes)
    # 1. What a micro-batch runs.
    prompts = memory.micro_batch_size or share
    predictions = prompts * group * length
    tokens = prompts * prompt + predictions
    keys = tokens + prompts * group * prompt
    longest = prompt + length
    attending = shape.attention_layers.values()
    windows = {min(layer.window or longest, longest) for layer in attending}
    masks = predictions * longest * (1 + size * shape.heads / shape.kv_heads) * len(windows)
    kept: dict[LayerShape, float] = {}
    for layer in {*shape.layers}:
        kept[layer] = kept_by_block(shape, layer, size, tokens, keys, length)
    kept_by_all = sum(kept[layer] for layer in shape.layers)
    if memory.gradient_checkpointing:
        inputs_of_blocks = FLOAT * shape.width * len(shape.layers) * tokens
        kept_by_all = max(kept.values()) + inputs_of_blocks
    chunk = max(SMALLEST_CHUNK, MAX_LOGITS["cuda"] // shape.vocab_size)
    rows = 3 * predictions  # log-softmax, and its gradient or the entropy
    if predictions > chunk:  # two buffers, later one and the gradient of the head
        rows = chunk + max(chunk, 0 if config.model.lora_rank else shape.width)
    components = {
        "activations": kept_by_all + masks,
        "logits": FLOAT * shape.vocab_size * rows,
    }
    if config.supervised:
        return components

    # 2. What sampling needs.
    prompts = memory.rollout_batch_size or share
    cached = prompts * (prompt + group * length)
    components["KV cache"] = 2 * len(shape.attention_layers) * shape.kv_width * size * cached
    states = [x for x in shape.layers if isinstance(x, GatedDeltaShape)]
    numbers_of_slot = sum(x.value_heads * x.key_dim * x.value_dim for x in states)
    components["states"] = FLOAT * numbers_of_slot * prompts * group
    # logits, log-probs, and what tokens are drawn from; top-p sorts them, with int64 indices
    numbers = 9 if sampling.top_p < 1 else 4
    components["decoding round"] = FLOAT * numbers * prompts * group * shape.vocab_size
    return components


def frozen_bytes(config: Config, trained: Transformer, name: str | None) -> int:
    """Bytes of the model of --reference or --teacher beside the trained one."""
    shares_weights = name == SELF or (name == INITIAL and config.model.lora_rank > 0)
    if not name or shares_weights or config.memory.offload_reference:
        return 0
    frozen = trained
    if name != INITIAL:
        frozen = Transformer(ModelSource.of(name).shape, seed=None)
        frozen.store(config.model.base_dtype)
    return sum(x.nbytes for x in frozen.parameters())


def peak_of(components: Mapping[str, float], num_kept: int = 0) -> float:
    """The most bytes at once, if what `num_kept` generations need stays between rollouts."""
    rollout = sum(components.get(part, 0) for part in IN_ROLLOUT)
    update = sum(components[part] for part in IN_UPDATE)
    more = -min(rollout, update)
    if num_kept:
        more = (num_kept - 1) * (rollout - components["sampler's copy"])
    return CARD_SPARE + sum(components.values()) + more


def mean_prompt(tokenizer: Tokenizer, task: Task) -> float:
    return mean(len(encode_prompt(tokenizer, task.train(number))) for number in range(16))


def fit_to_memory(
    config: Config,
    shape: ModelShape,
    prompt: float,
    available: float,
    processes: int = 1,
) -> tuple[Config, int]:
    """Set batch sizes of 0 to the largest of the halves that fit a card's `available` bytes.

    Blocks are recomputed only if no prompt fits otherwise. Returns `Sampler.num_kept` too.
    """
    memory = config.memory
    sizes = [-(-config.sampling.prompts_per_step // processes)]  # of a process, and its halves
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    rollout_sizes = [memory.rollout_batch_size] if memory.rollout_batch_size else sizes
    update_sizes = [memory.micro_batch_size] if memory.micro_batch_size else sizes
    weights = {}
    for recomputes in (False, True):
        recomputing = config.replace(gradient_checkpointing=recomputes)
        weights[recomputes] = weights_of(recomputing, shape, processes)
    smallest = {"micro_batch_size": update_sizes[-1], "gradient_checkpointing": True}

    def fits(num_kept: int, tried: Config) -> bool:
        of_weights = weights[tried.memory.gradient_checkpointing]
        components = of_weights | work_of(tried, shape, prompt, processes)
        return peak_of(components, num_kept) <= available

    num_kept = int(config.speed.cuda_graphs and not (config.supervised or memory.fsdp))
    if not fits(num_kept, config.replace(rollout_batch_size=rollout_sizes[-1], **smallest)):
        num_kept = 0
    for size in rollout_sizes:
        if fits(num_kept, config.replace(rollout_batch_size=size, **smallest)):
            break
    config = config.replace(rollout_batch_size=size)
    for recomputes in sorted({memory.gradient_checkpointing, True}):
        for size in update_sizes:
            config = config.replace(micro_batch_size=size, gradient_checkpointing=recomputes)
            if fits(num_kept, config):
                return config, MOST_KEPT if num_kept and fits(MOST_KEPT, config) else num_kept
    return config, 0


def sizes_of(config: Config) -> str:
    """The flags that `fit_to_memory` sets."""
    memory = config.memory
    flags = f"--micro-batch-size {memory.micro_batch_size}"
    if not config.supervised:
        flags += f" --rollout-batch-size {memory.rollout_batch_size}"
    return flags + " --gradient-checkpointing" * memory.gradient_checkpointing
