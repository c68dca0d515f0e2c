"""Helpers of packing.py: distinct completions as rows, and the numbering of their tokens.

NumPy on the host only. The worked example in packing.py shows these arrays. Shapes: R rows, S the
longest completion.
"""

from dataclasses import dataclass

import numpy as np

from ..types import Completions

# Two attention calls replace one only if together they compute at most this share of its scores.
SPLIT_AT = 0.8


@dataclass(frozen=True)
class CompletionRows:
    """One row per distinct completion, with the prompt that it continues."""

    tokens: np.ndarray  # [R, S]
    lengths: np.ndarray  # [R], EOS included
    prompt: np.ndarray  # [R]
    row_of: np.ndarray  # [P, G] the row of each completion
    num_common: np.ndarray  # [R] length of the prefix that a row shares with the row before it

    @classmethod
    def of_completions(cls, completions: Completions, *, distinct: bool) -> "CompletionRows":
        """One row per completion, or per distinct completion of a group; no shared prefixes yet."""
        ids, mask = completions.completion_ids.numpy(), completions.completion_mask.numpy()
        lengths = mask.sum(-1)
        row_of = np.empty(lengths.shape, dtype=np.int64)
        row_of_text: dict[tuple[int, bytes] | tuple[int, int], int] = {}
        chosen: list[tuple[int, int]] = []
        for p, g in np.ndindex(lengths.shape):
            key = (p, ids[p, g, : lengths[p, g]].tobytes()) if distinct else (p, g)
            if key not in row_of_text:
                row_of_text[key] = len(chosen)
                chosen.append((p, g))
            row_of[p, g] = row_of_text[key]
        p, g = np.array(chosen).T
        return cls(ids[p, g], lengths[p, g], p, row_of, np.zeros_like(p))

    def sorted_by_prefix(self) -> "CompletionRows":
        """The rows in lexicographic order within each prompt, with -1 as padding.

        In this order, the longest prefix that a row shares with any earlier row is the one that
        it shares with the row just before it.
        """
        tokens = np.where(np.arange(self.tokens.shape[1]) < self.lengths[:, None], self.tokens, -1)
        order = np.lexsort((*tokens.T[::-1], self.prompt))  # by prompt, token 0, token 1, ..
        tokens, prompt = tokens[order], self.prompt[order]
        equal = (tokens[1:] == tokens[:-1]) & (tokens[1:] >= 0)
        equal &= (prompt[1:] == prompt[:-1])[:, None]
        num_common = np.concatenate([[0], equal.cumprod(1).sum(1)])
        row_of = order.argsort()[self.row_of]
        return CompletionRows(tokens, self.lengths[order], prompt, row_of, num_common)

    @property
    def num_inputs(self) -> np.ndarray:
        """`[R]`, tokens that the model must run: all but the last, which predicts nothing."""
        return np.maximum(self.lengths - 1, 0)

    @property
    def num_known(self) -> np.ndarray:
        """`[R]`, inputs already run by the row before, whose last token is not run."""
        inputs = self.num_inputs
        before = np.roll(inputs, 1)  # row 0 gets the last row's, but its num_common is 0
        return np.minimum(self.num_common, np.minimum(inputs, before))


def pad_rows(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Consecutive packed tokens as padded rows, and the indices that undo the padding.

    starts [0, 3] and lengths [3, 2] give the rows [[0, 1, 2], [3, 4, 3]] and the indices
    [0, 1, 2, 3, 4].

    Returns:
        `[R, T]` with T = lengths.max(), places in the packed tokens; padding repeats a row's first
        place, or is 0 in an empty row. `[sum(lengths)]`, indices of the real entries in the
        flattened rows.
    """
    columns = np.arange(lengths.max(initial=0))
    real = columns < lengths[:, None]
    padding = np.where(lengths > 0, starts, 0)[:, None]
    return np.where(real, starts[:, None] + columns, padding), np.flatnonzero(real)


def number_entries(starts: np.ndarray, num_inherited: np.ndarray, width: int) -> np.ndarray:
    """Number the entries of rows that inherit their first entries from the row before.

    starts [5, 7], num_inherited [0, 1] and width 2 give [[5, 6], [5, 7]].

    Args:
        starts: `[R]`, the number of the first entry that each row does not inherit; the next
            entries count up from it.
        num_inherited: `[R]`, how many entries a row takes from the row before.

    Returns:
        `[R, width]`. Numbers beyond a row's length are meaningless.
    """
    numbers: np.ndarray = starts[:, None] + np.arange(width) - num_inherited[:, None]
    for r in np.flatnonzero(num_inherited):
        numbers[r, : num_inherited[r]] = numbers[r - 1, : num_inherited[r]]
    return numbers


def split_by_length(
    num_new: np.ndarray, num_inputs: np.ndarray, prompt_width: int
) -> list[np.ndarray]:
    """Split the rows that add tokens into two sets of similar lengths, if that saves padding.

    The cost of a set is the number of attention scores that it computes: rows * most tokens added *
    (prompt_width + most inputs).

    Args:
        num_new: `[R]`, tokens that each row adds.
        num_inputs: `[R]`, inputs of each row, those run by other rows included.

    Returns:
        Up to two arrays of row indices; rows that add nothing are left out.
    """
    order = np.argsort(-num_new, kind="stable")[: np.count_nonzero(num_new)]  # most tokens first
    if not len(order):
        return []
    num_rows, inputs = np.arange(1, len(order) + 1), num_inputs[order]
    # scores of the set order[:i + 1], whose first row adds the most tokens
    head = num_rows * num_new[order[0]] * (prompt_width + np.maximum.accumulate(inputs))
    # scores of the set order[i:], in which row i adds the most tokens
    most_inputs = np.maximum.accumulate(inputs[::-1])[::-1]
    tail = num_rows[::-1] * num_new[order] * (prompt_width + most_inputs)
    both = head[:-1] + tail[1:]
    if not len(both) or both.min() > SPLIT_AT * head[-1]:
        return [order]
    cut = int(both.argmin()) + 1
    return [order[:cut], order[cut:]]
