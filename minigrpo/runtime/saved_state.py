"""Compare the state in a checkpoint with that of the running objects, before any of it is loaded.

torch loads what it is given: text in place of betas fails in the first update, and a moment of
another shape makes a fused kernel write beyond its end.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from ..model.shape import ModelShape
from .text import quoted

PLAIN = (bool, int, float, str)


def misfit(found: Any, own: Any, name: str) -> str:
    """Where the form of a saved value is not that of the running one; "" if it is the same.

    The form is the keys of dicts, the lengths of lists, the types of plain values, and the shapes
    of tensors. `name` is what the answer calls the value.
    """
    if isinstance(own, Tensor):
        return _misfit_of_tensor(found, own, name)
    if isinstance(own, Mapping) and isinstance(found, Mapping):
        for key in own.keys() ^ found.keys():
            return f"{name}.{key} is {'missing' if key in own else 'unknown'}"
        return _first(misfit(found[key], x, f"{name}.{key}") for key, x in own.items())
    if isinstance(own, list | tuple) and isinstance(found, list | tuple):
        if len(found) != len(own):
            return f"{name} has {len(found)} parts, not {len(own)}"
        pairs = enumerate(zip(found, own, strict=True))
        return _first(misfit(x, y, f"{name}.{number}") for number, (x, y) in pairs)
    same = type(found) is type(own) or (type(own) is float and type(found) is int)
    return "" if same else f"{name} is {quoted(found)}"


def shape_of(state: Mapping[str, Any]) -> ModelShape:
    """The shape of the model in a checkpoint.

    Raises ValueError or TypeError for one that no model has, or that is not that of the weights: a
    model of a billion layers would be built before anything is compared.
    """
    found, weights = state["shape"], state["model"]
    sizes = {k: x for k, x in asdict(ModelShape(vocab_size=1)).items() if type(x) in PLAIN}
    common = found.keys() & sizes.keys()
    if problem := misfit({k: found[k] for k in common}, {k: sizes[k] for k in common}, "shape"):
        raise ValueError(problem)
    shape = ModelShape(**found)
    if shape.layers > len(weights):
        raise ValueError(f"shape.layers is {shape.layers}, with {len(weights)} tensors")
    return shape


def _misfit_of_tensor(found: Any, own: Tensor, name: str) -> str:
    if not isinstance(found, Tensor):
        return f"{name} is {quoted(found)}"
    if found.shape != own.shape:
        return f"{name} has the shape {list(found.shape)}, not {list(own.shape)}"
    if found.is_floating_point() != own.is_floating_point():
        return f"{name} has the type {found.dtype}, not {own.dtype}"
    if own.is_contiguous() and not found.is_contiguous():  # numbers that share their memory
        return f"{name} has the strides {list(found.stride())}, not {list(own.stride())}"
    return ""


def _first(problems: Iterable[str]) -> str:
    return next(filter(None, problems), "")
