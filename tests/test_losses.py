import itertools
from collections import defaultdict
from dataclasses import replace
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import torch
from torch.testing import assert_close

from minigrpo.advantages import SCALES, advantages, neutral
from minigrpo.losses import (
    KL_ESTIMATORS,
    LOSSES,
    SAMPLER_CORRECTIONS,
    LossNormalizer,
    loss_spec,
    policy_loss,
    sampler_weights,
)
from minigrpo.settings import LOSS_NAMES, LossConfig

from .tiny import ROOT, check_golden, golden, partly_known

GOLDEN = golden("losses")
KL = {"kl_coef": 0.04}
WIDE = {"clip_low": 0.2, "clip_high": 0.28}
ROWS = {
    "grpo": {"loss": "grpo", **WIDE},
    "grpo+beta.04": {"loss": "grpo", **WIDE, **KL},
    "dr_grpo": {"loss": "dr_grpo", **WIDE},
    "dr_grpo+beta.04": {"loss": "dr_grpo", **WIDE, **KL},
    "dapo": {"loss": "dapo"},
    "dapo+beta.04": {"loss": "dapo", **KL},
    "gspo(seq,grpo)": {"loss": "gspo"},
    "gspo eps.05/.05": {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.05},
    "cispo hi=1.28": {"loss": "cispo", "ratio_cap": 1.28},
    "cispo hi=5": {"loss": "cispo"},
    "cispo hi=1.28 beta.04": {"loss": "cispo", "ratio_cap": 1.28, **KL},
    "grpo delta=1.3": {"loss": "grpo", **WIDE, "ratio_cap": 1.3},
    "grpo beta.04 biascorr": {"loss": "grpo", **WIDE, **KL, "kl": "k3_is"},
    "rloo": {"loss": "rloo", **WIDE},
}
METRICS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "kl", "cispo_clip_ratio")


