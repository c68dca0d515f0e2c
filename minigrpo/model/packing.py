"""Pack completions for the model, and map the log-probs back to `[P, G, S]`.

A packing decides which tokens the model runs, and which of them attend to which. All packings give
the same log-probs. They differ in how much they run:

    repeated       each completion with its own copy of the prompt, as usual; the baseline
    shared-prompt  each prompt once, and each distinct completion of its group once
    prefix-tree    each prompt once, and each distinct prefix of its group's completions once

The prompt's last token predicts a completion's first. A completion's last token predicts nothing,
so it is not run. Packings are built on the host, once per micro-batch; packed_attention.py uses
them on the device, and packing_rows.py holds the helpers on NumPy arrays.

A worked example, the prefix tree of two prompts with three completions each. 9 is EOS, 0 padding.

>>> prompt_ids = torch.tensor([[10, 11, 12], [20, 21, 0]])
>>> completion_ids = torch.tensor([[[1, 2, 9], [1, 2, 9], [1, 3, 9]],
...                                [[4, 9, 0], [4, 5, 9], [6, 9, 0]]])
>>> completions = Completions(prompt_ids, torch.tensor([3, 2]), completion_ids, completion_ids > 0)

Each distinct completion becomes a row, in lexicographic order. `row_of [P, G]` is the row of each
completion, `num_common [R]` the length of the prefix that a row shares with the row before it.

>>> rows = CompletionRows.of_completions(completions, distinct=True).sorted_by_prefix()
>>> rows.tokens.tolist()
[[1, 2, 9], [1, 3, 9], [4, 5, 9], [4, 9, -1], [6, 9, -1]]
>>> rows.row_of.tolist()
[[0, 0, 1], [3, 2, 4]]
>>> rows.num_common.tolist()
[0, 1, 0, 1, 0]
>>> rows.num_known.tolist()  # of these, the tokens that the row before has run
[0, 1, 0, 1, 0]

The packed tokens are the prompts, then the tokens that each row adds: 11 instead of the 25 that
`repeated` runs. A token's place is its index in the packed sequence, its position the index in its
own text.

    place        0   1   2    3   4    5   6    7    8   9    10
    token       10  11  12   20  21    1   2    3    4   5     6
    position     0   1   2    0   1    3   4    4    2   3     2
    added by    prompt 0     prompt 1  row 0  row 1  row 2  row 4   (row 3 adds nothing)

>>> packing = prefix_tree(completions)
>>> packing.tokens.ids.tolist()
[10, 11, 12, 20, 21, 1, 2, 3, 4, 5, 6]
>>> packing.tokens.positions.tolist()
[0, 1, 2, 0, 1, 3, 4, 4, 2, 3, 2]
>>> len(repeated(completions).tokens.ids)
25

Prediction m is the log-prob of `targets[m]` after the packed token at `sources[m]`, and `index`
maps each completion token to its prediction. Where completions share a prefix, they point to
the same predictions, and autograd sums their gradients.

>>> packing.sources.tolist()
[2, 5, 6, 5, 7, 4, 8, 9, 8, 4, 10]
>>> packing.targets.tolist()
[1, 2, 9, 3, 9, 4, 5, 9, 9, 6, 9]
>>> packing.index.tolist()
[[[0, 1, 2], [0, 1, 2], [0, 3, 4]], [[5, 8, 0], [5, 6, 7], [9, 10, 0]]]

Attention runs on padded rows: the prompts, then the tokens that each row adds, whose keys are their
prompt and their whole completion. These are split by length if that saves padding: here into rows 0
and 2, which add two tokens each, and rows 1 and 4, which add one.

>>> packing.causal_rows.tolist()
[[0, 1, 2], [3, 4, 3]]
>>> for part in packing.completion_attention:
...     print(part.query_rows.tolist(), part.key_rows.tolist())
[[5, 6], [8, 9]] [[0, 1, 2, 5, 6], [3, 4, 3, 8, 9]]
[[7], [10]] [[0, 1, 2, 5, 7], [3, 4, 3, 10, 10]]
>>> packing.completion_attention[0].visible[1, 0].int().tolist()  # row 2: padding is the third key
[[1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
>>> packing.unpad.tolist()  # place of each packed token in all of these padded rows, joined
[0, 1, 2, 3, 4, 6, 7, 10, 8, 9, 11]

On a CPU, prompt and completion are two parts, which merged_attention.py merges. There, the prompts'
keys are not copied for each row: rows 0 and 1 attend to prompt 0 together.

>>> packing.parts[1].query_rows.tolist(), packing.parts[1].key_rows.tolist()
([[5, 6, 7], [8, 9, 10]], [[0, 1, 2], [3, 4, 3]])
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..types import Completions
from .merged_attention import AttentionPart
from .packed_attention import CompletionAttention, Packing, SharedPrefixPacking
from .packing_rows import CompletionRows, number_entries, pad_rows, split_by_length
from .transformer import PackedTokens

__all__ = ["PACKINGS", "Packing", "prefix_tree", "repeated", "shared_prompt"]


def repeated(completions: Completions) -> Packing:
    """Each completion with its own copy of the prompt: P * G sequences."""
    rows = CompletionRows.of_completions(completions, distinct=False)
    prompt_len = completions.prompt_len.numpy()[rows.prompt]  # [R]
    lengths = prompt_len + rows.num_inputs
    starts = np.cumsum(lengths) - lengths  # where in the packed tokens each sequence begins
    prompt_ids = completions.prompt_ids.numpy()[rows.prompt]
    parts = zip(prompt_ids, prompt_len, rows.tokens, rows.num_inputs, strict=True)
    causal_rows, unpad = pad_rows(starts, lengths)
    columns = np.arange(rows.tokens.shape[1])
    real = columns < rows.lengths[:, None]  # [R, S]
    first_prediction = np.cumsum(rows.lengths) - rows.lengths
    return Packing(
        tokens=_packed_tokens(
            np.concatenate([np.concatenate([a[:n], b[:m]]) for a, n, b, m in parts]),
            np.concatenate([np.arange(n) for n in lengths]),
        ),
        **_predictions(
            completions.completion_mask,
            sources=((starts + prompt_len - 1)[:, None] + columns)[real],
            targets=rows.tokens[real],
            index=first_prediction[rows.row_of][..., None] + columns,
        ),
        parts=(AttentionPart.of(causal_rows, unpad, causal_rows),),
        unpad=_tensor(unpad),
    )


def shared_prompt(completions: Completions) -> Packing:
    """Each prompt once, each distinct completion of its group once."""
    return _pack_shared(completions, CompletionRows.of_completions(completions, distinct=True))


def prefix_tree(completions: Completions) -> Packing:
    """Each prompt once, each distinct prefix of its group's completions once."""
    rows = CompletionRows.of_completions(completions, distinct=True)
    return _pack_shared(completions, rows.sorted_by_prefix())


