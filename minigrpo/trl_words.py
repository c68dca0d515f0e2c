"""TRL's words, with those that are used here instead.

This module imports no torch, so that settings are read and refused without waiting for it.
"""

from collections.abc import Iterable
from difflib import get_close_matches

from .errors import ConfigError

# A word of TRL (GRPOConfig, GRPOTrainer or the command line) -> what is here instead. docs/trl.md
# has the same rows. Words that mean the same here have none.
TRL_WORDS = {
    "model_name_or_path": "--model",
    "processing_class": "--tokenizer",
    "chat_template_kwargs": "--chat-args enable_thinking=false",
    "eval_dataset": "--eval-data",
    "train_dataset": "--data FILE.jsonl, or from Python rows",
    "reward_funcs": "--rewards FILE.py, or from Python functions",
    "num_generations": "--group-size",
    "num_generations_eval": "--eval-samples",
    "max_completion_length": "--max-new-tokens",
    "max_prompt_length": "prompts are never cut; one that does not fit is refused",
    "generation_kwargs": "--temperature, --top-k, --top-p, --min-p, --stop",
    "repetition_penalty": "none: training would divide by another distribution",
    "per_device_train_batch_size": "--prompts-per-step, over all processes and not per device; "
    "--micro-batch-size for memory",
    "batch_size": "--prompts-per-step",
    "gradient_accumulation_steps": "--micro-batch-size: a step is split, never made longer",
    "steps_per_generation": "each step samples afresh; --num-iterations repeats its update",
    "num_train_epochs": "--max-steps: an epoch is as many steps as rows / --prompts-per-step",
    "lr": "--learning-rate",
    "lr_scheduler_type": "always a warm-up, then a cosine to a tenth",
    "warmup_ratio": "--warmup-steps",
    "max_grad_norm": "--grad-clip",
    "optim": "always AdamW; --fused-optimizer, --offload-optimizer",
    "beta": "--kl-coef",
    "use_bias_correction_kl": "--kl k3_is",
    "sync_ref_model": "none: the reference is the start, or --reference MODEL",
    "epsilon": "--clip-low",
    "epsilon_high": "--clip-high",
    "loss_type": "--loss",
    "importance_sampling_level": "--loss gspo",
    "scale_rewards": "--scale group, batch or none",
    "mask_truncated_completions": "--overlong mask",
    "top_entropy_quantile": "a loss of your own, which gets x.entropy",
    "environment_factory": "--environment FILE.py:NAME, or from Python a class",
    "tools": "--environment FILE.py:NAME, or from Python functions",
    "max_tool_calling_iterations": "--max-turns, one more",
    "multi_objective_aggregation": "--aggregate normalize-then-sum, or sum-then-normalize",
    "vllm_importance_sampling_mode": "--sampler-correction",
    "vllm_importance_sampling_clip_max": "--sampler-cap",
    "vllm_importance_sampling_cap": "--sampler-cap",
    "off_policy_mask_threshold": "--sampler-correction sequence-mask",
    "use_adaptive_entropy": "--entropy-coef, which stays constant",
    "entropy_target": "--entropy-coef, which stays constant",
    "use_vllm": "not needed: it samples with the weights that it trains, without a server",
    "use_peft": "--lora-rank 16",
    "peft_config": "--lora-rank, --lora-alpha, --lora-targets",
    "lora_r": "--lora-rank",
    "bf16": "--use-amp",
    "fp16": "--use-amp --amp-dtype float16",
    "dtype": "--use-amp; with --lora-rank also --base-dtype bfloat16",
    "load_in_4bit": "--lora-rank 16 --base-dtype nf4",
    "torch_compile": "--compile-model",
    "deepspeed": "each GPU holds the whole model: torchrun distributed_train.py",
    "fsdp": "each GPU holds the whole model: torchrun distributed_train.py",
    "output_dir": "--out-dir",
    "report_to": "--track wandb or trackio; TensorBoard is always written",
    "logging_steps": "every step is logged, in metrics.jsonl",
    "log_completions": "always, in samples.jsonl",
    "eval_steps": "--eval-every",
    "save_steps": "--save-every",
    "save_total_limit": "--keep-last",
    "resume_from_checkpoint": "--resume auto",
}


def hint(name: str) -> str:
    """What is here instead of TRL's `num_generations`, or of `--num-generations`; "" of others."""
    word = name.lstrip("-").replace("-", "_")
    return TRL_WORDS.get(word, "")


def unknown_setting(name: str, known: Iterable[str] = ()) -> ConfigError:
    """The error for a setting that there is not."""
    here = hint(name) or " or ".join(get_close_matches(name, known))
    return ConfigError(f"unknown setting: {name}{here and f'; in minigrpo: {here}'}")
