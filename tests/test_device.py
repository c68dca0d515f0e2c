"""The same runs with everything on a device that is not the host: what CUDA would refuse is an error here too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmark
from minigrpo import Config, Trainer, accel
from minigrpo.tools import probe
from minigrpo.tools.bench_steps import LEAN

from .gradients import TINY
from .pretend import pretend_cuda
from .test_benchmark import TINY as TINY_WORK


def test_the_pretended_device_refuses_what_cuda_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_cuda(monkeypatch):
        x = torch.ones(3, requires_grad=True)
        there = x.to("cuda")
        for made in (there, there + 1, there[:2], torch.arange(3, device=there.device), there.new_empty(2)):
            assert made.device.type == "cuda" and made.is_cuda
        assert there.cpu().device.type == "cpu" and x.device.type == "cpu"
        for wrong in (lambda: there + x, lambda: there[torch.tensor([0])], lambda: torch.cat([there, x])):
            with pytest.raises(RuntimeError, match="two devices"):
                wrong()
        with pytest.raises(TypeError, match="to numpy"):
            there.detach().numpy()
        leaf = there.detach().requires_grad_()
        (leaf * leaf).sum().backward()
        assert leaf.grad is not None and leaf.grad.is_cuda


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"layout": "repeated", "kv_cache": False, "draft_answers": False, "num_iterations": 2, "loss": "gspo"},
    "fast": {"use_amp": True, "low_precision_weights": True, "kl_coef": 0.1},
    "lean": {**LEAN, "micro_batch_size": 2, "kl_coef": 0.1},
    "truncated": {"loss": "cispo", "sampler_correction": True, "top_k": 50, "top_p": 0.9, "resample_dead_groups": 1},
    "supervised": {"loss": "nll", "group_size": 1, "fused_optimizer": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_and_its_resumption_have_nothing_on_two_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    options = {**TINY, "reward_weights": "", "max_steps": 4, **WAYS[way], "out_dir": str(tmp_path), "device": "cuda"}
    with pretend_cuda(monkeypatch):
        for more in ({"stop_after": 2}, {"resume": "auto"}):
            trainer = Trainer(Config(**{**options, **more}), quiet=True)
            assert trainer.model.wte.weight.is_cuda
            trainer.fit()
    assert json.loads((tmp_path / "summary.json").read_text())["step"] == 4


@pytest.mark.parametrize("what", [["steps"], ["memory", "--group-sizes", "2"]])
def test_a_benchmark_has_nothing_on_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: list[str]) -> None:
    monkeypatch.setattr("minigrpo.tools.bench_memory.logprobs_alone.__defaults__", (40, 300, 16))
    monkeypatch.setattr(accel, "compile_blocks", lambda config, model: None)
    for rate in ("matmul_rate", "bandwidth"):  # products of a size for GPUs
        monkeypatch.setattr(probe, rate, lambda *args: 1e12)
    only = ["--only", "tree", "lean"] if what == ["steps"] else []
    with pretend_cuda(monkeypatch):
        benchmark.main([*what, *TINY_WORK[:-1], "cuda", *only, "--out-dir", str(tmp_path)])
    rows = json.loads(next(tmp_path.glob("*.json")).read_text())["rows"]
    assert {row["status"] for row in rows} == {"ok"}
