"""Which curves the page has: a table of panels, in the order of the page.

With one run a panel has a line per metric. With several it is split into one panel per metric, with
a line per run. Panels of metrics that no run has logged are left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...runtime.measures import PASS_AT, SAMPLED, in_words
from ..run_data import RunData

Names = Callable[[RunData], Sequence[str]]


@dataclass(frozen=True)
class Panel:
    """A card of the page: some metrics of steps, or some measures of evaluations."""

    title: str
    about: str  # what it shows, or how to read it
    names: Names
    evaluations: bool = False
    stacked: bool = False
    rare: bool = False  # left out while all values are 0


def logged(*names: str) -> Names:
    """Metrics by name."""
    return lambda run: [name for name in names if name in run.names(name)]


def parts(suffix: str) -> Names:
    return lambda run: run.names("rewards/", suffix)


def measured(run: RunData) -> dict[str, None]:
    """The names of all measures of a run's evaluations."""
    return dict.fromkeys(name for record in run.evaluations for name in record)


def success(run: RunData) -> list[str]:
    return [name for name in (run.success + SAMPLED, run.success) if name in measured(run)]


def rewards(run: RunData) -> list[str]:
    return [name for name in ("reward" + SAMPLED, "reward") if name in measured(run)]


def others(run: RunData) -> list[str]:
    """The sampled measures besides the success and the reward."""
    shown = {*success(run), *rewards(run)}
    ends = (name for name in measured(run) if name.endswith(SAMPLED) or name.startswith(PASS_AT))
    return [name for name in ends if name not in shown]


def kinds(run: RunData) -> list[str]:
    return [name for name in measured(run) if name.startswith(f"{run.success}/")]


GROUPS: dict[str, tuple[Panel, ...]] = {
    "Does it learn?": (
        Panel(
            "Right answers, held out",
            "Share of right completions of prompts that training never sees, with 95 % intervals.",
            success,
            evaluations=True,
        ),
        Panel("Reward in training", "Mean over all completions of a step.", logged("reward")),
        Panel("Reward parts", "Mean of each part, before it is weighted.", parts("/mean")),
        Panel("Reward, held out", "Weighted sum of the parts.", rewards, evaluations=True),
        Panel("Other measures, held out", "Of sampled completions.", others, evaluations=True),
        Panel("By kind of question", "Right answers, greedy, held out.", kinds, evaluations=True),
    ),
    "Is the policy healthy?": (
        Panel(
            "Groups without a signal",
            "Share of groups whose completions all have the same reward: they teach nothing.",
            logged("frac_reward_zero_std", "frac_reward_zero_std/drawn"),
        ),
        Panel("Entropy", "Nats per token. A fall to 0 ends exploration.", logged("entropy")),
        Panel("KL", "To the initial model, nats per token.", logged("kl")),
        Panel("Length", "Tokens per completion.", logged("completions/mean_length")),
        Panel(
            "Cut off",
            "Share of completions that reach the longest length without an end.",
            logged("completions/clipped_ratio"),
        ),
        Panel(
            "Clipped ratios",
            "Share of tokens; always 0 with one update per rollout.",
            lambda run: run.names("clip_ratio/", "_mean"),
        ),
        Panel("Gradient norm", "Before it is clipped.", logged("grad_norm")),
        Panel("Learning rate", "Warm-up, then decay.", logged("learning_rate")),
        Panel("Loss", "About 0 is right with one update per rollout.", logged("loss")),
        Panel(
            "Sampler and trainer",
            "Mean difference of their log-probs; rounding only, if the settings agree.",
            logged("sampling/logp_difference_mean"),
        ),
        Panel("Reward failures", "Per step.", parts("/failures"), rare=True),
        Panel("Skipped steps", "So far.", logged("skipped_steps"), rare=True),
    ),
    "What does it cost?": (
        Panel(
            "Seconds per step",
            "By phase, stacked.",
            lambda run: run.names("time/") or logged("step_time")(run),
            stacked=True,
        ),
        Panel("Memory", "Peak MiB of the process.", logged("memory/peak_mib")),
        Panel(
            "Tokens per update",
            "Run by the model, and if nothing were shared.",
            logged("tokens/run", "tokens/repeated"),
        ),
    ),
}


def label(panel: Panel, name: str, run: RunData) -> str:
    """What a metric or a measure is called in a legend."""
    bare, sampled = name.removesuffix(SAMPLED), name.endswith(SAMPLED)
    if panel.evaluations and bare in (run.success, "reward"):
        how = "sampled" if sampled else "greedy"
        return how if bare == "reward" else f"{in_words(bare)}, {how}"
    first, _, rest = bare.partition("/")
    if first == "rewards":
        return rest.rpartition("/")[0]
    if first == "clip_ratio":
        return rest.removesuffix("_mean")
    return rest if rest and first in (run.success, "time", "tokens") else bare
