"""The Sampler: from examples to completions and their texts."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from contextlib import closing, nullcontext
from dataclasses import KW_ONLY, dataclass

import numpy as np

from ..config import Config
from ..guard import OOMBackoff
from ..model.inference import InferenceCopy
from ..model.transformer import Transformer
from ..runtime.device import autocast, product_dtype
from ..settings import SamplingConfig
from ..text.encoding import StopFinder, decode, encode_answer, pad, prompt_within
from ..text.tokenizer import Tokenizer
from ..turns.dialogues import Dialogues
from ..types import Completion, Completions, Example, Warn
from .generate import Generation
from .graphs import RoundGraphs, capturing


@dataclass(frozen=True)
class Sampled:
    """G completions of each of P examples, and the work that they took."""

    completions: Completions  # on the host
    texts: Sequence[Sequence[Completion]]  # [P][G]
    rounds: int  # rounds of decoding
    tokens: int  # tokens that the model ran, prompts included


@dataclass(eq=False)
class Sampler:
    """Completes examples: encodes prompts, and halves the batch when memory runs out."""

    config: Config
    model: Transformer  # must not be compiled: shapes differ in every round of decoding
    tokenizer: Tokenizer
    _: KW_ONLY
    warn: Warn
    speculate: bool = False  # propose the tokens of the true answers
    dialogues: Dialogues | None = None  # what answers turns, or None if a completion is one turn

    def __post_init__(self) -> None:
        speed = self.config.speed
        stop_texts = self.config.sampling.stop
        self.stop_texts = StopFinder(self.tokenizer, stop_texts) if stop_texts else None
        self.num_speculative_tokens = speed.num_speculative_tokens if self.speculate else 0
        self.has_graphs = speed.cuda_graphs and self.model.device.type == "cuda"
        # The copy of the weights, and with graphs the generations, stay in memory between calls.
        self.keeps = True
        self.copy: InferenceCopy | None = None
        self.generations: dict[Hashable, Generation] = {}
        # The number of prompts that fit depends on the number of samples of each, the key.
        self.backoffs: defaultdict[int, OOMBackoff] = defaultdict(
            lambda: OOMBackoff("sampling", "--rollout-batch-size", 0, self.warn, self._free_others)
        )

    def _free_others(self) -> bool:
        """Free the generations that do not run; return whether there are any."""
        number = len(self.generations)
        self.generations.clear()
        return number > 0

    def release(self) -> bool:
        """Free all that is kept, and keep nothing from now on; return whether anything was."""
        has_copy = self.copy is not None and self.copy.model is not self.model
        self.copy = None
        self.keeps = False
        return self._free_others() or has_copy

    def complete(
        self,
        examples: Sequence[Example],
        *,
        num_samples: int,
        uniforms: np.ndarray | None,
        sampling: SamplingConfig,  # its temperature, top_k, top_p and min_p count
        batch_size: int,
    ) -> Sampled:
        """Complete each example `num_samples` times; a `batch_size` of 0 decodes all at once."""
        speed = self.config.speed
        max_new_tokens = self.config.sampling.max_new_tokens
        room = self.model.shape.context - max_new_tokens
        prompt_ids, prompt_len = pad([prompt_within(self.tokenizer, x, room) for x in examples])
        drafts = None
        if self.num_speculative_tokens:
            answers = [encode_answer(self.tokenizer, example) for example in examples]
            # What lies far beyond the longest completion is never proposed, and costs memory.
            drafts = pad(answers)[0][:, : 2 * max_new_tokens]
        # A prompt that a user types has no environment.
        dialogues = self.dialogues if examples[0].in_turns else None
        # All that a generation cannot change from call to call.
        kind = num_samples, uniforms is None, sampling.model_dump_json(), dialogues is None

        def sampled(prompts_at_once: int) -> Sampled:
            """Complete all; when memory runs out, this is called again with fewer at once."""
            if dialogues is not None:
                dialogues.begin(examples, num_samples)
            generation = self.generations.pop(kind, None)
            if self.copy is None:
                self.copy = InferenceCopy(self.model, product_dtype(speed))
            else:
                self.copy.refresh()
            if generation is None:
                generation = Generation(
                    self.copy.model,
                    stops=self.tokenizer.stops,
                    stop_texts=self.stop_texts,
                    max_new_tokens=max_new_tokens,
                    num_samples=num_samples,
                    sampling=sampling,
                    num_speculative_tokens=self.num_speculative_tokens,
                    dialogues=dialogues,
                    graphs=RoundGraphs(capturing) if self.has_graphs else None,
                )
            with autocast(speed, self.model.device):
                generation.begin(prompt_ids, prompt_len, uniforms, drafts, prompts_at_once)
                completions = generation.run().to("cpu")
            if not self.keeps:
                self.copy = None
            elif self.has_graphs:
                self.generations[kind] = generation
            if dialogues is None:
                texts = decode(self.tokenizer, completions)
            else:
                texts = dialogues.finish(completions)
            return Sampled(completions, texts, generation.rounds, generation.tokens)

        most = min(batch_size or len(examples), len(examples))
        with closing(dialogues) if dialogues is not None else nullcontext():
            return self.backoffs[num_samples].run(sampled, most)
