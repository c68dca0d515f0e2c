"""Rollouts: zero-variance groups, overlong completions, truncated sampling."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from minigrpo import Trainer
from minigrpo.model.packing import PACKINGS
from minigrpo.rollout import overlong_punishment, shuffled
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.rollout_metrics import has_ended, rollout_metrics
from minigrpo.types import Completions, Example, RewardTable

from .gradients import make_trainer


def test_overlong_punishment_is_dapos() -> None:
    """Nothing up to L - buffer, -1 at L, a straight line between (arXiv 2503.14476, equation
    13)."""
    assert overlong_punishment(
        torch.tensor([0, 60, 80, 90, 99, 100]), 100, 20
    ).tolist() == pytest.approx([0, 0, 0, -0.5, -0.95, -1])


def test_overlong_completions_are_kept_masked_or_punished(tmp_path) -> None:  # type: ignore[no-untyped-def]
    batches = {}
    for overlong in ("keep", "mask", "punish"):
        trainer = make_trainer(
            tmp_path / overlong, overlong=overlong, overlong_buffer=4, scale="none", kl_coef=0.0
        )
        batches[overlong] = trainer.source.batch(0)
        stops = trainer.tokenizer.stops
        metrics = trainer.learner.learn(batches[overlong], 0)
        assert np.isfinite(metrics["loss"])
    keep, mask, punish = batches["keep"], batches["mask"], batches["punish"]
    assert keep.texts == mask.texts == punish.texts
    ended = has_ended(keep.completions, stops)
    assert 0 < ended.sum() < ended.numel()
    assert keep.loss_mask is None and mask.loss_mask is not None
    assert torch.equal(mask.loss_mask, ended)
    counted = mask.with_loss_mask_applied().completions.completion_mask
    assert torch.equal(counted.any(-1), ended)
    assert torch.equal(counted[ended], keep.completions.completion_mask[ended])
    assert np.array_equal(punish.rewards.total, keep.rewards.total)  # rewards are raw
    lengths = keep.completions.completion_mask.sum(-1)
    total = torch.from_numpy(keep.rewards.total) + overlong_punishment(lengths, 12, 4)
    torch.testing.assert_close(
        punish.advantages, total - total.mean(1, keepdim=True), check_dtype=False
    )
    assert rollout_metrics(mask, stops)["completions/clipped_ratio"] == pytest.approx(
        1 - float(ended.double().mean())
    )


def test_a_negative_reward_cannot_be_divided_by_a_mean(tmp_path: Path) -> None:
    """It ends the run with one line: only the scale of MaxRL cannot take it."""
    options = {"reward_weights": "similarity=-1", "temperature": 1.5}
    make_trainer(tmp_path / "grpo", **options).source.batch(0)
    with pytest.raises(ConfigError, match="--scale mean .*may be negative, got -0"):
        make_trainer(tmp_path / "maxrl", loss="maxrl", **options).source.batch(0)


def test_the_reference_has_the_temperature_of_the_policy(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", temperature=0.6, kl_coef=0.1)
    reference, c = trainer.reference.model, trainer.source.batch(0).completions  # type: ignore[attr-defined]
    packing = PACKINGS["repeated"](c)
    for temperature, same in ((0.6, True), (1.0, False)):
        expected = reference(packing.tokens, packing, temperature)[0]
        assert torch.allclose(trainer.reference.logp(c), expected, rtol=1e-9, atol=1e-11) == same  # type: ignore[arg-type]


def test_the_sampler_correction_knows_that_truncation_renormalises(tmp_path: Path) -> None:
    """A kept token was drawn with p / mass, so its weight p / (p / mass) is the kept mass."""
    options = {"sampler_correction": True, "loss": "cispo", "top_k": 20}
    trainer = make_trainer(tmp_path / "run", **options)
    batch = trainer.source.batch(0)
    c, learner = batch.completions, trainer.learner
    assert c.log_kept_mass is not None
    logp, _ = learner.forward(learner.pack(c))
    weights = learner._sampler_correction(batch, logp)
    mask = c.completion_mask
    kept = c.log_kept_mass.exp()[mask]
    assert weights is not None and kept.mean() < 0.5
    torch.testing.assert_close(weights[mask], kept, rtol=1e-5, atol=0, check_dtype=False)
    # with several inner steps it is the old policy's weight, and does not move with the policy's
    old = replace(batch, old_logp=logp.detach() - 0.5)
    weights = learner._sampler_correction(old, logp)
    assert weights is not None
    share = kept * torch.tensor(-0.5).exp()
    torch.testing.assert_close(weights[mask], share, rtol=1e-5, atol=0, check_dtype=False)


def test_the_same_prompts_are_sampled_anew_in_every_step_and_with_every_seed(
    tmp_path: Path,
) -> None:
    trainers = [make_trainer(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    trainers[1].model.load_state_dict(trainers[0].model.state_dict())
    examples = [trainers[0].task.train(i) for i in range(3)]

    def ids(trainer: Trainer, step: int) -> list[int]:
        (part,) = trainer.source.sample(examples, step)  # type: ignore[attr-defined]
        return part.completion_ids[part.completion_mask].tolist()

    first = ids(trainers[0], 0)
    assert ids(trainers[0], 0) == first
    assert first not in (ids(trainers[0], 1), ids(trainers[1], 0))


@pytest.mark.parametrize("loss", ["grpo", "dapo"])  # dapo divides by tokens, of which 0 are left
def test_masked_completions_have_no_gradient(tmp_path: Path, loss: str) -> None:
    """All of them cut off: the step happens, and changes no weight."""
    options = {"overlong": "mask", "max_new_tokens": 2, "warmup_steps": 0, "loss": loss}
    trainer = make_trainer(tmp_path / "run", **options)
    batch = trainer.source.batch(0)
    assert batch.loss_mask is not None
    batch.loss_mask[:] = False
    before = trainer.model.wte.weight.clone()
    metrics = trainer.learner.learn(batch, 0)
    assert metrics["grad_norm"] == metrics["loss"] == trainer.learner.guard.skipped == 0
    assert torch.equal(trainer.model.wte.weight, before)


def test_replacements_are_those_of_a_run_with_more_steps_and_no_regular_ones(
    tmp_path: Path,
) -> None:
    """A run that is resumed with another --max-steps asked others, and some of them twice."""
    short, long = (make_trainer(tmp_path / str(n), max_steps=n) for n in (2, 9))
    sources = [trainer.source.examples for trainer in (short, long)]  # type: ignore[attr-defined]
    drawn = [
        [x.index for x in source.replacements(step, attempt, [0, 1])]
        for source in sources
        for step in (0, 1)
        for attempt in (0, 1)
    ]
    assert drawn[:4] == drawn[4:]
    replaced = {index for pair in drawn for index in pair}
    regular = {x.index for step in range(9) for x in sources[1].take(step)}
    assert len(replaced) == 8 and len(regular) == 54 and not replaced & regular


def test_resampling_replaces_dead_groups_only_and_gives_up_after_n_tries(
    tmp_path, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    plain = make_trainer(tmp_path / "plain").source.batch(0)
    trainer = make_trainer(tmp_path / "resampled", dynamic_sampling=2)
    asked: list[int] = []
    submit = trainer.scorer.submit

    class Doctored:
        """Scores of 0 for the groups at places 1 and 3, and of those that replace them for the
        second.
        """

        def __init__(self, table: RewardTable, dead: list[int]) -> None:
            self.table, self.dead = table, dead

        def result(self) -> RewardTable:
            self.table.total[self.dead] = 0.0
            return self.table

    def doctored(examples, texts):  # type: ignore[no-untyped-def]
        asked.append(len(examples))
        return Doctored(submit(examples, texts).result(), {1: [1, 3], 2: [1], 3: [0]}[len(asked)])

    monkeypatch.setattr(trainer.scorer, "submit", doctored)
    batch = trainer.source.batch(0)
    assert asked == [6, 2, 1]  # the second try replaces what is dead still, and there is no third
    assert [batch.examples[i] for i in (0, 2, 4, 5)] == [plain.examples[i] for i in (0, 2, 4, 5)]
    assert len({example.index for example in [*batch.examples, *plain.examples]}) == 8
    for p in (0, 2, 4, 5):
        assert batch.texts[p] == plain.texts[p]
    assert batch.rewards is not None and plain.rewards is not None and batch.advantages is not None
    assert (batch.rewards.total[[0, 2, 4, 5]] == plain.rewards.total[[0, 2, 4, 5]]).all()
    assert batch.advantages[1].any()
    assert not batch.advantages[3].any()
    stops = trainer.tokenizer.stops
    assert rollout_metrics(batch, stops)["frac_reward_zero_std"] == pytest.approx(1 / 6)
    assert rollout_metrics(batch, stops)["frac_reward_zero_std/drawn"] == pytest.approx(2 / 6)
    for group, mask, texts in zip(
        batch.completions.completion_ids,
        batch.completions.completion_mask,
        batch.texts,
        strict=True,
    ):
        decoded = [
            trainer.tokenizer.decode([t for t in row[m].tolist() if t not in stops])
            for row, m in zip(group, mask, strict=True)
        ]
        assert decoded == texts
    assert np.isfinite(trainer.learner.learn(batch, 0)["loss"])


def test_completions_that_are_joined_are_those_that_were_put_in() -> None:
    a = Completions(
        torch.tensor([[1, 2]]),
        torch.tensor([2]),
        torch.tensor([[[3, 4]]]),
        torch.tensor([[[True, True]]]),
    )
    b = Completions(
        torch.tensor([[5]]),
        torch.tensor([1]),
        torch.tensor([[[6, 7, 8]]]),
        torch.tensor([[[True] * 3]]),
    )
    both = Completions.join([a, b])
    assert both.prompt_ids.tolist() == [[1, 2], [5, 0]]
    assert both.completion_ids.tolist() == [[[3, 4, 0]], [[6, 7, 8]]]
    assert both.completion_mask.sum(-1).tolist() == [[2], [3]]


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"min_p": 0.5}])
def test_truncation_warns_once_and_logs_what_it_removes(tmp_path, capfd, truncation) -> None:  # type: ignore[no-untyped-def]
    trainer = make_trainer(tmp_path / "run", **truncation, max_steps=2)
    trainer.fit()
    assert capfd.readouterr().err.count("truncate the sampler only") == 1
    removed = [
        line
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        if "removed_mass" in line
    ]
    assert len(removed) == 2


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


def test_shuffle_rewards_changes_the_advantages_and_not_the_logged_rewards(tmp_path: Path) -> None:
    plain, control = (
        make_trainer(tmp_path / str(on), shuffle_rewards=on, kl_coef=0.0).source.batch(0)
        for on in (False, True)
    )
    assert plain.rewards is not None and control.rewards is not None
    assert (plain.rewards.total == control.rewards.total).all()
    assert plain.advantages is not None and control.advantages is not None
    assert not torch.equal(plain.advantages, control.advantages)
    torch.testing.assert_close(plain.advantages.sort(1).values, control.advantages.sort(1).values)
