"""GPT-2 weights as safetensors, in the layout that Hugging Face writes: the one format in which models come and go.

Their linear layers are stored `[in, out]`, ours (torch's) `[out, in]`; the output head is tied and therefore not stored.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
NOT_PARAMETERS = (".attn.bias", ".attn.masked_bias", "lm_head.weight")  # causal masks, and the tied head
HEAD_SIZE = 64  # every published GPT-2 has heads of this size


def _transpose(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.t().contiguous() if name.endswith(TRANSPOSED) else x for name, x in state.items()}


def save_gpt2(state: dict[str, Tensor], path: Path, *, heads: int) -> None:
    """Write a GPT's state dict as float32; the number of heads, which no tensor tells, goes into the file's header."""
    save_file(
        _transpose({name: x.detach().float().cpu().contiguous() for name, x in state.items()}),
        path,
        metadata={"format": "pt", "heads": str(heads)},
    )


def load_gpt2(path: Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    """The shape (the fields of `GPTShape`) and state dict of a GPT-2 file, or of the `model.safetensors` in a folder.

    Raises ValueError in one line that says what is missing or damaged.
    """
    file = path / "model.safetensors" if path.is_dir() else path
    try:
        with safe_open(file, framework="pt") as tensors:
            metadata = tensors.metadata() or {}
            state = {name.removeprefix("transformer."): tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ValueError(f"--init-from {path}: there is no file {file}") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"--init-from {path}: {file} is not a whole safetensors file ({error})") from None
    state = {name: x for name, x in state.items() if not name.endswith(NOT_PARAMETERS)}
    try:
        vocab_size, width = state["wte.weight"].shape
        context = len(state["wpe.weight"])
    except (KeyError, ValueError):
        raise ValueError(f"--init-from {path}: not a GPT-2: wte.weight [V, D] and wpe.weight [T, D] expected") from None
    layers = len({name.split(".")[1] for name in state if name.startswith("h.")})
    heads = int(metadata.get("heads", max(1, width // HEAD_SIZE)))
    shape = {"vocab_size": vocab_size, "context": context, "layers": layers, "width": width, "heads": heads}
    state = _transpose({name: x.to(torch.float32) for name, x in state.items()})
    return shape, state
