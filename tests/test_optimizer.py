"""AdamW's groups, its schedule, and the variant that keeps moments in host memory."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from minigrpo.config import Config
from minigrpo.optimizer import BETAS, FINAL_RATE, OffloadedAdamW, learning_rate_at, make_optimizer

OPTIONS = {"learning_rate": 0.01, "weight_decay": 0.1, "fused_optimizer": False}


def model(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    made[0].bias.requires_grad_(False)
    return made.to(device)


def step(optimizer: torch.optim.Optimizer, number: int) -> None:
    """A step with a gradient that depends on its number; a parameter has none in the first."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for place, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(100 * number + place)
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.grad = None if place + number == 0 else gradient
    optimizer.step()


def test_matrices_alone_decay_and_frozen_weights_are_left_out() -> None:
    made = model()
    optimizer = make_optimizer(made, Config.of(**OPTIONS))
    matrices, others = optimizer.param_groups
    names = {id(p): name for name, p in made.named_parameters()}
    assert [names[id(p)] for p in matrices["params"]] == ["0.weight", "2.weight"]
    assert [names[id(p)] for p in others["params"]] == ["1.weight", "1.bias", "2.bias"]
    assert matrices["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    assert type(optimizer) is torch.optim.AdamW
    assert matrices["betas"] == BETAS


def test_the_learning_rate_warms_up_and_falls_to_a_tenth_by_a_cosine() -> None:
    config = Config.of(learning_rate=2.0, warmup_steps=4, max_steps=105)
    rates = [learning_rate_at(step, config) for step in range(110)]
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    quarter = (1 + math.cos(math.pi / 4)) / 2
    assert rates[29] == pytest.approx(2 * (FINAL_RATE + (1 - FINAL_RATE) * quarter))
    assert rates[104:] == pytest.approx([2 * FINAL_RATE] * 6)
    shortest = Config.of(learning_rate=1.0, warmup_steps=0, max_steps=1)
    assert learning_rate_at(0, shortest) == 1.0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fused", [False, True])
def test_moments_in_host_memory_give_the_same_weights_and_states(
    device: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":  # where there is nothing to wait for
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    models = [model(device), model(device)]
    config = Config.of(**{**OPTIONS, "fused_optimizer": fused})
    plain, same = (make_optimizer(one, config) for one in models)
    offloaded = OffloadedAdamW(same.param_groups)

    def compare() -> None:
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(a, b)
            there = plain.state.get(a, {})
            here = offloaded.state.get(b, {})
            assert there.keys() == here.keys()
            for name, moment in here.items():
                assert torch.equal(moment, there[name].cpu())
                assert not moment.is_cuda

    def on_host(optimizer: torch.optim.Optimizer) -> Any:
        return tree_map_only(torch.Tensor, lambda x: x.cpu().clone(), optimizer.state_dict())

    for number in range(4):
        if number == 3:  # each goes on from the other's state
            first = on_host(plain)
            second = on_host(offloaded)
            assert first["param_groups"] == second["param_groups"]
            plain.load_state_dict(second)
            offloaded.load_state_dict(first)
        step(plain, number)
        step(offloaded, number)
        compare()
