"""What each parameter of a model is. Initialisation, storage, weight decay and `plan` read it."""

from typing import Literal

from torch import nn

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


def role_of(module: nn.Module, name: str) -> Role:
    """The role of a module's own parameter."""
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
    """The role of each parameter, by its name."""
    found: dict[str, Role] = {}
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            found[f"{path}.{name}".lstrip(".")] = role_of(module, name)
    return found
