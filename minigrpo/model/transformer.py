"""A decoder-only transformer on packed tokens, see context.py: GPT-2, Llama, Qwen and the like."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .context import Context, TextRows
from .linear import Linear, cast_once, linear, times
from .logprobs import Entropy, at_least_fp32, token_logprobs
from .mixers import MIXERS, MLP, make_norm
from .packing import Packing
from .rotary import Rotations, rotation
from .shape import ModelShape as ModelShape
from .weights import Weights


@cache
def compiled_part(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of a block, compiled once for all layers and any number of tokens."""
    # DDP's own option splits graphs to overlap communication; blocks are compiled apart anyway
    torch._dynamo.config.optimize_ddp = False
    return torch.compile(function, dynamic=True)


class Block(nn.Module):
    """A mixer and an MLP, each with norms before or after it and a residual connection."""

    def __init__(self, shape: ModelShape, number: int) -> None:
        super().__init__()
        self.residual_multiplier = shape.residual_multiplier
        family = shape.family_row
        norm_before = nn.Identity if family.norms == "after" else make_norm
        norm_after = nn.Identity if family.norms == "before" else make_norm
        layer = shape.layers[number]
        self.mixer_name, make_mixer = MIXERS[layer.mixer]
        self.ln_1 = norm_before(shape)
        self.add_module(self.mixer_name, make_mixer(shape, layer, number))
        self.ln_1_after = norm_after(shape)
        self.ln_2 = norm_before(shape)
        self.mlp = MLP(shape)
        self.ln_2_after = norm_after(shape)

    @property
    def mixer(self) -> Any:
        return getattr(self, self.mixer_name)

    def forward(
        self, hidden: Tensor, context: Context, rotations: Rotations, compiled: bool
    ) -> Tensor:
        """`[N, D]` -> `[N, D]`."""
        # Mixing is not compiled, because its shapes differ from batch to batch. On a CPU it runs in
        # float32 or wider: in bfloat16, the backward pass of attention takes three times as long.
        before = Block.before_mixing
        after = Block.after_mixing
        if compiled:
            before = compiled_part(before)
            after = compiled_part(after)
        projected = before(self, hidden)
        with torch.autocast("cpu", enabled=False):
            if hidden.is_cpu:
                projected = tuple(map(at_least_fp32, projected))
            mixed = self.mixer.mix(context, rotations, *projected)
        return after(self, hidden, mixed)

    def before_mixing(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return self.mixer.project_in(cast_once(self.ln_1(hidden)))

    def after_mixing(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The block's inputs `[N, D]` and what its mixer made of them, `[N, M]` -> `[N, D]`."""
        from_mixer = self.ln_1_after(self.mixer.project_out(mixed))
        hidden = hidden + times(from_mixer, self.residual_multiplier)
        from_mlp = self.ln_2_after(self.mlp(cast_once(self.ln_2(hidden))))
        return hidden + times(from_mlp, self.residual_multiplier)


class Predictions(NamedTuple):
    """Predictions of completion tokens, in float32 or wider, in nats, 0 where masked."""

    logp: Tensor  # [P, G, S] log-probability of each token
    entropy: Tensor | None  # [P, G, S] of the distribution that predicts each token


class Transformer(Weights):
    """A decoder with GPT-2's names for its parts; weights.py fills and saves it."""

    def __init__(self, shape: ModelShape, seed: int | None = 0) -> None:
        """With a `seed` of None the weights are on `meta`, without memory."""
        super().__init__()
        self.shape = shape
        self.checkpointing = False  # blocks are computed again in the backward pass
        self.compiled = False  # blocks are compiled in passes with gradients
        self.ropes = {layer.rope for layer in shape.attention_layers.values() if layer.rope}
        has_positions = shape.family_row.learns_positions
        with torch.device("meta"):  # torch's own initialisation takes no time there
            self.wte = nn.Embedding(shape.vocab_size, shape.width)
            self.wpe = nn.Embedding(shape.context, shape.width) if has_positions else None
            self.h = nn.ModuleList(Block(shape, number) for number in range(len(shape.layers)))
            self.ln_f = make_norm(shape)
            self.head = None if shape.tied else Linear(shape.width, shape.vocab_size, bias=False)
        if seed is not None:
            self.initialise(torch.Generator().manual_seed(seed))

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    @property
    def head_weight(self) -> Tensor:
        """The weights of the output head, `[V, D]`."""
        return self.wte.weight if self.head is None else self.head.weight

    def forward_hidden(self, ids: Tensor, positions: Tensor, context: Context) -> Tensor:
        """Final hidden states `[N, D]` of tokens `ids [N]` at `positions [N]` in their texts."""
        # frozen embeddings may have a lower precision
        hidden = self.wte(ids).to(self.ln_f.weight.dtype)
        hidden = times(hidden, self.shape.embedding_scale)
        if self.wpe is not None:
            hidden = hidden + self.wpe(positions)
        rotations = {rope: rotation(rope, self.shape.head_dim, positions) for rope in self.ropes}
        is_training = torch.is_grad_enabled()
        # with checkpointing, the backward pass computes a block again; nothing in it is random
        recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        for block in self.h:
            run = partial(recomputed, block) if self.checkpointing and is_training else block
            hidden = run(hidden, context, rotations, self.compiled and is_training)
        return times(self.ln_f(hidden), 1 / self.shape.logits_divisor)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """`[..., D]` -> `[..., V]`."""
        return linear(hidden, self.head_weight)

    def logits(self, ids: Tensor) -> Tensor:
        """A plain causal forward of right-padded rows, `[B, T]` int64 -> `[B, T, V]`."""
        places = torch.arange(ids.numel(), device=ids.device)
        positions = places % ids.shape[1]
        context = TextRows(places.view(ids.shape), places, positions)
        hidden = self.forward_hidden(ids.flatten(), positions, context)
        return self.lm_head(hidden).unflatten(0, ids.shape)

    def forward(
        self,
        packing: Packing,
        temperature: float = 1.0,
        entropy: Entropy = "none",
    ) -> Predictions:
        """Predictions of completion tokens, of logits / temperature."""
        hidden = self.forward_hidden(packing.ids, packing.positions, packing)
        hidden = hidden.index_select(0, packing.sources)  # [M, D]
        logp, of_predictions = token_logprobs(
            hidden,
            self.head_weight,
            packing.targets,
            temperature,
            entropy,
        )

        def in_groups(values: Tensor) -> Tensor:
            return values[packing.index].where(packing.mask, 0)

        entropies = None if of_predictions is None else in_groups(of_predictions)
        return Predictions(in_groups(logp), entropies)
