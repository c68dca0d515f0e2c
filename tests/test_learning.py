"""A run learns: the mean reward rises by far more than its noise, and only if it is the reward."""

import json
from pathlib import Path
from statistics import mean, variance

from minigrpo import Config, Trainer

TASK = str(Path(__file__).parent / "case_task.py")
STEPS, WINDOW = 40, 10


def rewards(folder: Path, **changes: object) -> list[float]:
    """The mean reward of each step, as it is logged."""
    options = {
        "task": TASK,
        "init_from": "scratch",
        "layers": 1,
        "width": 32,
        "heads": 2,
        "context": 16,
        "prompts_per_step": 8,
        "group_size": 16,
        "max_new_tokens": 4,
        "max_steps": STEPS,
        "warmup_steps": 2,
        "learning_rate": 1e-2,
        "eval_every": 0,
        "eval_size": 4,
        "out_dir": str(folder),
    }
    Trainer(Config.of(**{**options, **changes}), quiet=True).fit()  # type: ignore[arg-type]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward"] for line in lines]


def gain(found: list[float]) -> tuple[float, float]:
    """By how much the mean of the last steps is above that of the first, and its standard error."""
    first, last = found[:WINDOW], found[-WINDOW:]
    error = ((variance(first) + variance(last)) / WINDOW) ** 0.5
    return mean(last) - mean(first), error


def test_a_short_run_learns_and_with_shuffled_rewards_it_does_not(tmp_path: Path) -> None:
    """The thresholds leave room: over the seeds 0 to 11 the gain was 0.19 to 0.49, and 15 to 24 of
    its standard errors; with shuffled rewards it was -0.02 to 0.02.
    """
    learnt, error = gain(rewards(tmp_path / "learns"))
    assert learnt > 0.12 and learnt > 5 * error
    drift, _ = gain(rewards(tmp_path / "control", shuffle_rewards=True))
    assert abs(drift) < 0.08
