"""Speculative decoding without a draft model: which tokens are run before they are sampled.

Leviathan et al. (arXiv 2211.17192) propose with a small model. Here proposals are read off texts
(drafts.py). running.py accepts a proposed token only if sampling picks it too: proposals change the
number of rounds, never the tokens.

The pick is a function of the logits and of one uniform number that is known beforehand. So a
proposal uses the same number: it is the token at that share of the tokens that followed the context
(contexts.py).

Each candidate belongs to a class: its kind of context, and how clear the choice was. The rate of a
class is how often it was right, measured while sampling. In each place the candidate with the best
rate is proposed, and a row's proposals end where the chance that all of them are right is too small
to be worth another token.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from .contexts import FACTOR, NUM_MARGINS
from .drafts import KINDS, NUM_CLASSES, SALTS, Drafts, Texts
from .history import History

MIN_TOKENS_PER_ROUND = 1.2  # accepted per sequence and round; fewer do not pay
FIRST_PAUSE = 8  # in rounds; each further pause is twice as long
# What a round costs, in tokens that the model runs: the round itself; each slot; and each place
# that a slot leaves empty, because another one runs more tokens.
ROUND_COST, SLOT_COST, EMPTY_COST = 800.0, 2.0, 0.25
SMOOTHING = 0.3  # share of the last round in the cost of a token
PRIOR_RATE, PRIOR_COUNT = 0.5, 2.0  # of a class that was not compared yet
MOST_COMPARED = 4000.0  # comparisons of a class; older ones count less and less
LONGEST_TEXT = 1 << 20  # tokens; tells apart the numbers of slots, columns and tokens
SOURCE_OF_CLASS = np.repeat([kind.source for kind in KINDS], NUM_MARGINS)


class ProposalPauses:
    """Pauses proposing while hardly any proposed token is accepted.

    Looking for proposals takes the host's time, and needs the tokens of each round. Each pause is
    twice as long as the last, so that sources which stay bad cost less and less.
    """

    def __init__(self) -> None:
        self.paused = False
        self._resume_at = 0
        self._length = FIRST_PAUSE

    def update(self, rounds: int, tokens_per_sequence: float, *, proposed: bool) -> None:
        """Decide whether the next rounds propose.

        Args:
            rounds: how many rounds have been run.
            tokens_per_sequence: tokens accepted in the last round, a mean over its sequences.
            proposed: whether proposals were looked for in the last round.
        """
        if proposed and tokens_per_sequence < MIN_TOKENS_PER_ROUND:
            self.paused, self._resume_at = True, rounds + self._length
            self._length *= 2
        elif rounds >= self._resume_at:
            self.paused = False


class Round(NamedTuple):
    """The size of a round."""

    number: int
    slots: int
    tokens: int  # that the model ran


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
    classes: np.ndarray  # [N, W - 1]
    # the first token of every kind of context, to be compared with what is sampled
    first: np.ndarray  # [N, K], -1 where the context is not known
    first_classes: np.ndarray  # [N, K]


def sharing(path: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """How many of N completions would run the same token of a kind of contexts, in one slot.

    Counted in a hash table, so that it is sometimes too many.

    Args:
        path: `[N]` uint64, equal for those that would run the same tokens before.
        tokens: `[N, K]`.
    """
    kinds = SALTS[: tokens.shape[1]]
    keys = (path[:, None] + tokens.astype(np.uint64)) * FACTOR + kinds
    places = ((keys * FACTOR) >> np.uint64(48)).astype(np.int64)
    counts: np.ndarray = np.bincount(places.ravel(), minlength=1 << 16)[places]
    return counts


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
        history: History,
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
            history=history,
        )
        rows = len(prompt_ids) * num_samples
        # the median token stands for the likeliest one
        self.u = np.full((rows, 1), 0.5) if u is None else u.cpu().flatten(0, 1).numpy()
        self.hits = history.hits.copy()  # [2, NUM_CLASSES], right candidates, and all compared
        self.pauses = ProposalPauses()
        # of a sampled token, in tokens that the model runs; slots of a completion: 1 if not shared
        self.token_cost, self.slots_per_row = (
            (ROUND_COST + (SLOT_COST + 1) * len(prompt_ids)) / rows,
            1.0,
        )
        self.last: Proposals | None = None
        self.work = Counter[str]()  # proposed/<source>, accepted/<source>: tokens

    def update(
        self, texts: Texts, numbers: np.ndarray, slots: np.ndarray, last: Round
    ) -> np.ndarray:
        accepted, proposed = 1.0, self.last is not None
        if self.last is not None:
            accepted = self._learn(self.last, texts)
            rows = len(self.last.numbers)
            cost = (ROUND_COST + SLOT_COST * last.slots + last.tokens) / rows / accepted
            self.token_cost += SMOOTHING * (cost - self.token_cost)
            self.slots_per_row = last.slots / rows
        self.pauses.update(last.number, accepted, proposed=proposed)
        self.last = None
        if self.pauses.paused or not len(numbers) or not len(self.drafts.kinds):
            return np.empty((len(numbers), 0), dtype=np.int64)
        self.drafts.index(texts)
        self.last = self._propose(texts, numbers, slots)
        return self.last.tokens

    def wake(self) -> None:
        self.last, self.pauses.paused = None, False

    def _propose(self, texts: Texts, numbers: np.ndarray, slots: np.ndarray) -> Proposals:
        columns = texts.lengths[numbers - texts.first]
        most = np.minimum(self.max_tokens, self.longest - 1 - columns)  # the last one is not run
        tokens = np.full((len(numbers), self.max_tokens), -1)
        classes = np.zeros_like(tokens)
        hits, compared = self.hits
        rates = (hits + PRIOR_RATE * PRIOR_COUNT) / (compared + PRIOR_COUNT)
        recent, where = self.drafts.recent(texts, numbers), self.drafts.where(numbers)
        left, chance = np.arange(len(numbers)), np.ones(len(numbers))
        # equal where the same tokens would be run, in one slot
        path = ((slots * LONGEST_TEXT + columns) * LONGEST_TEXT + recent[:, -1]).astype(np.uint64)
        for ahead in range(self.max_tokens):
            column = columns[left] + ahead
            u = self.u[numbers[left], np.minimum(column, self.u.shape[1] - 1)]
            found, found_classes = self.drafts.find(recent, column, where, u)
            if not ahead:
                first, first_classes = found, found_classes
            # what a token saves if it is right, less a completion's share of the cost to run it
            right = chance[:, None] * rates[found_classes]
            gains = right * self.token_cost - 1 / sharing(path, found)
            gains[found < 0] = -np.inf
            every, best = np.arange(len(left)), gains.argmax(1)
            token, chance, gain = (x[every, best] for x in (found, right, gains))
            # a stop token is not run: nothing follows it
            goes_on = (gain >= 0) & (ahead < most[left]) & ~np.isin(token, self.stops)
            if gain[goes_on].sum() < EMPTY_COST * self.slots_per_row * len(numbers):
                break
            left, token, chance, path = (x[goes_on] for x in (left, token, chance, path))
            path = path * FACTOR + token.astype(np.uint64)
            tokens[left, ahead] = token
            classes[left, ahead] = found_classes[every, best][goes_on]
            recent = np.hstack([recent[goes_on, 1:], token[:, None]])
            where = where[goes_on]
        run = len(tokens) + (tokens >= 0).sum(0).cumsum()  # [W - 1], with proposals up to each
        width = int(((tokens >= 0).any(0) & (run <= self.most_in_round)).sum())
        kept = tokens[:, :width], classes[:, :width]
        return Proposals(numbers, columns, *kept, first, first_classes)

    def _learn(self, last: Proposals, texts: Texts) -> float:
        """Compare proposals with what was sampled; return the tokens accepted per completion."""
        rows, width = last.numbers - texts.first, last.tokens.shape[1]
        accepted = texts.lengths[rows] - last.columns
        sampled = texts.ids[rows[:, None], last.columns[:, None] + np.arange(max(1, width))]
        compared = last.first >= 0
        right = last.first == sampled[:, :1]
        self._count(last.first_classes[compared], right[compared])
        # a proposal is compared with a sample if all before it were right
        proposed = last.tokens >= 0
        compared = proposed & (np.arange(width) < accepted[:, None])
        right = compared & (last.tokens == sampled[:, :width])
        later = compared[:, 1:]
        self._count(last.classes[:, 1:][later], right[:, 1:][later])
        for name, tokens in (("proposed", proposed), ("accepted", right)):
            sources = Counter(SOURCE_OF_CLASS[last.classes[tokens]].tolist())
            self.work.update({f"{name}/{source}": n for source, n in sources.items()})
        return float(accepted.mean())

    def _count(self, classes: np.ndarray, right: np.ndarray) -> None:
        self.hits[0] += np.bincount(classes, weights=right, minlength=NUM_CLASSES)
        self.hits[1] += np.bincount(classes, minlength=NUM_CLASSES)
        self.hits *= np.minimum(1, MOST_COMPARED / np.maximum(1, self.hits[1]))
