"""Load a model by name: the shipped one, a file, or a folder."""

from importlib.resources import files

from .transformer import Transformer

SHIPPED = "warm-start.safetensors"


def load_pretrained(name: str) -> Transformer:
    """The shipped model (`shipped`), or the one at a path. Raises ValueError if it does not fit."""
    if name == "shipped":
        name = str(files("minigrpo.assets").joinpath(SHIPPED))
    return Transformer.from_pretrained(name)
