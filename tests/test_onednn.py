"""Float32 products by oneDNN: the same values and gradients as torch's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minigrpo import Config
from minigrpo.model import linear as products
from minigrpo.model.linear import Linear, by_onednn, linear, onednn_is_faster, use_onednn
from minigrpo.model.logprobs import token_logprobs
from minigrpo.runtime.no_effect import Situation, without_effect
from minigrpo.tasks.registry import load_task

from .conftest import SHAPES

pytestmark = pytest.mark.skipif(not products.has_onednn(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = [*products._enabled]
    yield
    products._enabled[:] = before


def leaf(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("shape", [(37, 64), (5, 41, 64), (1, 64), (40, 64)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_gradients_are_those_of_float64(shape: tuple[int, ...], has_bias: bool) -> None:
    x, weight = leaf(*shape, seed=0), leaf(40_000, 64, seed=1)
    bias = leaf(40_000, seed=2) if has_bias else None
    use_onednn(True)
    assert by_onednn(x, weight)
    inputs = [a for a in (x, weight, bias) if a is not None]
    out = linear(x, weight, bias)
    slope = torch.cos(out.detach())
    found = [out, *torch.autograd.grad(out, inputs, slope)]
    with torch.no_grad():
        assert linear(x, weight, bias).equal(out)
    wide = [a.detach().double().requires_grad_() for a in inputs]
    exact = torch.nn.functional.linear(*wide)
    for mine, right in zip(
        found, [exact, *torch.autograd.grad(exact, wide, slope.double())], strict=True
    ):
        assert mine.shape == right.shape
        assert (mine - right).abs().max() < 1e-5 * right.abs().max()


def test_frozen_weights_and_inputs_without_gradients_get_none() -> None:
    use_onednn(True)
    layer = Linear(128, 1024)
    torch.nn.init.normal_(layer.weight, std=0.1)
    torch.nn.init.zeros_(layer.bias)
    x = torch.randn(64, 128)
    layer(x).sum().backward()
    assert layer.weight.grad is not None and x.grad is None
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(1024, -1), rtol=1e-4, atol=1e-4)
    layer.weight.requires_grad_(False)
    layer.weight.grad = None
    (grad,) = torch.autograd.grad(layer(x.requires_grad_()).sum(), x)
    assert layer.weight.grad is None
    torch.testing.assert_close(grad, layer.weight.sum(0).expand(64, -1), rtol=1e-4, atol=1e-4)


def test_chunked_log_probs_are_the_same_with_and_without() -> None:
    targets = torch.arange(40) * 7
    results = []
    for enabled in (True, False):
        use_onednn(enabled)
        hidden, head = leaf(40, 64, seed=3), leaf(3000, 64, seed=4)
        assert by_onednn(hidden, head) == enabled
        logp, entropy = token_logprobs(hidden, head, targets, 0.7, chunk=16)
        results.append([logp, entropy, *torch.autograd.grad(logp.sum(), (hidden, head))])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_only_large_float32_products_on_a_cpu_are_computed_with_it() -> None:
    use_onednn(True)
    x, weight = torch.randn(64, 128), torch.randn(1024, 128)
    assert by_onednn(x, weight)
    assert not by_onednn(x[:2], weight)
    assert not by_onednn(x.repeat(9, 1), weight[:1000])
    assert not by_onednn(x.double(), weight.double())
    assert not by_onednn(x, weight.bfloat16())
    assert not by_onednn(x.to("meta"), weight.to("meta"))
    use_onednn(False)
    assert not by_onednn(x, weight)


@pytest.mark.parametrize(
    ("vendor", "capability", "faster"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        ("", "AVX512", False),  # no /proc/cpuinfo
    ],
)
def test_it_is_chosen_by_the_processor(
    vendor: str, capability: str, faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if vendor:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(products, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    onednn_is_faster.cache_clear()
    assert onednn_is_faster() == faster
    config = Config.of(onednn=False)
    situation = Situation(config, torch.device("cpu"), 1, SHAPES["gpt2"], load_task("math", seed=0))
    assert ("--no-onednn (this CPU" in without_effect(situation)) == (not faster)
    onednn_is_faster.cache_clear()
