"""What a run's results depend on besides its config, for its record in config.toml."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def versions(num_processes: int) -> dict[str, str]:
    """The table `versions` of a run's config.toml: software, commit, threads and processes."""
    try:
        package = version("minigrpo")
    except PackageNotFoundError:
        package = "not installed"
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        commit = run.stdout.strip()
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
