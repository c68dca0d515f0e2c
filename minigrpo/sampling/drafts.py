"""Where proposals come from: tokens that were seen after the same context, in texts on the host.

`KINDS` is the table of what is looked up: the known answer, the prompt (as in prompt-lookup
decoding), the group's other completions, completions of earlier steps (as in DAS, arXiv 2511.13841,
and SPEC-RL, arXiv 2509.23232). They cost no forward pass. proposer.py decides which of them, and
how many, are run.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from .contexts import (
    FACTOR,
    NUM_MARGINS,
    ContextTable,
    hash_contexts,
    hash_recent,
    hash_rows,
    powers,
)
from .history import History, Visit, endings_of

LONGEST = 12  # tokens of a context
GROWTH = 0.5  # share by which the completions must have grown to be indexed anew
RECENT_TOKENS = 1 << 15  # of earlier completions, whatever their prompt


class Kind(NamedTuple):
    """Contexts that are looked up: in which texts, where they count, and how long they are."""

    source: str  # its name in --speculate
    texts: Literal["answer", "prompt", "earlier", "recent", "group", "own"]
    scope: Literal["prompt", "row", "run"]
    size: int  # in tokens; 0: the column of the next token stands for its context


KINDS = (
    *(Kind("answer", "answer", "prompt", size) for size in (12, 6, 3, 0)),
    *(Kind("siblings", "group", "prompt", size) for size in (12, 6, 3, 2)),
    *(Kind("lookup", "prompt", "prompt", size) for size in (4, 2)),
    Kind("lookup", "own", "row", 4),
    *(Kind("history", "earlier", "prompt", size) for size in (12, 6, 3)),
    *(Kind("history", "recent", "run", size) for size in (8, 5, 3)),
)
GROWING = ("group", "own")  # texts that grow while they are looked up
NUM_CLASSES = len(KINDS) * NUM_MARGINS  # of candidates: by kind of context and margin
SALTS = powers(64 + len(KINDS))[64:]  # uint64, tell the kinds of contexts apart
COLUMN = np.uint64(0xD1B54A32D192ED03)


def new_history() -> History:
    """An empty one, for the classes of `KINDS`."""
    return History(NUM_CLASSES, LONGEST)


@dataclass(frozen=True)
class Texts:
    """The completions so far, on the host."""

    ids: np.ndarray  # [R, width]
    lengths: np.ndarray  # [R]
    first: int  # the number of row 0 among all completions of `generate`
    tokens_taken: int  # tokens of the rows before it, which have been taken

    @property
    def num_tokens(self) -> int:
        return self.tokens_taken + int(self.lengths.sum())


class Rows(NamedTuple):
    """Texts to be indexed."""

    joined: np.ndarray  # [R, LONGEST + S], what came before the text, then the text
    lengths: np.ndarray  # [R], of the text
    prompts: np.ndarray  # [R] uint64, the hash of its prompt
    numbers: np.ndarray = np.zeros(1, dtype=np.int64)  # [R], of its completion, if it is one

    @classmethod
    def of_visits(cls, visits: Sequence[tuple[int, Visit]]) -> "Rows":
        """The completions of earlier visits, by their prompt's hash."""
        if not visits:
            nothing = np.zeros(0, dtype=np.int64)
            return cls(np.zeros((0, LONGEST), dtype=np.int64), nothing, nothing.astype(np.uint64))
        samples = [len(visit.lengths) for _, visit in visits]
        lengths = np.concatenate([visit.lengths for _, visit in visits])
        joined = np.full((len(lengths), LONGEST + lengths.max()), -1)
        joined[:, :LONGEST] = np.repeat([visit.ending for _, visit in visits], samples, axis=0)
        real = np.arange(lengths.max()) < lengths[:, None]
        joined[:, LONGEST:][real] = np.concatenate([visit.tokens for _, visit in visits])
        keys = np.array([key for key, _ in visits], dtype=np.uint64)
        return cls(joined, lengths, keys.repeat(samples))