PACKINGS: dict[str, Callable[[Completions], Packing]] = {
    "repeated": repeated,
    "shared-prompt": shared_prompt,
    "prefix-tree": prefix_tree,
}


@dataclass(frozen=True)
class _Prompts:
    """Prompts on the host. Comments give the values in the worked example."""

    ids: np.ndarray  # [P, Lp] [[10, 11, 12], [20, 21, 0]]
    lengths: np.ndarray  # [P] [3, 2]
    real: np.ndarray  # [P, Lp] bool, false for padding
    ends: np.ndarray  # [P] place of each prompt's last token: [2, 4]
    places: np.ndarray  # [P, Lp] place of each token, padded: [[0, 1, 2], [3, 4, 3]]
    unpad: np.ndarray  # place of each packed token in the flattened `places`: [0, 1, 2, 3, 4]

    @classmethod
    def of_completions(cls, completions: Completions) -> "_Prompts":
        lengths = completions.prompt_len.numpy()
        ids = completions.prompt_ids.numpy()[:, : lengths.max()]
        ends = np.cumsum(lengths) - 1
        places, unpad = pad_rows(ends + 1 - lengths, lengths)
        return cls(ids, lengths, np.arange(ids.shape[1]) < lengths[:, None], ends, places, unpad)


def _pack_shared(completions: Completions, rows: CompletionRows) -> SharedPrefixPacking:
    """Each prompt once, and the tokens of each row that the row before has not run.

    Comments give the values in the worked example.
    """
    prompts = _Prompts.of_completions(completions)
    columns = np.arange(rows.tokens.shape[1])
    # inputs [2, 2, 2, 1, 1], of which [0, 1, 0, 1, 0] have been run by the row before:
    # [2, 1, 2, 0, 1] tokens are added, from the places [5, 7, 8, 10, 10] on
    num_inputs, num_known = rows.num_inputs, rows.num_known
    num_new = num_inputs - num_known
    starts = prompts.lengths.sum() + np.cumsum(num_new) - num_new
    # place of each row's inputs: [[5, 6, .], [5, 7, .], [8, 9, .], [8, ., .], [10, ., .]]
    places = number_entries(starts, num_known, len(columns))
    # of the tokens [[1, 2, 9], [1, 3, 9], ..], those that a row adds: 1 2 | 3 | 4 5 | | 6
    added = (columns >= num_known[:, None]) & (columns < num_inputs[:, None])
    # a completion's column 0 is at position 3 after prompt 0, at position 2 after prompt 1
    positions = prompts.lengths[rows.prompt, None] + columns
    attention, unpad = _completion_attention(prompts, rows, places, starts)
    return SharedPrefixPacking(
        tokens=_packed_tokens(
            np.concatenate([prompts.ids[prompts.real], rows.tokens[added]]),
            np.concatenate([np.nonzero(prompts.real)[1], positions[added]]),
        ),
        **_shared_predictions(completions.completion_mask, prompts, rows, places),
        parts=_parts(prompts, rows, prompts.lengths.sum(), attention),
        unpad=_tensor(unpad),
        completion_attention=attention,
    )


