"""Estimate the memory of a step by kind, and its peak."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ..config import Config
from ..model.logprobs import block_size, chunk_size
from ..model.merged_attention import KERNELS
from ..model.shape import ModelShape
from .kept_activations import FLOAT, LOW, KeptByBlock
from .step_counts import StepCounts
from .stored_weights import StoredWeights

MIB = 2**20
# float32 copies of a logit that log-softmax, its gradient and the entropy hold at once
LOGIT_COPIES = 3.5
# With --keep-freed-memory. Where an aligned block was freed, glibc 2.36 finds no room for another
# one of its size.
LOGIT_COPIES_KEPT = 6
# of a decoding round: logits, log-probs, and the CDF by slot and by sequence
DECODING_COPIES = 4
ON_HOST = ", in host memory"


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one process by kind, on a type of device, such as cuda."""

    config: Config
    shape: ModelShape
    counts: StepCounts
    device: str
    student: ModelShape | None = None  # of a model that the reward asks

    def by_kind(self) -> dict[str, float]:
        """Bytes by kind; not all of it at the same time."""
        trained = float(self.weights.num_trained)
        kept, recomputed = self._activations()
        return {
            "weights": self.weights.num_bytes,
            "gradients": FLOAT * trained,
            self._adam: 2 * FLOAT * trained,
            self._reference: self._reference_weights(),
            self._student: self._frozen(self.student_weights) if self.student_weights else 0.0,
            "sampler's weights": self._samplers_weights(),
            "casts of weights": self._casts(self.weights),
            "KV cache": self._kv_cache(),
            "decoding round": self._decoding_round(),
            "activations": kept,
            "recomputed block": recomputed,
            "block's backward": self._block_backward(),
            "logits": self._logits(self.shape),
        }

    def peak(self, by_kind: Mapping[str, float]) -> float:
        """The most bytes at once: in the rollout, the reference, or a moment of the update."""
        kinds = ("weights", self._adam, self._reference, self._student, "sampler's weights")
        stays = sum(by_kind[kind] for kind in kinds if not kind.endswith(ON_HOST))
        casts, logits = by_kind["casts of weights"], by_kind["logits"]
        rollout = by_kind["KV cache"] + by_kind["decoding round"]
        if not by_kind["sampler's weights"]:
            rollout += casts
        # a frozen model's forward; one that waits in host memory is moved for it
        reference = casts + logits if by_kind[self._reference] else 0.0
        student = 0.0
        if self.student and self.student_weights:
            student = self._casts(self.student_weights) + self._logits(self.student)
        reference += by_kind[self._reference] * self._reference.endswith(ON_HOST)
        student += by_kind[self._student] * self._student.endswith(ON_HOST)
        later = max(reference, student, self._update(by_kind))
        # with CUDA graphs, the KV cache outlives the rollout
        if self.config.speed.cuda_graphs and self.device == "cuda":
            later += by_kind["KV cache"]
        return stays + max(rollout, later)

    @cached_property
    def weights(self) -> StoredWeights:
        return StoredWeights.of(self.config, self.shape)

    @cached_property
    def student_weights(self) -> StoredWeights | None:
        return StoredWeights.frozen(self.config, self.student) if self.student else None

    # --- weights, and what belongs to them --------------------------------------------------------

    @property
    def _adam(self) -> str:
        """The kind. A CPU has no other memory to offload to."""
        moved = self.config.memory.offload_optimizer and self.device != "cpu"
        return "Adam" + ON_HOST * moved

    @property
    def _reference(self) -> str:
        """The kind. A CPU has no other memory to offload to."""
        moved = self.config.memory.offload_reference and self.device != "cpu"
        return "reference" + ON_HOST * moved

    @property
    def _student(self) -> str:
        """The kind. --offload-reference moves it too."""
        return "student" + ON_HOST * self._reference.endswith(ON_HOST)

    def _reference_weights(self) -> float:
        """With adapters, the reference is the model without them, and takes nothing."""
        if not self.config.loss.kl_coef or not self.weights.is_whole:
            return 0.0
        return self._frozen(self.weights)

    def _frozen(self, weights: StoredWeights) -> float:
        """Of a model that is not trained."""
        saved = (FLOAT - LOW) * weights.in_blocks
        return weights.num_bytes - saved * self.config.speed.low_precision_weights

    def _samplers_weights(self) -> float:
        """The copies of --low-precision-weights."""
        return LOW * self.weights.in_blocks * self.config.speed.low_precision_weights

    def _casts(self, weights: StoredWeights) -> float:
        """Weights in the precision of a product, if they are stored in another one."""
        head = weights.model.head_weight
        if self.config.speed.use_amp:  # autocast's, which stay until the end of a forward
            return LOW * (weights.in_blocks + head.numel() * (head.itemsize == FLOAT))
        # a frozen head is cast as a whole; the casts of other layers are gone before
        return FLOAT * float(head.numel()) * (head.itemsize != FLOAT)

    # --- the rollout ------------------------------------------------------------------------------

    @property
    def _bytes_in_attention(self) -> int:
        """Of a number of keys and values. On a CPU, attention is always in float32."""
        return LOW if self.config.speed.use_amp and self.device != "cpu" else FLOAT

    @property
    def _slots(self) -> float:
        """Of one rollout batch."""
        return self.counts.slots * self.counts.prompts_at_once / self.counts.prompts

    def _kv_cache(self) -> float:
        counts, config = self.counts, self.config
        if not config.speed.kv_cache or not counts.slots:
            return 0.0
        window = config.sampling.max_new_tokens + config.speed.num_speculative_tokens + 1
        slots = self._slots
        prompts = counts.prompts_at_once if config.memory.share_prompt_kv else slots
        keys = prompts * counts.prompt_len + slots * window
        return 2.0 * self.shape.layers * self.shape.kv_width * self._bytes_in_attention * keys

    def _decoding_round(self) -> float:
        tokens, shape = self._slots * self.counts.window, self.shape
        prompts = self.counts.prompts_at_once * self.counts.prompt_len * bool(self._slots)
        # of one block: queries, keys, values, the output of attention, and the inside of the MLP
        queries = shape.heads * shape.head_dim
        block = queries + 2 * shape.kv_width + shape.width + self._inside_mlp
        logits = DECODING_COPIES * tokens * shape.vocab_size
        return FLOAT * (block * max(tokens, prompts) + logits)

    # --- the update -------------------------------------------------------------------------------

    @property
    def _share(self) -> float:
        """The share of the prompts that is in one micro-batch."""
        return self.counts.micro / self.counts.prompts

    @property
    def _merged(self) -> bool:
        """Whether attention merges parts instead of joining their keys."""
        return self.device in KERNELS

    @property
    def _inside_mlp(self) -> int:
        """Numbers per token that the MLP holds at once between its first and its last layer."""
        return (2 if self.shape.mlp == "gelu" else 3) * self.shape.mlp_width

    def _update(self, by_kind: Mapping[str, float]) -> float:
        """The most bytes at once in an update, besides what stays."""
        gradients, head = by_kind["gradients"], self.weights.head_gradient
        earlier = gradients * (self.counts.micro_batches > 1)  # of other micro-batches
        casts, kept, logits = (
            by_kind[kind] for kind in ("casts of weights", "activations", "logits")
        )
        # the logits are freed before the backward pass of the last block begins
        block = by_kind["recomputed block"] + by_kind["block's backward"]
        forward = casts + kept + logits
        backward = kept + max(logits, block) + head
        if not self.config.memory.gradient_checkpointing:  # the graph keeps the casts
            backward += casts
        # The output head's gradient comes first, the embedding's last. If they are tied, both
        # exist before their sum joins the other gradients.
        last = (2 if self.shape.tied else 1) * head
        if self._adam.endswith(ON_HOST):  # the moments of one parameter at a time
            last = max(last, 2.0 * FLOAT * self.weights.largest_trained)
        return max(forward + earlier, backward + earlier, gradients + last)

    def _block_backward(self) -> float:
        """Within one block: the gradients of its MLP, and of gathered keys and values.

        Merged, keys and values are gathered again for it.
        """
        counts, shape = self.counts, self.shape
        floats = (2 * shape.width + self._inside_mlp) * counts.packed
        keys = 2 * counts.merged if self._merged else counts.gathered
        return FLOAT * (floats + 2 * shape.kv_width * keys) * self._share

    def _activations(self) -> tuple[float, float]:
        """What all blocks keep until the backward pass, and one block that is recomputed in it."""
        counts, shape, low = self.counts, self.shape, self.config.speed.use_amp
        by_block = KeptByBlock.of(self.weights.block, shape, low=low, device=self.device)
        queries = keys = counts.packed
        if not self._merged:
            queries, keys = counts.padded, counts.causal + counts.gathered
        kept = counts.packed * by_block.per_token
        kept = (kept + queries * by_block.per_query + keys * by_block.per_key) * self._share
        # All layers share the masks, which are made from some in bytes. Joined, query heads that
        # share keys are rows of a mask.
        rows = 1 if self._merged else shape.heads // shape.kv_heads
        pairs = counts.merged_masked if self._merged else counts.masked
        masks = pairs * (rows * self._bytes_in_attention + 1) * self._share
        if not self.config.memory.gradient_checkpointing:
            return kept * shape.layers + masks, 0.0
        inputs = FLOAT * shape.width * shape.layers * counts.packed * self._share
        return inputs + masks, kept

    def _logits(self, shape: ModelShape) -> float:
        tokens = self.counts.predictions * self._share
        if not self.config.memory.chunked_logprobs:
            kept = self.config.speed.keep_freed_memory and self.device == "cpu"
            return FLOAT * (LOGIT_COPIES_KEPT if kept else LOGIT_COPIES) * tokens * shape.vocab_size
        chunk = chunk_size(shape.vocab_size, self.device)
        size = LOW if self.config.speed.use_amp else FLOAT
        trained = bool(self.weights.head_gradient)
        block = block_size(chunk, shape.width, size, self.device) if trained else chunk
        # the slopes of a block, and, of each block but the first, a second gradient of the head
        rows = min(block, tokens) + shape.width * trained * (tokens > block)
        chunk_logits = FLOAT * min(chunk, tokens)
        return shape.vocab_size * (chunk_logits + max(chunk_logits, size * rows))
