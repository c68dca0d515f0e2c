"""Tell what is wrong with a run, also while it is going, and what to do: `minigrpo doctor RUN`."""

import fnmatch
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import tyro

from ..run.console import Console
from .runs import Run
from .runs import RunArguments as Arguments

FEWEST_STEPS = 20  # a shorter run is not judged by its trends
RIGHT_SHARE = "held out"  # the series of the sampled share of right answers in evaluations


class Rule(NamedTuple):
    """What may be wrong with a run."""

    series: str  # metrics of this name, in which * is any text, or RIGHT_SHARE
    test: Callable[[np.ndarray, Run], bool | np.bool]  # of the values by step, [n]
    sentence: str
    advice: str
    fewest: int = FEWEST_STEPS  # logged steps below which the rule is silent


def at_first(values: np.ndarray) -> float:
    """The median of the first two fifths."""
    return float(np.median(values[: 1 + len(values) * 2 // 5]))


def at_last(values: np.ndarray) -> float:
    """The median of the last fifth."""
    return float(np.median(values[-1 - len(values) // 5 :]))


def solved(run: Run) -> bool:
    """Over 85 % of held-out answers are right, so equal rewards and a low entropy are expected."""
    return any(share.low > 0.85 for share in run.shares)  # NaN for what is no share


def has_not_risen(values: np.ndarray, run: Run) -> bool | np.bool:
    """The last third is not 2 standard errors above the first; 0 throughout is another rule's."""
    first, last = np.array_split(values, 3)[::2]
    error = np.sqrt((first.var() + last.var()) / len(last))
    return values.any() and last.mean() - first.mean() <= 2 * error and not solved(run)


RULES = (
    Rule(
        "rewards/*/failures",
        lambda values, run: values.any(),
        "A reward function fails on some completions, which count as the worst of their groups.",
        "The run's warnings name the first error. Mend the function, or raise its timeout_s.",
        fewest=1,
    ),
    Rule(
        "frac_reward_zero_std",
        # a KL or a teacher has a gradient, whatever the rewards are
        lambda values, run: (
            at_last(values) > 0.8
            and not (solved(run) or run.config.loss.kl_coef or run.config.loss.teacher)
        ),
        "In most groups all completions have equal rewards, which teach nothing.",
        "Take other prompts, a larger --group-size, --dynamic-sampling 3, or a reward with partial "
        "credit; --loss nll first if nothing is ever right.",
        fewest=1,
    ),
    Rule(
        "rewards/*/mean",
        lambda values, run: not values.any(),
        "A reward function has been 0 for every completion.",
        "Try it on a right answer. If it works, the model needs --loss nll on true answers first.",
    ),
    Rule(
        "reward",
        has_not_risen,
        "The reward has not risen.",
        "If it fell, lower --learning-rate. Otherwise try three times as much, more "
        "--prompts-per-step, or more steps.",
        fewest=100,
    ),
    Rule(
        "completions/clipped_ratio",
        lambda values, run: at_last(values) > 0.25,
        "Many completions are cut off before they end, and are scored by half a text.",
        "Raise --max-new-tokens, or use --overlong mask. If none ends, compare the stop tokens to "
        "those of the chat template; --loss nll on true answers teaches the end.",
    ),
    Rule(
        "entropy",
        lambda values, run: (
            at_last(values) < 0.2 * at_first(values) and not (run.config.supervised or solved(run))
        ),
        "Entropy has collapsed: the model writes nearly the same text each time.",
        "Lower --learning-rate, raise --clip-high (0.28, DAPO), or stop at the best evaluation.",
    ),
    Rule(
        "entropy",
        lambda values, run: at_last(values) > 2 * at_first(values) and not run.config.supervised,
        "Entropy grows: the model becomes random instead of better.",
        "Look at samples.jsonl, lower --learning-rate, or add --kl-coef 0.01.",
    ),
    Rule(
        "kl",
        lambda values, run: at_last(values) > max(0.1, 4 * at_first(values)),
        "The KL to the initial model has grown fourfold, beyond 0.1 nats per token.",
        "Lower --learning-rate or raise --kl-coef, unless the held-out measure still rises.",
    ),
    Rule(
        "sampling/logp_difference_mean",
        lambda values, run: at_last(values) > (0.05 if run.config.speed.use_amp else 0.001),
        "Sampler and trainer disagree about the same tokens by more than their precision explains.",
        "Run without --use-amp, or use --sampler-correction token-truncate.",
    ),
    Rule(
        RIGHT_SHARE,
        # three points or more between the intervals of the best evaluation and of the last
        lambda values, run: max(x.low for x in run.shares) > run.shares[-1].high + 0.03,
        "The model has got worse, or the reward pays for something else.",
        "Lower --learning-rate to a third, and keep the checkpoint nearest to the best evaluation.",
    ),
    Rule(
        "skipped_steps",
        lambda values, run: values.any(),
        "Steps were skipped, because their loss or gradient was not finite.",
        "Lower --learning-rate, or use --no-use-amp.",
        fewest=1,
    ),
)


def diagnose(run: Run) -> list[tuple[Rule, str]]:
    """The rules that find something, in the order of the table, with the numbers that they saw."""
    series = {name: [*run.curve(name).values()] for name in sorted({*chain(*run.metrics)})}
    series[RIGHT_SHARE] = [share.value for share in run.shares]
    findings = []
    for rule in RULES:
        for name in fnmatch.filter(series, rule.series):
            values = np.array(series[name])
            if values.size and len(run.metrics) >= rule.fewest and rule.test(values, run):
                trend = f"{at_first(values):.3g} at first, {at_last(values):.3g} at last"
                findings.append((rule, f"{name}: {trend}, at most {values.max():.3g}"))
    return findings


def print_findings(console: Console, run: Run) -> None:
    findings = diagnose(run)
    for rule, numbers in findings:
        console.say(f"doctor: {rule.sentence} {numbers}. {rule.advice}")
    if not findings:
        console.say(f"doctor: no findings in {len(run.metrics)} steps; trends need {FEWEST_STEPS}")


def main(argv: Sequence[str], prog: str) -> None:
    arguments = tyro.cli(Arguments, args=argv, prog=prog, description=__doc__)
    console = Console()
    for run in arguments.read(console.warn):
        console.say(f"{run.name}:")
        print_findings(console, run)
