"""Decoding with a KV cache that stores each prompt once, for all of its completions.

A decoder runs *slots*: sequences that each continue one prompt, at their own column; generate.py
picks their tokens. All slots of a prompt attend to it in one matrix product, and one softmax covers
the prompt and the slot's own tokens (Hydragen, Juravsky et al., arXiv 2402.05099).

Shapes: P prompts, B slots, W tokens per slot and round, K heads of keys and values, each shared by
R heads of queries (H = K * R), heads of size E, L layers.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.context import Context, Scan, TextRows, scan_rows, take_rows
from ..model.linear import has_float32_products
from ..model.logprobs import logits_of
from ..model.transformer import Transformer
from .graphs import copy_into, copy_rows, next_size
from .slot_states import SlotStates

COLUMN_BLOCK = 256  # with graphs, columns by which a cache grows: each number is a graph
FEWEST_ROWS = 32  # of a graph: fewer take a GPU as long


class Capacity(NamedTuple):
    prompts: int
    prompt_len: int  # tokens of the longest prompt
    slots: int
    slots_of_prompt: int
    columns: int  # new tokens of a slot
    tokens: int  # of a slot in a step


class Decoder:
    """Runs every prompt once, then a few tokens of every slot per round."""

    def __init__(self, model: Transformer, capacity: Capacity, *, few_sizes: bool = False) -> None:
        """With `few_sizes`, the numbers of slots and prompts are padded to one of few sizes."""
        self.model = model
        self.capacity = capacity
        self.few_sizes = few_sizes
        self.heads = model.shape.kv_heads  # K
        self.most_prompts = self.pad_to(capacity.prompts, capacity.prompts)
        self.most_slots = self.pad_to(capacity.slots, capacity.slots)

        # The caches are made when the type of keys and values is known.
        self.prompt_kv = torch.empty(0)  # [L, 2, P, K, Lp, E]
        self.own_kv = torch.empty(0)  # the slots' own tokens, [L, 2, B, K, columns, E]

        attending = model.shape.attention_layers
        longest_text = capacity.prompt_len + capacity.columns
        windows = {layer.window for layer in attending.values()}
        self.windows = {window for window in windows if 0 < window < longest_text}
        self.place_in_cache = {number: place for place, number in enumerate(attending)}
        self.states = SlotStates(self.most_slots, capacity.tokens, model.device)

        in_group = capacity.slots_of_prompt
        grid_size = self.most_prompts * self.pad_to(in_group, in_group)
        layout_size = self.most_slots * (1 + self.heads) + grid_size * self.heads
        self.layout = torch.zeros(layout_size, dtype=torch.int64, device=model.device)
        self.clear()

    def clear(self) -> None:
        self.columns = 0
        for cache in (self.prompt_kv, self.own_kv):
            cache.zero_()  # a NaN would stay: attention gives unused places the weight 0
        empty = np.zeros(0, dtype=np.int64)
        self._arrange(empty, empty)

    def pad_to(self, size: int, most: int) -> int:
        """The number of rows with which `size` slots, prompts or sequences of `most` are run."""
        if not self.few_sizes:
            return size
        return min(max(FEWEST_ROWS, next_size(size)), next_size(most))

    def _arrange(self, prompt_len: np.ndarray, prompt_of_slot: np.ndarray) -> None:
        """Set the length of each prompt, `[P]`, and the prompt of each slot, `[B]`.

        Attention to prompts takes the slots as a grid with one row per prompt. Slots of the prompts
        [0, 1, 0] have the grid [[0, 2], [1, 0]], padded with slot 0, and places [0, 2, 1] in it.
        """
        self.prompt_len = prompt_len
        self.prompt_of_slot = prompt_of_slot
        longest = int(prompt_len.max(initial=0))
        self.prompt_width = self.capacity.prompt_len if self.few_sizes else longest

        # 1. The slots by prompt, and the number of each among those of its prompt.
        slots_of_prompt = np.bincount(prompt_of_slot, minlength=len(prompt_len))
        slots = np.argsort(prompt_of_slot, kind="stable")
        rows = prompt_of_slot[slots]
        first_of_prompt = slots_of_prompt.cumsum() - slots_of_prompt
        numbers = np.arange(len(slots)) - first_of_prompt[rows]

        # 2. The grid [P, K, G'] of indices into the slots [B, K], and their places in the grid.
        num_rows = self.pad_to(len(prompt_len), self.capacity.prompts)
        widest = int(slots_of_prompt.max(initial=0))
        width = self.pad_to(widest, self.capacity.slots_of_prompt)
        self.grid_shape = num_rows, self.heads, width
        heads = np.arange(self.heads)[:, None]
        slot_grid = np.zeros((num_rows, 1, width), dtype=np.int64)
        slot_grid[rows, 0, numbers] = slots
        grid = slot_grid * self.heads + heads
        num_slots = self.pad_to(len(slots), self.capacity.slots)
        places = np.zeros((self.heads, num_slots), dtype=np.int64)
        places[:, slots] = (rows * self.heads + heads) * width + numbers

        # 3. One copy to the device.
        starts = np.zeros(num_slots, dtype=np.int64)  # the position of each slot's first column
        starts[: len(slots)] = prompt_len[prompt_of_slot]
        arrays = [starts, places.T.ravel(), grid.ravel()]
        self.starts, self.places, self.grid = copy_into(self.layout, arrays)

    def prefill(self, prompt_ids: Tensor, prompt_len: Tensor) -> Tensor:
        """Run new prompts, `[P', Lp]`, and add a slot for each; return logits `[P', V]`."""
        # 1. The tokens without padding, [N]: where each is in [P', Lp], and which one is there.
        lengths = prompt_len.cpu().numpy()
        width = int(lengths.max())
        is_token = np.arange(width) < lengths[:, None]
        places = prompt_ids.new_tensor(np.flatnonzero(is_token))
        # Padding repeats the token before it. Causality hides it from all others.
        numbers = is_token.ravel().cumsum() - 1
        rows = prompt_ids.new_tensor(numbers.reshape(is_token.shape))

        # 2. Run them.
        ids = prompt_ids[:, :width].flatten().index_select(0, places)
        context = PromptContext(self, rows, places, prompt_len)
        hidden = self.model.forward_hidden(ids, places % width, context)

        # 3. Add their slots.
        new_prompts = len(self.prompt_len) + np.arange(len(lengths))
        prompt_of_slot = np.append(self.prompt_of_slot, new_prompts)
        self._arrange(np.append(self.prompt_len, lengths), prompt_of_slot)
        return logits_of(hidden[prompt_len.cumsum(0) - 1], self.model.head_weight)

    def store_prompts(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store a layer's keys and values of new prompts, `[P', Lp, K, E]`."""
        if not len(self.prompt_kv):
            heads, size = k.shape[2:]
            layers = len(self.place_in_cache)
            prompt_len, columns = self.capacity.prompt_len, self.capacity.columns
            self.prompt_kv = k.new_zeros(layers, 2, self.most_prompts, heads, prompt_len, size)
            self.own_kv = k.new_zeros(layers, 2, self.most_slots, heads, columns, size)
        first = len(self.prompt_len)
        place = self.place_in_cache[layer]
        stored = self.prompt_kv[place, :, first : first + len(k)]
        stored[..., : k.shape[1], :] = torch.stack([k, v]).transpose(2, 3)

    def step(
        self,
        tokens: Tensor,
        first_columns: Tensor,
        num_columns: int,
        last: Tensor | None = None,
    ) -> Tensor:
        """Run W tokens of every slot, `[B, W]` -> `[B, W, V]`, the logits that follow them.

        Args:
            first_columns: the column of each slot's first token, `[B]`. What a slot wrote there
                before (a rejected proposal) is overwritten.
            num_columns: the number of columns that the slots use after this step, at most.
            last: the number of the only token of each slot that needs logits, `[B]`, which then
                are `[B, 1, V]`; or None for all tokens.
        """
        offsets = torch.arange(tokens.shape[1], device=tokens.device)
        columns = first_columns[:, None] + offsets  # [B, W]
        positions = self.starts[:, None] + columns
        self.states.begin(columns)
        context = StepContext(self, columns, self._masks(columns, positions, num_columns))
        # Proposals may go past the context. They are never kept, but their positions must exist.
        positions = positions.clamp(max=self.model.shape.context - 1)
        hidden = self.model.forward_hidden(tokens.flatten(), positions.flatten(), context)
        hidden = hidden.unflatten(0, tokens.shape)
        if last is not None:
            hidden = hidden.take_along_dim(last[:, None, None], dim=1)
        return logits_of(hidden, self.model.head_weight)

    def _masks(self, columns: Tensor, positions: Tensor, num_columns: int) -> Mapping[int, Tensor]:
        """What the tokens at `[B, W]` do not see, by window, `[B, 1, 1, W, Lp + num_columns]`."""
        in_prompt = torch.arange(self.prompt_width, device=columns.device)
        own = torch.arange(num_columns, device=columns.device)
        sees_prompt = in_prompt < self.starts[:, None]
        sees_prompt = sees_prompt[:, None].expand(-1, columns.shape[1], -1)
        sees_own = own <= columns[..., None]
        visible = torch.cat([sees_prompt, sees_own], dim=-1)
        masks = {0: ~visible[:, None, None]}
        for window in self.windows:
            age_in_prompt = positions[..., None] - in_prompt
            age_of_own = columns[..., None] - own
            is_old = torch.cat([age_in_prompt, age_of_own], dim=-1) >= window
            masks[window] = masks[0] | is_old[:, None, None]
        return masks

    def use_columns(self, num_columns: int) -> int:
        """Grow the usable columns to at least `num_columns`; return their number."""
        if self.few_sizes:
            num_columns = -(-num_columns // COLUMN_BLOCK) * COLUMN_BLOCK
        self.columns = max(self.columns, min(num_columns, self.capacity.columns))
        return self.columns

    def to_grid(self, x: Tensor) -> Tensor:
        """Group slots by prompt: `[B, K, T, E]` -> `[P, K, G' * T, E]`."""
        grid = x.flatten(0, 1).index_select(0, self.grid)
        return grid.unflatten(0, self.grid_shape).flatten(2, 3)

    def to_slots(self, x: Tensor) -> Tensor:
        """Undo `to_grid`: `[P, K, G' * T, E]` -> `[B, K, T, E]`."""
        rows = x.unflatten(2, (self.grid_shape[2], -1)).flatten(0, 2)
        return rows.index_select(0, self.places).unflatten(0, (-1, self.heads))

    def reorder(self, sources: np.ndarray) -> None:
        """Change to `len(sources)` slots: slot i continues the former slot `sources[i]`."""
        if np.array_equal(sources, np.arange(len(self.prompt_of_slot))):
            return

        # 1. Copy the slots that another slot continues.
        copies = np.flatnonzero(sources != np.arange(len(sources)))
        copy_rows([self.own_kv[..., : self.columns, :]], sources[copies], copies, dim=2)
        copy_rows(self.states.caches(), sources[copies], copies, dim=0)

        # 2. Prompts without slots leave, and the last prompts move into the gaps: if 0, 2 and 3 of
        #    four prompts are still in use, prompt 3 moves to place 1.
        prompt_of_slot = self.prompt_of_slot[sources]
        used = np.unique(prompt_of_slot)
        gaps = np.setdiff1d(np.arange(len(used)), used)
        movers = used[used >= len(used)]
        copy_rows([self.prompt_kv], movers, gaps, dim=2)
        prompt_len = self.prompt_len.copy()
        prompt_len[gaps] = prompt_len[movers]
        new_place = np.arange(len(self.prompt_len))
        new_place[movers] = gaps
        self._arrange(prompt_len[: len(used)], new_place[prompt_of_slot])


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """`q @ k.mT`, not rounded to 16 bits before the softmax where torch can do so."""
    if not has_float32_products(q):
        return q @ k.mT
    products = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT, out_dtype=torch.float32)
    return products.unflatten(0, k.shape[:2])


