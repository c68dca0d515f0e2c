"""Check examples before a run starts: their lengths, and what a user's task makes of them.

A prompt that does not fit the model would otherwise end the run at the step that draws it. The rows
of a file are all known, and are checked from the longest down. Of an endless supply the first ones
are checked, and more if they nearly fill the room.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from ..config import Config
from ..model.encoding import encode_prompt, messages_of, prompt_text
from ..model.tokenizer import Tokenizer
from ..types import Example, Task
from .flags import ConfigError
from .measures import EXACT, success_of
from .pool import WorkerPool
from .reward_calls import BATCHED, TOKENS, describe_failure, users_own
from .task_sources import task_sources
from .text import as_asked, short

FIRST_TRAIN, FIRST_HELD_OUT = 16, 64  # examples of each split that are always checked
MORE = 512  # examples of each split that are checked if one of the first nearly fills the room
NEARLY = 2 / 3  # of the room
OF_USERS = 256  # examples of each split of a user's task
MAX_ENCODED = 4096  # rows of a file that are tokenized
Warn = Callable[[str], object]


class Lengths:
    """The limits on the lengths of prompts and answers."""

    def __init__(self, config: Config, tokenizer: Tokenizer, context: int) -> None:
        """`context`: the model's number of positions."""
        self.tokenizer, self.context = tokenizer, context
        self.longest = config.sampling.max_new_tokens
        self.supervised = config.supervised
        self.room = context - self.longest  # for a prompt
        # a text never gives special tokens, but a chat template does
        never = set() if tokenizer.chat else {*tokenizer.special.values()}
        tokens = tokenizer.tokens.items()
        self.most_bytes = max(len(token) for number, token in tokens if number not in never)
        self.num_answers = self.num_encoded = 0  # looked at; tokenized
        self.num_suspects, self.roles_seen = 0, set[tuple[str, ...]]()
        self.long_answers: dict[str, int] = {}  # where -> tokens
        self.unwritable: list[str] = []  # where

    def is_suspect(self, example: Example) -> bool:
        """Whether an example of a file must be checked, and fewer than MAX_ENCODED were already.

        A plain prompt is no suspect if its bytes, which are at least as many as its tokens, fit. Of
        messages this cannot be told, and a template may refuse them, mostly for their roles: beyond
        MAX_ENCODED, one example of each sequence of roles is checked.
        """
        if messages := messages_of(self.tokenizer, example):
            roles = tuple(message["role"] for message in messages)
            suspect = self.num_suspects < MAX_ENCODED or roles not in self.roles_seen
            self.roles_seen.add(roles)
        else:
            suspect = self.num_suspects < MAX_ENCODED and not self._surely_fits(example)
        self.num_suspects += suspect
        return suspect

    def _surely_fits(self, example: Example) -> bool:
        prefix = len(self.tokenizer.prefix)
        prompt, answer = len(example.prompt.encode()) + prefix, len(example.answer.encode())
        fits = prompt <= self.room
        return fits and (not self.supervised or prompt + answer < self.context)

    def count(self, text: str, encode: Callable[[], Sequence[int]]) -> tuple[int, str]:
        """The number of tokens of a text, and how to say it.

        A text that is far too long is not tokenized, which could take minutes: the number is then
        the smallest that is possible.
        """
        least = -(-len(text.encode()) // self.most_bytes)
        if least > self.context:
            return least, f"at least {least}"
        size = len(encode())
        return size, str(size)

    def _count_prompt(self, where: str, example: Example) -> tuple[int, str]:
        try:
            text = prompt_text(self.tokenizer, example)
            return self.count(text, lambda: encode_prompt(self.tokenizer, example))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None

    def _count_answer(self, example: Example) -> tuple[int, str]:
        return self.count(example.answer, lambda: self.tokenizer.encode(example.answer))

    def check(self, where: str, example: Example) -> int:
        """Return the number of tokens of the prompt.

        Raises:
            ConfigError: the prompt, or with --loss nll the answer, is too long, or the chat
                template refuses the messages.
        """
        prompt, said = self._count_prompt(where, example)
        if prompt > self.room:
            raise ConfigError(
                f"{where}: the prompt has {said} tokens; at most {self.room} leave room for "
                f"--max-new-tokens {self.longest} in the model's context of {self.context}"
            )
        if self.supervised:
            answer, said = self._count_answer(example)
            left = self.context - prompt - 1  # the last one is end of text
            if answer > left:
                raise ConfigError(
                    f"{where}: the answer has {said} tokens; at most {left} fit the model's "
                    f"context of {self.context} after the prompt's {prompt}"
                )
        return prompt

    def note_answer(self, where: str, example: Example) -> None:
        """Count an answer, and whether it is longer than --max-new-tokens or cannot be written."""
        if not self.tokenizer.is_lossless and len(self.unwritable) < MAX_ENCODED:
            ids = self.tokenizer.encode(example.answer)
            if self.tokenizer.decode(ids) != example.answer:
                self.unwritable.append(where)
        if len(example.answer.encode()) > self.longest:  # tokens are at most as many as bytes
            if self.num_encoded >= MAX_ENCODED:
                return
            self.num_encoded += 1
            tokens = self._count_answer(example)[0]
            if tokens > self.longest:
                self.long_answers[where] = tokens
        self.num_answers += 1

    def warn_of_long_answers(self, warn: Warn, exact: bool) -> None:
        """Say how many answers no completion can equal, because they are too long, or because the
        tokenizer writes them in another way.

        Unless they have to be `exact`, it only matters that a completion as long is cut off.
        """
        if self.unwritable and exact:
            warn(
                f"{len(self.unwritable)} answers change when --tokenizer {self.tokenizer.name} "
                "encodes and decodes them, so no completion can equal them; the first: "
                f"{self.unwritable[0]}. Normalise them (Unicode's NFC)"
            )
        if not self.long_answers:
            return
        where = max(self.long_answers, key=lambda name: self.long_answers[name])
        warn(
            f"{len(self.long_answers)} of {self.num_answers} answers that were looked at are "
            f"longer than --max-new-tokens {self.longest}, so "
            f"{'no completion can equal them' if exact else 'completions like them are cut off'}; "
            f"the longest: {where}, {self.long_answers[where]} tokens"
        )


def check_examples(
    config: Config, task: Task, tokenizer: Tokenizer, context: int, warn: Warn
) -> None:
    """Check the examples of a task before a run starts.

    Args:
        context: the model's number of positions.

    Raises:
        ConfigError: in one line that names the file and the line, or the example and its split.
    """
    lengths = Lengths(config, tokenizer, context)
    asked = getattr(task, "task", task)  # without what --confidence adds
    if isinstance(asked, UsersTask):
        _check_users_task(asked, lengths, config.task.reward_timeout, warn)
    for source in getattr(task, "sources", [task]):
        if longest := getattr(source, "longest", None):
            for where, example in longest():
                if lengths.is_suspect(example):
                    lengths.check(where, example)
                lengths.note_answer(where, example)
        elif not isinstance(task, UsersTask):
            data, of_file = config.task.data, getattr(source, "num_held_out", None)
            name = f"--data {data}" if data and of_file else f"--task {config.task.name}"
            _check_supply(name, source, lengths)
    lengths.warn_of_long_answers(warn, exact=not getattr(task, "success", ""))


def _check_supply(name: str, source: Task, lengths: Lengths) -> None:
    """Check the first examples of both splits. Raises ConfigError."""
    size = 0
    for split, number, example in _some(source, FIRST_TRAIN, FIRST_HELD_OUT):
        size = max(size, lengths.check(f"{name}: {split}({number})", example))
        lengths.note_answer(f"{name}: {split}({number})", example)
    if size > NEARLY * lengths.room:
        for split, number, example in _some(source, MORE, MORE):
            lengths.check(f"{name}: {split}({number})", example)


def _some(source: Task, num_train: int, num_held_out: int) -> Iterator[tuple[str, int, Example]]:
    """Yield (split, number, example): the first of both splits, and the last held-out one."""
    for number in range(num_train):
        yield "train", number, source.train(number)
    size: int | None = getattr(source, "num_held_out", None)
    last = [size - 1] if size and size > num_held_out else []
    for number in [*range(min(num_held_out, size or num_held_out)), *last]:
        yield "held_out", number, source.held_out(number)


# --- users' tasks ---------------------------------------------------------------------------------


@runtime_checkable
class UsersTask(Task, Protocol):
    """`minigrpo.tasks.own.OwnTask`."""

    users: Task
    name: str  # how its errors begin: the flag, the file and the class


def _said(example: Example) -> tuple[str, str]:
    return example.prompt, example.answer


def _check_users_task(task: UsersTask, lengths: Lengths, timeout_s: float, warn: Warn) -> None:
    """Check a user's task: examples, splits, scores. Raises ConfigError in one line."""
    found: dict[str, list[Example]] = {"train": [], "held_out": []}
    for split, number, example in _some(task, OF_USERS, OF_USERS):
        lengths.check(f"{task.name}: {split}({number})", example)
        lengths.note_answer(f"{task.name}: {split}({number})", example)
        found[split].append(example)
    held_out = found["held_out"]
    trained = {as_asked(example.prompt) for example in found["train"]}
    if both := [x.prompt for x in held_out if as_asked(x.prompt) in trained]:
        warn(
            f"{task.name}: {len(both)} of {len(held_out)} evaluation prompts are also "
            f"training prompts, such as {short(both[0])}: evaluation cannot tell learning from "
            "remembering"
        )
    if 2 * (differ := len({_said(example) for example in held_out})) < len(held_out):
        warn(
            f"{task.name}: {differ} of {len(held_out)} evaluation examples differ, and intervals "
            "take all of them for independent; num_held_out is the number of distinct ones"
        )
    for split in ("train", "held_out"):
        if _said(getattr(task, split)(0)) != _said(found[split][0]):
            warn(
                f"{task.name}: {split}(0) gives another example each time; it must depend on the "
                "seed and the number only, or evaluations and resumed runs cannot be compared"
            )
    _check_scores(task, timeout_s)


def _check_scores(task: UsersTask, timeout_s: float) -> None:
    """Raise ConfigError for a task that cannot score texts, among them the true answer.

    Also if the task's success is neither 1 nor 0, or if a part named `exact` is not what eval.jsonl
    has under that name.
    """
    source = task_sources(task, timeout_s)[0]
    if source.kind == TOKENS:  # tried by token_rewards.py, with the model
        return
    pool, example = WorkerPool(0, "check"), task.train(0)
    question, success, right = users_own(example), success_of(task), list[float]()
    for text in (example.answer, "", f"{example.answer} "):
        # two texts in a batch: an answer of a wrong shape may fit a single one
        batched = source.kind == BATCHED
        size = 2 if batched else 1
        args = ([question] * 2, [text, example.answer]) if batched else (question, text)
        try:
            answer = pool.wait(pool.submit(source.answer, *args, needs_thread=True), timeout_s)
            scores = dict(zip(source.names, source.check(answer, size)[:, 0].tolist(), strict=True))
        except Exception as error:
            if isinstance(error, ConfigError) and str(error).startswith(task.name):
                raise
            call = f"{task.name}: score of train(0) and the text {text[:60]!r}"
            raise ConfigError(f"{call}: {describe_failure(error)}") from error
        right.append(scores.get(success, 0.0))
    pool.close()
    if odd := [x for x in right if x not in (0, 1) and not math.isnan(x)]:
        raise ConfigError(
            f"{task.name}: {success} is the success of the task, so it must be 1 for a right text "
            f"and 0 for any other, got {odd[0]:g}"
        )
    if success == EXACT and EXACT in source.names and right != [1, float(not example.answer), 0]:
        raise ConfigError(
            f"{task.name}: the part exact must be 1 for the true answer and 0 for any other text, "
            "as `exact` in eval.jsonl is; a part that means something else needs another name"
        )
