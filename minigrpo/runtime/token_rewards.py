"""Rewards that look at tokens: ids, spans, the policy's log-probs, and models of their own.

They are called in the calling thread, because they use the device, with a whole rollout at once,
after its completions have been joined. They are trusted like a task's `score_batch`: there is no
time limit, and an error in one ends the run in one line.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..model.encoding import decode, encode_answers, encode_prompts
from ..model.spans import find_spans
from ..model.tokenizer import Tokenizer
from ..types import Completions, Example, Task
from .flags import ConfigError
from .frozen_model import FrozenModel
from .reward_calls import PARTLY_NAN, BadRewardError, RewardSource, partly_nan
from .text import one_line, short


@dataclass(frozen=True)
class TokenBatch:
    """What a reward with `tokens=True`, or a task's `score_tokens`, is called with.

    P prompts with G completions each, of at most S tokens. In an evaluation G is 1, or
    --eval-samples.
    """

    examples: Sequence[Example]  # [P]
    texts: Sequence[Sequence[str]]  # [P][G]
    completions: Completions  # on the host; sampler_logp [P, G, S] has the policy's log-probs
    tokenizer: Tokenizer  # the policy's
    device: torch.device  # of the policy
    temperature: float  # at which the tokens were sampled: sampler_logp is of logits / temperature
    load: Callable[[str], FrozenModel] = field(repr=False)

    def spans(self, tag: str, *, with_tags: bool = False) -> Tensor:
        """`[P, G, 2]` int64, the tokens between <tag> and </tag>, see `model.spans.find_spans`.

        The second number is the one after the last token; -1, -1 where a tag is missing.
        """
        return find_spans(self.tokenizer, self.completions, tag, with_tags=with_tags)

    def model(self, name: str) -> FrozenModel:
        """A frozen model, at the temperature of the samples. It is loaded once per run.

        Its weights have --base-dtype; with --offload-reference they are in host memory while
        nothing is asked. `name` is that of a run, a model's folder or file, or ORG/NAME.
        Raises ConfigError in one line.
        """
        return self.load(name).at_temperature(self.temperature)


@dataclass(frozen=True)
class TokenScoring:
    """What a run gives to the rewards that look at tokens."""

    tokenizer: Tokenizer
    device: torch.device
    load: Callable[[str], FrozenModel]

    @torch.no_grad()
    def parts(
        self,
        sources: Sequence[RewardSource],
        examples: Sequence[Example],
        texts: Sequence[Sequence[str]],
        completions: Completions,
        temperature: float,
    ) -> dict[str, np.ndarray]:
        """The parts of all sources, `[P, G]` float64 each.

        Raises ConfigError in one line, if a source raises anything or returns something else.
        """
        run = self.tokenizer, self.device, temperature, self.load
        shape, found = completions.completion_mask.shape[:2], dict[str, np.ndarray]()
        for source in sources:
            try:
                # copies: a function may change the log-probs in place, and the loss needs them too
                own = [source.asked(example) for example in examples]
                own_texts, every = [list(group) for group in texts], torch.arange(len(texts))
                batch = TokenBatch(own, own_texts, completions.select(every), *run)
                answer = source.answer(batch)
                columns = {name: _flat(answer, name, shape) for name in source.names}
                rows = source.check(columns, shape.numel()).reshape(-1, *shape)
                if any(partly_nan(values).any() for values in rows):
                    raise BadRewardError(PARTLY_NAN)
            except ConfigError as error:  # one that names a flag says enough
                where = "" if str(error).startswith("--") else f"reward {', '.join(source.names)}: "
                raise ConfigError(f"{where}{error}") from error
            except (Exception, SystemExit) as error:
                raise ConfigError(f"reward {', '.join(source.names)}: {one_line(error)}") from error
            found |= dict(zip(source.names, rows, strict=True))
        return found

    def try_out(self, sources: Sequence[RewardSource], task: Task, context: int) -> None:
        """Score the true answer of one example, so that what cannot work is found before a run.

        Models are loaded here. `context` is the policy's number of positions.
        Raises ConfigError in one line.
        """
        if not sources:
            return
        example = task.train(0)
        prompt_ids, prompt_len = encode_prompts(self.tokenizer, [example], context - 1)
        ids = encode_answers(self.tokenizer, [example])[0][:, None, : context - int(prompt_len)]
        mask, logp = torch.ones_like(ids, dtype=torch.bool), torch.zeros(ids.shape)
        completions = Completions(prompt_ids, prompt_len, ids, mask, logp)
        texts = decode(self.tokenizer, completions)
        self.parts(sources, [example], texts, completions, temperature=1.0)


def _flat(answer: Any, name: str, shape: torch.Size) -> Any:
    """A part's values as a column of P * G. Raises BadRewardError for another shape."""
    if not isinstance(answer, Mapping) or name not in answer:
        raise BadRewardError(f"returned {short(answer)}, without {name}")
    values = answer[name]
    if isinstance(values, Tensor):
        values = values.detach().double().cpu().numpy()
    with contextlib.suppress(ValueError):  # rows of different lengths
        values = np.asanyarray(values)
    if getattr(values, "shape", None) != tuple(shape):
        raise BadRewardError(
            f"returned {short(values)}, not [{shape[0]}, {shape[1]}] numbers, one per completion"
        )
    return values.reshape(-1)
