"""Tell what is wrong with a run, and what to do about it: `minigrpo doctor RUN`.

It also works while the run is going. The rules are the table RULES: a series of the run's logs, a
test, a sentence that is printed if the test holds, and advice. Start and end are the medians over
the first and the last fifth of the steps. tests/test_doctor.py measures how often chance alone
finds something in a healthy run.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import tyro
from pydantic import Field

from ..config import Group
from ..runtime.console import Console
from ..runtime.stats import SAMPLED
from .runs import FEWEST_STEPS, Run, read_runs

HELD_OUT = "held out"  # the series of the sampled share of right answers in evaluations


@dataclass(frozen=True)
class Curve:
    """One series of a run, as the tests see it."""

    run: Run
    name: str
    steps: np.ndarray  # [n]
    values: np.ndarray  # [n]
    sizes: np.ndarray  # [n], examples per evaluation; 0 for a metric of steps
    window: int  # how many values the start and the end have

    @property
    def start(self) -> float:
        return float(np.median(self.values[: self.window]))

    @property
    def end(self) -> float:
        return float(np.median(self.values[-self.window :]))

    def rise(self, first: int, second: int) -> float:
        """By how many standard errors evaluation `second` is above `first` (pooled test)."""
        (p, n), (q, m) = ((self.values[i], self.sizes[i]) for i in (first, second))
        pooled = (p * n + q * m) / (n + m)
        error = math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
        return float(q - p) / error if error else 0.0

    def evidence(self) -> str:
        """The numbers of the start and the end."""
        first, last = self.steps[self.window - 1], self.steps[-self.window]
        end = f"{self.end:.3g} in steps {last:.0f} to {self.steps[-1]:.0f}"
        if last <= self.steps[0]:
            return f"{self.name} is {end}"
        return f"{self.name} is {self.start:.3g} up to step {first:.0f}, {end}"


class Rule(NamedTuple):
    """What may be wrong with a run."""

    name: str
    series: str  # a metric, or HELD_OUT; "*" stands for any text: each such metric is tested
    test: Callable[[Curve], bool]
    sentence: str
    advice: str
    fewest: int = FEWEST_STEPS  # logged steps below which the rule is silent


class Finding(NamedTuple):
    rule: Rule
    evidence: str  # numbers and steps


# --- tests that are more than a threshold ---------------------------------------------------------


def saturated(curve: Curve) -> bool:
    """Every reward function is within 2 % of 1."""
    parts = curve.run.names("rewards/*/mean")
    return bool(parts) and all(curve.run.ends(part)[1] >= 0.98 for part in parts)


def no_signal(curve: Curve) -> bool:
    """80 % of the groups have equal rewards, so no gradient; in a short run, all of them."""
    share = 0.8 if len(curve.run.metrics) >= FEWEST_STEPS else 0.999
    return curve.end > share and not saturated(curve)


def kl_runs_away(curve: Curve) -> bool:
    """More than 0.1 nats per token, and four times the value in the first two fifths."""
    return curve.end > max(0.1, 4 * float(np.median(curve.values[: 2 * curve.window])))


def precision_gap(curve: Curve) -> bool:
    return curve.end > (0.05 if curve.run.config.speed.use_amp else 0.001)


def collapses(curve: Curve) -> bool:
    return not curve.run.config.supervised and curve.end < 0.2 * curve.start


def explodes(curve: Curve) -> bool:
    return not curve.run.config.supervised and curve.end > 2 * curve.start


def falls(curve: Curve) -> bool:
    """The last evaluation is 4 standard errors below the best one."""
    return curve.rise(len(curve.values) - 1, int(np.argmax(curve.values))) > 4


def stands_still(curve: Curve) -> bool:
    """Neither the training reward nor the held-out share has moved by 2 standard errors."""
    run, (_, rewards) = curve.run, curve.run.points("reward")
    if len(curve.values) < 2 or len(rewards) < 100:
        return False  # too short to tell, or supervised, which has no rewards
    ends = rewards[: run.window], rewards[-run.window :]
    error = math.hypot(*(float(x.std()) / math.sqrt(len(x)) for x in ends))
    moved = abs(ends[1].mean() - ends[0].mean()) > 2 * error
    return not moved and abs(curve.rise(0, len(curve.values) - 1)) <= 2


RULES = (
    Rule(
        *("no signal", "frac_reward_zero_std", no_signal),
        "Most groups teach nothing, because all of their completions have equal rewards.",
        "Take easier or harder prompts, a larger --group-size, --dynamic-sampling 3, or a reward "
        "with partial credit; --loss nll first if the model never gets anything right.",
        fewest=1,
    ),
    Rule(
        *("saturated", "reward", saturated),
        "Every reward function is at its maximum: these prompts have nothing left to teach.",
        "Stop here, or take harder prompts.",
        fewest=1,
    ),
    Rule(
        *("silent reward", "rewards/*/mean", lambda curve: not curve.values.any()),
        "A reward function has been 0 for every completion.",
        "Try it on a right answer. If it works, the model needs --loss nll on true answers first.",
    ),
    Rule(
        *("failing reward", "rewards/*/failures", lambda curve: curve.values.sum() > 0),
        "A reward function fails on some completions, which then get its default reward.",
        "The run's warnings name the first error. Mend the function, or raise its timeout_s.",
        fewest=1,
    ),
    Rule(
        *("cut off", "completions/clipped_ratio", lambda curve: curve.end > 0.25),
        "Many completions are cut off before they end, and are scored by half a text.",
        "Raise --max-new-tokens, or use --overlong mask. If none ends, check that the stop tokens "
        "are those of the chat template; --loss nll on true answers teaches the end.",
    ),
    Rule(
        "shrinking texts",
        "completions/mean_length",
        lambda curve: curve.end < 0.5 * curve.start,
        "Completions have become less than half as long.",
        "Look at samples.jsonl: perhaps a short text earns part of the reward. Change that part, "
        "or add --kl-coef 0.01.",
    ),
    Rule(
        *("entropy collapse", "entropy", collapses),
        "Entropy has collapsed: the model writes nearly the same text each time.",
        "Lower --learning-rate, raise --clip-high (0.28, DAPO) with several --num-iterations, or "
        "stop at the best evaluation.",
    ),
    Rule(
        *("entropy explosion", "entropy", explodes),
        "Entropy grows: the model becomes random instead of better.",
        "Look at samples.jsonl: perhaps the reward does not depend on the text as it should. Or "
        "lower --learning-rate, or add --kl-coef 0.01.",
    ),
    Rule(
        *("KL runs away", "kl", kl_runs_away),
        "The KL to the initial model runs away.",
        "Lower --learning-rate or raise --kl-coef, unless the held-out measure still rises.",
    ),
    Rule(
        *("clipped ratios", "clip_ratio/*_mean", lambda curve: curve.end > 0.2),
        "Many ratios are clipped, so these tokens have no gradient.",
        "Lower --learning-rate or --num-iterations.",
    ),
    Rule(
        "clipped gradient",
        "grad_norm",
        lambda curve: curve.end > 5 * curve.run.config.optimizer.grad_clip,
        "The gradient is clipped to a fraction in most steps, however sure the batch is.",
        "Raise --grad-clip, or lower --learning-rate if the loss is unsteady.",
    ),
    Rule(
        *("sampler gap", "sampling/logp_difference_mean", precision_gap),
        "Sampler and trainer disagree about the same tokens by more than their precision explains.",
        "Set --temperature, --top-p and --top-k to their defaults, or use --sampler-correction 2.",
    ),
    Rule(
        *("falls", HELD_OUT, falls),
        "The model has got worse: the learning rate is too high, or the reward pays for something "
        "else.",
        "Lower --learning-rate to a third, and keep the checkpoint nearest to the best evaluation.",
    ),
    Rule(
        *("stands still", HELD_OUT, stands_still),
        "Neither the training reward nor the held-out measure has moved beyond noise.",
        "Raise --learning-rate by a factor of 3, train for longer, or use a larger --eval-size if "
        "the change is small.",
    ),
    Rule(
        *("skipped steps", "skipped_steps", lambda curve: curve.values.any()),
        "Steps were skipped, because their loss or gradient was not finite.",
        "The batches are in bad_batches/. Lower --learning-rate, or use --no-use-amp.",
        fewest=1,
    ),
    Rule(
        "slow rewards",
        "time/reward",
        lambda curve: curve.end > 0.3 * curve.run.ends("step_time")[1],
        "The step waits for its rewards.",
        "Raise --num-reward-workers, or make the slowest reward function faster.",
    ),
)


def diagnose(run: Run) -> list[Finding]:
    """The findings of all rules, in the order of the table; none for a healthy run."""
    found = []
    for rule in (rule for rule in RULES if len(run.metrics) >= rule.fewest):
        curves = [curve for curve in curves_of(run, rule.series) if rule.test(curve)]
        if curves:
            found.append(Finding(rule, "; ".join(curve.evidence() for curve in curves)))
    return found


def curves_of(run: Run, series: str) -> Iterator[Curve]:
    """The curves that a rule is about; none if the run has not logged them."""
    if series == HELD_OUT:
        steps, values, sizes = run.shares(run.success + SAMPLED)
        if len(steps):
            yield Curve(run, f"{run.success}, held out", steps, values, sizes, window=1)
        return
    for name in run.names(series):
        steps, values = run.points(name)
        yield Curve(run, name, steps, values, np.zeros(0), min(run.window, len(values)))


class Arguments(Group):
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, Field(min_length=1)]
    """Folders of runs."""


def show(console: Console, run: Run) -> None:
    """Print the findings on a run, or that there are none."""
    found = diagnose(run)
    for finding in found:
        console.say(f"doctor: {finding.rule.sentence} {finding.evidence}. {finding.rule.advice}")
    if not found:
        short = len(run.metrics) < FEWEST_STEPS
        trends = f"; trends are judged from {FEWEST_STEPS} steps" if short else ""
        console.say(f"doctor: nothing wrong in {len(run.metrics)} steps{trends}")


def main(argv: Sequence[str], prog: str) -> None:
    arguments = tyro.cli(Arguments, args=argv, prog=prog, description=__doc__)
    console = Console()
    for run in read_runs(arguments.runs, console.warn):
        console.say(f"{run.name}:")
        show(console, run)
