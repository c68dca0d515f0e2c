"""Where a model's weights come from, and where they go: random numbers, and files."""

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Self

import torch
from torch import nn

from ..errors import refusing
from . import hf
from .linear import to_nf4
from .shape import ModelShape

INTO_RESIDUAL = ("c_proj.weight", "o_proj.weight", "down_proj.weight")  # started smaller


class Weights(nn.Module):
    """What a Transformer does with its weights besides running them."""

    shape: ModelShape
    wte: nn.Embedding
    wpe: nn.Embedding | None
    head: nn.Linear | None

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Make room in the host's memory, and fill it with random weights."""
        self.to_empty(device="cpu")
        # GPT-2's scheme for every family, with two departures. After 400 supervised steps of a
        # GPT-2 on chess, the loss is 37 nats per example with both, 75 with the first, 80 without.
        # 1. The standard deviation scales as 1/sqrt(width), and is GPT-2's 0.02 at width 768.
        shape = self.shape
        std = 0.02 * math.sqrt(768 / shape.width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 2:
                scale = 1 / math.sqrt(2 * shape.layers) if name.endswith(INTO_RESIDUAL) else 1.0
                parameter.normal_(0.0, std * scale, generator=generator)
            else:
                parameter.fill_(1.0)
        if self.wpe is None:
            return
        # 2. The learned positions start as sinusoids. A fixed offset is then a rotation of the
        # position embedding, which makes copying from that offset easier to learn.
        frequencies = torch.logspace(0, -math.log10(2000), shape.width // 2)
        angles = torch.arange(shape.context)[:, None] * frequencies  # [T, D/2]
        self.wpe.weight.copy_(math.sqrt(2) * std * torch.cat([angles.sin(), angles.cos()], dim=1))

    @classmethod
    def from_pretrained(cls, path: str | Path, matrices: str = "float32", *, seed: int = 0) -> Self:
        """A model from a folder of Hugging Face's, or a safetensors file; `matrices`: see `store`.

        A config.json alone is random weights from `seed`. Raises ConfigError for tensors that are
        missing, left over or misshapen.
        """
        shape, tensors = hf.read_model(Path(path))
        with refusing("the weights do not fit config.json"):
            model = cls(shape, seed if tensors is None else None)
            if tensors is not None:
                state = hf.to_state(shape, model.state_dict().keys(), tensors)
                model.load_state_dict(state, assign=True)
        model.store(matrices)
        return model

    def sharing_weights(self) -> Self:
        """A copy of the modules that shares their parameters."""
        return copy.deepcopy(self, {id(parameter): parameter for parameter in self.parameters()})

    def store(self, matrices: str) -> None:
        """Copy weights, one after the other, into float32, or matrices into bfloat16.

        With `nf4` the linear layers of blocks become NF4, and are frozen; the others are bfloat16.
        """
        for name, parameter in self.named_parameters():
            kind = matrices if parameter.dim() == 2 else "float32"
            if kind == "nf4" and name.startswith("h."):
                parameter.data = to_nf4(parameter.requires_grad_(False))
            else:
                dtype = torch.get_default_dtype() if kind == "float32" else torch.bfloat16
                parameter.data = parameter.detach().to(dtype, copy=True).contiguous()

    def trim_vocab(self, number: int) -> None:
        """Keep only the first `number` tokens, so that vocabulary padding is never sampled."""
        self.shape = replace(self.shape, vocab_size=number)
        for part in (self.wte, self.head):
            if part is not None:
                part.weight = nn.Parameter(part.weight.detach()[:number].clone())

    def save_pretrained(self, path: str | Path, header: Mapping[str, str] | None = None) -> None:
        """Write a float32 file for `from_pretrained`, by default with the shape as its header."""
        shape = self.shape
        tensors = {  # the inverse of `hf.to_state`
            hf.stored_name(shape, name): hf.converted(shape, name, x, -1)
            for name, x in self.state_dict().items()
        }
        hf.write_tensors(tensors, Path(path), header or {hf.SHAPE: json.dumps(asdict(shape))})

    def export(self, folder: Path) -> None:
        """Write a folder that `from_pretrained` loads, transformers' and ours."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save_pretrained(folder / hf.WEIGHTS, hf.FOR_TRANSFORMERS)
        (folder / hf.CONFIG).write_text(json.dumps(hf.write_config(self.shape), indent=1) + "\n")
