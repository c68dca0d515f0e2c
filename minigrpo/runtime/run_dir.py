"""A run's folder: made or reopened, with the resolved config and the versions that it ran with."""

import fcntl
import json
import platform
import subprocess
import time
import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch

from ..config import Config
from ..types import RolloutBatch
from .distributed import DistContext
from .flags import ConfigError, flag
from .renamed import modern
from .settings import check_divides, places, toml_lines

# groups whose settings may differ between a run and its continuation: they change no result
MAY_DIFFER = {"speed", "memory", "run"}
MUST_AGREE = {"seed"}  # though it stands among them


def open_folder(config: Config) -> Path:
    """Make the folder of `config.run.out_dir`, or reopen it to resume.

    Raises ConfigError if it cannot be written, or holds a run that `--resume` was not asked for.
    """
    folder = Path(config.run.out_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{config.loss.name}")
    while (
        not config.run.out_dir and folder.exists()
    ):  # two runs that were started in the same second
        folder = folder.with_name(folder.name + "+")
    if (folder / "config.toml").exists() and not config.run.resume:
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
    ranks, prompts = dist.world_size, config.sampling.prompts_per_step
    if prompts % ranks:
        near = sorted({max(ranks, prompts // ranks * ranks), (prompts // ranks + 1) * ranks})
        raise ConfigError(
            f"--prompts-per-step {prompts} does not divide among {ranks} processes; "
            f"{' or '.join(map(str, near))} would"
        )
    share = prompts // ranks
    for name in ("micro_batch_size", "rollout_batch_size"):
        size = getattr(config.memory, name)
        check_divides(name, size, share, f"the {share} prompts of each process")


def check_same_run(config: Config, saved: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError if a checkpoint was made with a config that would give other results."""
    saved, now = modern(saved), config.flat()
    differ = [
        f"{flag(name)} was {saved[name]!r}, is {now[name]!r}"
        for name, (group, _) in places(Config).items()
        if (group not in MAY_DIFFER or name in MUST_AGREE)
        and name in saved
        and saved[name] != now[name]
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
    lines = toml_lines(config, leave_out=("out_dir", "resume"))
    lines += ["", "[versions]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in versions(num_processes).items()]
    text = "\n".join(lines) + "\n"
    tomllib.loads(text)
    (folder / "config.toml").write_text(text)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
