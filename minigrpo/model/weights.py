"""A model's weights: what each is, random initialisation, storage, and files."""

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor, nn

from ..errors import refusing
from ..hub import CONFIG
from . import hf
from .config_json import write_config
from .linear import to_nf4
from .shape import ModelShape

Role = Literal[
    "matrix",  # of a linear layer or an adapter
    "embedding",  # a vector per token or position
    "kernel",  # of a convolution
    "decay",  # how fast a state decays
    "scale",  # of a norm
    "bias",
]
# what a regulariser draws to 0, and what may be stored in 16 bits
DECAYING: tuple[Role, ...] = ("matrix", "embedding", "kernel")
LARGE: tuple[Role, ...] = ("matrix", "embedding")
# layers whose outputs are added to the residual stream; they start smaller
INTO_RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


class Weights(nn.Module):
    """The methods of a Transformer that fill, store, read and write its weights."""

    shape: ModelShape
    wte: nn.Embedding
    wpe: nn.Embedding | None
    head: nn.Linear | None

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Allocate the weights in the host's memory, and fill them with random numbers."""
        self.to_empty(device="cpu")
        # GPT-2's scheme for every family, with two departures. After 400 supervised steps of a
        # GPT-2 on chess, the loss is 37 nats per example with both, 75 with the first, 80 without.
        # 1. The standard deviation scales as 1/sqrt(width), and is GPT-2's 0.02 at width 768.
        shape = self.shape
        std = 0.02 * math.sqrt(768 / shape.width)
        role = roles(self)
        for name, parameter in self.named_parameters():
            if role[name] == "bias":
                parameter.zero_()
            elif role[name] == "scale":
                parameter.fill_(1.0)
            elif role[name] == "decay":
                parameter.uniform_(0.0, math.log(16), generator=generator)
            elif role[name] == "kernel":
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            else:
                is_residual = name.endswith(INTO_RESIDUAL)
                scale = 1 / math.sqrt(2 * len(shape.layers)) if is_residual else 1.0
                parameter.normal_(0.0, std * scale, generator=generator)
        if self.wpe is None:
            return
        # 2. The learned positions start as sinusoids. A fixed offset is then a rotation, which
        # makes copying from that offset easier to learn.
        frequencies = torch.logspace(0, -math.log10(2000), shape.width // 2)
        angles = torch.arange(shape.context)[:, None] * frequencies  # [T, D/2]
        sinusoids = torch.cat([angles.sin(), angles.cos()], dim=1)
        self.wpe.weight.copy_(math.sqrt(2) * std * sinusoids)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        matrix_dtype: str = "float32",
        *,
        seed: int = 0,
    ) -> Self:
        """Read a model from a folder of Hugging Face's or a safetensors file, and `store` it.

        A config.json alone gives random weights from `seed`. Raises ConfigError for tensors that
        are missing, left over or misshapen.
        """
        shape, tensors = hf.read_model(Path(path))
        with refusing(f"{path}: the weights do not fit the shape"):
            model = cls(shape, seed if tensors is None else None)
            if tensors is not None:
                state = hf.to_state(shape, model.state_dict().keys(), tensors)
                model.load_state_dict(state, assign=True)
        model.store(matrix_dtype)
        return model

    def sharing_weights(self) -> Self:
        """A copy of the modules that shares their parameters."""
        return copy.deepcopy(self, {id(parameter): parameter for parameter in self.parameters()})

    def store(self, matrix_dtype: str) -> None:
        """Copy the weights one by one: matrices in float32, bfloat16 or nf4, vectors in float32.

        With nf4 the linear layers of blocks are frozen, and the other matrices are bfloat16.
        """
        role = roles(self)
        for name, parameter in self.named_parameters():
            precision = matrix_dtype if role[name] in LARGE else "float32"
            if precision == "nf4" and role[name] == "matrix" and name.startswith("h."):
                parameter.data = to_nf4(parameter.requires_grad_(False))
            else:
                dtype = torch.get_default_dtype() if precision == "float32" else torch.bfloat16
                parameter.data = parameter.detach().to(dtype, copy=True).contiguous()

    def trim_vocab(self, number: int) -> None:
        """Keep only the first `number` tokens, so that vocabulary padding is never sampled."""
        self.shape = replace(self.shape, vocab_size=number)
        for module in (self.wte, self.head):
            if module is not None:
                module.weight = nn.Parameter(module.weight.detach()[:number].clone())

    def save_pretrained(
        self,
        path: str | Path,
        header: Mapping[str, str] | None = None,
        state: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write a float32 file for `from_pretrained`, by default with the shape as its header.

        `state` has whole tensors if those of the model are in shards.
        """
        shape = self.shape
        tensors = {}
        for name, tensor in (state or self.state_dict()).items():  # the inverse of `hf.to_state`
            tensors[hf.stored_name(shape, name)] = hf.converted(shape, name, tensor, to_file=True)
        if header is None:
            header = {hf.SHAPE: json.dumps(asdict(shape))}
        hf.write_tensors(tensors, Path(path), header)

    def export(self, folder: Path) -> None:
        """Write a folder that `from_pretrained` of transformers and of this class loads."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save_pretrained(folder / hf.WEIGHTS, hf.FOR_TRANSFORMERS)
        config = json.dumps(write_config(self.shape), indent=1)
        (folder / CONFIG).write_text(f"{config}\n")


def role_of(module: nn.Module, name: str) -> Role:
    if name == "bias":
        return "bias"
    if isinstance(module, nn.Linear):
        return "matrix"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return "scale"
    role: Role = module.role  # type: ignore[assignment]
    return role


def roles(model: nn.Module) -> dict[str, Role]:
    found: dict[str, Role] = {}
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            found[f"{path}.{name}".lstrip(".")] = role_of(module, name)
    return found
