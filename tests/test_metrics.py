"""What a run logs, against the same figures worked out by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minigrpo import Config
from minigrpo.evaluate import evaluate
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.rewards import RewardScorer
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.optim import make_optimizer
from minigrpo.runtime.rng import uniforms
from minigrpo.runtime.rollout_metrics import counts_of, rollout_metrics
from minigrpo.runtime.sampler_gap import LARGEST, MEAN, OFF, gap_sums
from minigrpo.types import Completions, Example, RewardTable, RolloutBatch

from .gradients import make_trainer, with_settings

EOS = 9
TOKENIZER = load_tokenizer("chess")


def test_rollout_metrics_by_hand() -> None:
    """Two prompts of 3 and 1 tokens; completions of 2, 1, 3 and 3 tokens, one of them cut off."""
    ids = torch.tensor([[[1, EOS, 0], [EOS, 0, 0]], [[1, 2, EOS], [1, 2, 3]]])
    mask = torch.tensor([[[1, 1, 0], [1, 0, 0]], [[1, 1, 1], [1, 1, 1]]]).bool()
    kept = torch.full((2, 2, 3), 0.75).log()
    kept[1, 1] = 0.0  # all of the mass
    kept[0, 1, 1:] = torch.nan  # padding
    total = np.array([[1.0, 3.0], [2.0, 2.0]], dtype=np.float32)
    batch = RolloutBatch(
        examples=[Example("abc", ""), Example("a", "")],
        completions=Completions(
            torch.tensor([[1, 2, 3], [1, 0, 0]]),
            torch.tensor([3, 1]),
            ids,
            mask,
            log_kept_mass=kept,
        ),
        texts=[["a", ""], ["ab", "abc"]],
        rewards=RewardTable(total, {"one": total / 2}, {"one": 3}),
        metrics={"rollout/rounds": 7.0},
    )
    # what the means of several processes are weighted by, where they may differ
    assert counts_of(batch) == {"rewards/one/mean": 4, "sampling/removed_mass": 9}
    assert rollout_metrics(batch, [EOS]) == pytest.approx(
        {
            "reward": 2.0,
            "reward_std": 2**0.5 / 2,  # of 1 and 3 with n - 1, and of two equal ones
            "frac_reward_zero_std": 0.5,
            "rewards/one/mean": 1.0,
            "rewards/one/failures": 3.0,
            "completions/clipped_ratio": 0.25,
            "completions/mean_length": 9 / 4,
            "tokens/repeated": 2 * (3 + 1) + (1 + 0 + 2 + 2),  # last tokens predict nothing
            "sampling/removed_mass": 0.25 * 6 / 9,
            "rollout/rounds": 7.0,
        }
    )


def test_metrics_of_two_processes_are_sums_of_counts_and_means_of_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = {"reward": 1.0, "tokens/repeated": 10.0, "rollout/tokens": 6.0, "rollout/rounds": 4.0}
    here["rewards/one/failures"] = 2.0
    there = torch.tensor([[2.0, 20.0, 2.0, 8.0, 1.0], [1.0] * 5], dtype=torch.float64)
    monkeypatch.setattr(DistContext, "sum", lambda self, x: torch.stack([x[0], there]))
    assert DistContext(world_size=2).combine(here) == {
        "reward": 1.5,
        "tokens/repeated": 30.0,
        "rollout/tokens": 8.0,
        "rollout/rounds": 6.0,
        "rewards/one/failures": 3.0,
    }


class Answers:
    """Stands in for a sampler: greedy answers are `greedy`, sampled ones are `sampled`."""

    tokenizer = TOKENIZER
    config = Config.of(max_new_tokens=5)

    def __init__(self, greedy: list[str], sampled: list[str]) -> None:
        self.greedy, self.sampled, self.u = greedy, sampled, list[Any]()

    def complete(
        self, examples: Any, *, num_samples: int = 1, u: Any = None, batch_size: int = 0
    ) -> Any:
        self.u.append(u)
        texts = self.greedy if u is None else self.sampled
        encoded = [[*TOKENIZER.encode(text), TOKENIZER.eot] for text in texts]
        longest = max(map(len, encoded))
        ids = torch.tensor([[row + [0] * (longest - len(row))] for row in encoded])
        mask = torch.arange(longest) < torch.tensor([[[len(row)]] for row in encoded])
        prompts = torch.zeros(len(texts), 1, dtype=torch.int64)
        yield Completions(prompts, torch.ones(len(texts), dtype=torch.int64), ids, mask)


class Lengths:
    parts = {"length": 2.0, "one": 1.0}  # noqa: RUF012

    def held_out(self, number: int) -> Example:
        return Example(str(number), "ab", index=number, kind="odd" if number % 2 else "even")

    def score(self, example: Example, text: str) -> dict[str, float]:
        return {"length": len(text) / 4, "one": 1.0}


def test_an_evaluation_by_hand() -> None:
    sampler = Answers(greedy=["ab", "ab", "abcd", "ab"], sampled=["x", "x", "x", "ab"])
    task: Any = Lengths()
    found = evaluate(sampler, task, RewardScorer(task), size=4, seed=3)  # type: ignore[arg-type]
    assert found == pytest.approx(
        {
            "n": 4.0,
            "exact_sampled": 0.25,
            "exact": 0.75,
            "length": 0.625,
            "length_sampled": (3 + 2) / 16,
            "one": 1.0,
            "one_sampled": 1.0,
            "reward": 2.25,
            "reward_sampled": 1.625,
            "exact/even": 0.5,
            "exact/odd": 1.0,
            "count/even": 2.0,
            "count/odd": 2.0,
        }
    )
    # not the numbers of the rollouts: step 0 would sample the same tokens
    expected = uniforms(3, "evaluate", 0, np.arange(4), 1, 5)
    assert sampler.u[0] is None and np.array_equal(sampler.u[1], expected)
    assert not np.array_equal(expected, uniforms(3, "sample", 0, np.arange(4), 1, 5))


def test_metrics_of_an_update_do_not_depend_on_its_micro_batches(tmp_path: Path) -> None:
    """And the gap between sampler and trainer is a mean and a maximum over all tokens."""
    trainer = make_trainer(tmp_path / "run", kl_coef=0.1, top_p=0.9, learning_rate=1e-30)
    batch = trainer.source.batch(0)
    c = batch.completions
    assert c.sampler_logp is not None
    c.sampler_logp[~c.completion_mask] = 7.0  # padding, which must not count
    whole, parts = (
        with_settings(trainer, micro_batch_size=size).learn(batch, 0) for size in (0, 1)
    )
    name = "tokens/run"  # each micro-batch has packed its own
    assert whole.pop(name) == parts.pop(name)
    assert parts == pytest.approx(whole, rel=1e-6)
    assert 0 < whole["sampling/logp_difference_max"] < 1e-4
    largest = whole["sampling/logp_difference_max"]
    assert whole["sampling/logp_difference_mean"] < largest < whole["entropy"]


def test_the_gap_counts_tokens_whose_probability_is_off_by_more_than_a_tenth() -> None:
    ratios = torch.tensor([[1.0, 1.09, 1.11, 0.5], [0.91, 0.89, 3.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True], [True, True, True, False]])
    sampled = torch.full((2, 4), -2.0, dtype=torch.float64)
    sampled[1, 3] = torch.inf  # padding
    found = gap_sums(ratios.log() - 2.0, sampled, mask)
    assert found[OFF] == 4
    assert found[LARGEST] == pytest.approx(np.log(3.0))
    assert found[MEAN] == pytest.approx(np.abs(np.log([1.09, 1.11, 0.5, 0.91, 0.89, 3])).sum())


def test_with_several_updates_the_gap_is_that_of_the_policy_that_sampled(tmp_path: Path) -> None:
    """Not how far the updates have moved the policy since."""
    trainer = make_trainer(tmp_path / "run", num_iterations=3, learning_rate=0.1, warmup_steps=0)
    batch = trainer.source.batch(0)
    before = [p.clone() for p in trainer.model.parameters()]
    metrics = trainer.learner.learn(batch, 0)
    pairs = zip(trainer.model.parameters(), before, strict=True)
    assert max((a - b).abs().max() for a, b in pairs) > 0.01
    assert metrics[LARGEST] < 1e-6 and metrics[OFF] == 0


def test_a_gradient_longer_than_the_clip_is_shortened_and_logged_as_it_was(tmp_path: Path) -> None:
    norms = {}
    for clip in (1e9, 1e-3):
        trainer = make_trainer(tmp_path / str(clip), grad_clip=clip)
        seen: list[float] = []
        parameters = list(trainer.model.parameters())

        def step(seen: list[float] = seen, parameters: Any = parameters, **_: Any) -> None:
            seen.append(float(sum(p.grad.square().sum() for p in parameters) ** 0.5))

        trainer.learner.optimizer.step = lambda *a, step=step, **k: step()  # type: ignore[method-assign,misc]
        metrics = trainer.learner.learn(trainer.source.batch(0), 0)
        norms[clip] = (metrics["grad_norm"], *seen)
    logged, applied = norms[1e9]
    assert logged == pytest.approx(applied) and logged > 0.01
    assert norms[1e-3] == pytest.approx((logged, 1e-3), rel=1e-4)


def test_weight_decay_shrinks_matrices_and_spares_biases_and_norms(tmp_path: Path) -> None:
    """With gradients of 0, decay is all that AdamW does: w * (1 - learning rate * decay).

    The learning rate is the schedule's: half of it at the first of two steps of warm-up.
    """
    options = {"weight_decay": 0.5, "learning_rate": 0.2, "warmup_steps": 2}
    trainer = make_trainer(tmp_path / "run", **options)
    learner = trainer.learner
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert learner._set_learning_rate(0) == 0.1
    learner.optimizer.step()
    for name, p in trainer.model.named_parameters():
        share = 1 - 0.1 * 0.5 if p.dim() >= 2 else 1.0
        torch.testing.assert_close(p, before[name] * share)
    assert {p.dim() for p in trainer.model.parameters()} == {1, 2}


def test_adamw_is_its_formula() -> None:
    """Loshchilov and Hutter (arXiv 1711.05101), with betas of 0.9 and 0.98 and eps of 1e-8."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    optimizer = make_optimizer(model, learning_rate=0.1, weight_decay=0.01, fused=False)
    expected, first, second = model.weight.item(), 0.0, 0.0
    for step, gradient in enumerate([3.0, -1.0, 0.5, 2.0], 1):
        first, second = 0.9 * first + 0.1 * gradient, 0.98 * second + 0.02 * gradient**2
        scaled = first / (1 - 0.9**step) / ((second / (1 - 0.98**step)) ** 0.5 + 1e-8)
        expected = expected * (1 - 0.1 * 0.01) - 0.1 * scaled
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step()
        assert model.weight.item() == pytest.approx(expected, rel=1e-12)
