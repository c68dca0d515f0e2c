"""Tell what is wrong with a run, also while it is going, and what to do: `minigrpo doctor RUN`."""

import fnmatch
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Annotated, NamedTuple

import numpy as np
import tyro
from pydantic import Field

from ..run.console import Console
from ..run.logging import Run, read_run
from ..settings import Group, OnePath

FEWEST_STEPS = 20  # a shorter run is not judged by its trends
HEADLINES = "held out"  # the series of `Run.headlines`


class Rule(NamedTuple):
    """What may be wrong with a run, and what to do about it."""

    series: str  # name of metrics, in which * is any text, or HEADLINES
    test: Callable[[np.ndarray, Run], bool | np.bool]  # takes the values by step, [n], and the run
    sentence: str
    advice: str
    fewest: int = FEWEST_STEPS  # logged steps below which the rule is silent


def early(values: np.ndarray) -> float:
    """The median of the first five steps; 0 without values."""
    return float(np.median(values[:5])) if len(values) else 0.0


def late(values: np.ndarray) -> float:
    """The median of the last fifth; 0 without values."""
    last_fifth = values[-1 - len(values) // 5 :]
    return float(np.median(last_fifth)) if len(values) else 0.0


def right(run: Run) -> np.ndarray:
    """The share of right completions by step, or no numbers if no reward function says it."""
    return np.array([*run.curve(f"rewards/{run.success}/mean").values()])


def solved(run: Run) -> bool:
    """Whether over 85 % of held-out answers are right: rewards are equal then, entropy is low."""
    return any(estimate.low > 0.85 for estimate in run.headlines)  # infinite if not a fraction


def is_destroyed(run: Run) -> bool:
    """Whether it has lost most of what it could do before the first step."""
    return run.headlines[0].low > 3 * run.headlines[-1].high


def has_risen(run: Run) -> bool:
    """Whether the reward has risen by over a tenth: then low entropy is what was learnt."""
    rewards = np.array([*run.curve("reward").values()])
    return late(rewards) - early(rewards) > 0.1 * abs(early(rewards))


RULES = (  # the gravest first
    Rule(
        "rewards/*/failures",
        lambda values, run: values.any(),
        "A reward function fails on some completions, which count as the worst of their groups.",
        "The run's warnings name the first error. Mend the function, or raise its timeout_s.",
        fewest=1,
    ),
    Rule(
        HEADLINES,
        lambda values, run: is_destroyed(run),
        "The policy was destroyed: it has lost what it could do before training.",
        "Begin again with a tenth of the --learning-rate. What follows here is of the same cause.",
    ),
    Rule(
        "reward",
        lambda values, run: has_risen(run) and late(right(run)) < 0.5 * early(right(run)),
        "The reward rises, while fewer completions are right: it pays for something else.",
        "Read samples.jsonl, and mend the reward. --kl-coef 0.02 keeps the model near its start.",
    ),
    Rule(
        "rewards/*/mean",
        lambda values, run: not values.any(),
        "A reward function has been 0 for every completion.",
        "See what it scores by `minigrpo sample`. If a right answer earns 0, mend the function or "
        "its rows. Otherwise take easier questions, partial credit, or --loss nll first.",
        fewest=1,
    ),
    Rule(
        "entropy",
        lambda values, run: (
            late(values) < 0.2 * values[0]
            and not (run.config.supervised or solved(run) or has_risen(run))
        ),
        "Entropy has collapsed: the model writes nearly the same text each time.",
        "Begin again with a third or a tenth of the --learning-rate.",
    ),
    Rule(
        "frac_reward_zero_std",
        # a KL or a teacher has a gradient, whatever the rewards are
        lambda values, run: (
            late(values) > 0.8
            and not (solved(run) or run.config.loss.kl_coef or run.config.loss.teacher)
        ),
        "In most groups all completions have equal rewards, which teach nothing.",
        "Take harder questions if most are right. If few are, take a larger --group-size, partial "
        "credit, or --dynamic-sampling 3.",
        fewest=1,
    ),
    Rule(
        "reward",
        lambda values, run: values.any() and late(values) <= early(values) and not solved(run),
        "The reward has not risen.",
        "If it fell, lower --learning-rate. Otherwise try three times the rate, more "
        "--prompts-per-step, or more steps.",
        fewest=50,
    ),
    Rule(
        "tools/call_frequency",
        lambda values, run: not values.any(),
        "The model has called no tool.",
        "Only calls in the form of the chat template count, which `minigrpo sample` shows.",
        fewest=1,
    ),
    Rule(
        "completions/clipped_ratio",
        lambda values, run: late(values) > 0.25,
        "Many completions are cut off before they end, and are scored by half a text.",
        "Raise --max-new-tokens, or use --overlong mask. If none ends, compare the stop tokens to "
        "those of the chat template; --loss nll on true answers teaches the end.",
    ),
    Rule(
        "entropy",
        lambda values, run: late(values) > 2 * early(values) and not run.config.supervised,
        "Entropy grows: the model becomes random instead of better.",
        "Look at samples.jsonl, lower --learning-rate, or add --kl-coef 0.01.",
    ),
    Rule(
        "sampling/logp_difference_mean",
        lambda values, run: late(values) > (0.05 if run.config.speed.use_amp else 0.001),
        "Sampler and trainer disagree about the same tokens by more than their precision explains.",
        "Run without --use-amp, or use --sampler-correction token-truncate.",
    ),
    Rule(
        HEADLINES,
        # three points or more between the intervals of the best evaluation and of the last
        lambda values, run: (
            max(x.low for x in run.headlines) > run.headlines[-1].high + 0.03
            and not is_destroyed(run)
        ),
        "The model has got worse, or the reward pays for something else.",
        "Lower --learning-rate to a third, and keep the checkpoint nearest to the best evaluation.",
    ),
)


def diagnose(run: Run) -> list[tuple[Rule, str]]:
    """The rules that find something, in the order of RULES, with the numbers that they saw."""
    names = sorted({*chain(*run.metrics)})
    series = {name: [*run.curve(name).values()] for name in names}
    series[HEADLINES] = [estimate.value for estimate in run.headlines]
    findings = []
    for rule in RULES:
        for name in fnmatch.filter(series, rule.series):
            values = np.array(series[name])
            is_long_enough = values.size > 0 and len(run.metrics) >= rule.fewest
            if is_long_enough and rule.test(values, run):
                ends = f"{values[0]:.3g} first, {values[-1]:.3g} last"
                medians = f"median {early(values):.3g} early, {late(values):.3g} late"
                findings.append((rule, f"{name}: {ends}; {medians}"))
    return findings


class RunArguments(Group):
    """The arguments of all commands on runs."""

    runs: Annotated[tuple[OnePath, ...], tyro.conf.Positional, Field(min_length=1)]
    """Folders of runs."""


def doctor_command(argv: Sequence[str], prog: str) -> None:
    arguments = tyro.cli(RunArguments, args=argv, prog=prog, description=__doc__)
    console = Console()
    for run in map(read_run, arguments.runs):
        findings = diagnose(run)
        is_short = len(run.metrics) < FEWEST_STEPS
        note = f" (trends need {FEWEST_STEPS} steps)" if is_short else ""
        console.say(f"{run.name}, {len(run.metrics)} steps, findings: {len(findings)}{note}")
        for rule, seen in findings:
            console.say(f"\nfinding  {rule.sentence}\nseen     {seen}\nadvice   {rule.advice}")
