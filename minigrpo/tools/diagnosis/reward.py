"""Rules about rewards and about the texts that get them."""

import numpy as np

from ..run_data import RunData
from .said import Said, listed


def no_signal(run: RunData, threshold: float) -> Said | None:
    share = run.end("frac_reward_zero_std")
    few = share < 1 if run.is_short else not share > threshold
    if few or np.isnan(share) or _saturated(run):
        return None
    rewards = run.series("reward")[-run.window :]
    unpaid = ", and every reward is 0" if not rewards.any() else ""
    return Said(
        "Most groups teach nothing, because all of their completions have equal rewards.",
        f"{share:.0%} of the groups in {run.last_steps}{unpaid}",
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
        f"{listed(silent)} never fires: no completion was ever paid for it.",
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
        f"The easy part of the reward ({listed(full)}) is full, and the hard one "
        f"({listed(stuck)}) does not rise.",
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
