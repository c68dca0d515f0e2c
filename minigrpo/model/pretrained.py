"""Where a model's weights come from: the one that ships, a file, or a folder."""

from importlib.resources import files

from .transformer import Transformer

SHIPPED = "warm-start.safetensors"


def load_pretrained(name: str) -> Transformer:
    """The model that ships (`shipped`), or one by path. Raises ValueError if it does not fit."""
    if name == "shipped":
        name = str(files("minigrpo.assets").joinpath(SHIPPED))
    return Transformer.from_pretrained(name)
