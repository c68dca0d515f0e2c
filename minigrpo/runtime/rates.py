"""Measure how fast this machine runs the parts of a step, in a few seconds.

Each part is timed with the code that a run uses, at the model's own width, precision and memory
settings: a block forward and backward on a packing, the output head on some predictions, rounds of
decoding on some slots, the optimizer on some parameters. A part is timed on a little work, and on
more until a call takes TARGET_SECONDS or the work is a step's. A line through both gives its time
for a step. What would take too much memory is timed at a smaller width or vocabulary,
and scaled by its FLOPs. --compile-model is left out, because compiling takes longer than all of it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from ..config import Config
from ..model.attention import Rotation
from ..model.logprobs import chunk_size, token_logprobs
from ..model.packed_attention import Packing
from ..model.packing import PACKINGS
from ..model.shape import ModelShape
from ..model.tokenizer import Tokenizer
from ..model.transformer import Transformer
from ..sampling.drafts import ProposalWindow
from ..sampling.params import SamplingParams
from ..sampling.running import RunningSequences
from ..sampling.sampler import Sampler
from ..types import Completions
from . import accel
from .base_model import add_lora
from .line import Line
from .machine import undisturbed_seconds
from .optim import make_optimizer
from .step_counts import StepCounts

TARGET_SECONDS = 0.1
# A decoding round is timed up to its own number of slots where possible: few rows take as long as
# it takes to read the weights, so a line through 1 and 4 slots is far too steep for 16.
TARGET_SECONDS_OF_ROUNDS = 1.5
REPEATS = 3
MOST_LAYERS = 4  # of the model in which decoding is timed
MOST_WIDTH = 768
MOST_LOGITS = 1 << 24
MOST_PARAMETERS = 1 << 22  # of the optimizer
MOST_IN_HEAD = 1 << 26  # floats of the output head
ROUNDS = 3  # of decoding, in one call


@dataclass(frozen=True)
class Rates:
    """Seconds that this machine takes; a gradient includes its forward."""

    block_forward: Line  # of one layer, by packed tokens
    block_gradient: Line
    head_forward: Line  # by predictions
    head_gradient: Line
    round: Line  # of decoding in all layers, by slots
    optimizer: float  # per parameter


Work = Callable[[int], Callable[[], object]]  # work of a size, to be timed


class FixedWindow(ProposalWindow):
    """Random models accept no proposals, but rounds that propose must be timed."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size

    def update(self, right: int, judged: int, num_slots: int) -> None: ...


