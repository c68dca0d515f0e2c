"""Load a model by name: the shipped one, a file, or a folder."""

from importlib.resources import files

import torch

from .transformer import Transformer

SHIPPED = "warm-start.safetensors"


def load_pretrained(name: str, matrices: torch.dtype | None = None) -> Transformer:
    """The shipped model (`shipped`), or the one at a path. Raises ValueError if it does not fit.

    `matrices` is the type of weights with two dimensions; None: float32, as all others.
    """
    if name == "shipped":
        name = str(files("minigrpo.assets").joinpath(SHIPPED))
    if not name:
        raise ValueError("must be shipped, scratch, or the path of a model, got nothing")
    return Transformer.from_pretrained(name, matrices)
