"""Pack completions for the model, and map the log-probs back to `[P, G, S]`.

`prefix-tree` runs each prompt once, and each distinct prefix of its group's completions once.
`repeated`, the reference, runs each completion with its own copy of the prompt. `pack` runs once
per step, on the host; `Packing` joins the prompts of a micro-batch. CONTRIBUTING.md has a worked
example.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from ..types import AddedRow, Completions, PackedPrompt
from .context import (
    Context,
    Scan,
    attend_in_rows,
    make_mask,
    scan_rows,
    sdpa,
    take_previous,
    take_rows,
)
from .logprobs import at_least_fp32


@dataclass(frozen=True)
class CompletionRows:
    """Attention of the tokens that completions add, as rows padded on the right."""

    queries: Tensor  # [C, T] places of packed tokens, in C rows
    keys: Tensor  # [C, L] places of the prompt and the completion's inputs
    last: Tensor  # [C, T] the last of the L keys that each query attends to
    masks: dict[int, Tensor] = field(default_factory=dict, init=False)  # by window, made once

    def attend(self, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [N, H, E]`, k and v `[N, K, E]` -> `[C, T, H, E]`."""
        num_keys = self.keys.shape[1]
        window = window if window < num_keys else 0
        if window not in self.masks:  # the layers share it, because autograd would keep each
            queries_per_key = q.shape[1] // k.shape[1]
            self.masks[window] = make_mask(self.last, num_keys, window, queries_per_key, q.dtype)
        if k.requires_grad:  # gradients of tokens in several rows are summed, which needs float32
            k = at_least_fp32(k)
            v = at_least_fp32(v)
        queries = take_rows(q, self.queries).transpose(1, 2)
        keys = take_rows(k, self.keys).transpose(1, 2).to(q.dtype)
        values = take_rows(v, self.keys).transpose(1, 2).to(q.dtype)
        return sdpa(queries, keys, values, self.masks[window]).transpose(1, 2)


