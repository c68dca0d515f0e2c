"""Rollouts: zero-variance groups, overlong completions, truncated sampling, advantages."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from minigrpo.advantages import advantages, shuffled
from minigrpo.model import packing
from minigrpo.model.packing import Packing, pack
from minigrpo.types import Example, RewardTable

from .steps import make_trainer


def test_overlong_completions_are_kept_or_masked(tmp_path: Path) -> None:
    batches = {}
    for overlong in ("keep", "mask"):
        trainer = make_trainer(tmp_path / overlong, overlong=overlong, scale="none", kl_coef=0.0)
        batches[overlong] = trainer.batches.batch(0)
    keep, mask = batches.values()
    assert keep.texts == mask.texts
    completions = keep.completions
    ended = completions.ended
    assert 0 < ended.sum() < ended.numel()

    assert keep.loss_mask is None
    assert torch.equal(mask.loss_mask, ended)
    alive, _ = trainer.learner.prepare(replace(mask, reference_logp=torch.zeros(ended.shape)))
    counted = alive.completions.completion_mask
    assert torch.equal(counted.any(-1), ended)
    assert torch.equal(counted[ended], completions.completion_mask[ended])


@pytest.mark.parametrize("estimator", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "mean", "none"])
def test_rewards_that_differ_by_rounding_are_equal(estimator: str, scale: str) -> None:
    total = np.array(
        [
            [0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2],
            [0.3, 0.3, 0.3, 0.3],
            [0.3, 0.3, 0.3, 0.3 + 1e-9],
        ]
    )
    assert total[0, 0] != total[0, 1]
    table = RewardTable(total, np.ones(total.shape, dtype=bool), {})
    assert table.zero_variance.tolist() == [True, True, False]
    found = advantages(torch.from_numpy(total), estimator=estimator, scale=scale)
    assert found.any(-1).tolist() == [False, False, True]


def test_the_reference_has_the_temperature_of_the_policy(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", temperature=0.6, kl_coef=0.1)
    batch = trainer.batches.batch(0)
    repeated = Packing.of(pack(batch.completions, "repeated"))
    for temperature, same in ((0.6, True), (1.0, False)):
        expected, _ = trainer.reference.model(repeated, temperature)
        assert torch.allclose(batch.reference_logp, expected, rtol=1e-9, atol=1e-11) == same


def test_the_sampler_correction_knows_that_truncation_renormalises(tmp_path: Path) -> None:
    """A kept token was drawn with p / mass, so its weight p / (p / mass) is the kept mass."""
    options = {"sampler_correction": "token-mask", "loss": "cispo", "top_k": 20}
    trainer = make_trainer(tmp_path / "run", **options)
    batch = trainer.batches.batch(0)
    completions = batch.completions
    mask = completions.completion_mask
    logp, _ = trainer.learner.forward(replace(batch, packed=pack(completions)), "none")
    weights = (logp.detach() - completions.truncated_sampler_logp).exp().clamp(max=2.0)
    kept = completions.log_kept_mass.exp()[mask]
    assert kept.mean() < 0.5
    assert_close(weights[mask], kept, rtol=1e-5, atol=0, check_dtype=False)


def test_a_step_packs_each_prompt_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the reference, the teacher, the old log-probs and both inner iterations."""
    count = Mock(wraps=packing.pack_prompt)
    monkeypatch.setattr(packing, "pack_prompt", count)
    options = {"kl_coef": 0.1, "teacher": "self", "num_iterations": 2, "micro_batch_size": 4}
    make_trainer(tmp_path / "run", **options).one_step()
    assert count.call_count == 6


def test_the_same_prompts_are_sampled_anew_in_each_step_and_with_each_seed(tmp_path: Path) -> None:
    trainers = [make_trainer(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    trainers[1].model.load_state_dict(trainers[0].model.state_dict())
    examples = [trainers[0].job.task.train(i) for i in range(3)]

    def texts(number: int, step: int) -> Any:
        return trainers[number].batches.roll_out(examples, step).texts

    first = texts(0, 0)
    assert texts(0, 0) == first
    assert first not in (texts(0, 1), texts(1, 0))


@pytest.mark.parametrize("loss", ["grpo", "dapo"])  # dapo divides by tokens, of which 0 are left
def test_masked_completions_have_no_gradient(tmp_path: Path, loss: str) -> None:
    """All of them cut off: the step happens, and changes no weight."""
    options = {"overlong": "mask", "max_new_tokens": 2, "warmup_steps": 0, "loss": loss}
    trainer = make_trainer(tmp_path / "run", **options)
    batch = trainer.batches.batch(0)
    batch.loss_mask[:] = False
    before = trainer.model.wte.weight.clone()
    metrics = trainer.learner.learn(batch, 0)
    assert metrics["grad_norm"] == metrics["loss"] == trainer.learner.guard.skipped == 0
    assert torch.equal(trainer.model.wte.weight, before)


def test_shuffled_rewards_keep_their_values_and_belong_to_the_prompt() -> None:
    total = torch.arange(12.0).reshape(3, 4)
    examples = [Example("", "", index=index) for index in (5, 6, 7)]
    first = shuffled(total, examples, seed=0, step=3)
    assert torch.equal(first.sort(1).values, total)
    assert not torch.equal(first, total)
    # neither the batch nor the place in it matters; step and seed do
    assert torch.equal(shuffled(total[1:], examples[1:], seed=0, step=3), first[1:])
    for other in ({"seed": 1, "step": 3}, {"seed": 0, "step": 4}):
        assert not torch.equal(shuffled(total, examples, **other), first)