class PromptContext(TextRows):
    """The prompts that enter a decoder, whose keys, values and states it stores."""

    def __init__(self, decoder: Decoder, rows: Tensor, places: Tensor, lengths: Tensor) -> None:
        super().__init__(rows, places, places % rows.shape[1])
        self.decoder = decoder
        self.last = lengths.cumsum(0) - 1  # [P'] the last token of each prompt
        self.first_slot = len(decoder.prompt_of_slot)

    def attend(self, layer: int, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.decoder.store_prompts(layer, take_rows(k, self.rows), take_rows(v, self.rows))
        return super().attend(layer, window, q, k, v)

    def previous(self, layer: int, inputs: Tensor, count: int) -> Tensor:
        before = super().previous(layer, inputs, count)
        states = self.decoder.states
        past = torch.cat([before[self.last], inputs[self.last, None]], dim=1)[:, 1:]
        with_room = F.pad(past, (0, 0, 0, states.most_tokens))
        states.put(states.past, layer, self.first_slot, with_room)
        return before

    def recur(self, layer: int, scan: Scan, inputs: Tensor) -> Tensor:
        outputs, ends = scan_rows(scan, None, inputs, self.rows, self.positions)
        states = self.decoder.states
        states.put(states.states, layer, self.first_slot, ends)
        none = inputs.new_zeros(len(ends), states.most_tokens, inputs.shape[-1])
        states.put(states.inputs, layer, self.first_slot, none)
        return outputs.flatten(0, 1).index_select(0, self.places)


class StepContext(Context):
    """The new tokens of all slots, at `columns [B, W]`; `masks` by window, 0 for longer ones."""

    def __init__(self, decoder: Decoder, columns: Tensor, masks: Mapping[int, Tensor]) -> None:
        self.decoder = decoder
        self.columns = columns
        self.slots = torch.arange(len(columns), device=columns.device)[:, None]
        self.masks = masks

    def attend(self, layer: int, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        decoder = self.decoder
        mask = self.masks.get(window, self.masks[0])
        place = decoder.place_in_cache[layer]
        num_slots, width = self.columns.shape
        num_columns = mask.shape[-1] - decoder.prompt_width

        # 1. Store the new keys and values.
        new_kv = torch.stack([k, v], dim=1).unflatten(0, (-1, width))  # [B, W, 2, K, E]
        decoder.own_kv[place][:, self.slots, :, self.columns] = new_kv
        own_k, own_v = decoder.own_kv[place, :, :num_slots, :, :num_columns]
        num_prompts = decoder.grid_shape[0]
        prompt_k, prompt_v = decoder.prompt_kv[place, :, :num_prompts, :, : decoder.prompt_width]

        # 2. Attend to the prompt and to the slot's own tokens, in one softmax.
        q = q * q.shape[-1] ** -0.5
        q = q.unflatten(0, (-1, width)).unflatten(2, (decoder.heads, -1))  # [B, W, K, R, E]
        q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, K, R * W, E]
        prompt_scores = decoder.to_slots(scores_of(decoder.to_grid(q), prompt_k))
        own_scores = scores_of(q, own_k)
        scores = torch.cat([prompt_scores, own_scores], dim=-1)  # [B, K, R * W, keys]
        scores.unflatten(2, (-1, width)).masked_fill_(mask, -torch.inf)
        weights = scores.softmax(-1).to(v.dtype)
        prompt_weights, own_weights = weights.split([decoder.prompt_width, num_columns], dim=-1)
        of_prompt = decoder.to_slots(decoder.to_grid(prompt_weights) @ prompt_v)
        attended = of_prompt + own_weights @ own_v

        # 3. Back to the order of tokens.
        attended = attended.unflatten(2, (-1, width))  # [B, K, R, W, E]
        attended = attended.permute(0, 3, 1, 2, 4)  # [B, W, K, R, E]
        return attended.flatten(2, 3).flatten(0, 1)

    def previous(self, layer: int, inputs: Tensor, count: int) -> Tensor:
        in_slots = inputs.unflatten(0, self.columns.shape)
        return self.decoder.states.previous(layer, in_slots, count).flatten(0, 1)

    def recur(self, layer: int, scan: Scan, inputs: Tensor) -> Tensor:
        in_slots = inputs.unflatten(0, self.columns.shape)
        return self.decoder.states.recur(layer, scan, in_slots).flatten(0, 1)