class Probe:
    """Times the parts of a step with the flags of a config, on random weights and tokens."""

    def __init__(
        self, config: Config, shape: ModelShape, tokenizer: Tokenizer, device: torch.device
    ) -> None:
        self.config, self.shape, self.tokenizer, self.device = config, shape, tokenizer, device
        head_size = min(shape.head_dim, MOST_WIDTH)
        heads = min(shape.heads, MOST_WIDTH // head_size)
        shared = shape.heads // shape.kv_heads
        heads = max(shared, heads - heads % shared)
        width = min(shape.width, MOST_WIDTH) if heads < shape.heads else shape.width
        vocab_size = max(2, min(shape.vocab_size, MOST_IN_HEAD // width))
        context, layers = min(shape.context, 4096), min(shape.layers, MOST_LAYERS)
        self.small = replace(
            shape,
            vocab_size=vocab_size,
            context=context,
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=heads // shared,
            head_dim=head_size,
            mlp_width=shape.mlp_width * width // shape.width,
        )
        # how much larger a block and the head of the model are
        self.block_scale = shape.block_weights / self.small.block_weights
        self.head_scale = shape.vocab_size * shape.width / (vocab_size * width)

    def rates(self, counts: StepCounts, completions: Completions) -> Rates:
        """The rates at a step's sizes; `completions`, like those of the step, are packed."""
        accel.set_up_process(self.config.speed, self.device)
        head_forward, head_gradient = self._head(counts.predictions / counts.micro_batches)
        unknown = Line(0.0, 0.0)
        first = Rates(
            block_forward=unknown,
            block_gradient=unknown,
            head_forward=head_forward,
            head_gradient=head_gradient,
            round=unknown,
            optimizer=self._optimizer(),
        )
        return self.rates_at(first, counts, completions)

    def rates_at(self, rates: Rates, counts: StepCounts, completions: Completions) -> Rates:
        """The rates at another step's sizes: blocks and rounds are measured, the rest is known."""
        forward, gradient = self._block(completions, counts.micro)
        a_round = self._decoding(counts) if counts.slots else Line(0.0, 0.0)
        return replace(rates, block_forward=forward, block_gradient=gradient, round=a_round)

    def _autocast(self) -> AbstractContextManager[object]:
        return accel.autocast(self.config.speed, self.device)

    def _seconds(self, function: Callable[[], object]) -> float:
        return undisturbed_seconds(function, self.device, REPEATS)

    def _grown(
        self, work_of: Work, most: float, target: float = TARGET_SECONDS
    ) -> tuple[Line, int]:
        """Time `work_of(size)()` for the sizes 1, 4, 16, .. `most` until its growth shows.

        Returns the seconds by size, and the last size.
        """
        size, last = 1, max(1, round(most))
        little = more = self._seconds(work_of(1))
        while size < last and more < max(target, 2 * little):
            size = min(4 * size, last)
            more = self._seconds(work_of(size))
        return Line.through(1, little, size, more), size

    def _line(self, work_of: Work, size: int) -> Line:
        little, more = (self._seconds(work_of(n)) for n in (1, size))
        return Line.through(1, little, size, more)

    # --- the update -----------------------------------------------------------------------------

    def _block(self, completions: Completions, micro: int) -> tuple[Line, Line]:
        """One block on packed tokens: a forward, and a forward with its backward.

        Of small blocks several run, so that their activations do not all stay in a CPU's cache.
        """
        room = MOST_PARAMETERS // self.small.block_weights
        number = max(1, min(self.small.layers, room))
        model = self._model(replace(self.small, layers=number, vocab_size=2))
        blocks = [*model.h]
        recomputed = self.config.memory.gradient_checkpointing

        def pack(prompts: int) -> Packing:
            part = completions.select(torch.arange(prompts))
            return PACKINGS[self.config.speed.packing](part).to(self.device)

        def work(prompts: int, *, backward: bool) -> Callable[[], object]:
            packing = pack(prompts)
            tokens, attend = len(packing.tokens.ids), packing.layer(0)
            if self.small.rope_theta:
                positions = packing.tokens.positions
                attend = Rotation.of(self.small, positions, torch.float32).before(attend)
            x = torch.randn(tokens, self.small.width, device=self.device, requires_grad=backward)

            def run() -> None:
                out = x
                with torch.set_grad_enabled(backward), self._autocast():
                    for block in blocks:
                        again = backward and recomputed
                        out = accel.recompute(block, out, attend) if again else block(out, attend)
                if backward:
                    out.sum().backward()

            return run

        forward, gradient = (partial(work, backward=backward) for backward in (False, True))
        with_backward, most = self._grown(gradient, min(micro, len(completions)))
        unit, scale = len(pack(most).tokens.ids) / most, self.block_scale / number
        return self._line(forward, most).times(scale, unit), with_backward.times(scale, unit)

    def _head(self, most: float) -> tuple[Line, Line]:
        """The output head with its log-softmax, on predictions."""
        vocab_size, width = self.small.vocab_size, self.small.width
        head = torch.randn(vocab_size, width, device=self.device).mul_(0.02)
        if self.config.model.lora_rank:
            head = head.to(getattr(torch, self.config.model.base_dtype))
        else:
            head.requires_grad_()
        memory, temperature = self.config.memory, self.config.sampling.temperature
        chunk = chunk_size(vocab_size, self.device.type) if memory.chunked_logprobs else 0

        def work(tokens: int, *, backward: bool) -> Callable[[], object]:
            hidden = torch.randn(tokens, width, device=self.device, requires_grad=backward)
            targets = torch.zeros(tokens, dtype=torch.int64, device=self.device)

            def run() -> None:
                with torch.set_grad_enabled(backward), self._autocast():
                    logp, _ = token_logprobs(hidden, head, targets, temperature, chunk)
                if backward:
                    logp.sum().backward()

            return run

        forward, gradient = (partial(work, backward=backward) for backward in (False, True))
        with_backward, size = self._grown(gradient, min(most, MOST_LOGITS / vocab_size))
        scale = self.head_scale
        return self._line(forward, size).times(scale), with_backward.times(scale)

    def _optimizer(self) -> float:
        """Seconds per parameter of clipping the gradient and one step of AdamW."""
        options = self.config.optimizer
        rows = min(self.shape.num_parameters, MOST_PARAMETERS) // 1024
        model = nn.Linear(1024, max(1, rows)).to(self.device)
        optimizer = make_optimizer(
            model,
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            fused=self.config.speed.fused_optimizer,
            offload=self.config.memory.offload_optimizer,
        )
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

        def run() -> None:
            nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip)
            optimizer.step()

        return self._seconds(run) / sum(p.numel() for p in model.parameters())

    # --- the rollout ----------------------------------------------------------------------------

    def _decoding(self, counts: StepCounts) -> Line:
        """A round of decoding, on slots."""
        whole, rest = (
            partial(self._rounds, Sampler(self.config, self._model(shape), self.tokenizer), counts)
            for shape in (self.small, replace(self.small, layers=0))
        )
        slots = counts.decoded / max(1.0, counts.rounds) / counts.window
        both, slots = self._grown(whole, slots, TARGET_SECONDS_OF_ROUNDS)
        # without layers, what is left is the head, the picking of tokens, and the host
        head = self._line(rest, slots)
        more = self.shape.layers / self.small.layers * self.block_scale

        def scaled(both: float, head: float) -> float:
            return (max(0.0, both - head) * more + head * self.head_scale) / ROUNDS

        return Line(scaled(both.fixed, head.fixed), scaled(both.each, head.each))

    def _model(self, shape: ModelShape) -> Transformer:
        """A random model, with adapters if the config has any."""
        model, settings = Transformer(shape), self.config.model
        if not shape.layers:
            settings = replace(settings, lora_targets="")  # none of them is there
        add_lora(model, settings)
        return model.to(self.device)

    def _rounds(self, sampler: Sampler, counts: StepCounts, slots: int) -> Callable[[], object]:
        """ROUNDS rounds on so many slots, in the middle of their completions."""
        window, done = round(counts.window), max(1, round(counts.completion_len / 2))
        length, device = done + (ROUNDS + 2) * window, self.device
        prompt_len = torch.tensor([max(1, round(counts.prompt_len))], device=device)
        prompt_ids = torch.zeros(1, int(prompt_len), dtype=torch.int64, device=device)
        sampling = self.config.sampling
        sequences = RunningSequences(
            slots,
            1,
            max_new_tokens=length,
            stops=(),
            params=SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p),
            u=torch.rand(slots, 1, length, device=device),
            drafts=prompt_ids.expand(slots, -1) if window > 1 else None,
            num_speculative_tokens=window - 1,
            device=device,
        )
        sequences.proposal_window = FixedWindow(window)
        with torch.no_grad(), self._autocast():
            decoder = sampler.decoder(sampler.low_precision, length + window)
            decoder.prefill(prompt_ids, prompt_len, slots)

        def run() -> None:
            sequences.lengths.fill_(done)
            sequences.length_bound = done
            with torch.no_grad(), self._autocast():
                for _ in range(ROUNDS):
                    sequences.accept(decoder.step(*sequences.next_inputs()))
                    sequences.update_slots(decoder)

        return run
