"""The Sampler: from examples to completions and their texts."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch

from ..config import Config, SamplingConfig
from ..model.encoding import StopTexts, decode, encode_answer, encode_prompts, pad
from ..model.tokenizer import Tokenizer
from ..model.transformer import Transformer
from ..runtime.device import low_precision_copy
from ..runtime.graphs import RoundGraphs, capturing
from ..runtime.guard import OOMBackoff
from ..turns.dialogues import Dialogues
from ..types import Completions, Example, Warn
from .generate import Generation


@dataclass(eq=False)
class Sampler:
    """Completes examples: encodes prompts, and halves the batch when memory runs out."""

    config: Config
    model: Transformer  # must not be compiled: shapes differ in every round of decoding
    tokenizer: Tokenizer
    _: KW_ONLY
    autocast: Callable[[], AbstractContextManager[object]]
    warn: Warn
    speculate: bool = False  # propose the tokens of the true answers
    dialogues: Dialogues | None = None  # answers turns; None: each completion is one turn

    def __post_init__(self) -> None:
        speed, texts = self.config.speed, self.config.sampling.stop
        self.stops: Collection[int] = self.tokenizer.stops
        self.stop_texts = StopTexts(self.tokenizer, texts) if texts else None
        self.num_speculative_tokens = speed.num_speculative_tokens if self.speculate else 0
        self.low_precision = low_precision_copy(speed, self.model)
        self.has_graphs = speed.cuda_graphs and self.model.device.type == "cuda"
        # by number of samples per prompt, on which the number of prompts that fit depends
        self.backoffs: defaultdict[int, OOMBackoff] = defaultdict(
            lambda: OOMBackoff("sampling", "--rollout-batch-size", size=0, warn=self.warn)
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
            # autocast keeps its casts of trained weights, which graphs read, until this ends
            with self.autocast():
                # the guard turns autocast off after bad steps
                is_low = torch.is_autocast_enabled(self.model.device.type)
                generation = Generation(
                    self.low_precision if is_low else self.model,
                    prompt_ids,
                    prompt_len,
                    stops=self.stops,
                    stop_texts=self.stop_texts,
                    max_new_tokens=max_new_tokens,
                    num_samples=num_samples,
                    prompts_at_once=prompts_at_once,
                    u=u,
                    sampling=sampling,
                    drafts=drafts,
                    num_speculative_tokens=self.num_speculative_tokens,
                    work=self.work,
                    answers=dialogues,
                    graphs=RoundGraphs(capturing()) if self.has_graphs else None,
                )
                return generation.run()

        most = min(batch_size or len(examples), len(examples))
        with closing(dialogues) if dialogues is not None else nullcontext():
            completions = self.backoffs[num_samples].run(completed, most).to("cpu")
            if dialogues is not None:
                return completions, dialogues.finish(completions)
            return completions, decode(self.tokenizer, completions)