def loss_of(
    *tensors: Any, loss: Any = "grpo", length: int | None = None, **given: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`policy_loss`, with the clips among its arguments."""
    names = {"clip_low": "low", "clip_high": "high", "ratio_cap": "cap"}
    clips = {names[name]: given.pop(name) for name in names.keys() & given.keys()}
    spec = loss_spec(loss)
    if length is not None:
        given["normalizer"] = LossNormalizer.of(tensors[-1], length)
    return policy_loss(*tensors, loss=replace(spec, clip=replace(spec.clip, **clips)), **given)


def golden_inputs() -> tuple[torch.Tensor, ...]:
    """Inputs as TRL was given them: float32 numbers, carried in float64 here."""
    names = ("logp", "old", "ref", "adv")
    logp, *others = (torch.tensor(GOLDEN[name], dtype=torch.float64) for name in names)
    return logp.requires_grad_(), *others, torch.tensor(GOLDEN["mask"]).bool()


@pytest.mark.parametrize("row", ROWS)
def test_loss_gradient_and_metrics_are_those_of_trl(row: str) -> None:
    logp, old, ref, adv, mask = golden_inputs()
    length = GOLDEN["max_completion_length"]
    loss, metrics = loss_of(logp, old, adv, mask, ref_logp=ref, length=length, **ROWS[row])
    loss.backward()
    expected = GOLDEN["results"][row]
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-7)
    slope = torch.tensor(expected["grad"], dtype=torch.float64)
    assert_close(logp.grad, slope, atol=1e-7, rtol=0)
    found = {name: value.item() for name, value in metrics.items()}
    theirs = {name: x for name, x in expected["metrics"].items() if name in METRICS}
    assert found == pytest.approx(theirs, abs=1e-5)


def trl_trainer(**attributes: Any) -> Any:
    """The trainer of the TRL that is installed; it is not set up, and has what its methods read."""
    from trl import GRPOTrainer

    class Trainer(GRPOTrainer):
        def __getattr__(self, name: str) -> None:
            return None

    trainer = object.__new__(Trainer)
    vars(trainer).update(beta=0.0, _metrics={"train": defaultdict(list)}, **attributes)
    return trainer


@pytest.mark.peer
def test_the_golden_numbers_are_those_of_the_trl_that_is_installed() -> None:
    logp, old, ref, adv, mask = (x.detach().float() for x in golden_inputs())
    logp.requires_grad_()
    trainer = trl_trainer(
        loss_type="grpo",
        epsilon_low=0.2,
        epsilon_high=0.28,
        top_entropy_quantile=1.0,
        importance_sampling_level="token",
        current_gradient_accumulation_steps=1,
        model=Mock(training=True),
        args=Mock(delta=None),
        accelerator=Mock(gather=lambda x: x, reduce=lambda x, reduction: x),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, logp.detach(), None),
    )
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    batch = {
        **dict.fromkeys(("prompt_ids", "completion_ids"), ids),
        **dict.fromkeys(("prompt_mask", "completion_mask"), mask),
        "advantages": adv,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
    }
    loss = trainer._compute_loss(None, batch)
    loss.backward()
    expected = GOLDEN["results"]["grpo"]
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-7)
    assert_close(logp.grad, torch.tensor(expected["grad"]))
    found = {key: trainer._metrics["train"][key][0] for key in expected["metrics"]}
    assert found == pytest.approx(expected["metrics"], abs=1e-6)


CAP = 1.2
# row -> what TRL calls it
MODES = {
    "token-truncate": {"mode": "token_truncate"},
    "token-mask": {"mode": "token_mask"},
    "icepop": {"mode": "token_mask", "clip_min": 0.5},
    "sequence-truncate": {"mode": "sequence_truncate"},
    "sequence-mask": {"mode": "sequence_mask"},
}
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]  # [P, G]


def gap_inputs() -> tuple[torch.Tensor, ...]:
    """Log-probs of the trainer and of the sampler, and the mask. Some ratios are below 1/2."""
    _, old, ref, _, mask = golden_inputs()
    return old, 2 * ref - old, mask


def trl_rollout(**settings: Any) -> dict[str, torch.Tensor]:
    """Ratios by the rollout of the TRL that is installed, which samples nothing."""
    old, drawn, mask = (x.float().repeat(len(REWARDS), 1) for x in gap_inputs())
    rows = [row[kept].tolist() for row, kept in zip(drawn, mask.bool(), strict=True)]
    prompt_ids = [[1]] * len(rows)
    completion_ids = [[1] * len(row) for row in rows]
    trainer = trl_trainer(
        model=Mock(training=True, is_gradient_checkpointing=False),
        accelerator=Mock(device="cpu", gather=lambda x: x, process_index=0),
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        num_iterations=1,
        num_generations=len(REWARDS[0]),
        _tokenizer=Mock(pad_token_id=0),
        args=Mock(gradient_accumulation_steps=1, steps_per_generation=1, report_to=[]),
        reward_funcs=[None],
        reward_func_names=["a"],
        reward_weights=torch.tensor([1.0]),
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards="group",
        _logs=defaultdict(list, rewards=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
        _generate=lambda prompts: (
            *(prompt_ids, completion_ids, None, prompts),
            *(rows, {}, None, None),
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (old, None, None),
        _calculate_rewards=lambda *_: torch.tensor(REWARDS).flatten()[:, None],
        **settings,
    )
    return trainer._generate_and_score_completions([{"prompt": "a"}] * len(rows))


@pytest.mark.peer
def test_the_corrections_are_those_of_the_trl_that_is_installed() -> None:
    made = {}
    for row, names in MODES.items():
        given = {f"vllm_importance_sampling_{name}": x for name, x in names.items()}
        given["vllm_importance_sampling_clip_max"] = CAP
        found = trl_rollout(**given)
        made[row] = found["importance_sampling_ratio"][:4].expand(4, 3).tolist()
    check_golden("rollout", "corrections", made)


@pytest.mark.parametrize("row", MODES)
def test_the_correction_of_the_sampler_gap_is_that_of_trl(row: str) -> None:
    old, drawn, mask = gap_inputs()
    expected = torch.tensor(golden("rollout")["corrections"][row], dtype=torch.float64)
    found = sampler_weights(row, CAP, old, drawn, mask)
    assert_close(found[mask], expected[mask], rtol=1e-6, atol=0)
    assert MODES.keys() == SAMPLER_CORRECTIONS.keys()


def test_a_reward_that_does_not_concern_a_completion_has_no_influence() -> None:
    """Neither pays it to be left out, nor does it change what the others get."""
    rewards = partly_known([[None, -2.0, -1.0, -6.0], [None] * 4, [1.0, None, 3.0, None]])
    found = advantages(torch.from_numpy(neutral(rewards)), scale="none")
    assert found.tolist() == [[0, 1, 2, -3], [0] * 4, [-1, 0, 1, 0]]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_maxrl_follows_the_likelihood_to_the_order_of_its_group(size: int) -> None:
    """log p = -sum_k (1 - p)^k / k. Over all groups of G samples, each right with probability p,
    the expected gradient is that of the terms up to k = G - 1 (arXiv 2602.02710; one fewer than
    without a baseline, because groups without a right answer are left out). The gradient of the
    expected reward, which is that of Dr. GRPO, is the first term alone.
    """
    logit = torch.tensor(-0.7, dtype=torch.float64, requires_grad=True)
    p = logit.sigmoid()
    one_token = torch.ones(size, 1, dtype=torch.bool)

    def slope(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logit, retain_graph=True)[0]

    def expected_slope(loss: str) -> torch.Tensor:
        total = torch.tensor(0.0)
        for right in itertools.product((0.0, 1.0), repeat=size):
            rewards = torch.tensor(right, dtype=torch.float64)
            logp = torch.where(rewards > 0, p.log(), (1 - p).log())
            adv = advantages(rewards[None], scale=LOSSES[loss].scale)[0]
            value, _ = policy_loss(logp[:, None], None, adv, one_token, loss=loss)
            total = total - logp.sum().exp().detach() * value
        return slope(total)

    truncated = -torch.stack([(1 - p) ** k / k for k in range(1, size)]).sum()
    assert_close(expected_slope("maxrl"), slope(truncated), rtol=1e-12, atol=0)
    of_others = (size - 1) / size  # Dr. GRPO's baseline contains the sample itself
    assert_close(expected_slope("dr_grpo"), slope(of_others * p), rtol=1e-12, atol=0)


def test_nll_is_the_mean_negative_log_probability_of_the_tokens() -> None:
    logp, _, _, _, mask = golden_inputs()
    loss, _ = policy_loss(logp, None, None, mask, loss="nll")
    assert loss.item() == pytest.approx(-logp[mask].mean().item())


@pytest.mark.parametrize("loss", LOSSES)
def test_padding_has_no_loss_and_no_gradient_even_if_it_is_infinite(loss: str) -> None:
    logp, old, ref, adv, mask = golden_inputs()
    mask[0] = False  # a completion may be empty
    options = {"loss": loss, "ref_logp": ref, "kl_coef": 0.1, "length": 3}
    clean, _ = loss_of(logp, old, adv, mask, **options)
    (expected,) = torch.autograd.grad(clean, logp)
    assert expected.isfinite().all()
    assert not expected[0].any()
    assert expected[1].any()
    dirty = logp.detach().masked_fill(~mask, torch.inf).requires_grad_()
    found, _ = loss_of(dirty, old.masked_fill(~mask, -torch.inf), adv, mask, **options)
    found.backward()
    assert found.item() == clean.item()
    assert_close(dirty.grad, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("kl", "forward"), [("k2", True), ("k3", False), ("k3_is", True)])
def test_kl_estimators_have_the_exact_on_policy_gradient(kl: str, forward: bool) -> None:
    """A three-way categorical, where the expectation over samples is a sum: k2, k3_is: KL(pi||ref);
    k3: KL(ref||pi).
    """
    logits = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.2, 0.4, 0.1], dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    penalty = KL_ESTIMATORS[kl](ref - logp, (logp - logp.detach()).exp())
    estimated = (logp.detach().exp() * penalty).sum()
    exact = (logp.exp() * (logp - ref)).sum() if forward else (ref.exp() * (ref - logp)).sum()
    found, expected = (
        torch.autograd.grad(x, logits, retain_graph=True) for x in (estimated, exact)
    )
    assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_token_weights_spare_the_kl() -> None:
    logp = torch.tensor([[-1.0, -2.0, -0.5]])
    ref = torch.tensor([[-1.2, -1.0, -0.7]])
    weights = torch.tensor([[1.5, 0.4, 2.0]])
    loss, _ = loss_of(
        logp,
        None,
        torch.tensor([1.5]),
        logp < 0,
        loss="dapo",
        ref_logp=ref,
        kl_coef=0.3,
        token_weights=weights,
    )
    kl = (ref - logp).exp() - (ref - logp) - 1
    assert_close(loss, (-1.5 * weights + 0.3 * kl).mean())


def test_advantages_are_their_formulas() -> None:
    rewards = torch.tensor([[3.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0]], requires_grad=True)
    means = {
        "group_mean": rewards.mean(1, keepdim=True),
        "leave_one_out": (rewards.sum(1, keepdim=True) - rewards) / 3,  # of the others
    }
    stds = {"group": rewards.std(1, keepdim=True) + 1e-4, "batch": rewards.std() + 1e-4, "none": 1}
    for (estimator, mean), (scale, std) in itertools.product(means.items(), stds.items()):
        found = advantages(rewards, estimator=estimator, scale=scale)
        assert_close(found, ((rewards - mean) / std).detach())
        assert not found.requires_grad
    # large ones keep their differences
    small = torch.tensor([[0.0, 1.0, 2.0, 5.0]], dtype=torch.float64)
    for scale in stds:
        found = advantages(small + 1.7e9, scale=scale)
        assert_close(found, advantages(small, scale=scale), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_only_the_log_probs_of_the_policy_get_a_gradient(loss: str) -> None:
    """An `old_logp` that is not detached would cancel the gradient, a `ref_logp` the KL.

    Without an `old_logp`, it is that of the policy.
    """
    torch.manual_seed(0)
    logp = torch.randn(2, 3, requires_grad=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    others = {
        "old_logp": logp + 0.01,
        "advantages": logp.mean(-1),
        "ref_logp": logp - 0.5,
        "token_weights": logp.exp(),
    }

    def gradient(old_logp: Any, advantages: torch.Tensor, **options: Any) -> torch.Tensor:
        value, _ = loss_of(logp, old_logp, advantages, mask, loss=loss, kl_coef=0.1, **options)
        return torch.autograd.grad(value, logp, retain_graph=True)[0]

    found = gradient(**others)
    assert found.any()
    constants = {name: x.detach() for name, x in others.items()}
    assert_close(found, gradient(**constants), rtol=0, atol=0)
    del constants["old_logp"]
    same = gradient(logp.detach(), **constants)
    assert_close(gradient(None, **constants), same, rtol=0, atol=0)


TWO = torch.zeros(2, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"kl": "k9", "kl_coef": 0.1, "ref_logp": TWO},
        {"loss": "ppo"},
        {"kl_coef": 0.1},  # without ref_logp
        {"advantages": torch.zeros(3)},  # would broadcast for logp [2, 3, 3]
        {"mask": torch.ones(3, dtype=torch.bool)},
        {"old_logp": TWO[0]},
        {"token_weights": TWO[:, :1]},
        {"added": TWO[:, :1]},
    ],
)
def test_what_would_broadcast_by_chance_or_is_missing_is_refused(changes: dict) -> None:
    tensors = {"logp": TWO, "old_logp": None, "advantages": TWO[:, 0], "mask": TWO == 0}
    tensors |= {name: x for name, x in changes.items() if name in tensors}
    others = {name: x for name, x in changes.items() if name not in tensors}
    with pytest.raises((ValueError, KeyError)):
        loss_of(*tensors.values(), **others)


def test_advantages_refuse_what_cannot_work() -> None:
    groups_of_one = TWO[:, :1]
    for rewards in (groups_of_one, TWO[0], TWO.log()):
        with pytest.raises(ValueError):
            advantages(rewards)
    with pytest.raises(ValueError):
        advantages(TWO - 0.5, scale="mean")


def test_the_settings_name_every_loss_and_kl_estimator() -> None:
    """settings.py lists them itself, so that --help does not wait for torch."""
    fields = LossConfig.model_fields
    assert list(LOSS_NAMES) == list(LOSSES)
    assert set(get_args(fields["kl"].annotation)) == {*KL_ESTIMATORS}
    assert set(get_args(fields["scale"].annotation)) == {"auto", *SCALES}
    assert set(get_args(fields["sampler_correction"].annotation)) == {"none", *SAMPLER_CORRECTIONS}


@pytest.mark.parametrize("name", ["logp", "old_logp", "ref_logp", "advantages", "token_weights"])
def test_what_is_not_finite_never_gives_a_finite_loss(name: str) -> None:
    """The learner skips such a step: it must see it."""
    given = dict.fromkeys(("logp", "old_logp", "ref_logp", "token_weights"), TWO - 0.5)
    given["advantages"] = TWO[:, 0] + 1
    given[name] = given[name].clone()
    given[name][0] = torch.nan
    tensors = [given.pop(name) for name in ("logp", "old_logp", "advantages")]
    reads_no_ratio = {"nll"} if name in ("advantages", "old_logp") else set()
    for loss in LOSSES.keys() - reads_no_ratio:
        value, _ = loss_of(*tensors, TWO == 0, loss=loss, kl_coef=0.1, **given)
        assert value.isnan(), loss


def test_the_documented_loss_is_its_formula() -> None:
    page = (ROOT / "docs" / "tasks.md").read_text()
    code = page.partition("## A loss of your own")[2].split("```python\n")[1].partition("```")[0]
    scope = {}
    exec(code, scope)
    own = scope["fading"]
    logp, old, _, adv, mask = golden_inputs()
    entropy = torch.rand(logp.shape, dtype=torch.float64)
    value, _ = policy_loss(logp, old, adv, mask, loss=own, entropy=entropy)
    faded = adv[..., None] * 0.99 ** torch.arange(logp.shape[-1])
    expected, _ = policy_loss(logp, old, faded, mask, loss="grpo", added=-0.01 * entropy)
    assert_close(value, expected)
    with pytest.raises(ValueError):
        policy_loss(logp, old, adv, mask, loss=lambda x: own(x).sum(), entropy=entropy)
