"""Whole runs on a simulated device that is not the host: what CUDA would reject
is an error here too.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import cli, probe
from benchmarks.layers import LEAN
from minigrpo import Config, Trainer
from minigrpo.model.transformer import Transformer
from minigrpo.runtime import accel
from minigrpo.runtime.rng import uniforms
from minigrpo.sampling.cached_decoder import CachedDecoder
from minigrpo.sampling.cuda_graphs import CUDAGraphCache
from minigrpo.sampling.decoders import ReplicatedPrefixDecoder, SharedPrefixDecoder
from minigrpo.sampling.generate import ROUNDS_BETWEEN_CHECKS, generate

from .conftest import EOS, SHAPES, make_completions
from .gradients import GROUPED, TINY
from .pretend import pretend_cuda
from .test_benchmark import TINY as TINY_WORK


def test_the_pretended_device_refuses_what_cuda_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_cuda(monkeypatch):
        x = torch.ones(3, requires_grad=True)
        there = x.to("cuda")
        for made in (
            there,
            there + 1,
            there[:2],
            torch.arange(3, device=there.device),
            there.new_empty(2),
        ):
            assert made.device.type == "cuda" and made.is_cuda
        assert there.cpu().device.type == "cpu" and x.device.type == "cpu"
        for wrong in (
            lambda: there + x,
            lambda: there[torch.tensor([0])],
            lambda: torch.cat([there, x]),
        ):
            with pytest.raises(RuntimeError, match="two devices"):
                wrong()
        with pytest.raises(TypeError, match="to numpy"):
            there.detach().numpy()
        leaf = there.detach().requires_grad_()
        (leaf * leaf).sum().backward()
        assert leaf.grad is not None and leaf.grad.is_cuda


WAYS: dict[str, dict[str, Any]] = {
    "plain": {
        "packing": "repeated",
        "kv_cache": False,
        "speculative_decoding": False,
        "num_iterations": 2,
        "loss": "gspo",
    },
    "fast": {"use_amp": True, "low_precision_weights": True, "kl_coef": 0.1},
    "lean": {**LEAN, "micro_batch_size": 2, "rollout_batch_size": 2, "kl_coef": 0.1},
    "truncated": {
        "loss": "cispo",
        "sampler_correction": True,
        "top_k": 50,
        "top_p": 0.9,
        "dynamic_sampling": 1,
    },
    "recorded, grouped queries": {
        **GROUPED,
        "use_amp": True,
        "low_precision_weights": True,
        "cuda_graphs": True,
    },
    "half": {"use_amp": True, "amp_dtype": "float16", "offload_optimizer": True},
    "supervised": {"loss": "nll", "group_size": 1},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_and_its_resumption_have_nothing_on_two_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    options = {
        **TINY,
        "reward_weights": "",
        "max_steps": 4,
        **WAYS[way],
        "out_dir": str(tmp_path),
        "device": "cuda",
    }
    with pretend_cuda(monkeypatch):
        for steps, fused in (
            (1, False),
            (2, True),
            (3, False),
        ):  # whose counts of steps lie in different places
            more = {
                "stop_after": steps,
                "fused_optimizer": fused,
                "resume": "auto" if steps > 1 else "",
            }
            trainer = Trainer(Config.of(**{**options, **more}), quiet=True)
            assert trainer.model.wte.weight.is_cuda
            trainer.fit()
    assert json.loads((tmp_path / "summary.json").read_text())["step"] == 3


@pytest.mark.parametrize("what", [["steps"], ["memory", "--group-sizes", "2"]])
def test_a_benchmark_has_nothing_on_two_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: list[str]
) -> None:
    monkeypatch.setattr("benchmarks.memory.logprobs_alone.__defaults__", (40, 300, 16))
    monkeypatch.setattr(accel, "compile_blocks", lambda model: None)
    for rate in ("matmul_rate", "bandwidth"):  # products of a size for GPUs
        monkeypatch.setattr(probe, rate, lambda *args: 1e12)
    only = ["--only", "tree", "lean"] if what == ["steps"] else []
    with pretend_cuda(monkeypatch):
        cli.main([*what, *TINY_WORK[:-1], "cuda", *only, "--out-dir", str(tmp_path)])
    rows = json.loads(next(tmp_path.glob("*.json")).read_text())["rows"]
    assert {row["status"] for row in rows} == {"ok"}


@pytest.mark.parametrize("decoder", [ReplicatedPrefixDecoder, SharedPrefixDecoder])
@pytest.mark.parametrize("num_samples", [1, 5])
def test_the_host_waits_at_most_once_per_round(
    monkeypatch: pytest.MonkeyPatch, decoder: type[CachedDecoder], num_samples: int
) -> None:
    """And without drafts, where nothing is decided on the host, in one round of four."""
    before_round = list[int]()
    step = CachedDecoder.step

    def counted(self: CachedDecoder, *args: Any) -> Tensor:
        before_round.append(device.waits)
        return step(self, *args)

    monkeypatch.setattr(CachedDecoder, "step", counted)
    with pretend_cuda(monkeypatch) as device:
        model = Transformer(SHAPES["gpt2"], seed=1).cuda()
        c = make_completions(0, prompts=6).to("cuda")
        u = torch.from_numpy(uniforms(0, "test", 0, np.arange(6), num_samples, 24)).to("cuda")
        for drafts in (None, c.completion_ids[:, 0]):
            before_round.clear()
            generate(
                model,
                c.prompt_ids,
                c.prompt_len,
                stops=(),
                max_new_tokens=24,
                num_samples=num_samples,
                u=u,
                drafts=drafts,
                decoder=decoder,
            )
            waits = np.diff(before_round)
            assert len(waits) > 15 and waits.max() == 1
            if drafts is None:
                assert waits.sum() <= -(-len(waits) // ROUNDS_BETWEEN_CHECKS)


@pytest.mark.parametrize(("shape", "amp"), [("gpt2", True), ("grouped-query", False)])
def test_recorded_rounds_write_what_rounds_write(
    monkeypatch: pytest.MonkeyPatch, shape: str, amp: bool
) -> None:
    """Rollout after rollout, of other prompts and weights; a round is recorded once for a shape,
    and never waits.
    """
    with pretend_cuda(monkeypatch):
        model, graphs = Transformer(SHAPES[shape], seed=1).cuda(), CUDAGraphCache()
        with torch.no_grad():
            # surer of itself, so that completions part one by one, and slots become more
            model.head_weight.mul_(3)
        recorded = []
        for turn in range(4):
            c = make_completions(turn % 2, prompts=6).to("cuda")
            u = torch.from_numpy(uniforms(0, "test", turn, np.arange(6), 5, 9)).to("cuda")
            options: dict[str, Any] = {
                "stops": [EOS],
                "max_new_tokens": 9,
                "num_samples": 5,
                "u": u,
            }
            with torch.autocast("cuda", torch.bfloat16, enabled=amp):
                first = generate(model, c.prompt_ids, c.prompt_len, **options)
                options["drafts"] = first.completion_ids[:, 0]
                plain = generate(model, c.prompt_ids, c.prompt_len, **options)
                found = generate(
                    model, c.prompt_ids, c.prompt_len, decoder=graphs.decoder, **options
                )
            assert torch.equal(found.completion_ids, plain.completion_ids)
            assert torch.equal(found.completion_mask, plain.completion_mask)
            recorded.append(dict(graphs.captured))
            with torch.no_grad():
                next(model.h[0].mlp.parameters()).mul_(1.1)
        assert {slots for slots, *_ in recorded[3]} == {16, 32}
        assert {window for _, window, _ in recorded[3]} >= {1, 2}
        assert all(recorded[3][shape] is a_round for shape, a_round in recorded[2].items())
