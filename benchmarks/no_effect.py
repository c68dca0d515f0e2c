"""Which speed and memory layers have nothing to do on a job, so that no row claims their gain."""

import torch

from minigrpo.config import Config
from minigrpo.model.logprobs import chunk_size

TF32_CAPABILITY = 8  # of a CUDA device that has TF32


def without_effect(config: Config, device: torch.device, vocab_size: int) -> dict[str, str]:
    """The flags that change nothing on this job, each with the reason."""
    prompts, sampling = config.sampling.prompts_per_step, config.sampling
    one_rollout_batch = config.memory.rollout_batch_size in (0, prompts)
    in_update = config.memory.micro_batch_size or prompts
    tokens = in_update * sampling.group_size * sampling.max_new_tokens
    kl, cuda = config.loss.kl_coef > 0, device.type == "cuda"
    reasons = {
        "offload_reference": "no KL, so there is no reference"
        if not kl
        else ""
        if cuda
        else "no GPU, so the reference is in host memory",
        "overlap_rewards": "no reward pool"
        if not config.speed.parallel_rewards
        else "one rollout batch, and no KL"
        if one_rollout_batch and not kl
        else "",
        "rollout_batch_size": "one rollout batch" if one_rollout_batch else "",
        "skip_zero_variance_groups": "a KL, so every group has a gradient" if kl else "",
        "use_tf32": "" if cuda and _has_tf32(device) else "no GPU with TF32",
        "chunked_logprobs": "all logits fit into one chunk"
        if tokens <= chunk_size(vocab_size, device.type)
        else "",
        "speculative_decoding": ""
        if config.speed.num_speculative_tokens
        else "--num-speculative-tokens 0",
    }
    return {name: reason for name, reason in reasons.items() if reason}


def _has_tf32(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= TF32_CAPABILITY
