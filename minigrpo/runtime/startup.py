"""What a run checks as it starts, beyond its config: a plan makes the same checks."""

import torch

from ..config import Config
from . import accel
from .combinations import check_shares
from .distributed import DistContext
from .trackers import check_tracker


def check_machine(config: Config, dist: DistContext) -> torch.device:
    """The device of this process, once the settings are known to fit machine and processes.

    Raises ConfigError: a device, a precision, a compiler or a tracker that is not there, or prompts
    that do not divide among the processes.
    """
    device = accel.pick_device(config.speed.device, dist.local_rank)
    check_shares(config, dist.world_size)
    accel.grad_scaler(config.speed, device)
    accel.check_compiler(config.speed, device)
    check_tracker(config)
    return device
