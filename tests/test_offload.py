"""--offload-optimizer: other memory, the same numbers."""

from typing import Any

import pytest
import torch

from minigrpo.model.transformer import Transformer
from minigrpo.runtime.offloaded_optimizer import MOMENTS, OffloadedAdamW
from minigrpo.runtime.optim import make_optimizer

from .conftest import SHAPES
from .pretend import pretend_cuda

STEPS = 3


class Trained:
    """A model on the pretended device, and its optimizer."""

    def __init__(self, *, offload: bool, fused: bool) -> None:
        self.model = Transformer(SHAPES["grouped-query"], seed=1).to("cuda")
        self.optimizer = make_optimizer(
            self.model, learning_rate=0.01, weight_decay=0.1, fused=fused, offload=offload
        )

    def step(self, number: int) -> None:
        """A step with a gradient that depends on its number; a parameter has none in the first."""
        for place, parameter in enumerate(self.model.parameters()):
            generator = torch.Generator().manual_seed(100 * number + place)
            gradient = torch.randn(parameter.shape, generator=generator).to("cuda")
            parameter.grad = None if place + number == 0 else gradient
        self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().cpu() for parameter in self.model.parameters()]

    def state(self) -> dict[str, Any]:
        """The state, as a checkpoint that is loaded has it."""
        state = self.optimizer.state_dict()
        on_host = {
            number: {name: x.cpu().clone() for name, x in moments.items()}
            for number, moments in state["state"].items()
        }
        return {**state, "state": on_host}


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_moments_in_host_memory_give_the_same_weights_and_states(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretend_cuda(monkeypatch):
        plain, offloaded = (Trained(offload=offload, fused=fused) for offload in (False, True))
        for number in range(STEPS):
            plain.step(number)
            offloaded.step(number)
        assert equal(plain.weights(), offloaded.weights())
        states = plain.optimizer.state.values(), offloaded.optimizer.state.values()
        for there, here in zip(*states, strict=True):
            assert all(there[name].is_cuda and not here[name].is_cuda for name in MOMENTS)
            assert there["step"].is_cuda == here["step"].is_cuda == fused
        a, b = plain.state(), offloaded.state()
        assert a["param_groups"] == b["param_groups"]
        assert a["state"].keys() == b["state"].keys()
        for number, moments in a["state"].items():
            assert moments.keys() == b["state"][number].keys()
            assert equal([*moments.values()], [b["state"][number][name] for name in moments])

        # each goes on from the other's state
        plain.optimizer.load_state_dict(b)
        offloaded.optimizer.load_state_dict(a)
        assert not any(
            state[name].is_cuda for state in offloaded.optimizer.state.values() for name in MOMENTS
        )
        plain.step(STEPS)
        offloaded.step(STEPS)
        assert equal(plain.weights(), offloaded.weights())


def test_a_state_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_cuda(monkeypatch):
        offloaded = Trained(offload=True, fused=True)
        offloaded.step(0)
        state = offloaded.state()
        first, second = state["param_groups"]
        with pytest.raises(ValueError, match="parameter groups"):
            offloaded.optimizer.load_state_dict({**state, "param_groups": [first]})
        short = {**second, "params": second["params"][1:]}
        with pytest.raises(ValueError, match="size of optimizer's group"):
            offloaded.optimizer.load_state_dict({**state, "param_groups": [first, short]})


def test_a_model_on_the_host_has_the_plain_optimizer() -> None:
    model = Transformer(SHAPES["gpt2"])
    options: dict[str, Any] = {"learning_rate": 1e-3, "weight_decay": 0.0, "fused": True}
    assert not isinstance(make_optimizer(model, offload=True, **options), OffloadedAdamW)
