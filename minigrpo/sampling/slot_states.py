"""What layers with a state remember of each slot of a decoder.

The next tokens of a slot may begin before the column where its last ones ended: a proposal was
rejected, or a dialogue waits. So a state is kept as it was before the last tokens, beside their
inputs, and a step replays those of them that were kept. Tables never move in memory.

Shapes: B slots, W tokens per slot and step, inputs of width C or F.
"""

import torch
from torch import Tensor

from ..model.context import Scan


class SlotStates:
    """The states and the last inputs of each slot, by layer."""

    def __init__(self, most_slots: int, most_tokens: int, device: torch.device) -> None:
        """Make room for `most_slots` slots that run up to `most_tokens` tokens per step."""
        self.most_slots = most_slots
        self.most_tokens = most_tokens
        self.columns = torch.zeros(most_slots, dtype=torch.int64, device=device)  # of the last step
        self.width = most_tokens  # tokens per slot of the last step, of which none is kept yet
        self.past: dict[int, Tensor] = {}  # [slots, n + most_tokens, C] n inputs, and the last ones
        self.states: dict[int, Tensor] = {}  # [slots, ..] before the last tokens
        self.inputs: dict[int, Tensor] = {}  # [slots, most_tokens, F] the last inputs
        self.tables = (self.past, self.states, self.inputs)

    def put(self, table: dict[int, Tensor], layer: int, first: int, rows: Tensor) -> None:
        """Put rows into a table, for new slots from `first` on."""
        if layer not in table:
            table[layer] = rows.new_zeros(self.most_slots, *rows.shape[1:])
        table[layer][first : first + len(rows)] = rows
        self.columns[first : first + len(rows)] = 0

    def begin(self, columns: Tensor) -> None:
        """Begin a step whose tokens are at `columns [B, W]`."""
        if not any(self.tables):
            return
        last = self.columns[: len(columns)]
        self.replayed = self.width
        self.kept = (columns[:, 0] - last).clamp(0, self.width)  # [B] of the last tokens
        last.copy_(columns[:, 0])
        self.width = columns.shape[1]

    def previous(self, layer: int, new: Tensor, count: int) -> Tensor:
        """The inputs before each of the tokens, `[B, W, C]` -> `[B, W, count, C]`."""
        num_slots, width, channels = new.shape
        past = self.past[layer][:num_slots]
        places = self.kept[:, None] + torch.arange(count, device=new.device)
        before = past.gather(1, places[..., None].expand(-1, -1, channels))
        joined = torch.cat([before, new], dim=1)
        past[:, : count + width] = joined
        return joined.unfold(1, count, 1)[:, :width].transpose(2, 3)

    def recur(self, layer: int, scan: Scan, new: Tensor) -> Tensor:
        """Run a scan along the tokens of each slot, `[B, W, F]` -> `[B, W, ..]`."""
        num_slots, width, _ = new.shape
        states = self.states[layer][:num_slots]
        inputs = self.inputs[layer][:num_slots]
        is_kept = torch.arange(self.replayed, device=new.device) < self.kept[:, None]
        _, replayed = scan(states, inputs[:, : self.replayed] * is_kept[..., None], "states")
        states.copy_(replayed)
        inputs[:, :width] = new
        return scan(states, new, "outputs")[0]

    def caches(self) -> list[Tensor]:
        """All that has a row for each slot."""
        rows = [rows for table in self.tables for rows in table.values()]
        return [self.columns, *rows] if rows else []
