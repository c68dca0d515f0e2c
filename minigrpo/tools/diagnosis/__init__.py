"""What may be wrong with a run: a table of rules, each with its threshold and why it has that.

A rule looks at the records of a run. It says nothing, or gives a Finding: what is wrong, the
numbers that show it, and what to do. `diagnose` asks all of them. Start and end are the first and
the last fifth of the steps of a run; entropy and KL are in nats per token.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..run_data import FEWEST_STEPS as FEWEST_STEPS
from ..run_data import RunData
from . import cost, policy, reward
from .said import Said


class Finding(NamedTuple):
    """What the rule of this name says."""

    rule: str
    what: str  # a sentence
    evidence: str  # numbers and steps
    advice: str


@dataclass(frozen=True)
class Rule:
    """A rule: it gets the run and its threshold."""

    threshold: float
    source: str  # why this threshold
    say: Callable[[RunData, float], Said | None]
    trend: bool = True  # whether it says nothing about a run of fewer than FEWEST_STEPS


RULES: dict[str, Rule] = {
    "no signal": Rule(
        0.8,
        "groups of equal rewards have no gradient (DAPO, 2503.14476); in a short run, all of them",
        reward.no_signal,
        trend=False,
    ),
    "saturated": Rule(0.98, "all parts within 2 % of 1", reward.saturated, trend=False),
    "silent part": Rule(0.0, "never above 0", reward.silent_part),
    "dominated": Rule(0.05, "one part within 5 % of 1, another within 5 % of 0", reward.dominated),
    "reward failures": Rule(0, "a working reward never fails", reward.reward_failures, trend=False),
    "cut": Rule(
        0.25, "a quarter of the texts; 50-80 % is common on GSM8K with 256 tokens", reward.cut
    ),
    "length grows": Rule(1.5, "half as long again", reward.length_grows),
    "length collapses": Rule(0.5, "half as long", reward.length_collapses),
    "entropy collapses": Rule(
        0.2, "a healthy run keeps half or more in 1,000 steps", policy.entropy_collapses
    ),
    "entropy explodes": Rule(
        2.0, "healthy runs fall; shuffled rewards triple it", policy.entropy_explodes
    ),
    "KL runs away": Rule(
        0.1, "nats per token, and four times its early value", policy.kl_runs_away
    ),
    "clip ratio": Rule(
        0.2, "PPO's usual share of clipped ratios is below 20 %", policy.clipped_ratio
    ),
    "gradient clipped": Rule(5.0, "times --grad-clip", policy.gradient_clipped),
    "sampler gap": Rule(0.05, "with autocast; 0.001 in float32", policy.sampler_gap),
    "falls": Rule(4.0, "standard errors between the best and the last evaluation", policy.falls),
    "no movement": Rule(2.0, "standard errors", policy.no_movement),
    "overfits": Rule(3.0, "standard errors of the held-out fall", policy.overfits),
    "skipped steps": Rule(0, "a healthy run skips none", cost.skipped, trend=False),
    "slow phase": Rule(0.3, "of the step", cost.slow_phase),
    "memory": Rule(0.9, "of what the machine allows", cost.memory_near_limit, trend=False),
}
NOTES: dict[str, Rule] = {
    "loss is 0": Rule(1e-3, "a question that everybody asks", cost.loss_is_zero)
}


def diagnose(run: RunData, rules: dict[str, Rule] | None = None) -> list[Finding]:
    """The findings of all rules, in the order of the table; none for a healthy run."""
    return list(_findings(run, RULES if rules is None else rules))


def not_judged(run: RunData) -> str:
    """What follows "nothing wrong" for a run that is too short for most rules; else ""."""
    return f"; trends are judged from {FEWEST_STEPS} steps" if run.is_short else ""


def _findings(run: RunData, rules: dict[str, Rule]) -> Iterator[Finding]:
    for name, rule in rules.items():
        if rule.trend and run.is_short:
            continue
        if said := rule.say(run, rule.threshold):
            yield Finding(name, *said)
