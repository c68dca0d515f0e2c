"""A lower bound on the time of a training step on this machine.

    seconds = rounds * (weight bytes + KV bytes) / bandwidth + FLOPs / matmul rate

Both rates are measured. The output head is counted only for the tokens that need it.
"""

from dataclasses import dataclass

import torch

from minigrpo.runtime.flops import ForwardFlops

from . import probe
from .workload import Workload


@dataclass(frozen=True)
class StepWork:
    """The amount of work in a measured step."""

    completions: float
    completion_len: float  # tokens, mean
    rounds: float  # of decoding, after the prompts
    tokens_rollout: float  # tokens that the model ran while sampling
    tokens_update: float  # tokens that it ran in the update
    prompt_copies: int  # times that sampling ran each prompt
    precision: str  # of matrix products: float32, tf32 or amp


@dataclass(frozen=True)
class Roofline:
    work: Workload
    bytes_per_s: float
    flops_per_s: dict[str, float]  # by precision

    @classmethod
    def probed(cls, work: Workload) -> "Roofline":
        """Measure this machine's rates."""
        rates = {}
        for name, dtype, matmul_precision in (
            ("float32", torch.float32, "highest"),
            ("tf32", torch.float32, "high"),
            ("amp", torch.bfloat16, "highest"),
        ):
            torch.set_float32_matmul_precision(matmul_precision)
            rates[name] = probe.matmul_rate(work.device, dtype)
        torch.set_float32_matmul_precision("highest")
        return cls(work, probe.bandwidth(work.device), rates)

    def seconds(self, step: StepWork) -> tuple[float, float]:
        """The bound for the whole step, and for its FLOPs alone."""
        flops = self._flops(step) / self.flops_per_s[step.precision]
        return self._bytes(step) / self.bytes_per_s + flops, flops

    def _attended(self, step: StepWork) -> float:
        """The approximate number of tokens that each token attends to."""
        return self.work.prompt_len + step.completion_len / 2

    def _flops(self, step: StepWork) -> float:
        config, shape, attended = self.work.config, self.work.shape, self._attended(step)
        # only the last token of a prompt needs the head
        without_head = self.work.prompt_len - 1
        without_head *= step.prompt_copies * config.sampling.prompts_per_step
        rollout = ForwardFlops.of(
            shape,
            tokens=step.tokens_rollout,
            attended=attended,
            head_tokens=step.tokens_rollout - without_head,
        ).total
        completion_tokens = step.completions * step.completion_len
        forward = ForwardFlops.of(
            shape,
            tokens=step.tokens_update,
            attended=attended,
            head_tokens=min(completion_tokens, step.tokens_update),
        ).total
        # a backward pass takes twice the FLOPs of its forward; the reference is one more forward
        return rollout + (3 + bool(config.loss.kl_coef)) * forward

    def _bytes(self, step: StepWork) -> float:
        shape, size = self.work.shape, 2 if step.precision == "amp" else 4
        parameters = shape.layers * shape.block_weights + shape.vocab_size * shape.width
        rows = step.completions * step.completion_len / max(1.0, step.rounds)  # per round
        cached_tokens = self.work.prompt_len + rows * self._attended(step)
        return step.rounds * size * (parameters + 2 * shape.layers * shape.kv_width * cached_tokens)
