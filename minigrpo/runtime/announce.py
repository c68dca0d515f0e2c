"""A run's messages on the screen: at the start, at evaluations, without a signal, at the end."""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from ..config import Config
from .checkpoint import path_of
from .fast import BFLOAT16_AND_TF32, FLOAT16, LAYERS, cuda_capability, device_kind
from .flags import as_flags, job_of
from .logging import Screen
from .machine import running_elsewhere
from .measures import (
    OTHER_EXAMPLES,
    PASS_AT,
    SAMPLED,
    Estimate,
    headline,
    in_words,
    number_of,
    sizes,
)
from .no_effect import Situation, without_effect

STEPS_WITHOUT_SIGNAL = 20  # in a row, before the warning
Evaluation = Mapping[str, float]


def introduce(
    screen: Screen, situation: Situation, parameters: int, weights: Mapping[str, float]
) -> None:
    """Print what a step is, what the reward is, and which settings have no effect.

    `weights` are those of the reward parts in force.
    """
    config, device, processes = situation.config, situation.device, situation.processes
    sampling, speed, share = config.sampling, config.speed, situation.share
    micro = -(-share // (config.memory.micro_batch_size or share))
    group = "true answers" if config.supervised else f"{sampling.group_size} completions"
    screen.say(
        f"{config.loss.name}: {sampling.prompts_per_step} prompts x {group} per step, "
        f"on {processes} x {device.type}: {share} prompts per process in {micro} "
        f"micro-batch{'es' if micro > 1 else ''}; {parameters / 1e6:.1f} M parameters"
    )
    parts = [f"{weight:g} x {name}" for name, weight in weights.items() if weight]
    where = " (in evaluations only)" if config.supervised else ""
    screen.say(f"reward{where}: {' + '.join(parts) or '0, because all weights are 0'}")
    if about := getattr(situation.task, "about", ""):
        screen.say(f"task: {about}")
    of_task = config.settings_by_task().get(job_of(config.flat()), {})
    if own := {name: x for name, x in of_task.items() if name not in config.given}:
        screen.say(f"settings of the task: {' '.join(as_flags(own))}")
    if speed.fast:
        kind = device_kind(str(device))
        settings = config.flat()
        layers = as_flags({name: settings[name] for name in LAYERS[kind]})
        screen.say(f"--fast on {kind}: {' '.join(layers)}")
    if idle := without_effect(situation):
        screen.say(idle)
    if screen.rank == 0:
        for warning in warnings(situation):
            screen.warn(warning)


def warnings(situation: Situation) -> Iterator[str]:
    """What is allowed, and perhaps not what was meant."""
    speed, sampling = situation.config.speed, situation.config.sampling
    if speed.cuda_graphs and situation.on_cpu:
        yield "--cuda-graphs: no CUDA device, so rounds are not captured: slower, same tokens"
    if speed.use_amp and speed.amp_dtype == "bfloat16" and not situation.on_cpu:
        capability = cuda_capability(str(situation.device))
        if capability < BFLOAT16_AND_TF32:
            instead = "--amp-dtype float16" if capability >= FLOAT16 else "--no-use-amp"
            yield (
                f"--amp-dtype bfloat16 is slow on a card of compute capability "
                f"{'.'.join(map(str, capability))}: it is emulated below 8.0; {instead} is faster"
            )
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        yield (
            "--top-k, --top-p and --min-p truncate the sampler only: training uses the full "
            "distribution (sampling/removed_mass is what they remove; --sampler-correction "
            "corrects for it)"
        )
    yield from busy_cores(torch.get_num_threads())


def busy_cores(threads: int) -> Iterator[str]:
    """A warning if other programs keep so many cores busy that this one's threads do not fit.

    The threads of a matrix product spin while they wait for each other, so two trainings of two
    threads each on two cores take up to 50 times as long per step. One thread waits for nobody.
    """
    try:
        load = os.getloadavg()[0]
    except OSError:  # unknown on this system
        return
    cores = os.cpu_count() or 1
    # rounded, because an idle machine has a load of a few tenths
    busy = min(round(load), running_elsewhere())
    if threads > 1 and busy + threads > cores:
        yield (
            f"{cores} cores, a load of {load:.1f}, and {threads} threads of this run: threads "
            "that wait for a core make steps many times slower; OMP_NUM_THREADS=1 prevents it"
        )


WATCHED = {  # metric -> the least value that is a problem, and what is said of it
    "frac_reward_zero_std": (
        1.0,
        "all completions of each prompt had equal rewards, so nothing is learnt. A model that "
        "never gets a part right needs a warm start on true answers first (--loss nll)",
    ),
    "completions/clipped_ratio": (
        0.5,
        "at least half of the completions were cut off at --max-new-tokens, and judged by what "
        "they had by then. Raise --max-new-tokens; a model that never ends needs a warm start "
        "on true answers first (--loss nll)",
    ),
}


class SignalWatch:
    """Warns once of a metric of WATCHED that has been bad for several steps in a row."""

    def __init__(self, screen: Screen, is_main: bool) -> None:
        self.screen, self.is_main, self.steps = screen, is_main, dict.fromkeys(WATCHED, 0)

    def add(self, metrics: Mapping[str, float]) -> None:
        for name, (least, words) in WATCHED.items():
            self.steps[name] = self.steps[name] + 1 if metrics.get(name, 0) >= least else 0
            if self.steps[name] == STEPS_WITHOUT_SIGNAL and self.is_main:
                self.screen.warn(f"for {STEPS_WITHOUT_SIGNAL} steps {words}")


def say_evaluation(screen: Screen, step: int, found: Mapping[str, Estimate]) -> None:
    """Print the headline of an evaluation, sampled and greedy, in a line of a usual terminal."""
    success = headline(found)
    sampled, greedy = (found[name] for name in (success + SAMPLED, success))
    screen.say(
        f"held out, step {step}: {in_words(success)} {percent(sampled)} sampled, "
        f"{percent(greedy)} greedy",
        wrap=True,
    )


def percent(share: Estimate) -> str:
    """A share with its 95 % interval in whole percent, if it has one."""
    low, high = (f"{100 * x:.0f}" for x in (share.low, share.high))
    return f"{share.value:.1%}" + ("" if math.isnan(share.low) else f" [{low}, {high}]")


def progress(metrics: Mapping[str, float], last: Evaluation | None, config: Config) -> str:
    """The text next to the progress bar: now, at the last evaluation, and how fast.

    Tokens are those of the completions, over all processes.
    """
    seen = [f"{name} {metrics[name]:.3f}" for name in ("reward", "loss") if name in metrics][:1]
    name = headline(last or {})
    if last and isinstance(last.get(name + SAMPLED), float):  # a resumed log may lack it
        seen.append(f"{in_words(name)} {last[name + SAMPLED]:.1%}")
    group = 1 if config.supervised else config.sampling.group_size
    tokens = metrics["completions/mean_length"] * config.sampling.prompts_per_step * group
    return "  ".join([*seen, f"{tokens / metrics['step_time']:,.0f} tok/s"])


def show_change(
    screen: Screen,
    first: Evaluation,
    last: Evaluation,
    found: Mapping[float, Mapping[str, Estimate]],
    seconds: float,
) -> None:
    """Print evaluations before and after, first the sampled measure, which GRPO maximises.

    `found` has their 95 % intervals by step; an evaluation from before a resume has none. `seconds`
    are those of all parts of the run; NaN if they are not known.
    """
    rows, kinds = [], []
    for name in (name for name in first if name in last and name not in ("step", "n")):
        before, after = first[name], last[name]
        change, (success, slash, kind) = f"{after - before:+.3f}", name.partition("/")
        if not slash:
            ends = [
                str(found.get(x["step"], {}).get(name, Estimate(x[name]))) for x in (first, last)
            ]
            is_sampled = name.endswith(SAMPLED) or name.startswith(PASS_AT)
            how = "sampled" if is_sampled else "greedy"
            rows.append([name.removesuffix(SAMPLED), how, *map(str, ends), change])
        elif success != "count":
            shares = f"{before:.3f}", f"{after:.3f}"
            n = sizes(first.get(f"count/{kind}", 0), last.get(f"count/{kind}", 0))
            kinds.append([kind, n, *shares, change])
    took = f" ({seconds:.0f} s)" if math.isfinite(seconds) else ""
    # a resumed run may have lost its first evaluations
    start = f"after {first['step']:.0f}" if first["step"] else "before"
    numbers = number_of(first), number_of(last)
    differ = numbers[0] != numbers[1]
    asked = sizes(*numbers, " held-out examples", start) + (f" {start} and after" * (not differ))
    title = f"{asked} {last['step']:.0f} steps{took}, with 95 % intervals{OTHER_EXAMPLES * differ}"
    screen.table(title, ["", "", "before", "after", "change"], rows, narrow=True)
    if kinds:
        title = f"{in_words(headline(last))} by kind of question, greedy"
        screen.table(title, ["", "n", "before", "after", "change"], kinds, narrow=True)


def show_cost(screen: Screen, rows: list[list[str]]) -> None:
    """Print the estimated and the measured cost of a step."""
    title = "one step of one process: estimated (if nothing repeats) and measured"
    screen.table(title, ["", "estimated", "measured"], rows)


def say_end(screen: Screen, run: Path, status: str, reason: str, step: int) -> None:
    """Print how a run ended, and how to continue one that was stopped."""
    saved = path_of(run / "checkpoints", step)
    screen.say(f"{status} ({reason}) at step {step}; saved {saved}")
    if status == "stopped":
        resume = f"--config {run / 'config.toml'} --out-dir {run} --resume auto"
        screen.say(f"continue with: {resume}")
    screen.say(f"run: {run}")
