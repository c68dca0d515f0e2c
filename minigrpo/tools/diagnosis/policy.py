"""Rules about the policy and its learning."""

import math
from typing import NamedTuple

import numpy as np

from ...runtime.measures import SAMPLED, in_words
from ..run_data import RunData, mean
from .said import Said

NUM_TRIALS = "n"  # key of an evaluation: how many examples it has


def entropy_collapses(run: RunData, threshold: float) -> Said | None:
    start, end = run.start("entropy"), run.end("entropy")
    if run.supervised or not end < threshold * start:
        return None
    return Said(
        "Entropy has collapsed: the model writes nearly the same text each time, so groups differ "
        "less and less.",
        f"{start:.3g} nats per token at the start, {end:.3g} in {run.last_steps}",
        "Lower --learning-rate, raise --clip-high (0.28, DAPO) with several --num-iterations, or "
        "stop at the best evaluation.",
    )


def entropy_explodes(run: RunData, threshold: float) -> Said | None:
    start, end = run.start("entropy"), run.end("entropy")
    if run.supervised or not end > threshold * start:
        return None
    return Said(
        "Entropy grows: the model becomes random instead of better.",
        f"{start:.3g} nats per token at the start, {end:.3g} in {run.last_steps}",
        "The reward does not depend on the text as it should (look at samples.jsonl), or "
        "--learning-rate is too high; --kl-coef 0.01 keeps the model near its start.",
    )


def kl_runs_away(run: RunData, threshold: float) -> Said | None:
    kl = run.series("kl")
    early, late = mean(kl[run.window : 2 * run.window]), run.end("kl")
    if not (late > threshold and late > 4 * early):
        return None
    return Said(
        "The KL to the initial model runs away.",
        f"{early:.3g} nats per token in the second fifth of the run, {late:.3g} in "
        f"{run.last_steps}",
        "Lower --learning-rate or raise --kl-coef; see whether the held-out measure still rises.",
    )


def clipped_ratio(run: RunData, threshold: float) -> Said | None:
    share = run.end("clip_ratio/low_mean") + run.end("clip_ratio/high_mean")
    if not share > threshold:
        return None
    return Said(
        "Many ratios are clipped, so these tokens have no gradient.",
        f"{share:.0%} of the tokens in {run.last_steps}",
        "Lower --learning-rate or --num-iterations.",
    )


def gradient_clipped(run: RunData, threshold: float) -> Said | None:
    norms, limit = run.series("grad_norm")[-run.window :], run.settings["grad_clip"]
    norms = norms[np.isfinite(norms)]
    if not len(norms) or not (norms > threshold * limit).mean() > 0.9:
        return None
    return Said(
        "The gradient is clipped to a fraction in nearly every step, so all steps have the same "
        "length, however sure the batch is.",
        f"median norm {np.median(norms):.3g} against --grad-clip {limit:g} in {run.last_steps}",
        "Raise --grad-clip, or lower --learning-rate if the loss is unsteady.",
    )


def sampler_gap(run: RunData, threshold: float) -> Said | None:
    allowed = threshold if run.settings["use_amp"] else threshold / 50
    gap = run.end("sampling/logp_difference_mean")
    if not gap > allowed:
        return None
    return Said(
        "Sampler and trainer disagree about the same tokens, more than their precision explains.",
        f"log-probs differ by {gap:.2g} per token in {run.last_steps}; up to {allowed:g} is usual",
        "Set --temperature, --top-p and --top-k to their defaults, or use --sampler-correction.",
    )


def shares(run: RunData) -> list[tuple[int, float, float]]:
    """(step, sampled share of right completions, number of examples) of each evaluation."""
    name = run.success + SAMPLED
    return [
        (r["step"], float(r[name]), float(r[NUM_TRIALS]))
        for r in run.evaluations
        if isinstance(r.get(name), int | float) and r.get(NUM_TRIALS)
    ]


def apart(first: tuple[int, float, float], second: tuple[int, float, float]) -> float:
    """How many standard errors the second share is above the first (pooled two-sample test)."""
    (_, p, n), (_, q, m) = first, second
    pooled = (p * n + q * m) / (n + m)
    error = math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    return (q - p) / error if error else 0.0


class Change(NamedTuple):
    """The mean training reward in the first and the last fifth of a run."""

    start: float
    end: float
    error: float  # standard error of the difference

    @classmethod
    def of(cls, run: RunData) -> "Change":
        rewards = run.series("reward")
        ends = rewards[: run.window], rewards[-run.window :]
        errors = (float(np.nanstd(x)) / math.sqrt(len(x)) for x in ends)
        return cls(mean(ends[0]), mean(ends[1]), math.hypot(*errors))


def falls(run: RunData, threshold: float) -> Said | None:
    found = shares(run)
    if len(found) < 3:
        return None
    best = max(found, key=lambda x: x[1])
    if not apart(found[-1], best) > threshold:
        return None
    return Said(
        "The model got better and then worse, or only worse: the learning rate is too high, or "
        "the reward pays for something else.",
        f"{in_words(run.success)} {best[1]:.1%} at step {best[0]}, {found[-1][1]:.1%} at step "
        f"{found[-1][0]} (sampled, held out)",
        "Lower --learning-rate to a third; the checkpoint nearest to the best evaluation is the "
        "one to keep (--keep-last).",
    )


def no_movement(run: RunData, threshold: float) -> Said | None:
    found = shares(run)
    if len(found) < 2 or run.supervised or len(run.metrics) < 100:
        return None
    reward = Change.of(run)
    moved = abs(reward.end - reward.start) > threshold * reward.error
    if moved or abs(apart(found[0], found[-1])) > threshold:
        return None
    return Said(
        "Nothing moves beyond noise.",
        f"reward {reward.start:.3g} at the start, {reward.end:.3g} in {run.last_steps}; "
        f"{in_words(run.success)} {found[0][1]:.1%} and {found[-1][1]:.1%}",
        "Raise --learning-rate by a factor of 3, train for longer, or use a larger --eval-size "
        "if the change is small.",
    )


def overfits(run: RunData, threshold: float) -> Said | None:
    found = shares(run)
    if len(found) < 2 or run.supervised:
        return None
    reward = Change.of(run)
    if not (
        reward.end - reward.start > 5 * reward.error and apart(found[-1], found[0]) > threshold
    ):
        return None
    return Said(
        "The training reward rises while the held-out measure falls.",
        f"reward {reward.start:.3g} to {reward.end:.3g}; {in_words(run.success)} "
        f"{found[0][1]:.1%} to {found[-1][1]:.1%} (sampled, held out)",
        "More or other training data, fewer steps, or --kl-coef 0.01. If the reward is not what "
        "the measure measures, change the reward.",
    )
