"""The Sampler: from examples to completions and their texts."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from ..config import Config, SamplingConfig
from ..model.encoding import decode, encode_answer, encode_prompts, pad
from ..model.tokenizer import Tokenizer
from ..model.transformer import Transformer
from ..runtime.device import low_precision_copy
from ..runtime.guard import OOMBackoff
from ..types import Completions, Example, Warn
from .generate import Answers, Generation


class Sampler:
    """Completes examples: encodes prompts, and halves the batch when memory runs out."""

    def __init__(
        self,
        config: Config,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        autocast: Callable[[], AbstractContextManager[object]],
        warn: Warn,
        speculate: bool = False,
        dialogues: Answers | None = None,
    ) -> None:
        """
        Args:
            model: must not be compiled: shapes differ in every round of decoding.
            speculate: whether to propose the tokens of the true answers.
            dialogues: answers turns; None: each completion is one turn.
        """
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.autocast = autocast
        self.stops: Collection[int] = tokenizer.stops
        self.num_speculative_tokens = config.speed.num_speculative_tokens if speculate else 0
        self.dialogues = dialogues
        self.low_precision = low_precision_copy(config.speed, model)
        # by number of samples per prompt, on which the number of prompts that fit depends
        self.backoffs: defaultdict[int, OOMBackoff] = defaultdict(
            lambda: OOMBackoff("sampling", "--rollout-batch-size", size=0, warn=warn)
        )
        self.work = Counter[str]()  # see Generation; the rollout clears it

    def complete(
        self,
        examples: Sequence[Example],
        *,
        num_samples: int,
        u: np.ndarray | None,
        sampling: SamplingConfig,
        batch_size: int,
    ) -> tuple[Completions, list[list[str]]]:
        """Complete each example `num_samples` times. Returns them, on the host, and their texts.

        `u` and `sampling`: see `Generation`. `batch_size`: prompts decoded together, 0: all.
        """
        max_new_tokens = self.config.sampling.max_new_tokens
        room = self.model.shape.context - max_new_tokens
        prompt_ids, prompt_len = encode_prompts(self.tokenizer, examples, room)
        drafts = None
        if self.num_speculative_tokens:
            # what lies far beyond the longest completion is never proposed, and costs memory
            answers = [encode_answer(self.tokenizer, example) for example in examples]
            drafts = pad(answers)[0][:, : 2 * max_new_tokens]
        # a prompt that a user types has no environment
        dialogues = self.dialogues if examples[0].tools is not None else None

        def completed(prompts_at_once: int) -> Completions:
            """Out of memory, it is called again with fewer."""
            if dialogues is not None:
                dialogues.begin(examples, num_samples)
            with self.autocast():
                # the guard turns autocast off after bad steps
                is_low = torch.is_autocast_enabled(self.model.device.type)
                generation = Generation(
                    self.low_precision if is_low else self.model,
                    prompt_ids,
                    prompt_len,
                    stops=self.stops,
                    max_new_tokens=max_new_tokens,
                    num_samples=num_samples,
                    prompts_at_once=prompts_at_once,
                    u=u,
                    sampling=sampling,
                    drafts=drafts,
                    num_speculative_tokens=self.num_speculative_tokens,
                    work=self.work,
                    answers=dialogues,
                )
                return generation.run()

        most = min(batch_size or len(examples), len(examples))
        completions = self.backoffs[num_samples].run(completed, most).to("cpu")
        if dialogues is not None:
            return completions, dialogues.finish(completions)
        return completions, decode(self.tokenizer, completions)
