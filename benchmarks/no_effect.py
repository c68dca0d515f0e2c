"""Which speed and memory settings change nothing on a job, so that no row claims a gain of them."""

from dataclasses import dataclass

import torch

from minigrpo.config import Config
from minigrpo.model.logprobs import chunk_size
from minigrpo.model.transformer import ModelShape
from minigrpo.types import Task

TF32_CAPABILITY = 8  # of the first CUDA devices that have TF32


@dataclass(frozen=True)
class Situation:
    """What is known of a run once its device, its task and its model are."""

    config: Config
    device: torch.device
    processes: int
    shape: ModelShape
    task: Task


def reason(name: str, situation: Situation) -> str:
    """Why a setting has no effect, or "" if it has one."""
    config, on_cuda = situation.config, situation.device.type == "cuda"
    prompts, kl = config.sampling.prompts_per_step, config.loss.kl_coef > 0
    one_rollout_batch = config.memory.rollout_batch_size in (0, prompts)
    most_tokens = (config.memory.micro_batch_size or prompts) * (
        config.sampling.group_size * config.sampling.max_new_tokens
    )
    chunk = chunk_size(situation.shape.vocab_size, situation.device.type)
    reasons = {
        "offload_reference": ((not kl, "no --kl-coef"), (not on_cuda, "CPU")),
        "overlap_rewards": (
            (not config.speed.parallel_rewards, "--no-parallel-rewards"),
            (one_rollout_batch and not kl, "one rollout batch, and no KL"),
        ),
        "rollout_batch_size": ((one_rollout_batch, "that is all prompts"),),
        "skip_zero_variance_groups": ((kl, "with a KL every group has a gradient"),),
        "use_tf32": (
            (not on_cuda, "CPU"),
            (on_cuda and not _has_tf32(situation.device), "this GPU has no TF32"),
        ),
        "chunked_logprobs": ((most_tokens <= chunk, "all tokens fit into one chunk"),),
    }
    return next((words for idle, words in reasons.get(name, ()) if idle), "")


def _has_tf32(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= TF32_CAPABILITY