@dataclass(frozen=True)
class PaddedRows:
    """Attention within padded rows, first of texts by themselves and then of what is added."""

    causal: Tensor  # [C, T] into the packed tokens; padding repeats the row's first token
    added: Sequence[CompletionRows]  # up to two sets, of rows of similar lengths
    unpad: Tensor  # [N] place of each packed token in the flattened and concatenated padded rows

    def attend(self, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = [attend_in_rows(self.causal, window, q, k, v)]
        for added in self.added:
            attended.append(added.attend(window, q, k, v))
        return torch.cat([rows.flatten(0, 1) for rows in attended]).index_select(0, self.unpad)


@dataclass(frozen=True)
class StateRows:
    """What layers with a state read of a packing."""

    parents: Tensor  # [N] int64, the packed token before each in its text; -1 for the first ones
    causal: Tensor  # [C', T'] the rows of texts by themselves
    rows: Tensor  # [C, T] all inputs of each completion; padding repeats the row's first token
    prompts: Tensor  # [C] the causal row that each continues
    places: Tensor  # [N] place of each packed token in the flattened causal rows and these


class Packing(Context):
    """The packed tokens of a micro-batch."""

    def __init__(self, prompts: Sequence[PackedPrompt], device: torch.device | str = "cpu") -> None:
        """Join packed prompts, such as those of a micro-batch, on a device."""
        self.joined = joined = join(prompts)
        self.upload = upload = partial(to_device, device=torch.device(device))
        sources = joined.sources
        targets = joined.targets
        if len(sources) == 0:  # all completions are empty, and `index` needs a valid entry
            sources = targets = np.array([0])
        self.ids = upload(joined.ids)  # [N] int64, the packed tokens
        self.positions = upload(joined.positions)  # [N] int64, of each in its own text
        self.sources = upload(sources)  # [M] packed tokens whose next token is predicted
        self.targets = upload(targets)  # [M] that next token
        self.index = upload(joined.index)  # [P, G, S] into the M predictions, see `PackedPrompt`
        self.mask = upload(joined.mask)  # [P, G, S] bool, where a token was sampled

    def attend(self, layer: int, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.padded_rows.attend(window, q, k, v)

    def previous(self, layer: int, inputs: Tensor, count: int) -> Tensor:
        # gradients of tokens before several others are summed, which needs float32
        return take_previous(at_least_fp32(inputs), self.state_rows.parents, count)

    def recur(self, layer: int, scan: Scan, inputs: Tensor) -> Tensor:
        """Run a scan along each prompt, and from its end along each completion."""
        run = partial(scan_rows, scan, inputs=at_least_fp32(inputs), positions=self.positions)
        own = self.state_rows
        of_prompts, states = run(states=None, rows=own.causal)
        states = states.index_select(0, own.prompts)
        of_completions, _ = run(states=states, rows=own.rows, needs="outputs")
        outputs = torch.cat([of_prompts.flatten(0, 1), of_completions.flatten(0, 1)])
        return outputs.index_select(0, own.places)

    @cached_property
    def padded_rows(self) -> PaddedRows:
        joined = self.joined
        upload = self.upload
        padded_queries = [_padded(joined.causal_rows)]
        sets: list[CompletionRows] = []
        for rows in _split_by_length(joined.added_rows):
            queries = _padded([row.queries for row in rows])
            keys = _padded([row.keys for row in rows])
            last = joined.positions[queries]
            sets.append(CompletionRows(upload(queries), upload(keys), upload(last)))
            padded_queries.append(queries)
        unpad = _first_places(padded_queries)
        return PaddedRows(upload(padded_queries[0]), sets, upload(unpad))

    @cached_property
    def state_rows(self) -> StateRows:
        joined = self.joined
        causal = _padded(joined.causal_rows)
        added = joined.added_rows
        rows = _padded([row.keys[len(joined.causal_rows[row.prompt]) :] for row in added])
        return StateRows(
            parents=self.upload(joined.parents),
            causal=self.upload(causal),
            rows=self.upload(rows),
            prompts=self.upload(np.array([row.prompt for row in added], dtype=np.int64)),
            places=self.upload(_first_places([causal, rows])),
        )


def join(prompts: Sequence[PackedPrompt]) -> PackedPrompt:
    """Several prompts as one, whose places and predictions are counted through all of them."""
    parents: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    indices: list[np.ndarray] = []
    causal_rows: list[np.ndarray] = []
    added_rows: list[AddedRow] = []
    num_tokens = 0
    num_predictions = 0
    for prompt in prompts:
        parents.append(np.where(prompt.parents < 0, -1, prompt.parents + num_tokens))
        sources.append(prompt.sources + num_tokens)
        indices.append(np.where(prompt.mask, prompt.index + num_predictions, 0))
        for row in prompt.added_rows:
            queries = row.queries + num_tokens
            keys = row.keys + num_tokens
            added_rows.append(AddedRow(queries, keys, len(causal_rows) + row.prompt))
        causal_rows += [row + num_tokens for row in prompt.causal_rows]
        num_tokens += len(prompt.ids)
        num_predictions += len(prompt.sources)
    return PackedPrompt(
        ids=np.concatenate([prompt.ids for prompt in prompts]),
        positions=np.concatenate([prompt.positions for prompt in prompts]),
        parents=np.concatenate(parents),
        sources=np.concatenate(sources),
        targets=np.concatenate([prompt.targets for prompt in prompts]),
        index=np.stack(indices),
        mask=np.stack([prompt.mask for prompt in prompts]),
        causal_rows=causal_rows,
        added_rows=added_rows,
    )


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of an array on a device; the host does not wait for it."""
    copied = torch.tensor(array)
    if device.type == "cuda":
        copied = copied.pin_memory()
    return copied.to(device, non_blocking=True)


def pack(completions: Completions, packing: str = "prefix-tree") -> list[PackedPrompt]:
    """Pack each prompt with its completions on the host, by a value of --packing."""
    shares_prefixes = packing == "prefix-tree"
    ids = completions.completion_ids.numpy()
    mask = completions.completion_mask.numpy()
    prompts = []
    for p, length in enumerate(completions.prompt_len.tolist()):
        prompt = completions.prompt_ids[p, :length].numpy()
        prompts.append(pack_prompt(prompt, ids[p], mask[p], shares_prefixes))
    return prompts


def pack_prompt(
    prompt: np.ndarray, completion_ids: np.ndarray, mask: np.ndarray, shares_prefixes: bool
) -> PackedPrompt:
    """Pack a prompt `[L]` with its completions `[G, S]`, whose sampled tokens are in the mask."""
    # 1. The texts that are run: the prompt and all tokens of a completion but its last.
    group_size, width = completion_ids.shape
    prompt_len = len(prompt)
    prompts = np.broadcast_to(prompt, (group_size, prompt_len))
    texts = np.concatenate([prompts, completion_ids], axis=1)
    lengths = prompt_len + (mask * np.arange(width)).max(axis=1)
    # after its end, each text has a number of its own, so that no two texts agree there
    ended = np.arange(prompt_len + width) >= lengths[:, None]
    texts = np.where(ended, -1 - np.arange(group_size)[:, None], texts)

    # 2. The packed tokens: of each text, those that no text before it begins with.
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    parents: list[np.ndarray] = []
    paths: list[np.ndarray] = []  # the places of each text's tokens
    sampled_after: list[np.ndarray] = []  # the place before each sampled token
    added_rows: list[AddedRow] = []
    num_tokens = 0
    for g, text in enumerate(texts):
        shared = np.arange(0)
        if shares_prefixes and g > 0:
            common = (texts[:g] == text).argmin(axis=1)  # tokens up to the first difference
            nearest = common.argmax()
            shared = paths[nearest][: common[nearest]]
        added = np.arange(len(shared), lengths[g])
        path = np.concatenate([shared, num_tokens - len(shared) + added])
        ids.append(text[added])
        positions.append(added)
        parents.append(np.where(added > 0, path[added - 1], -1))
        paths.append(path)
        sampled_after.append(path[prompt_len - 1 + np.flatnonzero(mask[g])])
        queries = path[max(prompt_len, len(shared)) :]
        if shares_prefixes and len(queries):
            added_rows.append(AddedRow(queries, keys=path, prompt=0))
        num_tokens += len(added)

    # 3. The predictions: each token after the same place once, in the order of the completions.
    sources = np.concatenate(sampled_after)
    targets = completion_ids[mask]
    pairs = sources * (1 + targets.max(initial=0)) + targets
    _, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
    distinct = np.sort(first)
    index = np.zeros(mask.shape, dtype=np.int64)
    index[mask] = np.searchsorted(distinct, first)[inverse]
    return PackedPrompt(
        ids=np.concatenate(ids),
        positions=np.concatenate(positions),
        parents=np.concatenate(parents),
        sources=sources[distinct],
        targets=targets[distinct],
        index=index,
        mask=mask,
        causal_rows=[np.arange(prompt_len)] if shares_prefixes else paths,
        added_rows=added_rows,
    )


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows padded on the right with their first entry, `[C, T]`."""
    longest = max((len(row) for row in rows), default=1)
    padded = np.empty((len(rows), longest), dtype=np.int64)
    for n, row in enumerate(rows):
        padded[n] = row[0]
        padded[n, : len(row)] = row
    return padded


def _first_places(rows: Sequence[np.ndarray]) -> np.ndarray:
    """The place of each packed token in the flattened and concatenated rows, `[N]`."""
    # padding repeats the first token of its row, so the first place of a token is its own
    _, places = np.unique(np.concatenate([row.ravel() for row in rows]), return_index=True)
    return places


def _split_by_length(added: Sequence[AddedRow]) -> list[Sequence[AddedRow]]:
    """Split rows into two sets of similar lengths, if that saves padding."""
    if not added:
        return []
    rows = sorted(added, key=lambda row: -len(row.queries))
    best: list[Sequence[AddedRow]] = [rows]
    fewest = 0.8 * _num_scores(rows)  # a second call costs something too
    for cut in range(1, len(rows), 1 + len(rows) // 32):  # of many, 32 are tried
        long = rows[:cut]
        short = rows[cut:]
        number = _num_scores(long) + _num_scores(short)
        if number <= fewest:
            best = [long, short]
            fewest = number
    return best


def _num_scores(rows: Sequence[AddedRow]) -> int:
    most_queries = max(len(row.queries) for row in rows)
    most_keys = max(len(row.keys) for row in rows)
    return len(rows) * most_queries * most_keys