class Drafts:
    """The texts from which tokens are proposed for the completions of some prompts."""

    def __init__(
        self,
        sources: Collection[str],
        prompt_ids: np.ndarray,
        prompt_len: np.ndarray,
        *,
        num_samples: int,
        stops: np.ndarray,
        answers: np.ndarray | None,
        history: History,
    ) -> None:
        """`prompt_ids [P, Lp]`, `prompt_len [P]`, `answers [P, L]`; answers end at a stop token."""
        self.num_samples = num_samples
        self.endings = endings_of(prompt_ids, prompt_len, LONGEST)  # [P, LONGEST]
        self.prompts = hash_rows(prompt_ids, prompt_len)  # [P]
        known = self._known_texts(prompt_ids, prompt_len, stops, answers, history)
        chosen = [
            number
            for number, kind in enumerate(KINDS)
            if kind.source in sources and kind.texts in (*known, *GROWING)
        ]
        self.kinds = np.array(chosen, dtype=np.int64)  # [K] of KINDS
        self.sizes = np.array([KINDS[k].size for k in chosen], dtype=np.int64)  # [K]
        self.by_column = COLUMN * (self.sizes == 0).astype(np.uint64)  # [K]
        # [2, K], 1 if a kind's contexts count for the prompt, and for the row, alone
        self.scopes = np.array(
            [[KINDS[k].scope == scope for k in chosen] for scope in ("prompt", "row")],
            dtype=np.uint64,
        )
        grows = np.array([KINDS[k].texts in GROWING for k in chosen], dtype=bool)
        self.fixed, self.growing = np.flatnonzero(~grows), np.flatnonzero(grows)  # of [K]
        self.num_indexed = self.indexed_at = 0  # tokens in the growing table; when it was made
        self.fixed_table = self._table(self.fixed, known)
        self.growing_table = self._table(self.growing, {})

    def _known_texts(
        self,
        prompt_ids: np.ndarray,
        prompt_len: np.ndarray,
        stops: np.ndarray,
        answers: np.ndarray | None,
        history: History,
    ) -> dict[str, Rows]:
        """The texts that do not change while the prompts are completed, by their names in KINDS."""
        before = np.full_like(self.endings, -1)
        texts = {"prompt": Rows(np.hstack([before, prompt_ids]), prompt_len, self.prompts)}
        if answers is not None:
            ends = np.isin(answers, stops)
            lengths = np.where(ends.any(1), ends.argmax(1) + 1, answers.shape[1])
            texts["answer"] = Rows(np.hstack([self.endings, answers]), lengths, self.prompts)
        if history.visits:
            keys = [key for key in dict.fromkeys(self.prompts.tolist()) if key in history.visits]
            texts["recent"] = Rows.of_visits([*history.newest(RECENT_TOKENS)])
            if keys:
                texts["earlier"] = Rows.of_visits([(key, history.visits[key]) for key in keys])
        return texts

    def _table(self, places: np.ndarray, texts: dict[str, Rows]) -> ContextTable:
        """A table of the contexts of some kinds, `places` among the K."""
        contexts, tokens = [np.zeros(0, dtype=np.uint64)], [np.zeros(0, dtype=np.int64)]
        for name, rows in texts.items():
            of_text = np.array([p for p in places if KINDS[self.kinds[p]].texts == name], dtype=int)
            if not len(of_text) or not len(rows.joined):
                continue
            hashes = hash_contexts(rows.joined, self.sizes[of_text].tolist(), LONGEST)
            hashes += self._where(rows.prompts, rows.numbers)[:, None, of_text]
            columns = np.arange(1, hashes.shape[1] + 1, dtype=np.uint64)
            hashes += columns[:, None] * self.by_column[of_text]
            real = np.arange(hashes.shape[1]) < rows.lengths[:, None]
            contexts.append(hashes[real].ravel())
            tokens.append(rows.joined[:, LONGEST:][real].repeat(len(of_text)))
        return ContextTable(np.concatenate(contexts), np.concatenate(tokens))

    def _where(self, prompts: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """`[R, K]`, what tells contexts of other kinds, prompts and rows apart in their hashes."""
        of_prompt, of_row = self.scopes
        row = prompts + (numbers.astype(np.uint64) + np.uint64(1)) * FACTOR
        where: np.ndarray = SALTS[self.kinds] + prompts[:, None] * of_prompt + row[:, None] * of_row
        return where

    def where(self, numbers: np.ndarray) -> np.ndarray:
        """`[N, K]`, the same for completions by their numbers among all of `generate`."""
        return self._where(self.prompts[numbers // self.num_samples], numbers)

    def index(self, texts: Texts) -> None:
        """Index what was sampled so far, if it has grown enough."""
        total = texts.num_tokens
        if not len(self.growing) or total - self.indexed_at <= GROWTH * self.num_indexed:
            return
        self.indexed_at, self.num_indexed = total, int(texts.lengths.sum())
        numbers = texts.first + np.arange(len(texts.ids))
        prompts = numbers // self.num_samples
        joined = np.hstack([self.endings[prompts], texts.ids[:, : texts.lengths.max()]])
        rows = Rows(joined, texts.lengths, self.prompts[prompts], numbers)
        self.growing_table = self._table(self.growing, dict.fromkeys(GROWING, rows))

    def recent(self, texts: Texts, numbers: np.ndarray) -> np.ndarray:
        """`[N, LONGEST]`, the last tokens of completions and their prompts, -1 before these."""
        rows = numbers - texts.first
        columns = texts.lengths[rows]
        ids = texts.ids[rows, : columns.max(initial=0)]
        joined = np.hstack([self.endings[numbers // self.num_samples], ids])
        return np.take_along_axis(joined, columns[:, None] + np.arange(LONGEST), axis=1)

    def find(
        self, recent: np.ndarray, columns: np.ndarray, where: np.ndarray, u: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """What each kind of context proposes.

        Args:
            recent: `[N, LONGEST]`, the last tokens.
            columns: `[N]`, the column of the token to be proposed.
            where: `[N, K]`, as the method of this name returns it.
            u: `[N]`, the uniform numbers of the tokens to be proposed.

        Returns:
            `[N, K]` tokens, -1 where a context is not known, and `[N, K]` their classes.
        """
        contexts = hash_recent(recent, self.sizes) + where
        contexts += (columns + 1).astype(np.uint64)[:, None] * self.by_column
        tokens, margins = np.full(contexts.shape, -1), np.zeros(contexts.shape, dtype=np.int64)
        for places, table in ((self.fixed, self.fixed_table), (self.growing, self.growing_table)):
            if len(places):
                found = table.find(contexts[:, places], u)
                tokens[:, places], margins[:, places] = found.tokens, found.margins
        return tokens, NUM_MARGINS * self.kinds + margins
