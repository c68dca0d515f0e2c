"""Speculative decoding without a draft model: which tokens are run before they are sampled.

Leviathan et al. (arXiv 2211.17192) propose with a small model. Here proposals are read off texts
(drafts.py). running.py accepts a proposed token only if sampling picks it too: proposals change the
number of rounds, never the tokens.

The pick is a function of the logits and of one uniform number that is known beforehand. So a
proposal uses the same number: it is the token at that share of the tokens that followed the context
(contexts.py).

The rate of a kind of context is how often its candidates were right, measured while sampling. In
each place the candidate with the best rate is proposed, and a row's proposals end where the chance
that all of them are right is too small to be worth another token. Everything starts anew with each
call of `generate`, so there is no state that a checkpoint would have to keep.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from .drafts import KINDS, Drafts, Texts

FIRST_PAUSE = 8  # in rounds; each further pause is twice as long
# What rounds cost, in tokens that the model runs: the round itself; proposing in it; each slot; and
# each place that a slot leaves empty, because another one runs more tokens. They are constants, not
# times, so that a run makes the same rounds on a busy machine.
ROUND_COST, PROPOSING_COST, SLOT_COST, EMPTY_COST = 250.0, 150.0, 0.5, 0.25
# Of a token with proposals, relative to one without: the first estimate, which bears a few rounds
# without success; and the share of the last round in the next estimate.
FIRST_COST, SMOOTHING = 0.7, 0.3
PRIOR_RATE, PRIOR_COUNT = 0.9, 4.0  # of a kind that was not compared yet
SOURCES = np.array([kind.source for kind in KINDS])


class ProposalPauses:
    """Pauses proposing while it costs more than it saves.

    Each pause is twice as long as the last, so that sources which stay bad cost less and less.
    """

    def __init__(self) -> None:
        self.paused = False
        self._resume_at = 0
        self._length = FIRST_PAUSE

    def update(self, rounds: int, *, proposed: bool, pays: bool) -> None:
        """Decide, after so many rounds, whether the next ones propose.

        Args:
            proposed: whether proposals were looked for in the last round.
            pays: whether that costs less than it saves.
        """
        if proposed and not pays:
            self.paused, self._resume_at = True, rounds + self._length
            self._length *= 2
        elif rounds >= self._resume_at:
            self.paused = False


class Round(NamedTuple):
    """The size of a round."""

    number: int
    slots: int
    tokens: int  # that the model ran

    @property
    def plain_cost(self) -> float:
        """What it would have cost without proposals."""
        return ROUND_COST + (SLOT_COST + 1) * self.slots


class Proposer(Protocol):
    """What `RunningSequences` asks of a source of proposals."""

    max_tokens: int

    def update(
        self, texts: Texts, numbers: np.ndarray, slots: np.ndarray, last: Round
    ) -> np.ndarray:
        """Learn what became of the last proposals; propose what follows completions `numbers [N]`.

        Completions in one of the `slots [N]` that are equal so far cost a round no more than one of
        them, if the same is proposed for all.

        Returns:
            `[N, W - 1]`, -1 behind the last proposal of each.
        """

    def wake(self) -> None:
        """Prompts have joined: forget the last proposals, which are not run, and end a pause."""


@dataclass(frozen=True)
class Proposals:
    """What may follow N completions."""

    numbers: np.ndarray  # [N], of the completions among all of `generate`
    columns: np.ndarray  # [N], their lengths
    tokens: np.ndarray  # [N, W - 1], -1 where nothing is proposed any more
    kinds: np.ndarray  # [N, W - 1], rows of KINDS
    # the first token of every kind of context, to be compared with what is sampled
    first: np.ndarray  # [N, K], -1 where the context is not known
    first_kinds: np.ndarray  # [K]


class TextProposer:
    """Proposes tokens for the completions of some prompts, from texts."""

    def __init__(
        self,
        sources: Collection[str],
        prompt_ids: Tensor,
        prompt_len: Tensor,
        *,
        num_samples: int,
        u: Tensor | None,
        stops: Collection[int],
        max_new_tokens: int,
        max_tokens: int,
        most_in_round: int,
        answers: Tensor | None,
    ) -> None:
        """Most arguments are those of `generate`; `max_tokens` is its `num_speculative_tokens`.

        Nothing is proposed beyond `most_in_round` tokens that the model would run in a round.
        """
        self.max_tokens, self.longest = max_tokens, max_new_tokens
        self.most_in_round = most_in_round
        self.stops = np.array(sorted(stops), dtype=np.int64)
        self.drafts = Drafts(
            sources,
            prompt_ids.cpu().numpy(),
            prompt_len.cpu().numpy(),
            num_samples=num_samples,
            stops=self.stops,
            answers=None if answers is None else answers.cpu().numpy(),
        )
        rows = len(prompt_ids) * num_samples
        # the median token stands for the likeliest one
        self.u = np.full((rows, 1), 0.5) if u is None else u.cpu().flatten(0, 1).numpy()
        self.hits = np.zeros((2, len(KINDS)))  # right candidates, and all that were compared
        self.pauses, self.cost = ProposalPauses(), FIRST_COST
        self.last: Proposals | None = None
        self.work = Counter[str]()  # proposed/<source>, accepted/<source>: tokens

    def update(
        self, texts: Texts, numbers: np.ndarray, slots: np.ndarray, last: Round
    ) -> np.ndarray:
        proposed = self.last is not None
        if self.last is not None:
            accepted = self._learn(self.last, texts)
            cost = ROUND_COST + PROPOSING_COST + SLOT_COST * last.slots + last.tokens
            self.cost += SMOOTHING * (cost / last.plain_cost / accepted - self.cost)
        self.pauses.update(last.number, proposed=proposed, pays=self.cost <= 1)
        self.last = None
        if self.pauses.paused or not len(numbers):
            return np.empty((len(numbers), 0), dtype=np.int64)
        self.drafts.index(texts)
        self.last = self._propose(texts, numbers, slots, self.cost * last.plain_cost / len(numbers))
        return self.last.tokens

    def wake(self) -> None:
        self.last, self.pauses.paused = None, False

    def _propose(
        self, texts: Texts, numbers: np.ndarray, slots: np.ndarray, value: float
    ) -> Proposals:
        """`value`: the cost of a sampled token, which one that is right saves."""
        columns = texts.lengths[numbers - texts.first]
        most = np.minimum(self.max_tokens, self.longest - 1 - columns)  # the last one is not run
        tokens = np.full((len(numbers), self.max_tokens), -1)
        kinds = np.zeros_like(tokens)
        hits, compared = self.hits
        rates = (hits + PRIOR_RATE * PRIOR_COUNT) / (compared + PRIOR_COUNT)
        in_use = self.drafts.kinds
        recent = self.drafts.recent(texts, numbers)
        share = 1 / np.bincount(slots)[slots]  # of a token's cost, which a slot bears together
        left, chance = np.arange(len(numbers)), np.ones(len(numbers))
        for ahead in range(self.max_tokens):
            column = columns[left] + ahead
            u = self.u[numbers[left], np.minimum(column, self.u.shape[1] - 1)]
            found = self.drafts.find(recent, numbers[left], column, u)
            if not ahead:
                first = found
            right = np.where(found < 0, 0, rates[in_use])
            every, best = np.arange(len(left)), right.argmax(1)
            token, chance = found[every, best], chance * right[every, best]
            gain = chance * value - share[left]
            # a stop token is not run: nothing follows it
            goes_on = (gain >= 0) & (ahead < most[left]) & ~np.isin(token, self.stops)
            if gain[goes_on].sum() <= EMPTY_COST * share.sum():
                break
            left, token, chance = (x[goes_on] for x in (left, token, chance))
            tokens[left, ahead] = token
            kinds[left, ahead] = in_use[best[goes_on]]
            recent = np.hstack([recent[goes_on, 1:], token[:, None]])
        run = len(tokens) + (tokens >= 0).sum(0).cumsum()  # [W - 1], with proposals up to each
        width = int(((tokens >= 0).any(0) & (run <= self.most_in_round)).sum())
        kept = tokens[:, :width], kinds[:, :width]
        return Proposals(numbers, columns, *kept, first, in_use)

    def _learn(self, last: Proposals, texts: Texts) -> float:
        """Compare proposals with what was sampled; return the tokens accepted per completion."""
        rows, width = last.numbers - texts.first, last.tokens.shape[1]
        accepted = texts.lengths[rows] - last.columns
        sampled = texts.ids[rows[:, None], last.columns[:, None] + np.arange(max(1, width))]
        compared = last.first >= 0
        right = last.first == sampled[:, :1]
        kinds = np.broadcast_to(last.first_kinds, compared.shape)
        self._count(kinds[compared], right[compared])
        # a proposal is compared with a sample if all before it were right
        proposed = last.tokens >= 0
        compared = proposed & (np.arange(width) < accepted[:, None])
        right = compared & (last.tokens == sampled[:, :width])
        later = compared[:, 1:]
        self._count(last.kinds[:, 1:][later], right[:, 1:][later])
        for name, tokens in (("proposed", proposed), ("accepted", right)):
            sources = Counter(SOURCES[last.kinds[tokens]].tolist())
            self.work.update({f"{name}/{source}": n for source, n in sources.items()})
        return float(accepted.mean())

    def _count(self, kinds: np.ndarray, right: np.ndarray) -> None:
        self.hits[0] += np.bincount(kinds, weights=right, minlength=len(KINDS))
        self.hits[1] += np.bincount(kinds, minlength=len(KINDS))
