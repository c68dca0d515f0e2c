"""What is said about bad input: ConfigError, and what TRL's words are called here.

This module imports no torch, so that settings are read and refused without waiting for it.
"""

from fnmatch import fnmatchcase


class ConfigError(ValueError):
    """Bad input of the user's: a setting, a file, a function. The commands print it as one line."""


# A word of TRL (of GRPOConfig, GRPOTrainer or its command line) or a pattern -> what is here
# instead. docs/trl.md has the same rows. Words that mean the same here have none.
TRL_WORDS = {
    "model_name_or_path": "--model",
    "model_revision": "--model ORG/NAME@REVISION",
    "processing_class": "--tokenizer",
    "dataset_name": "--data FILE.jsonl, or from Python rows",
    "train_dataset": "--data FILE.jsonl, or from Python rows",
    "eval_dataset": "--eval-data",
    "reward_funcs": "--rewards FILE.py, or from Python functions",
    "reward_model_name_or_path": "--rewards FILE.py, with a function that asks the model",
    "num_generations": "--group-size",
    "max_completion_length": "--max-new-tokens",
    "max_prompt_length": "prompts are never cut; one that does not fit is refused",
    "per_device_train_batch_size": "--prompts-per-step, over all processes and not per device; "
    "--micro-batch-size for memory",
    "per_device_eval_batch_size": "--rollout-batch-size",
    "train_batch_size": "--prompts-per-step",
    "batch_size": "--prompts-per-step",
    "generation_batch_size": "--prompts-per-step x --group-size completions per step",
    "gradient_accumulation_steps": "--micro-batch-size: a step is split, never made longer",
    "steps_per_generation": "each step samples afresh; --num-iterations repeats its update",
    "num_train_epochs": "--max-steps: an epoch is as many steps as rows / --prompts-per-step",
    "epochs": "--max-steps: an epoch is as many steps as rows / --prompts-per-step",
    "lr": "--learning-rate",
    "lr_scheduler_type": "always a warm-up, then a cosine to a tenth",
    "warmup_ratio": "--warmup-steps",
    "max_grad_norm": "--grad-clip",
    "optim": "always AdamW; --offload-optimizer saves memory",
    "beta": "--kl-coef",
    "ref_model": "--kl-coef: the reference is the model at the start",
    "sync_ref_model": "the reference of --kl-coef stays the model at the start",
    "epsilon": "--clip-low",
    "epsilon_high": "--clip-high",
    "delta": "--ratio-cap",
    "loss_type": "--loss",
    "importance_sampling_level": "--loss gspo for sequence; others have a ratio per token",
    "scale_rewards": "--scale group, batch or none",
    "mask_truncated_completions": "--overlong mask",
    "vllm_importance_sampling_c*": "--sampler-correction",
    "use_vllm": "not needed: it samples with the weights that it trains, without a server",
    "vllm_*": "not needed: it samples with the weights that it trains, without a server",
    "use_peft": "--lora-rank 16",
    "peft_config": "--lora-rank, --lora-alpha, --lora-targets",
    "lora_r": "--lora-rank",
    "lora_target_modules": "--lora-targets",
    "lora_dropout": "adapters have no dropout",
    "load_in_*bit": "--lora-rank 16 --base-dtype bfloat16: weights are not quantised",
    "bf16": "--use-amp",
    "fp16": "--use-amp --amp-dtype float16",
    "tf32": "--use-tf32",
    "dtype": "--use-amp; with --lora-rank also --base-dtype bfloat16",
    "torch_dtype": "--use-amp; with --lora-rank also --base-dtype bfloat16",
    "activation_checkpointing": "--gradient-checkpointing",
    "torch_compile": "--compile-model",
    "use_liger*": "not needed: the loss never holds all logits",
    "attn_implementation": "always torch's own fused attention",
    "use_cpu": "--device cpu",
    "deepspeed": "each GPU holds the whole model: torchrun distributed_train.py",
    "fsdp": "each GPU holds the whole model: torchrun distributed_train.py",
    "output_dir": "--out-dir",
    "run_name": "--out-dir",
    "report_to": "--track wandb or trackio; TensorBoard is always written",
    "logging_steps": "every step is logged, in metrics.jsonl",
    "log_completions": "samples.jsonl always has them",
    "eval_steps": "--eval-every",
    "eval_strategy": "--eval-every",
    "num_generations_eval": "--eval-samples",
    "save_steps": "--save-every",
    "save_strategy": "--save-every",
    "save_total_limit": "--keep-last",
    "resume_from_checkpoint": "--resume auto",
    "push_to_hub": "minigrpo export writes a folder to upload",
}


def hint(name: str) -> str:
    """What is here instead of TRL's `num_generations`, or of `--num-generations`; "" of others."""
    word = name.lstrip("-").replace("-", "_")
    return next((here for pattern, here in TRL_WORDS.items() if fnmatchcase(word, pattern)), "")


def unknown_setting(name: str) -> ConfigError:
    """The error for a setting that there is not."""
    here = f" (here: {hint(name)})" if hint(name) else ""
    return ConfigError(f"unknown setting: {name}{here}")
