"""The sequences of a batch, on the device and as the host knows them, and the slots they share."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..turns.dialogues import Dialogues
from ..types import Completions


class Tables:
    """A row for each of P * G sequences on the device, and a padding row after them: R in all."""

    def __init__(
        self, num_sequences: int, columns: int, truncates: bool, device: torch.device
    ) -> None:
        size = (num_sequences + 1, columns)
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)  # `length + unread` of each
        self.sampled = torch.zeros_like(self.ids, dtype=torch.bool)  # others are an answer's
        self.logp = torch.zeros_like(self.ids, dtype=torch.float32)
        self.log_kept_mass = torch.zeros_like(self.logp) if truncates else None
        # [R] each, see RoundState
        self.lengths = self.ids.new_zeros(len(self.ids))
        self.unread = torch.zeros_like(self.lengths)
        self.waiting = torch.zeros_like(self.lengths, dtype=torch.bool)

    def clear(self) -> None:
        """Forget all sequences."""
        for table in vars(self).values():
            if table is not None:
                table.zero_()
        self.lengths[-1] = 1  # a round runs the last token of each row

    def completions(self, prompt_ids: Tensor, prompt_len: Tensor, ended: Tensor) -> Completions:
        """The completions of P prompts; `ended`, `[P * G]`, says which were not cut off."""
        groups = (len(prompt_ids), -1)
        longest = int(self.lengths[:-1].max())

        def grouped(table: Tensor) -> Tensor:
            return table[: len(ended), :longest].unflatten(0, groups)

        return Completions(
            prompt_ids,
            prompt_len,
            grouped(self.ids),
            grouped(self.sampled),
            grouped(self.logp),
            log_kept_mass=None if self.log_kept_mass is None else grouped(self.log_kept_mass),
            ended=ended.unflatten(0, groups),
        )


@dataclass(frozen=True)
class RoundState:
    """What the host knows of the N running sequences after a round; each array is `[N]`."""

    sequence: np.ndarray  # int64, the number p * G + g, ascending
    slot: np.ndarray  # int64
    length: np.ndarray  # int64, tokens so far, without unread ones
    last_token: np.ndarray  # int64
    unread: np.ndarray  # int64, tokens of an answer that are stored, and have not been run
    waiting: np.ndarray  # bool, a turn has been submitted, and its answer has not come
    answer: np.ndarray  # int64, the number of an answer that has just come, or 0 for none
    ended: np.ndarray  # bool, the last token is a stop, or completes a stop text
    is_full: np.ndarray  # bool, there is no place for another token

    @property
    def runs(self) -> np.ndarray:
        """`[N]` bool: the next round has something to run for a sequence."""
        return (self.unread > 0) | ~(self.ended | self.is_full)

    def select(self, which: np.ndarray) -> "RoundState":
        """The sequences where `which`, `[N]` bool, is true."""
        return RoundState(**{name: values[which] for name, values in vars(self).items()})


def exchange_turns(dialogues: Dialogues, tables: Tables, state: RoundState) -> RoundState:
    """Submit the turns that have ended, and store the answers that have come.

    A stop token ends a turn. Its sequence keeps its slot and waits: each round runs its last token
    again, and drops what is picked. The rounds after the answer has come run the answer's tokens.
    If nothing else can run, this waits until an answer comes.
    """
    # 1. Submit turns. A stop token within an answer does not end one.
    asks = state.ended & (state.unread == 0) & ~state.waiting
    asking = state.sequence[asks]
    turns = zip(asking, tables.ids[asking].tolist(), state.length[asks], strict=True)
    for sequence, ids, length in turns:
        dialogues.submit(int(sequence), ids[:length])

    # 2. Take answers.
    waiting = state.waiting | asks
    unread = state.unread.copy()
    answer = np.zeros_like(state.sequence)
    numbers: dict[tuple[int, ...], int] = {}  # numbers of distinct answers, from 1
    stored: list[tuple[int, int, int]] = []  # sequence, column and token
    for sequence, tokens in dialogues.replies(wait=not state.runs.any()).items():
        n = int(np.searchsorted(state.sequence, sequence))
        waiting[n] = False
        unread[n] = len(tokens)
        answer[n] = numbers.setdefault(tuple(tokens), len(numbers) + 1)
        for column, token in enumerate(tokens, start=int(state.length[n])):
            stored.append((sequence, column, token))

    # 3. Store them, each after the turn that it answers; two copies to the device.
    if stored:
        rows, columns, answer_ids = tables.ids.new_tensor(stored).T
        tables.ids[rows, columns] = answer_ids
    on_host = np.stack([state.sequence, unread, waiting])
    sequences, of_unread, of_waiting = tables.ids.new_tensor(on_host)
    tables.unread[sequences] = of_unread
    tables.waiting[sequences] = of_waiting.bool()
    return replace(state, unread=unread, waiting=waiting, answer=answer)


class Slots(NamedTuple):
    """A new assignment of B slots to N sequences."""

    old_slot: np.ndarray  # [B] the old slot that each new one continues
    of_sequence: np.ndarray  # [N] the new slot of each sequence
    first_sequence: np.ndarray  # [B] one of the N sequences in each new slot


def assign_slots(slot: np.ndarray, *properties: np.ndarray) -> Slots:
    """Assign one slot to the sequences that agree in their old slot and in all properties, `[N]`.

    Slots keep their place where possible, so that little is copied: sequences of the slots
    [0, 0, 0, 1] with the last tokens [5, 7, 5, 5] get the slots [0, 2, 0, 1].
    """
    # 1. Group the sequences, by one number for all that must agree; it is ordered by slot first.
    key = slot
    for values in properties:
        key = key * (values.max(initial=0) + 1) + values
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    old = slot[first]  # the old slot of each group, sorted

    # 2. The first group of each old slot stays there, if that place still exists.
    is_first = np.diff(old, prepend=-1) > 0
    stays = is_first & (old < len(old))
    new = np.empty_like(old)
    new[stays] = old[stays]
    new[~stays] = np.setdiff1d(np.arange(len(old)), old[stays])

    by_place = np.argsort(new)
    return Slots(old[by_place], new[group], first[by_place])
