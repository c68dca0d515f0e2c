"""TRL's GRPOTrainer on a workload: same weights, prompts, rewards, loss, optimizer and schedule.

transformers and trl come with the extra `peer`, and are imported only here.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedTokenizerFast, TrainerCallback, logging
from trl import GRPOConfig, GRPOTrainer

from minigrpo.build import FrozenModels, make_scorer
from minigrpo.config import Config
from minigrpo.optimizer import BETAS, learning_rate_at
from minigrpo.runtime.parallel import Parallel
from minigrpo.text.encoding import encode_prompt
from minigrpo.types import Completion, Example

from .measure import synchronize
from .work import Strict, Work

NEVER = "<|never|>"  # not a token of the model: ends completions of a forced length


class SameScheduleTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer with the learning rate schedule of this library."""

    schedule: Config
    metrics: dict[str, float]  # gets the seconds of sampling

    def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
        synchronize(self.accelerator.device)
        start = time.perf_counter()
        completions = super()._generate_single_turn(*args, **options)
        synchronize(self.accelerator.device)
        self.metrics["rollout"] = time.perf_counter() - start
        return completions

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        def factor(step: int) -> float:
            return learning_rate_at(step, self.schedule) / self.schedule.optimizer.learning_rate

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
        return self.lr_scheduler


class StepByStep(TrainerCallback):  # type: ignore[misc]
    """Calls `begin` before a step samples, and `end` after its optimizer step."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self.begin = begin
        self.end = end

    def on_step_begin(self, *_: Any, **options: Any) -> None:
        self.begin()

    def on_step_end(self, *_: Any, **options: Any) -> None:
        self.end()


def make_trainer(
    work: Work,
    config: Config,
    settings: Mapping[str, Any],
    steps: int,
    folder: Path,
    callback: StepByStep,
    metrics: dict[str, float],
) -> GRPOTrainer:
    """A trainer of `steps` rollouts with the model in `folder`. Each step fills `metrics`."""
    logging.set_verbosity_error()
    own = work.tokenizer
    own.engine.encode_special_tokens = False  # the tokenizer below copies it; templates write them
    turn_end = own.text_of([own.turn_end])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own.engine,
        chat_template=own.chat and own.chat.source,
        eos_token=NEVER if work.forced else turn_end,
        pad_token=turn_end,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    examples = [work.task.train(i) for i in range(steps * config.sampling.prompts_per_step)]
    # Completions end as here. There is no padding token, which would get no gradient.
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | ends))
    rank = config.model.lora_rank
    # As in this library, all layers but the output head have adapters.
    adapters = {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    SameScheduleTrainer.schedule = config
    SameScheduleTrainer.metrics = metrics
    arguments = GRPOConfig(
        output_dir=str(folder / "output"),
        use_cpu=work.device.type == "cpu",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        max_steps=steps,
        num_generations=config.sampling.group_size,
        max_completion_length=config.sampling.max_new_tokens,
        temperature=config.sampling.temperature,
        learning_rate=config.optimizer.learning_rate,
        weight_decay=config.optimizer.weight_decay,
        max_grad_norm=config.optimizer.grad_clip,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        loss_type=config.loss.name,
        beta=config.loss.kl_coef,
        use_bias_correction_kl=False,
        disable_dropout=True,  # our GPT-2 has none; TRL would also sample with it
        shuffle_dataset=False,
        seed=config.run.seed,
        **settings,
    )
    asked = [list(example.messages) or example.prompt for example in examples]
    prompts = [{"prompt": prompt, "number": number} for number, prompt in enumerate(asked)]
    trainer = SameScheduleTrainer(
        model=str(folder),
        reward_funcs=reward_function(work, config, examples, metrics),
        args=arguments,
        peft_config=LoraConfig(**adapters) if rank else None,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    for model in filter(None, (trainer.model, trainer.ref_model)):
        model.register_forward_pre_hook(count_positions_without_padding, with_kwargs=True)
    return trainer


def count_positions_without_padding(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a forward: give a model with learned positions the positions of its tokens.

    GPT-2 in transformers counts the padding on the left too, unless it is told the positions, as by
    `generate`, but not by TRL's update: its log-probs would not be those of the sampling.
    """
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is None and mask is not None and mask.dim() == 2:
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return args, kwargs


def reward_function(
    work: Work, config: Config, examples: Sequence[Example], metrics: dict[str, float]
) -> Callable[..., list[float]]:
    """Our rewards as a reward function of TRL; it puts what a step of ours logs into `metrics`."""
    job = work.with_flags(config)
    frozen_models = FrozenModels(
        job, work.model, Parallel(work.device), Strict(), {}, config.model.name
    )
    scorer = make_scorer(job, frozen_models, Strict().warn)
    group = config.sampling.group_size

    def reward(
        completions: list[Any], completion_ids: list[list[int]], number: list[int], **others: Any
    ) -> list[float]:
        asked = [examples[i] for i in number[::group]]
        said = [Completion(x if isinstance(x, str) else x[0]["content"]) for x in completions]
        texts = [said[i : i + group] for i in range(0, len(said), group)]
        rewards: list[float] = scorer.score(asked, texts).total.flatten().tolist()
        lengths = [len(ids) for ids in completion_ids]
        prompt_len = max(len(encode_prompt(work.tokenizer, example)) for example in asked)
        metrics["completion_tokens"] = sum(lengths)
        metrics["reward"] = sum(rewards) / len(rewards)
        # every row is padded to the longest prompt and to the longest completion
        metrics["tokens/run"] = len(lengths) * (prompt_len + max(lengths))
        return rewards

    return reward
