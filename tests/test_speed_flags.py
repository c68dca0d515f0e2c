"""Speed and memory flags do what they say: the setting arrives, and the results stay."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minigrpo import Trainer, learner
from minigrpo.runtime import accel
from minigrpo.types import RewardTable

from .gradients import gradient_of, make_trainer, with_settings
from .pretend import pretend_cuda


def test_fused_and_plain_adamw_make_the_same_steps(tmp_path: Path) -> None:
    """In float64: fusing changes the order of the operations and nothing else."""
    options = {"learning_rate": 0.01, "weight_decay": 0.1, "warmup_steps": 0, "kl_coef": 0.1}
    trainers = {
        fused: make_trainer(tmp_path / str(fused), fused_optimizer=fused, **options)
        for fused in (True, False)
    }
    before = [p.detach().clone() for p in trainers[True].model.parameters()]
    for step in range(3):
        batch = trainers[False].source.batch(step)  # one batch, as rounding might flip a token
        for trainer in trainers.values():
            trainer.learner.learn(batch, step)
    for fused, trainer in trainers.items():
        assert [group["fused"] for group in trainer.learner.optimizer.param_groups] == [fused] * 2
    pairs = zip(before, *(t.model.parameters() for t in trainers.values()), strict=True)
    for start, fused_weight, plain_weight in pairs:
        torch.testing.assert_close(fused_weight, plain_weight, rtol=1e-9, atol=1e-12)
        assert (plain_weight - start).abs().max() > 1e-3


@pytest.fixture
def tf32_as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("tf32_as_before")
def test_tf32_is_set_and_unset_for_the_process(tmp_path: Path) -> None:
    for use, expected in ((True, "high"), (False, "highest")):
        make_trainer(tmp_path / str(use), use_tf32=use)
        assert torch.get_float32_matmul_precision() == expected


class Overheard:
    """Pending rewards that note when they are waited for."""

    def __init__(self, pending: Any, events: list[str]) -> None:
        self.pending, self.events = pending, events

    def result(self) -> RewardTable:
        self.events.append("wait")
        return self.pending.result()


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("dynamic_sampling", [0, 1])
def test_overlapped_rewards_are_those_of_the_same_batch(
    tmp_path: Path, kl_coef: float, dynamic_sampling: int
) -> None:
    """With overlap, all rollout batches are decoded before any reward is waited for."""
    options = {"rollout_batch_size": 2, "kl_coef": kl_coef, "dynamic_sampling": dynamic_sampling}
    batches, orders = [], []
    for overlap in (True, False):
        trainer = make_trainer(tmp_path / str(overlap), overlap_rewards=overlap, **options)
        events: list[str] = []
        submit = trainer.scorer.submit

        def listen(*args: Any, submit: Any = submit, events: list[str] = events) -> Overheard:
            events.append("submit")
            return Overheard(submit(*args), events)

        trainer.scorer.submit = listen  # type: ignore[method-assign,assignment]
        batches.append(trainer.source.batch(0))
        orders.append(events[:6])
        trainer.scorer.close()
    assert orders == [["submit"] * 3 + ["wait"] * 3, ["submit", "wait"] * 3]
    a, b = batches
    assert a.texts == b.texts and a.examples == b.examples
    assert a.rewards is not None and b.rewards is not None
    assert (a.rewards.total == b.rewards.total).all() and a.rewards.total.any()
    assert a.advantages is not None and torch.equal(a.advantages, b.advantages)  # type: ignore[arg-type]
    assert (a.ref_logp is None) == (kl_coef == 0)
    if kl_coef:
        assert torch.equal(a.ref_logp, b.ref_logp)  # type: ignore[arg-type]


def test_an_offloaded_reference_waits_on_the_host_and_gives_the_same_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a pretended device, because on a CPU there is nowhere to go."""
    gradients: list[list[Tensor]] = []
    with pretend_cuda(monkeypatch):
        for offload in (False, True):
            options = {"kl_coef": 0.1, "offload_reference": offload, "device": "cuda"}
            trainer = make_trainer(tmp_path / str(offload), **options)
            for _ in range(2):  # weights go to the device for one step, and are not kept there
                batch = trainer.source.batch(0)
                reference = trainer.reference.model  # type: ignore[attr-defined]
                where = {p.device.type for p in reference.parameters()}
                assert where == ({"cpu"} if offload else {"cuda"})
                assert {p.device.type for p in trainer.model.parameters()} == {"cuda"}
            assert batch.ref_logp is not None and batch.ref_logp.any()
            gradients.append([g.cpu() for g in gradient_of(trainer.learner, batch)])
    assert len(gradients[0]) > 0
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("micro_batch_size", [0, 2])
def test_the_ratio_is_one_in_the_first_inner_step_and_not_in_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_batch_size: int
) -> None:
    """The old log-probs are computed without gradients and apart from the update's forward."""
    options = {"num_iterations": 2, "learning_rate": 0.01, "warmup_steps": 0, "temperature": 0.8}
    trainer = make_trainer(tmp_path / "run", micro_batch_size=micro_batch_size, **options)
    furthest: list[float] = []
    plain = learner.policy_loss

    def listening(logp: Tensor, old: Tensor, *args: Any, **others: Any) -> Any:
        furthest.append(float((logp.detach() - old).abs().max()))
        return plain(logp, old, *args, **others)

    monkeypatch.setattr(learner, "policy_loss", listening)
    batch = trainer.source.batch(0)
    trainer.learner.learn(batch, 0)
    calls = len(furthest) // 2
    assert calls == (3 if micro_batch_size else 1)
    assert max(furthest[:calls]) < 1e-12  # float64
    assert min(furthest[calls:]) > 1e-4


def test_checkpointing_and_chunks_are_on_where_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gradients are equal by design, so that a flag which is lost would not be seen there."""
    trainer = make_trainer(tmp_path / "run")
    batch = trainer.source.batch(0)
    calls = list[int]()
    recompute = accel.recompute
    monkeypatch.setattr(accel, "recompute", lambda *args: calls.append(1) or recompute(*args))
    gradient_of(with_settings(trainer, gradient_checkpointing=False), batch)
    assert not calls
    gradient_of(with_settings(trainer, gradient_checkpointing=True), batch)
    assert len(calls) == trainer.model.shape.layers
    for chunked in (False, True):
        made: Trainer = make_trainer(tmp_path / str(chunked), chunked_logprobs=chunked)
        assert bool(made.model.logprob_chunk) == bool(made.learner.trained.logprob_chunk) == chunked
