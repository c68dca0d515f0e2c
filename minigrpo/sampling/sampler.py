"""The Sampler: from examples to completions and their texts."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import closing, nullcontext
from dataclasses import KW_ONLY, dataclass

import numpy as np

from ..config import Config
from ..guard import OOMBackoff
from ..model.frozen_model import CurrentModel
from ..model.transformer import Transformer
from ..runtime.device import autocast, product_dtype
from ..settings import SamplingConfig
from ..text.encoding import StopFinder, decode, encode_answer, pad, prompt_within
from ..text.tokenizer import Tokenizer
from ..turns.dialogues import Dialogues
from ..types import Completion, Completions, Example, Warn
from .generate import Generation, Sizes
from .graphs import RoundGraphs, capturing

PROMPT_BLOCK = 64  # with graphs, the room for prompts is a multiple of so many tokens


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
    model: Transformer
    tokenizer: Tokenizer
    _: KW_ONLY
    warn: Warn
    show: Callable[[int, int], object] | None = None  # hears how far an evaluation is
    speculate: bool = False  # propose the tokens of the true answers
    dialogues: Dialogues | None = None  # what answers turns, or None if a completion is one turn
    num_kept: int = 1  # generations that stay between calls with graphs, first those of rollouts

    def __post_init__(self) -> None:
        speed = self.config.speed
        stop_texts = self.config.sampling.stop
        self.stop_texts = StopFinder(self.tokenizer, stop_texts) if stop_texts else None
        self.num_speculative_tokens = speed.num_speculative_tokens if self.speculate else 0
        self.has_graphs = speed.cuda_graphs and self.model.device.type == "cuda"
        if self.config.memory.fsdp:  # whole weights take too much memory in an update
            self.num_kept = 0
        self.current_model = CurrentModel(self.model, product_dtype(speed), self.num_kept > 0)
        self.generations: dict[Hashable, Generation] = {}
        # The number of prompts that fit depends on the number of samples of each, the key.
        self.backoffs: defaultdict[int, OOMBackoff] = defaultdict(
            lambda: OOMBackoff("sampling", "--rollout-batch-size", 0, self.warn, self._forget)
        )

    def _forget(self) -> bool:
        """Free the generations that do not run; return whether there were any."""
        number = len(self.generations)
        self.generations.clear()
        return number > 0

    def release(self) -> bool:
        """Free what is kept between calls, from now on too; return whether anything was kept."""
        kept = self.num_kept > 0 and (self.has_graphs or self.config.speed.use_amp)
        self.num_kept = 0
        self.current_model.forget()
        self._forget()
        return kept

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
        dialogues = self.dialogues
        longest_prompt = prompt_ids.shape[1]
        if self.has_graphs:  # which a longer prompt in a later step would make useless
            longest_prompt = -(-longest_prompt // PROMPT_BLOCK) * PROMPT_BLOCK
        draft_len = 0 if drafts is None else drafts.shape[1]
        is_rollout = sampling is self.config.sampling  # not a copy of it, as in evaluations
        key = num_samples, uniforms is None, sampling.model_dump_json()

        def attempt(model: Transformer, prompts_at_once: int) -> Sampled:
            """Complete all; when memory runs out, this is called again with fewer at once."""
            if dialogues is not None:
                dialogues.begin(examples, num_samples)
            sizes = Sizes(len(examples), prompts_at_once, longest_prompt, draft_len)
            generation = self.generations.pop(key, None)
            if generation is not None:
                sizes = Sizes(*map(max, sizes, generation.sizes))
            if generation is None or sizes != generation.sizes:
                generation = Generation(
                    model,
                    stops=self.tokenizer.stops,
                    stop_texts=self.stop_texts,
                    max_new_tokens=max_new_tokens,
                    num_samples=num_samples,
                    sizes=sizes,
                    sampling=sampling,
                    num_speculative_tokens=self.num_speculative_tokens,
                    dialogues=dialogues,
                    graphs=RoundGraphs(capturing()) if self.has_graphs else None,
                )
            with autocast(speed, self.model.device):
                generation.begin(prompt_ids, prompt_len, uniforms, drafts)
                completions = generation.run(None if is_rollout else self.show).to("cpu")
            if self.has_graphs and self.num_kept > (0 if is_rollout else 1):
                self.generations[key] = generation
            if dialogues is None:
                texts = decode(self.tokenizer, completions)
            else:
                texts = dialogues.finish(completions)
            return Sampled(completions, texts, generation.rounds, generation.tokens)

        most = min(batch_size or len(examples), len(examples))
        end_dialogues = closing(dialogues) if dialogues is not None else nullcontext()
        with self.current_model as model, end_dialogues:
            return self.backoffs[num_samples].run(lambda size: attempt(model, size), most)
