"""A run's folder: made or reopened, with the resolved config and the versions that it ran with."""

import fcntl
import json
import platform
import subprocess
import time
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch

from ..config import Config
from ..types import RolloutBatch
from .distributed import DistContext
from .flags import ConfigError, flag

# what may differ between a run and its continuation: stopping, evaluation, logging and speed;
# everything else changes results
MAY_DIFFER = """max_steps stop_after eval_every eval_size eval_size_during save_every keep_last out_dir resume device
    fast plan profile use_amp amp_dtype low_precision_weights use_tf32 compile_model cuda_graphs gradient_checkpointing layout
    kv_cache share_prompt_kv draft_answers draft_window fused_optimizer parallel_rewards num_reward_workers overlap_rewards
    skip_dead_groups chunked_logprobs offload_reference micro_batch_size rollout_batch_size
    pg_timeout"""


def open_folder(config: Config) -> Path:
    """Make the folder of `config.out_dir`, or reopen it to resume.

    Raises ConfigError if it cannot be written, or holds a run that `--resume` was not asked for.
    """
    folder = Path(config.out_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{config.loss}")
    while not config.out_dir and folder.exists():  # two runs that were started in the same second
        folder = folder.with_name(folder.name + "+")
    if (folder / "config.toml").exists() and not config.resume:
        raise ConfigError(
            f"--out-dir {folder}: holds a run; --resume auto goes on with it, another folder "
            "starts afresh"
        )
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--out-dir {folder}: cannot be written ({error.strerror})") from None
    return folder


def check_ranks(config: Config, dist: DistContext) -> None:
    """Raise ConfigError unless prompts and micro-batches divide among the processes."""
    ranks, prompts = dist.world_size, config.prompts_per_step
    if prompts % ranks:
        near = sorted({max(ranks, prompts // ranks * ranks), (prompts // ranks + 1) * ranks})
        raise ConfigError(
            f"--prompts-per-step {prompts} does not divide among {ranks} processes; "
            f"{' or '.join(map(str, near))} would"
        )
    for name in ("micro_batch_size", "rollout_batch_size"):
        size, share = getattr(config, name), prompts // ranks
        if size and share % size:
            divisors = [n for n in range(1, share + 1) if share % n == 0]
            raise ConfigError(
                f"{flag(name)} must divide the {share} prompts of each process: one of "
                f"{', '.join(map(str, divisors))} "
                f"(0: all), got {size}"
            )


def check_same_run(config: Config, saved: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError if a checkpoint was made with a config that would give other results."""
    now = config.to_dict()
    names = [field.name for field in fields(Config) if field.name not in MAY_DIFFER.split()]
    differ = [
        f"{flag(name)} was {saved.get(name)!r}, is {now[name]!r}"
        for name in names
        if saved.get(name) != now[name]
    ]
    if differ:
        raise ConfigError(f"--resume: {folder} was made with another config: {'; '.join(differ)}")


def versions(num_processes: int) -> dict[str, str]:
    """What the results depend on besides the config."""
    try:
        package = version("minigrpo")
    except PackageNotFoundError:
        package = "not installed"
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "minigrpo": package,
        "git_commit": commit,
        "threads": str(torch.get_num_threads()),
        "processes": str(num_processes),
    }


def lock(folder: Path) -> IO[str]:
    """Keep other processes out of a run's folder for as long as the file that is returned is open.

    Raises ConfigError if another run is in there. The lock goes with the process, however it ends.
    """
    file = open(folder / ".lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"--out-dir {folder}: another run is writing to it; wait for its end or take another "
            "folder"
        ) from None
    except OSError:
        pass  # a file system without locks
    return file


def dump_batch(folder: Path, batch: RolloutBatch, step: int, rank: int) -> Path:
    """Write a batch that could not be learnt from, as plain types and tensors (`torch.load(...,
    weights_only=True)`).
    """
    path = folder / "bad_batches" / f"step_{step + 1:06d}_rank_{rank}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "prompts": [example.prompt for example in batch.examples],
        "texts": [list(group) for group in batch.texts],
    }
    rewards = None if batch.rewards is None else torch.from_numpy(batch.rewards.total)
    tensors = {
        **vars(batch.completions),
        "rewards": rewards,
        "advantages": batch.advantages,
        "ref_logp": batch.ref_logp,
    }
    torch.save({**record, **tensors}, path)
    return path


def write_config(folder: Path, config: Config, num_processes: int = 1) -> None:
    """`config.toml`: loads again with --config, into another folder. What is None is not written,
    TOML has no null.
    """
    values = {
        name: value for name, value in config.to_dict().items() if name not in ("out_dir", "resume")
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None]
    lines += ["", "[versions]"] + [
        f"{name} = {json.dumps(value)}" for name, value in versions(num_processes).items()
    ]
    text = "\n".join(lines) + "\n"
    tomllib.loads(text)
    (folder / "config.toml").write_text(text)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