def _shared_predictions(
    mask: Tensor, prompts: _Prompts, rows: CompletionRows, places: np.ndarray
) -> dict[str, Tensor]:
    """Predict each distinct prefix once; `index` maps completions to their predictions."""
    columns = np.arange(rows.tokens.shape[1])
    # lengths [3, 3, 3, 2, 2] without the common [0, 1, 0, 1, 0]: [3, 2, 3, 1, 2] predictions per
    # row, beginning with number [0, 3, 5, 8, 9]
    num_new = rows.lengths - rows.num_common
    starts = np.cumsum(num_new) - num_new
    # the token before each token: [[2, 5, 6], [2, 5, 7], [4, 8, 9], [4, 8, .], [4, 10, .]]
    before = np.concatenate([prompts.ends[rows.prompt, None], places[:, :-1]], axis=1)
    # the new ones of them: 2 5 6 | 5 7 | 4 8 9 | 8 | 4 10
    new = (columns >= rows.num_common[:, None]) & (columns < rows.lengths[:, None])
    # predictions of each row: [[0, 1, 2], [0, 3, 4], [5, 6, 7], [5, 8, .], [9, 10, .]]
    numbers = number_entries(starts, rows.num_common, len(columns))
    return _predictions(
        mask, sources=before[new], targets=rows.tokens[new], index=numbers[rows.row_of]
    )


