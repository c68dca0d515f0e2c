"""Complete examples with the current policy, for training, evaluation and the tools.

`generate` works on tensors. The sampler encodes prompts, chooses the decoder and the precision, and
splits the batch if memory runs out.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from ..config import Config
from ..model.encoding import encode_answers, encode_prompts
from ..model.tokenizer import Tokenizer
from ..model.transformer import Transformer
from ..runtime import accel
from ..runtime.oom import OOMBackoff
from ..types import Completions, Example
from .cuda_graphs import CUDAGraphCache
from .decoders import Decoder, ReplicatedPrefixDecoder, SharedPrefixDecoder, UncachedDecoder
from .generate import SamplingParams, generate_parts

GREEDY = SamplingParams()  # with u=None; with u it samples from the model's own distribution


class Sampler:
    """Encodes prompts, generates, and halves the batch when memory runs out."""

    def __init__(
        self,
        config: Config,
        model: Transformer,
        tokenizer: Tokenizer,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        warn: Callable[[str], object] = lambda text: None,
    ) -> None:
        """`model` must not be compiled: shapes differ in every round of decoding."""
        self.config, self.model, self.tokenizer, self.autocast = config, model, tokenizer, autocast
        self.stops: Collection[int] = tokenizer.stops
        self.graphs = CUDAGraphCache()
        self.decoder = self._choose_decoder()
        self.low_precision = accel.low_precision_copy(config.speed, model)
        # by number of samples per prompt: training and evaluation fit different numbers of prompts
        self.backoffs: defaultdict[int, OOMBackoff] = defaultdict(
            lambda: OOMBackoff("sampling", "--rollout-batch-size", 0, warn)
        )
        self.work = Counter[str]()  # `generate` adds to it; the rollout clears it

    def _choose_decoder(self) -> Callable[..., Decoder]:
        if self.config.speed.cuda_graphs:
            return self.graphs.decoder
        if not self.config.speed.kv_cache:
            return UncachedDecoder
        share = self.config.memory.share_prompt_kv
        return SharedPrefixDecoder if share else ReplicatedPrefixDecoder

    def complete(
        self,
        examples: Sequence[Example],
        *,
        num_samples: int = 1,
        u: np.ndarray | None = None,
        params: SamplingParams = GREEDY,
        batch_size: int = 0,
        watch: Callable[[Tensor, Tensor], object] | None = None,
    ) -> Iterator[Completions]:
        """Complete each example `num_samples` times; yield parts of the batch, on the host.

        Args:
            u: uniform numbers in [0, 1), `[P, G, S]`, S >= --max-new-tokens; None picks the most
                likely token each time.
            batch_size: prompts decoded together, 0: all. It affects memory and time only.
            watch: called with `ids [R, S]` and `lengths [R]` on the model's device after each
                decoding round: see `generate_parts`.

        Raises ValueError for another `u`, or a prompt that leaves no room for --max-new-tokens.
        """
        longest = self.config.sampling.max_new_tokens
        room = self.model.shape.context - longest
        prompt_ids, prompt_len = encode_prompts(self.tokenizer, examples, room)
        drafts = None
        if self.config.speed.speculative_decoding:
            # what lies far beyond the longest completion is never proposed, and costs memory
            drafts = encode_answers(self.tokenizer, examples)[0][:, : 2 * longest]
        accel.refresh(self.low_precision, self.model)
        done = 0
        parts: Iterator[Completions] = iter(())  # the examples from `done` on

        def generate_rest(size: int) -> Iterator[Completions]:
            rest = slice(done, None)
            low = torch.is_autocast_enabled(self.model.device.type)  # off after the fallback
            return generate_parts(
                self.low_precision if low else self.model,
                prompt_ids[rest],
                prompt_len[rest],
                stops=self.stops,
                max_new_tokens=longest,
                num_samples=num_samples,
                prompts_at_once=size,
                u=None if u is None else torch.from_numpy(u[rest]),
                params=params,
                decoder=self.decoder,
                drafts=None if drafts is None else drafts[rest],
                num_speculative_tokens=self.config.speed.num_speculative_tokens,
                work=self.work,
                watch=watch,
            )

        def next_part(size: int) -> Completions:
            """The next part; after an error, the rest begins again with `size` prompts at once."""
            nonlocal parts
            with self.autocast():
                part = next(parts, None)
                if part is None:
                    parts = generate_rest(size)
                    part = next(parts)
                return part

        backoff, total = self.backoffs[num_samples], len(examples)
        while done < total:
            part = backoff.run(next_part, min(batch_size or total, total), self.graphs.reset)
            done += len(part)
            yield part.to("cpu")
