"""Rollouts: zero-variance groups, overlong completions, truncated sampling, advantages."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from minigrpo.advantages import advantages, shuffled
from minigrpo.metrics import rollout_metrics
from minigrpo.model import packing
from minigrpo.model.packing import Packing, pack
from minigrpo.types import Completions, Example, RewardTable

from .steps import make_completions, make_trainer


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
        [[0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], [0.3, 0.3, 0.3, 0.3], [0.3, 0.3, 0.3, 0.3 + 1e-9]]
    )
    assert total[0, 0] != total[0, 1]
    table = RewardTable(total, np.ones(total.shape, dtype=bool), {})
    assert table.zero_variance.tolist() == [True, True, False]
    found = advantages(torch.from_numpy(total), estimator=estimator, scale=scale)
    assert found.any(-1).tolist() == [False, False, True]


def test_the_reference_and_the_scorer_have_the_temperature_of_the_policy(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", temperature=0.6, kl_coef=0.1)
    trainer.scorer.score = Mock(wraps=trainer.scorer.score)
    batch = trainer.batches.batch(0)
    assert trainer.scorer.score.call_args.args[3] == 0.6
    repeated = Packing(pack(batch.completions, "repeated"))
    for temperature, same in ((0.6, True), (1.0, False)):
        expected, _ = trainer.reference.model(repeated, temperature)
        assert torch.allclose(batch.reference_logp, expected, rtol=1e-9, atol=1e-11) == same


def test_advantages_are_those_of_the_settings_over_all_processes(tmp_path: Path) -> None:
    options = {"loss": "rloo", "scale": "batch", "shuffle_rewards": True}
    batches = make_trainer(tmp_path / "run", **options).batches
    other = torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batches.dist = Mock(wraps=batches.dist, rank=1)
    batches.dist.on_all.side_effect = lambda own: [other, own()]
    batch = batches.batch(0)
    total = shuffled(torch.from_numpy(batch.rewards.total), batch.examples, seed=0, step=0)
    expected = advantages(torch.cat([other, total]), estimator="leave_one_out", scale="batch")
    assert torch.equal(batch.advantages, expected[5:].float())


def test_an_update_packs_each_prompt_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the old log-probs and both inner iterations."""
    count = Mock(wraps=packing.pack_prompt)
    monkeypatch.setattr(packing, "pack_prompt", count)
    make_trainer(tmp_path / "run", num_iterations=2, micro_batch_size=4).one_step()
    assert count.call_count == 6


def test_batches_are_joined_as_wide_as_the_widest() -> None:
    first = make_completions(0)
    wide = replace(make_completions(1, length=11), sampler_logp=torch.ones(3, 4, 11))
    joined = Completions.join([replace(first, sampler_logp=torch.zeros(3, 4, 9)), wide])
    assert joined.sampler_logp.shape == joined.completion_ids.shape == (6, 4, 11)
    assert torch.equal(joined.select([4]).completion_mask, wide.completion_mask[1:2])


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


def test_resampling_replaces_dead_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_trainer(tmp_path / "plain").batches.batch(0)
    trainer = make_trainer(tmp_path / "resampled", dynamic_sampling=2)
    asked = []
    score = trainer.scorer.score

    def doctored(examples: Any, *others: Any) -> RewardTable:
        """0 for the groups at places 1 and 3, and for the second of those that replace them."""
        asked.append(len(examples))
        table = score(examples, *others)
        dead = [[1, 3], [1], [0]][len(asked) - 1]
        table.total[dead] = 0.0
        return table

    monkeypatch.setattr(trainer.scorer, "score", doctored)
    batch = trainer.batches.batch(0)
    assert asked == [6, 2, 1]  # the second try replaces what is dead still, and there is no third
    assert len({example.index for example in [*batch.examples, *plain.examples]}) == 8
    for p in (0, 2, 4, 5):
        assert batch.examples[p] == plain.examples[p]
        assert batch.texts[p] == plain.texts[p]
        assert (batch.rewards.total[p] == plain.rewards.total[p]).all()
    assert batch.advantages.any(1).tolist() == [True, True, True, False, True, True]
    metrics = rollout_metrics(batch)
    assert metrics["frac_reward_zero_std"].tolist() == [0, 0, 0, 1, 0, 0]
    assert metrics["frac_reward_zero_std/drawn"] == pytest.approx(2 / 6)
    assert np.isfinite(trainer.learner.learn(batch, 0)["loss"])


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