def _completion_attention(
    prompts: _Prompts, rows: CompletionRows, places: np.ndarray, starts: np.ndarray
) -> tuple[tuple[CompletionAttention, ...], np.ndarray]:
    """How the added tokens attend; and `[N]`, each packed token's place in all padded rows."""
    num_inputs, num_new = rows.num_inputs, rows.num_inputs - rows.num_known
    # the prompts' padded rows come first: 6 places, of which 5 are real: [0, 1, 2, 3, 4, ..]
    unpad = np.zeros(starts[-1] + num_new[-1], dtype=np.int64)
    unpad[: len(prompts.unpad)] = prompts.unpad
    num_padded = prompts.places.size
    parts = []
    # two parts: rows [0, 2] add two tokens each, rows [1, 4] one each, row 3 adds nothing
    for part in split_by_length(num_new, num_inputs, prompts.ids.shape[1]):
        # queries [[5, 6], [8, 9]], then [[7], [10]]; here none of them is padding
        query_rows, real = pad_rows(starts[part], num_new[part])
        # the tokens 5 6 8 9 are at places 6 7 8 9 of all padded rows, then 7 10 at 10 11
        unpad[query_rows.flat[real]] = num_padded + real
        num_padded += query_rows.size
        parts.append(_attention_of(part, query_rows, real, prompts, rows, places))
    return tuple(parts), unpad


def _attention_of(
    part: np.ndarray,
    query_rows: np.ndarray,
    real: np.ndarray,
    prompts: _Prompts,
    rows: CompletionRows,
    places: np.ndarray,
) -> CompletionAttention:
    """For some of the rows: their keys, and which of them each query may attend to."""
    prompt, num_inputs = rows.prompt[part], rows.num_inputs[part]
    columns = np.arange(num_inputs.max())
    # keys of the completion, padded with its first: [[5, 6], [8, 9]], then [[5, 7], [10, 10]]
    own_keys = places[part][:, : len(columns)]
    own_keys = np.where(columns < num_inputs[:, None], own_keys, own_keys[:, :1])
    # columns of the queries: [[0, 1], [0, 1]], then [[1], [0]], as row 1 adds its column 1 only
    query_columns = rows.num_known[part, None] + np.arange(query_rows.shape[1])
    # the query 7 (row 1, column 1) sees 0 1 2 of the prompt, then 5 and 7
    sees_prompt = prompts.real[prompt, None].repeat(query_rows.shape[1], axis=1)
    sees_own = columns <= query_columns[..., None]
    return CompletionAttention(
        query_rows=_tensor(query_rows),
        real=_tensor(real),
        key_rows=_tensor(np.concatenate([prompts.places[prompt], own_keys], axis=1)),
        visible=_tensor(np.concatenate([sees_prompt, sees_own], axis=-1)[:, None]),
    )


def _parts(
    prompts: _Prompts, rows: CompletionRows, first: int, attention: tuple[CompletionAttention, ...]
) -> tuple[AttentionPart, ...]:
    """The prompts; the added tokens by prompt, from place `first` on; and the same by row."""
    num_new = rows.num_inputs - rows.num_known
    # prompt 0 has 3 added tokens from place 5 on, prompt 1 has 3 from place 8 on
    num_added = np.array([num_new[rows.prompt == p].sum() for p in range(len(prompts.ids))])
    # queries [[5, 6, 7], [8, 9, 10]] with the keys [[0, 1, 2], [3, 4, .]]
    by_prompt = pad_rows(first + np.cumsum(num_added) - num_added, num_added)
    own = [part.own_part(prompts.ids.shape[1]) for part in attention]
    if own:
        visible = prompts.real[:, None, None]
        own.insert(0, AttentionPart.of(*by_prompt, prompts.places, visible))
    return AttentionPart.of(prompts.places, prompts.unpad, prompts.places), *own


def _predictions(
    mask: Tensor, sources: np.ndarray, targets: np.ndarray, index: np.ndarray
) -> dict[str, Tensor]:
    """These fields of a Packing, with `index` set to 0 where masked."""
    if not len(sources):  # all completions are empty; the masked index still needs a valid entry
        sources, targets = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    index = np.where(mask.numpy(), index, 0)
    arrays = {"sources": sources, "targets": targets, "index": index}
    return {"mask": mask, **{name: _tensor(x) for name, x in arrays.items()}}


def _packed_tokens(ids: np.ndarray, positions: np.ndarray) -> PackedTokens:
    return PackedTokens(_tensor(ids), _tensor(positions))


def _tensor(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))
