"""What may be wrong with a run: a table of rules, each with its threshold and its source.

A rule looks at the records of a run. It says nothing, or gives a Finding: what is wrong, the
numbers that show it, and what to do. `diagnose` asks all of them. Start and end are the first and
the last fifth of the steps of a run; entropy and KL are in nats per token.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..losses import LOSSES
from .run_data import RunData, mean

FEWEST_STEPS = 20  # a shorter run is not judged by its trends
NUM_TRIALS = "n"  # key of an evaluation: how many examples it has


class Finding(NamedTuple):
    """One thing that is wrong with a run, or worth knowing."""

    rule: str
    what: str  # a sentence
    evidence: str  # numbers and steps
    advice: str


class Said(NamedTuple):
    """What a rule says; None instead if it has nothing to say."""

    what: str
    evidence: str
    advice: str


@dataclass(frozen=True)
class Rule:
    """A rule: it gets the run and its threshold."""

    threshold: float
    source: str  # why this threshold
    say: Callable[[RunData, float], Said | None]
    trend: bool = True  # whether it needs FEWEST_STEPS


# --- the signal -----------------------------------------------------------------------------------


def no_signal(run: RunData, threshold: float) -> Said | None:
    share = run.end("frac_reward_zero_std")
    if not share > threshold or _saturated(run):
        return None
    return Said(
        "Most groups teach nothing, because all of their completions have equal rewards.",
        f"{share:.0%} of the groups in {run.last_steps}",
        "Take easier or harder prompts, a larger --group-size, --dynamic-sampling 3, or a reward "
        "with partial credit; a model that never gets anything right needs a warm start "
        "(--loss nll).",
    )


def saturated(run: RunData, threshold: float) -> Said | None:
    if not _saturated(run, threshold):
        return None
    return Said(
        "The reward is at its maximum: there is nothing left to learn from these prompts.",
        f"every reward part is above {threshold:.0%} of 1 in {run.last_steps}",
        "Stop here, or take harder prompts.",
    )


def _saturated(run: RunData, threshold: float = 0.98) -> bool:
    parts = run.names("rewards/", "/mean")
    return bool(parts) and all(run.end(part) >= threshold for part in parts)


def silent_part(run: RunData, threshold: float) -> Said | None:
    silent = []
    for part in run.names("rewards/", "/mean"):
        values = run.series(part)
        if np.isfinite(values).any() and np.nanmax(np.abs(values)) <= threshold:
            silent.append(part.split("/")[1])
    if not silent:
        return None
    return Said(
        f"{_listed(silent)} never fires: no completion was ever paid for it.",
        f"0 in all {len(run.metrics)} steps",
        "Check the reward on a right answer; if it is right, the task is too hard for this model "
        "without a warm start (--loss nll).",
    )


def dominated(run: RunData, threshold: float) -> Said | None:
    parts = {part.split("/")[1]: part for part in run.names("rewards/", "/mean")}
    full = [name for name, part in parts.items() if run.end(part) >= 1 - threshold]
    stuck = [
        name
        for name, part in parts.items()
        if 0 < run.end(part) <= threshold and run.end(part) <= 1.5 * run.start(part)
    ]
    if not full or not stuck:
        return None
    return Said(
        f"The easy part of the reward ({_listed(full)}) is full, and the hard one "
        f"({_listed(stuck)}) does not rise.",
        f"above {1 - threshold:.0%} and below {threshold:.0%} in {run.last_steps}",
        "Give the hard part more weight (--reward-weights), or partial credit on the way to it.",
    )


def reward_failures(run: RunData, threshold: float) -> Said | None:
    failed = {name.split("/")[1]: run.series(name) for name in run.names("rewards/", "/failures")}
    counts = {part: int(np.nansum(values)) for part, values in failed.items()}
    worst = max(counts, key=lambda part: counts[part], default="")
    if not worst or counts[worst] <= threshold:
        return None
    steps = [r["step"] for r in run.metrics if r.get(f"rewards/{worst}/failures")]
    return Said(
        f"The reward {worst} fails on some completions, and pays 0 for them.",
        f"{counts[worst]} failures in {len(steps)} of {len(run.metrics)} steps, first at step "
        f"{steps[0]}",
        "The warnings of the run name the first error. Mend the function, or raise "
        "--reward-timeout.",
    )


# --- the texts ------------------------------------------------------------------------------------


def cut(run: RunData, threshold: float) -> Said | None:
    share = run.end("completions/clipped_ratio")
    if not share > threshold:
        return None
    longest = run.settings["max_new_tokens"]
    if share > 0.99:
        return Said(
            "No completion ends: the model does not write its end-of-text token.",
            f"{share:.0%} are cut off at --max-new-tokens {longest} in {run.last_steps}",
            "Check that the stop tokens are those of the model's chat template; warm the model up "
            "on true answers (--loss nll), which teaches the end.",
        )
    return Said(
        "Many completions are cut off before they end, and are judged by half a text.",
        f"{share:.0%} reach --max-new-tokens {longest} in {run.last_steps}",
        "Raise --max-new-tokens, or use --overlong mask or --overlong punish.",
    )


def length_grows(run: RunData, threshold: float) -> Said | None:
    start, end = (f("completions/mean_length") for f in (run.start, run.end))
    if not end > threshold * start:
        return None
    return Said(
        "Completions grow longer.",
        f"{start:.0f} tokens at the start, {end:.0f} in {run.last_steps}",
        "That is right for a task that needs reasoning. Otherwise --loss dr_grpo removes GRPO's "
        "preference for long wrong answers, and --overlong punish pays for short ones.",
    )


def length_collapses(run: RunData, threshold: float) -> Said | None:
    start, end = (f("completions/mean_length") for f in (run.start, run.end))
    if not end < threshold * start:
        return None
    return Said(
        "Completions shrink.",
        f"{start:.0f} tokens at the start, {end:.0f} in {run.last_steps}",
        "Look at samples.jsonl: a part of the reward may be had for a short text. Change that "
        "part, or add --kl-coef 0.01.",
    )


# --- the policy -----------------------------------------------------------------------------------


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


# --- learning -------------------------------------------------------------------------------------


def shares(run: RunData, name: str = "exact_sampled") -> list[tuple[int, float, float]]:
    """(step, share, number of examples) of each evaluation that has the measure."""
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
        f"exactly right {best[1]:.1%} at step {best[0]}, {found[-1][1]:.1%} at step "
        f"{found[-1][0]} (sampled, held out)",
        "Lower --learning-rate to a third; the checkpoint nearest to the best evaluation is the "
        "one to keep (--keep-last).",
    )


def no_movement(run: RunData, threshold: float) -> Said | None:
    found, rewards = shares(run), run.series("reward")
    if len(found) < 2 or run.supervised or len(run.metrics) < 100:
        return None
    start, end = rewards[: run.window], rewards[-run.window :]
    spread = math.hypot(*(float(np.nanstd(x)) / math.sqrt(len(x)) for x in (start, end)))
    moved = abs(mean(end) - mean(start)) > threshold * spread
    if moved or abs(apart(found[0], found[-1])) > threshold:
        return None
    return Said(
        "Nothing moves beyond noise.",
        f"reward {mean(start):.3g} at the start, {mean(end):.3g} in {run.last_steps}; exactly "
        f"right {found[0][1]:.1%} and {found[-1][1]:.1%}",
        "Raise --learning-rate by a factor of 3, train for longer, or use a larger --eval-size "
        "if the change is small.",
    )


def overfits(run: RunData, threshold: float) -> Said | None:
    found, rewards = shares(run), run.series("reward")
    if len(found) < 2 or run.supervised:
        return None
    start, end = rewards[: run.window], rewards[-run.window :]
    spread = math.hypot(*(float(np.nanstd(x)) / math.sqrt(len(x)) for x in (start, end)))
    if not (mean(end) - mean(start) > 5 * spread and apart(found[-1], found[0]) > threshold):
        return None
    return Said(
        "The training reward rises while the held-out measure falls.",
        f"reward {mean(start):.3g} to {mean(end):.3g}; exactly right {found[0][1]:.1%} to "
        f"{found[-1][1]:.1%} (sampled, held out)",
        "More or other training data, fewer steps, or --kl-coef 0.01. If the reward is not what "
        "the measure measures, change the reward.",
    )


def skipped(run: RunData, threshold: float) -> Said | None:
    counts = run.series("skipped_steps")
    number = np.nanmax(counts) if np.isfinite(counts).any() else 0
    if not number > threshold:
        return None
    first = next(r["step"] for r in run.metrics if r.get("skipped_steps"))
    return Said(
        "Steps were skipped, because their loss or gradient was not finite.",
        f"{number:.0f} steps, the first at step {first}",
        "The batches are in bad_batches/. Lower --learning-rate, or use --no-use-amp.",
    )


# --- time and memory ------------------------------------------------------------------------------

ADVICE = {
    "reward": "--num-reward-workers, or --overlap-rewards with several rollout batches",
    "data": "a faster disk, or a task that makes its examples faster",
    "reference": "--no-offload-reference, --use-amp, or a run without --kl-coef",
}


def slow_phase(run: RunData, threshold: float) -> Said | None:
    step = run.end("step_time")
    part = {name: run.end(f"time/{name}") / step for name in ADVICE} if step > 0 else {}
    worst = max(part, key=lambda name: np.nan_to_num(part[name]), default="")
    if not worst or not part[worst] > threshold:
        return None
    return Said(
        f"The step waits for its {worst} phase.",
        f"{part[worst]:.0%} of {step:.2g} s per step in {run.last_steps}",
        f"What may help: {ADVICE[worst]}.",
    )


def memory_near_limit(run: RunData, threshold: float) -> Said | None:
    limit, peak = run.memory_limit_mib, run.series("memory/peak_mib")
    most = np.nanmax(peak) if np.isfinite(peak).any() else 0.0
    if not most > threshold * limit:
        return None
    return Said(
        "Memory is nearly full; a batch of longer texts may not fit.",
        f"peak {most:,.0f} MiB of the {limit:,.0f} MiB that this machine allows",
        "--micro-batch-size, --rollout-batch-size, --gradient-checkpointing and "
        "--chunked-logprobs need less; `minigrpo plan` shows by how much.",
    )


def loss_is_zero(run: RunData, threshold: float) -> Said | None:
    losses = run.series("loss")
    one_update = run.settings["num_iterations"] == 1 and not run.settings["kl_coef"]
    if run.supervised or not one_update or not mean(np.abs(losses)) < threshold:
        return None
    if LOSSES[run.settings["loss"]].advantage == "none":
        return None
    return Said(
        "The loss is about 0, and that is right.",
        f"mean |loss| {mean(np.abs(losses)):.1g}",
        "With one update per rollout the ratio is 1, and the advantages of a group add up to 0. "
        "The gradient is not 0; look at the reward instead.",
    )


RULES: dict[str, Rule] = {
    "no signal": Rule(
        0.8, "groups of equal rewards have no gradient (DAPO, 2503.14476)", no_signal
    ),
    "saturated": Rule(0.98, "all parts within 2 % of 1", saturated),
    "silent part": Rule(0.0, "never above 0", silent_part),
    "dominated": Rule(0.05, "one part within 5 % of 1, another within 5 % of 0", dominated),
    "reward failures": Rule(0, "a working reward never fails", reward_failures, trend=False),
    "cut": Rule(0.25, "a quarter of the texts; 50-80 % is common on GSM8K with 256 tokens", cut),
    "length grows": Rule(1.5, "half as long again", length_grows),
    "length collapses": Rule(0.5, "half as long", length_collapses),
    "entropy collapses": Rule(
        0.2, "a healthy run keeps half or more in 1,000 steps", entropy_collapses
    ),
    "entropy explodes": Rule(
        2.0, "healthy runs fall; shuffled rewards triple it", entropy_explodes
    ),
    "KL runs away": Rule(0.1, "nats per token, and four times its early value", kl_runs_away),
    "clip ratio": Rule(0.2, "PPO's usual share of clipped ratios is below 20 %", clipped_ratio),
    "gradient clipped": Rule(5.0, "times --grad-clip", gradient_clipped),
    "sampler gap": Rule(0.05, "with autocast; 0.001 in float32", sampler_gap),
    "falls": Rule(4.0, "standard errors between the best and the last evaluation", falls),
    "no movement": Rule(2.0, "standard errors", no_movement),
    "overfits": Rule(3.0, "standard errors of the held-out fall", overfits),
    "skipped steps": Rule(0, "a healthy run skips none", skipped, trend=False),
    "slow phase": Rule(0.3, "of the step", slow_phase),
    "memory": Rule(0.9, "of what the machine allows", memory_near_limit, trend=False),
}
NOTES: dict[str, Rule] = {"loss is 0": Rule(1e-3, "a question that everybody asks", loss_is_zero)}


def diagnose(run: RunData, rules: dict[str, Rule] | None = None) -> list[Finding]:
    """The findings of all rules, in the order of the table; none for a healthy run."""
    return list(_findings(run, RULES if rules is None else rules))


def _findings(run: RunData, rules: dict[str, Rule]) -> Iterator[Finding]:
    for name, rule in rules.items():
        if rule.trend and len(run.metrics) < FEWEST_STEPS:
            continue
        if said := rule.say(run, rule.threshold):
            yield Finding(name, *said)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
