"""Estimate the memory of a step by kind, and its peak."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..config import Config
from ..model.logprobs import chunk_size
from ..model.shape import ModelShape
from .step_counts import StepCounts

MIB = 2**20
# bytes that autograd keeps per token, layer and unit of width, measured with saved-tensor hooks;
# key: whether autocast is on
KEPT = {False: 66, True: 41}
# floats per token and unit of width that one block holds for a moment: in a forward, the outputs of
# its linear maps and of GELU (3 + 1 + 4 + 4); in a backward pass, the gradients of the MLP
# (1 + 4 + 4 + 1)
FORWARD_FLOATS, BACKWARD_FLOATS = 12, 10
# float32 copies of a logit that log-softmax, its gradient and the entropy hold at once
LOGIT_COPIES = 3.5
# of a decoding round: logits, log-probs, and the CDF by slot and by sequence
DECODING_COPIES = 4


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one process by kind, on a type of device, such as cuda."""

    config: Config
    shape: ModelShape
    counts: StepCounts
    device: str

    def by_kind(self) -> dict[str, float]:
        """Bytes by kind; not all of it at the same time."""
        low, low_weights = self.config.speed.use_amp, self.config.speed.low_precision_weights
        parameters = self.shape.num_parameters
        blocks = self.shape.layers * self.shape.block_weights
        frozen = 4.0 * parameters - (2.0 * blocks if low_weights else 0)
        return {
            "weights": 4.0 * parameters,
            "gradients": 4.0 * parameters,
            "Adam": 8.0 * parameters,
            "reference": frozen * bool(self.config.loss.kl_coef),
            "weights in low precision": 2.0 * blocks * low * (1 + low_weights),
            "KV cache": self._kv_cache(),
            "decoding round": self._decoding_round(),
            "activations": self._activations(),
            "block's backward": self._block_backward(),
            "logits": self._logits(),
        }

    def peak(self, by_kind: Mapping[str, float]) -> float:
        """The most bytes at once: in the rollout, or at the start or the end of a backward pass."""
        stays = ["weights", "Adam", "weights in low precision"]
        # on a CPU there is nowhere to move the reference to
        if self.device == "cpu" or not self.config.memory.offload_reference:
            stays.append("reference")
        rollout = by_kind["KV cache"] + by_kind["decoding round"]
        # The head is tied: its gradient comes first, the embedding's last, and their sum joins the
        # gradient of earlier micro-batches, if there are any.
        head = 4.0 * self.shape.vocab_size * self.shape.width
        earlier = by_kind["gradients"] * (self.counts.micro_batches > 1)
        # the logits are freed before the backward pass of the last block begins
        most = max(by_kind["logits"], by_kind["block's backward"])
        first = by_kind["activations"] + most + head + earlier
        update = max(first, by_kind["gradients"] + 2 * head)
        # with CUDA graphs, the KV cache outlives the rollout
        together = self.config.speed.cuda_graphs and self.device == "cuda"
        most = update + by_kind["KV cache"] if together else max(update, rollout)
        return most + sum(by_kind[name] for name in stays)

    @property
    def _bytes_per_key(self) -> int:
        return 2 if self.config.speed.use_amp and self.device != "cpu" else 4

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
        if config.speed.speculative_decoding and not config.speed.cuda_graphs:
            slots *= 1.5  # it begins with a slot per prompt, and grows: old and new exist at once
        prompts = counts.prompts_at_once if config.memory.share_prompt_kv else slots
        keys = prompts * counts.prompt_len + slots * window
        return 2.0 * self.shape.layers * self.shape.kv_width * self._bytes_per_key * keys

    def _decoding_round(self) -> float:
        tokens, shape = self._slots * self.counts.window, self.shape
        prompts = self.counts.prompts_at_once * self.counts.prompt_len * bool(self._slots)
        block = FORWARD_FLOATS * shape.width * max(tokens, prompts)
        return 4.0 * (block + DECODING_COPIES * tokens * shape.vocab_size)

    def _block_backward(self) -> float:
        counts, floats = self.counts, BACKWARD_FLOATS * self.counts.packed
        floats += 2 * counts.gathered  # gradients of the gathered keys and values
        return 4.0 * floats * self.shape.width * (counts.micro / counts.prompts)

    def _activations(self) -> float:
        counts, low = self.counts, self.config.speed.use_amp
        share = counts.micro / counts.prompts
        kept = KEPT[low]
        if low and self.device == "cpu":
            # attention runs in float32: queries, outputs, and keys and values unless gathered
            kept += 2 * (2 if counts.gathered else 4)
        gathered = counts.gathered * 2 * self._bytes_per_key
        padding = (counts.padded - counts.packed) * 2 * self._bytes_per_key  # queries and outputs
        per_layer = (counts.packed * kept + gathered + padding) * share * self.shape.width
        if self.config.memory.gradient_checkpointing:
            inputs = 4 * counts.packed * share * self.shape.width * self.shape.layers
            return per_layer + inputs
        return per_layer * self.shape.layers

    def _logits(self) -> float:
        tokens = self.counts.predictions * (self.counts.micro / self.counts.prompts)
        copies = tokens * LOGIT_COPIES
        if self.config.memory.chunked_logprobs:
            copies = min(chunk_size(self.shape.vocab_size, self.device), tokens) * 2
        return 4.0 * copies * self.shape.vocab_size
