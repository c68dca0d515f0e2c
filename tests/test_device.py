"""Speed layers one by one: each gives the numbers of the plain path, on weights that are shared."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minigrpo import Config, Transformer
from minigrpo.model import logprobs
from minigrpo.model.packing import plain_attention
from minigrpo.model.shape import ModelShape
from minigrpo.runtime import device as layers
from minigrpo.sampling.generate import Generation
from minigrpo.types import ConfigError

from .steps import make_trainer

CPU = torch.device("cpu")
SHAPE = ModelShape(vocab_size=23, context=40, layers=2, width=16, heads=2)
IDS = torch.arange(24).reshape(2, 12) % 23
config = Config.of


def loss_of(model: Transformer) -> Tensor:
    return model.logits(IDS).log_softmax(-1).square().mean()


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:-1", "", "cuda:99", "cpu:1"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        layers.pick_device(config(device=name).speed.device)


def test_each_local_process_has_a_cuda_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layers.pick_device("cpu", 3) == CPU
    chosen = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    found = [layers.pick_device(name, 3) for name in ("auto", "cuda", "cuda:1")]
    assert found == chosen == [torch.device("cuda", n) for n in (3, 3, 1)]


def test_an_apple_gpu_serves_one_process_without_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    mps = torch.device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert layers.pick_device("mps") == mps
    assert not layers.grad_scaler(config(device="mps", use_amp=True).speed, mps).is_enabled()
    with pytest.raises(ConfigError):
        layers.pick_device("mps", local_rank=1)
    with pytest.raises(ConfigError):
        layers.grad_scaler(config(use_amp=True, amp_dtype="float16").speed, mps)
    with pytest.raises(ConfigError):
        config(device="mps", compile_model=True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError):
        layers.pick_device("mps")


class NoFloat64(TorchDispatchMode):
    """An operation that gives float64 fails, as on an Apple GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            assert not (isinstance(x, Tensor) and x.dtype == torch.float64), func
        return out


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2, "base_dtype": "nf4", "use_amp": True}])
def test_what_a_device_computes_is_without_float64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Of a step, all but rewards and advantages, which are computed on the host."""
    settings |= {"kl_coef": 0.1, "num_iterations": 2, "top_p": 0.9, "device": "cpu"}
    run = make_trainer(tmp_path / "run", dtype=torch.float32, max_steps=1, **settings)
    monkeypatch.setitem(logprobs.MAX_LOGITS, "cpu", 1)  # in chunks
    monkeypatch.setattr(logprobs, "SMALLEST_CHUNK", 2)
    for owner, name in (
        (Generation, "_enter"), (Generation, "_run_round"), (Generation, "_update_slots"),
        (run.reference, "logp"), (run.learner, "learn"),
    ):  # fmt: skip
        plain = getattr(owner, name)

        def watched(*args: Any, plain: Any = plain) -> Any:
            with NoFloat64():
                return plain(*args)

        monkeypatch.setattr(owner, name, watched)
    run.one_step()
    run.run_dir.close()


@pytest.mark.parametrize("causal", [False, True])
def test_attention_without_kernels_is_attention(causal: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 5, generator=draw).double() for _ in range(3))
    mask = None if causal else torch.randn(7, 7, generator=draw).double()
    how: dict[str, Any] = {"attn_mask": mask, "is_causal": causal}
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, **how)
    torch.testing.assert_close(plain_attention(q, k, v, **how), expected, rtol=1e-12, atol=1e-12)


def test_amp_is_autocast_and_float16_is_for_cuda() -> None:
    x = torch.ones(2, 2)
    for options, dtype in (({}, torch.float32), ({"use_amp": True}, torch.bfloat16)):
        speed = config(**options).speed
        with layers.autocast(speed, CPU):
            assert (x @ x).dtype == dtype
        assert not layers.grad_scaler(speed, CPU).is_enabled()
    half = config(use_amp=True, amp_dtype="float16").speed
    with pytest.raises(ConfigError):
        layers.grad_scaler(half, CPU)
    assert not layers.grad_scaler(config(amp_dtype="float16").speed, CPU).is_enabled()


def test_a_low_precision_copy_of_frozen_weights_gives_autocasts_numbers() -> None:
    speed, model = config(use_amp=True).speed, Transformer(SHAPE, seed=1)
    model.h[0].requires_grad_(False)
    low = layers.low_precision_copy(speed, model)
    cast = [name for name, p in low.named_parameters() if p.dtype == torch.bfloat16]
    assert cast and all(name.startswith("h.0") for name in cast)
    pairs = zip(model.named_parameters(), low.parameters(), strict=True)
    assert all((a is b) == (name not in cast) for (name, a), b in pairs)
    with torch.no_grad(), layers.autocast(speed, CPU):
        assert torch.equal(low.logits(IDS), model.logits(IDS))


@pytest.mark.parametrize("option", ["gradient_checkpointing", "compile_model"])
def test_training_layers_do_not_touch_the_samplers_model(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = list[torch.nn.Module]()
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compiled.append(self))
    model = Transformer(SHAPE, seed=1)
    trained = layers.with_training_layers(config(**{option: True}), model)
    assert all(a is b for a, b in zip(model.parameters(), trained.parameters(), strict=True))
    assert [*model.state_dict()] == [*trained.state_dict()]
    assert model.run_block is not layers.recompute and not {*compiled} & {*model.modules()}
    if option == "compile_model":
        assert compiled == [*trained.h]
        assert all(a.attention is not b.attention for a, b in zip(trained.h, model.h, strict=True))
    else:
        ran = list[int]()
        trained.h[0].register_forward_pre_hook(lambda *_: ran.append(1))
        trained.logits(IDS)
    if option == "gradient_checkpointing":
        loss_of(trained).backward()
        assert len(ran) == 3  # the last time to recompute


def test_tf32_is_set_for_the_process() -> None:
    for use_tf32, precision in ((True, "high"), (False, "highest")):
        layers.set_up_process(config(use_tf32=use_tf32).speed, CPU)
        assert torch.get_float32_matmul_precision() == precision


def test_phases_add_up_and_the_peak_of_memory_counts_what_was_freed() -> None:
    timer, before = layers.PhaseTimer(CPU), layers.peak_memory_mib(CPU)
    for name in ("rollout", "update", "rollout"):
        with timer.phase(name):
            time.sleep(0.01)
    seconds = timer.take()
    assert seconds["rollout"] >= 0.02 and seconds["update"] >= 0.01
    assert timer.take() == {}
    torch.ones(int(before + 64) * 2**18)
    assert layers.peak_memory_mib(CPU) > before + 32


def test_the_profiler_writes_a_trace_of_the_main_process(tmp_path: Path) -> None:
    run = config(profile=True).run
    for is_main, traces in ((False, 0), (True, 1)):
        with layers.profiler(run, tmp_path, is_main) as profiler:
            for _ in range(7):
                torch.ones(3).sum()
                profiler.step()
        assert len(list(tmp_path.glob("profile/*.json"))) == traces
