"""Rollouts: zero-variance groups, overlong completions, truncated sampling, advantages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from minigrpo.advantages import advantages, overlong_punishment, shuffled
from minigrpo.metrics import rollout_metrics
from minigrpo.model.packing import PACKINGS
from minigrpo.types import Example, RewardTable

from .steps import make_trainer


def test_overlong_punishment_is_dapos() -> None:
    """Nothing up to L - buffer, -1 at L, a straight line between (2503.14476, equation 13)."""
    lengths = torch.tensor([0, 60, 80, 90, 99, 100])
    expected = pytest.approx([0, 0, 0, -0.5, -0.95, -1])
    assert overlong_punishment(lengths, 100).tolist() == expected


def test_overlong_completions_are_kept_masked_or_punished(tmp_path: Path) -> None:
    batches = {}
    for overlong in ("keep", "mask", "punish"):
        trainer = make_trainer(tmp_path / overlong, overlong=overlong, scale="none", kl_coef=0.0)
        batches[overlong] = trainer.source.batch(0)
        stops = trainer.tokenizer.stops
        assert np.isfinite(trainer.learner.learn(batches[overlong], 0)["loss"])
    keep, mask, punish = batches["keep"], batches["mask"], batches["punish"]
    assert keep.texts == mask.texts == punish.texts
    ended = keep.completions.ended(stops)
    assert 0 < ended.sum() < ended.numel()
    assert keep.loss_mask is None and mask.loss_mask is not None
    assert torch.equal(mask.loss_mask, ended)
    alive, _ = trainer.learner.prepare(replace(mask, ref_logp=torch.zeros(ended.shape)))
    counted = alive.completions.completion_mask
    assert torch.equal(counted.any(-1), ended)
    assert torch.equal(counted[ended], keep.completions.completion_mask[ended])
    assert np.array_equal(punish.rewards.total, keep.rewards.total)  # rewards are raw
    lengths = keep.completions.completion_mask.sum(-1)
    total = torch.from_numpy(keep.rewards.total) + overlong_punishment(lengths, 12)
    centred = total - total.mean(1, keepdim=True)
    assert_close(punish.advantages, centred, check_dtype=False)
    clipped = rollout_metrics(mask, stops)["completions/clipped_ratio"]
    assert clipped.mean() == pytest.approx(1 - float(ended.double().mean()))


@pytest.mark.parametrize("estimator", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "mean", "none"])
def test_rewards_that_differ_by_rounding_are_equal(estimator: str, scale: str) -> None:
    groups = [[0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], [0.3] * 4, [0.3, 0.3, 0.3, 0.3 + 1e-9]]
    assert groups[0][0] != groups[0][1]
    total = np.array(groups)
    assert RewardTable(total, {}).zero_variance.tolist() == [True, True, False]
    found = advantages(torch.from_numpy(total), estimator=estimator, scale=scale)
    assert found.any(-1).tolist() == [False, False, True]


def test_the_reference_has_the_temperature_of_the_policy(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", temperature=0.6, kl_coef=0.1)
    reference, batch = trainer.reference.model, trainer.source.batch(0)
    packing = PACKINGS["repeated"](batch.completions)
    for temperature, same in ((0.6, True), (1.0, False)):
        expected = reference(packing, temperature)[0]
        assert torch.allclose(batch.ref_logp, expected, rtol=1e-9, atol=1e-11) == same


def test_the_sampler_correction_knows_that_truncation_renormalises(tmp_path: Path) -> None:
    """A kept token was drawn with p / mass, so its weight p / (p / mass) is the kept mass."""
    options = {"sampler_correction": "token-mask", "loss": "cispo", "top_k": 20}
    trainer = make_trainer(tmp_path / "run", **options)
    batch = trainer.source.batch(0)
    c, learner = batch.completions, trainer.learner
    logp, _ = learner.forward(learner.pack(batch))
    weights = (logp.detach() - c.behavior_logp).exp().clamp(max=2.0)
    mask = c.completion_mask
    kept = c.log_kept_mass.exp()[mask]
    assert kept.mean() < 0.5
    assert_close(weights[mask], kept, rtol=1e-5, atol=0, check_dtype=False)


def test_the_same_prompts_are_sampled_anew_in_each_step_and_with_each_seed(tmp_path: Path) -> None:
    trainers = [make_trainer(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    trainers[1].model.load_state_dict(trainers[0].model.state_dict())
    examples = [trainers[0].task.train(i) for i in range(3)]

    def texts(number: int, step: int) -> Any:
        return trainers[number].source.roll_out(examples, step).texts

    first = texts(0, 0)
    assert texts(0, 0) == first
    assert first not in (texts(0, 1), texts(1, 0))


@pytest.mark.parametrize("loss", ["grpo", "dapo"])  # dapo divides by tokens, of which 0 are left
def test_masked_completions_have_no_gradient(tmp_path: Path, loss: str) -> None:
    """All of them cut off: the step happens, and changes no weight."""
    options = {"overlong": "mask", "max_new_tokens": 2, "warmup_steps": 0, "loss": loss}
    trainer = make_trainer(tmp_path / "run", **options)
    batch = trainer.source.batch(0)
    batch.loss_mask[:] = False
    before = trainer.model.wte.weight.clone()
    metrics = trainer.learner.learn(batch, 0)
    assert metrics["grad_norm"] == metrics["loss"] == trainer.learner.guard.skipped == 0
    assert torch.equal(trainer.model.wte.weight, before)


def test_resampling_replaces_dead_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_trainer(tmp_path / "plain").source.batch(0)
    trainer = make_trainer(tmp_path / "resampled", dynamic_sampling=2)
    asked = []
    score = trainer.scorer.score

    def doctored(examples: Any, *others: Any) -> RewardTable:
        """0 for the groups at places 1 and 3, and for the second of those that replace them."""
        asked.append(len(examples))
        table = score(examples, *others)
        table.total[{1: [1, 3], 2: [1], 3: [0]}[len(asked)]] = 0.0
        return table

    monkeypatch.setattr(trainer.scorer, "score", doctored)
    batch = trainer.source.batch(0)
    assert asked == [6, 2, 1]  # the second try replaces what is dead still, and there is no third
    assert len({example.index for example in [*batch.examples, *plain.examples]}) == 8
    for p in (0, 2, 4, 5):
        assert batch.examples[p] == plain.examples[p] and batch.texts[p] == plain.texts[p]
        assert (batch.rewards.total[p] == plain.rewards.total[p]).all()
    assert batch.advantages[1].any()
    assert not batch.advantages[3].any()
    metrics = rollout_metrics(batch, trainer.tokenizer.stops)
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


def test_rewards_are_scaled_one_by_one_before_they_are_added_up(tmp_path: Path) -> None:
    options = {"reward_weights": {"similarity": 1.0, "length": -0.5}, "overlong": "punish"}
    (tmp_path / "length.py").write_text(
        "import minigrpo\n@minigrpo.reward\ndef length(example, text):\n    return len(text)\n"
    )
    options |= {"rewards": str(tmp_path / "length.py"), "aggregate": "normalize-then-sum"}
    batch = make_trainer(tmp_path / "run", **options).source.batch(0)
    total = overlong_punishment(batch.completions.completion_len, 12).double()
    for name, weight in (("similarity", 1.0), ("length", -0.5)):
        part = torch.from_numpy(batch.rewards.parts[name])
        assert part.std(-1).min() > 0
        centred = part - part.mean(-1, keepdim=True)
        total += weight * centred / (part.std(-1, keepdim=True) + 1e-4)
    expected = (total - total.mean(-1, keepdim=True)) / (total.std() + 1e-4)
    assert_close(batch.advantages, expected, check_dtype=False, rtol=0, atol=1e-5)
