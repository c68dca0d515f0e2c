"""A run's messages on the screen: at the start, at evaluations, without a signal, at the end."""

from collections.abc import Mapping

import torch

from ..config import Config
from ..types import RolloutBatch
from .fast import LAYERS, device_kind
from .logging import NoLog, RunLog, Screen
from .settings import as_flags

STEPS_WITHOUT_SIGNAL = 20  # in a row, before the warning
STEPS_BETWEEN_SAMPLES = 10
SAMPLES_LOGGED = 2
Evaluation = Mapping[str, float]


def introduce(
    screen: Screen, config: Config, parameters: int, device: torch.device, processes: int
) -> None:
    """Print one line that describes a step, and warnings about the settings."""
    sampling, speed = config.sampling, config.speed
    share = sampling.prompts_per_step // processes
    micro = -(-share // (config.memory.micro_batch_size or share))
    group = "true answers" if config.supervised else f"{sampling.group_size} completions"
    screen.say(
        f"{config.loss.name}: {sampling.prompts_per_step} prompts x {group} per step, "
        f"on {processes} x {device.type}: {share} prompts per process in {micro} "
        f"micro-batch{'es' if micro > 1 else ''}; {parameters / 1e6:.1f} M parameters"
    )
    if speed.fast:
        kind = device_kind(speed.device, speed.amp_dtype)
        settings = config.flat()
        layers = as_flags({name: settings[name] for name in LAYERS[kind]})
        screen.say(f"--fast on {kind}: {' '.join(layers)}")
    if speed.cuda_graphs and device.type != "cuda":
        screen.warn(
            "--cuda-graphs: no CUDA device, so rounds are not captured: slower, same tokens"
        )
    if sampling.top_k or sampling.top_p < 1:
        screen.warn(
            "--top-k and --top-p truncate the sampler only: training uses the full distribution "
            "(sampling/removed_mass is what they remove; --sampler-correction corrects for it)"
        )


def introduce_rewards(screen: Screen, weights: Mapping[str, float]) -> None:
    """Print the weights of the reward parts in force, from the task, its flags or TOML."""
    parts = [f"{weight:g} {name}" for name, weight in weights.items() if weight]
    if parts:
        screen.say(f"reward = {' + '.join(parts)}".replace("+ -", "- "))
    else:
        screen.warn("--reward-weights: all weights are 0, so every reward is 0")


class SignalWatch:
    """Warns once if all groups have had equal rewards for several steps in a row."""

    def __init__(self, screen: Screen, is_main: bool) -> None:
        self.screen, self.is_main, self.steps = screen, is_main, 0

    def add(self, metrics: Mapping[str, float]) -> None:
        self.steps = self.steps + 1 if metrics.get("frac_reward_zero_std") == 1 else 0
        if self.steps == STEPS_WITHOUT_SIGNAL and self.is_main:
            self.screen.warn(
                f"for {STEPS_WITHOUT_SIGNAL} steps all completions of each prompt had equal "
                "rewards, so nothing is learnt. A model that never gets a part right needs a warm "
                "start on true answers first (--loss nll)"
            )


def log_samples(log: RunLog | NoLog, batch: RolloutBatch, step: int) -> None:
    """Every few steps, log some completions of one prompt with their reward parts."""
    if batch.rewards is None or step % STEPS_BETWEEN_SAMPLES:
        return
    example, texts = batch.examples[0], batch.texts[0][:SAMPLES_LOGGED]
    for g, text in enumerate(texts):
        record = {
            "prompt": example.prompt,
            "completion": text,
            "truth": example.answer,
            "parts": {name: float(scores[0, g]) for name, scores in batch.rewards.parts.items()},
            "reward": float(batch.rewards.total[0, g]),
        }
        log.sample(step, record)
    shown = [f"prompt      {example.prompt}", f"truth       {example.answer}"]
    shown += [f"completion  {text}" for text in texts]
    log.sample_text(step, "\n".join(f"    {line}" for line in shown))


def say_evaluation(screen: Screen, step: int, values: Evaluation) -> None:
    screen.say(
        f"evaluation at step {step} on {values['n']:.0f} held-out examples: exactly right "
        f"{values['exact_sampled']:.1%} sampled, {values['exact']:.1%} greedy; "
        f"greedy reward {values['reward']:.3f}"
    )


def progress(metrics: Mapping[str, float], last: Evaluation | None) -> str:
    """The text next to the progress bar."""
    seen = ""
    if last:
        seen = f"step {last['step']:.0f}: {last['exact_sampled']:.1%} exactly right, sampled  "
    if "reward" in metrics:
        now = f"reward {metrics['reward']:.3f}"
    else:
        now = f"loss {metrics['loss']:.4f}"
    return f"{now}  {seen}{metrics['step_time']:.2f} s/step"


def show_change(
    screen: Screen, first: Evaluation, last: Evaluation, step: int, seconds: float
) -> None:
    """Print evaluations before and after, first the sampled measure, which GRPO maximises."""
    names = [
        name
        for name in first
        if name in last and name not in ("step", "n") and not name.startswith("count/")
    ]
    rows = []
    for name in names:
        kind = name.removeprefix("exact/")
        n = last.get(f"count/{kind}", last["n"]) if kind != name else last["n"]
        ends = first[name], last[name], last[name] - first[name]
        how = "sampled" if name == "exact_sampled" else "greedy"
        numbers = f"{ends[0]:.3f}", f"{ends[1]:.3f}", f"{ends[2]:+.3f}"
        rows.append([name.removesuffix("_sampled"), how, f"{n:.0f}", *numbers])
    title = f"held-out examples before and after {step} steps ({seconds:.0f} s)"
    screen.table(title, ["", "", "n", "before", "after", "change"], rows)
