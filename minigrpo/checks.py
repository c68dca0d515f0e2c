"""What is checked before a run starts: its examples, and what its processes must have alike."""

from collections.abc import Mapping, Sequence
from typing import Any

from .build import Job
from .config import Config
from .evaluate import held_out_examples
from .identity import digest
from .model.frozen_model import with_context
from .rewards.scorer import RewardScorer
from .run.console import Console
from .text.encoding import check_prompt, encode_answer, messages_of, template_args
from .text.tokenizer import Tokenizer
from .types import ConfigError, Example, Warn
from .userfiles import files_read

CHECKED = 16  # examples of each split that a run makes before it starts


def check_examples(job: Job, context: int, console: Console) -> None:
    """Raise ConfigError for examples that do not fit the model, with `context` positions."""
    config, task, tokenizer = job.config, job.task, job.tokenizer
    if config.task.eval_data and not config.task.data:
        raise ConfigError("--eval-data needs --data, the files to train on")
    examples = list[Example]()
    for number in range(task.num_known):
        example = task.known(number)
        if example.prompt or example.messages:  # else its environment asks
            _check_fit(config, tokenizer, context, example)
        examples.append(example)
    made = [*map(task.train, range(CHECKED)), *held_out_examples(task, CHECKED)]
    for example in made:
        _check_fit(config, tokenizer, context, example)
    _warn_of_examples(tokenizer, config.model.chat_args, [*examples, *made], console.warn)


def _check_fit(config: Config, tokenizer: Tokenizer, context: int, example: Example) -> None:
    """Raise ConfigError for an example that does not fit the model, or the teacher."""
    room = context - config.sampling.max_new_tokens
    if field := config.loss.teacher_context:
        check_prompt(tokenizer, with_context(tokenizer, example, field), room)
    if config.supervised:
        if not example.answer:
            raise ConfigError(f"{example.label} has no answer, which --loss nll learns")
        room = min(room, context - len(encode_answer(tokenizer, example)))
    check_prompt(tokenizer, example, room)


def _warn_of_examples(
    tokenizer: Tokenizer, chat_args: Mapping[str, Any], examples: Sequence[Example], warn: Warn
) -> None:
    """Warn of what is plausible in examples, but has no effect or another one."""
    for example in examples:
        if messages_of(tokenizer, example):  # there it is an error
            continue
        spelled = [token for token in tokenizer.special if token in example.prompt]
        if spelled:
            advice = "Give messages: the chat template writes its tokens"
            warn(f"{example.label}: {spelled[0]} in the prompt stays text. {advice}")
            break
    given = chat_args.keys() | {name for x in examples for name in template_args(x)}
    if tokenizer.chat and (unread := given - tokenizer.chat.variables):
        names = ", ".join(sorted(unread))
        warn(f"{tokenizer.chat.name} never reads {names} of --chat-args, chat_template_kwargs")


def digests(job: Job, scorer: RewardScorer, checksums: Mapping[str, str]) -> dict[str, str]:
    """What all processes of a run must have alike; of users' code the files, not their results."""
    task = job.task
    examples = [*map(task.train, range(CHECKED)), *map(task.known, range(task.num_known))]
    return {
        "rows": digest([task.about, *examples]),
        "rewards": digest([scorer.names, scorer.weights]),
        "tokenizer": job.tokenizer.fingerprint,
        **checksums,
        **files_read(),
    }
