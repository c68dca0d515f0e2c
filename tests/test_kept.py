"""What the plan says that autograd keeps, beside what autograd saves."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from minigrpo import Config
from minigrpo.model import linear
from minigrpo.model.packing import PACKINGS
from minigrpo.model.shape import ModelShape
from minigrpo.model.transformer import Transformer
from minigrpo.runtime import accel
from minigrpo.runtime.base_model import add_lora
from minigrpo.runtime.step_counts import as_sampled, nothing_shared
from minigrpo.runtime.step_memory import StepMemory
from minigrpo.types import Completions

from .conftest import make_completions

SIZES: dict[str, Any] = {"vocab_size": 23, "context": 64, "width": 64, "heads": 4}
GROUPED: dict[str, Any] = {
    **SIZES,
    "kv_heads": 2,
    "mlp_width": 96,
    "norm": "rms",
    "projections": "separate",
    "mlp": "swiglu",
    "out_bias": False,
    "mlp_bias": False,
    "rope_theta": 100.0,
}
SHAPES = {
    "gpt2": ModelShape(**SIZES),
    "qwen2": ModelShape(**GROUPED),
    "qwen3": ModelShape(**GROUPED, qkv_bias=False, head_norm=True, head_dim=24, tied=False),
}
SOME = {"gpt2": "c_attn", "qwen2": "q_proj,up_proj", "qwen3": "v_proj,o_proj,down_proj"}
WAYS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "repeated prompts": {"packing": "repeated"},
    "checkpointing": {"gradient_checkpointing": True},
    "adapters": {"lora_rank": 3},
    "some adapters": {"lora_rank": 3, "lora_targets": "some", "base_dtype": "bfloat16"},
    "checkpointed adapters": {"lora_rank": 3, "gradient_checkpointing": True},
}


def saved(config: Config, shape: ModelShape, completions: Completions) -> float:
    """Bytes that autograd saves in a forward pass, parameters not counted."""
    model = Transformer(shape)
    add_lora(model, config.model)
    packing = PACKINGS[config.speed.packing](completions)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # kept, or a number would be used again

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with hooks, accel.autocast(config.speed, torch.device("cpu")):
        outputs = accel.with_training_layers(config, model)(packing.tokens, packing)
    assert outputs[0].requires_grad
    return sum(storage.nbytes() for storage in storages.values())


def planned(config: Config, shape: ModelShape, completions: Completions) -> dict[str, float]:
    lengths = {"prompt_len": 1.0, "completion_len": 1.0, "longest": 1.0}  # replaced
    counts = as_sampled(nothing_shared(config, **lengths), config, completions)
    return StepMemory(config, shape, counts, "cpu").by_kind()


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHAPES)
def test_a_block_keeps_what_the_plan_says(
    name: str, way: str, amp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # rounding up adds up to an eighth to the casts of inputs, which the plan leaves out
    monkeypatch.setattr(linear, "round_number", lambda count: count)
    settings = {**WAYS[way], "init_from": "scratch", "use_amp": amp}
    if "lora_targets" in settings:
        settings["lora_targets"] = SOME[name]
    config = Config.of(**settings, prompts_per_step=3, group_size=4)
    completions = make_completions(0, width=20, length=30)
    # the difference of one block: all share masks and positions, and the first one keeps less if
    # its input has no gradient
    shapes = [replace(SHAPES[name], layers=layers) for layers in (2, 3)]
    few, many = (saved(config, shape, completions) for shape in shapes)
    small, large = (planned(config, shape, completions) for shape in shapes)
    kinds = ["activations"]
    if not config.memory.gradient_checkpointing and amp:
        kinds.append("casts of weights")
    expected = sum(large[kind] - small[kind] for kind in kinds)
    assert expected == pytest.approx(many - few, rel=0.005)


def test_a_recomputed_block_keeps_what_it_keeps_without_checkpointing() -> None:
    shape, completions = SHAPES["qwen3"], make_completions(1)
    small = {"init_from": "scratch", "prompts_per_step": 3, "group_size": 4}
    plain = planned(Config.of(**small), shape, completions)
    config = Config.of(**small, gradient_checkpointing=True)
    checkpointed = planned(config, shape, completions)
    one, two = (
        planned(Config.of(**small), replace(shape, layers=layers), completions)["activations"]
        for layers in (1, 2)
    )
    assert plain["recomputed block"] == 0
    assert checkpointed["recomputed block"] == pytest.approx(two - one)
