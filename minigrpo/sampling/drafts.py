"""Where proposals come from: tokens that were seen after the same context, in texts on the host.

`KINDS` is the table of what is looked up: the known answer, the prompt and the completion's own
text (as in prompt-lookup decoding), the group's other completions (as in DAS, arXiv 2511.13841).
They cost no forward pass. proposer.py decides which of them, and how many, are run.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .contexts import ContextTable, hash_contexts, hash_recent, powers

LONGEST = 6  # tokens of a context
GROWTH = 0.5  # share by which the completions must have grown to be indexed anew


class Kind(NamedTuple):
    """Contexts that are looked up: in which texts of the prompt, and how long they are."""

    source: str  # its name in --speculate
    size: int  # in tokens; 0: the column of the next token stands for its context


KINDS = (
    *(Kind("answer", size) for size in (6, 3, 0)),
    *(Kind("lookup", size) for size in (4, 2)),
    *(Kind("siblings", size) for size in (6, 3, 2)),
)
SALTS = powers(64 + len(KINDS))[64:]  # uint64, tell the kinds of contexts apart
COLUMN, OWNER = np.uint64(0xD1B54A32D192ED03), np.uint64(0xA24BAED4963EE407)


@dataclass(frozen=True)
class Texts:
    """The completions so far, on the host."""

    ids: np.ndarray  # [R, width]
    lengths: np.ndarray  # [R]
    first: int  # the number of row 0 among all completions of `generate`


class Rows(NamedTuple):
    """Texts to be indexed."""

    joined: np.ndarray  # [R, LONGEST + S], what came before the text, then the text
    lengths: np.ndarray  # [R], of the text
    prompts: np.ndarray  # [R], the number of its prompt


class Index:
    """The contexts of some kinds, and what followed them."""

    def __init__(self, texts: dict[str, Rows]) -> None:
        """`texts`: by the name of the source that reads them."""
        self.kinds = np.array([k for k, kind in enumerate(KINDS) if kind.source in texts], int)
        self.sizes = np.array([KINDS[k].size for k in self.kinds], dtype=np.int64)  # [K]
        contexts, tokens = [np.zeros(0, dtype=np.uint64)], [np.zeros(0, dtype=np.int64)]
        for k in self.kinds:
            kind = KINDS[k]
            rows = texts[kind.source]
            hashes = hash_contexts(rows.joined, kind.size, LONGEST)  # [R, S]
            columns = np.arange(hashes.shape[1])
            hashes += marks(np.array([k]), rows.prompts[:, None], columns)[..., 0]
            real = columns < rows.lengths[:, None]
            contexts.append(hashes[real])
            tokens.append(rows.joined[:, LONGEST:][real])
        self.table = ContextTable(np.concatenate(contexts), np.concatenate(tokens))

    def find(
        self, hashes: np.ndarray, prompts: np.ndarray, columns: np.ndarray, u: np.ndarray
    ) -> np.ndarray:
        """`[N, K]` tokens, as in `Drafts.find`, from `hashes [N, LONGEST + 1]` of contexts."""
        contexts = hashes[:, self.sizes] + marks(self.kinds, prompts, columns)
        return self.table.find(contexts, u)


def marks(kinds: np.ndarray, prompts: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """`[.., K]`, what tells equal contexts of other kinds, prompts `[..]` or columns `[..]` apart.

    Columns count for the kinds of size 0 alone.
    """
    by_column = np.array([COLUMN * (KINDS[k].size == 0) for k in kinds], dtype=np.uint64)
    where = (prompts + 1).astype(np.uint64) * OWNER
    column = (columns + 1).astype(np.uint64)[..., None]
    found: np.ndarray = SALTS[kinds] + where[..., None] + column * by_column
    return found


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
    ) -> None:
        """`prompt_ids [P, Lp]`, `prompt_len [P]`, `answers [P, L]`; answers end at a stop token."""
        self.num_samples, self.num_indexed = num_samples, 0
        columns = prompt_len[:, None] + np.arange(-LONGEST, 0)
        ids = np.take_along_axis(prompt_ids, columns.clip(min=0), axis=1)
        self.endings = np.where(columns >= 0, ids, -1)  # [P, LONGEST], -1 before the first token
        prompts, nothing = np.arange(len(prompt_ids)), np.full_like(self.endings, -1)
        texts = {"lookup": Rows(np.hstack([nothing, prompt_ids]), prompt_len, prompts)}
        if answers is not None:
            ends = np.isin(answers, stops)
            lengths = np.where(ends.any(1), ends.argmax(1) + 1, answers.shape[1])
            texts["answer"] = Rows(np.hstack([self.endings, answers]), lengths, prompts)
        # of what does not change while the prompts are completed; and of what does
        self.known = Index({name: rows for name, rows in texts.items() if name in sources})
        self.growing, self.grows = Index({}), "siblings" in sources

    def index(self, texts: Texts) -> None:
        """Index what was sampled so far, if it has grown enough."""
        total = int(texts.lengths.sum())
        if not self.grows or self.num_indexed <= total <= (1 + GROWTH) * self.num_indexed:
            return
        self.num_indexed = total
        prompts = (texts.first + np.arange(len(texts.ids))) // self.num_samples
        joined = np.hstack([self.endings[prompts], texts.ids[:, : texts.lengths.max()]])
        self.growing = Index({"siblings": Rows(joined, texts.lengths, prompts)})

    @property
    def kinds(self) -> np.ndarray:
        """`[K]`, the rows of KINDS in which something is found."""
        return np.append(self.known.kinds, self.growing.kinds)

    def recent(self, texts: Texts, numbers: np.ndarray) -> np.ndarray:
        """`[N, LONGEST]`, the last tokens of completions and their prompts, -1 before these."""
        rows = numbers - texts.first
        columns = texts.lengths[rows]
        ids = texts.ids[rows, : columns.max(initial=0)]
        joined = np.hstack([self.endings[numbers // self.num_samples], ids])
        return np.take_along_axis(joined, columns[:, None] + np.arange(LONGEST), axis=1)

    def find(
        self, recent: np.ndarray, numbers: np.ndarray, columns: np.ndarray, u: np.ndarray
    ) -> np.ndarray:
        """What each kind of context proposes.

        Args:
            recent: `[N, LONGEST]`, the last tokens.
            numbers: `[N]`, of the completions among all of `generate`.
            columns: `[N]`, the column of the token to be proposed.
            u: `[N]`, the uniform numbers of the tokens to be proposed.

        Returns:
            `[N, K]` tokens, one for each of `kinds`; -1 where a context is not known.
        """
        hashes, prompts = hash_recent(recent), numbers // self.num_samples
        parts = self.known, self.growing
        return np.hstack([part.find(hashes, prompts, columns, u) for part in parts])
