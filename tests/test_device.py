"""Speed layers one by one: each gives the numbers of the plain path, on weights that are shared."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minigrpo import Config, Transformer
from minigrpo.model import transformer
from minigrpo.model.frozen_model import InferenceCopy
from minigrpo.model.packing import Packing, pack
from minigrpo.model.shape import ModelShape
from minigrpo.optimizer import grad_scaler
from minigrpo.runtime import device as layers

from .steps import SHAPES, make_completions
from .tiny import refused

CPU = torch.device("cpu")
IDS = torch.arange(24).reshape(2, 12) % 12
config = Config.of


def loss_of(model: Transformer) -> Tensor:
    return model.logits(IDS).log_softmax(-1).square().mean()


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:-1", "", "cuda:99", "cpu:1"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    refused(lambda: layers.pick_device(config(device=name).speed.device))


def test_each_local_process_has_a_cuda_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layers.pick_device("cpu", 3) == CPU
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    found = [layers.pick_device(name, 3) for name in ("auto", "cuda", "cuda:1")]
    assert found == chosen == [torch.device("cuda", n) for n in (3, 3, 1)]


def test_amp_is_autocast_and_float16_is_for_cuda() -> None:
    x = torch.ones(2, 2)
    for options, dtype in (({}, torch.float32), ({"use_amp": True}, torch.bfloat16)):
        speed = config(**options).speed
        with layers.autocast(speed, CPU):
            assert (x @ x).dtype == dtype
        assert not grad_scaler(speed, CPU).is_enabled()
    half = config(use_amp=True, amp_dtype="float16").speed
    refused(grad_scaler, half, CPU)
    assert not grad_scaler(config(amp_dtype="float16").speed, CPU).is_enabled()


@pytest.mark.parametrize("shape", SHAPES.values())
def test_an_inference_copy_gives_the_numbers_of_autocast(shape: ModelShape) -> None:
    speed = config(use_amp=True).speed
    model = Transformer(shape, seed=1)
    model.h[0].requires_grad_(False)
    copied = InferenceCopy(model, layers.product_dtype(speed))
    own = dict(model.named_parameters())
    for name, parameter in copied.model.named_parameters():
        assert (parameter is own.get(name)) == (parameter.dtype == torch.float32)
    places = [x.data_ptr() for x in copied.model.parameters()]
    for is_fresh in (True, False, True):
        if is_fresh:
            copied.refresh()
        with torch.no_grad(), layers.autocast(speed, CPU):
            same = torch.equal(copied.model.logits(IDS), model.logits(IDS))
        assert same == is_fresh
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += parameter.requires_grad * torch.randn_like(parameter)
    assert places == [x.data_ptr() for x in copied.model.parameters()]


@pytest.mark.parametrize("option", ["gradient_checkpointing", "compile_model"])
def test_training_layers_spare_the_sampler(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, ran = set(), []

    def fake_compile(function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        assert dynamic
        compiled.add(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", fake_compile)
    monkeypatch.setattr(transformer, "compiled_part", cache(transformer.compiled_part.__wrapped__))
    model = Transformer(SHAPES["gpt2"], seed=1)
    model.h[0].register_forward_pre_hook(lambda *_: ran.append(option))
    loss_of(model).backward()
    assert not compiled and len(ran) == 1
    packing = Packing(pack(make_completions(0)))
    model.checkpointing = option == "gradient_checkpointing"
    model.compiled = option == "compile_model"
    with torch.no_grad():
        model(packing)
    assert not compiled and len(ran) == 2
    model(packing).logp.sum().backward()
    if option == "compile_model":
        assert compiled == {"before_mixing", "after_mixing"} and len(ran) == 3
    else:
        assert not compiled and len(ran) == 4  # again in the backward pass


def test_tf32_is_set_for_the_process() -> None:
    for use_tf32, precision in ((True, "high"), (False, "highest")):
        layers.set_up_process(config(use_tf32=use_tf32).speed, CPU)
        assert torch.get_float32_matmul_precision() == precision


def test_the_profiler_writes_a_trace_of_the_main_process(tmp_path: Path) -> None:
    run = config(profile=True).run
    for is_main, traces in ((False, 0), (True, 1)):
        with layers.profiler(run, tmp_path, is_main) as profiler:
            for _ in range(7):
                torch.ones(3).sum()
                profiler.step()
        assert len(list(tmp_path.glob("profile/*.json"))) == traces
