"""grpo.py, the algorithm in one file, computes the same as the library."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close

import grpo
from minigrpo import losses
from minigrpo.advantages import advantages
from minigrpo.config import Config
from minigrpo.model.packing import Packing, pack
from minigrpo.model.transformer import Transformer
from minigrpo.types import Completions, Example, RolloutBatch

from .steps import EOS, make_learner

SOURCE = Path(grpo.__file__).read_text()
LIBRARY_AS_DATA = {
    *("minigrpo.text.tokenizer", "minigrpo.model.context", "minigrpo.model.transformer"),
    *("minigrpo.task", "minigrpo.tasks.chess_env", "minigrpo.types"),
}
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3], [5]]


def in_rows(completions: Completions) -> tuple[Tensor, Tensor]:
    """The library's completions as grpo.py has them: `ids [B, T]` and `mask [B, T]`."""
    ids = []
    mask = []
    for p, g in np.ndindex(completions.completion_mask.shape[:2]):
        prompt = completions.prompt_ids[p, : completions.prompt_len[p]]
        tokens = completions.completion_ids[p, g][completions.completion_mask[p, g]]
        ids.append(torch.cat([prompt, tokens]))
        mask.append(torch.cat([torch.zeros_like(prompt), torch.ones_like(tokens)]))
    return pad_sequence(ids, batch_first=True), pad_sequence(mask, batch_first=True).bool()


def perturbed(model: Transformer, seed: int) -> Transformer:
    other = Transformer(model.shape).double()
    other.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.05 * noise)
    return other


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("policy_has_moved", [False, True])
def test_the_gradient_is_the_librarys(
    model: Transformer, completions: Completions, kl_coef: float, policy_has_moved: bool
) -> None:
    """With a reference that is not the policy, and with old log-probs that let the clip act."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(completions.completion_mask.shape[:2], generator=generator).double()
    ids, mask = in_rows(completions)
    old = perturbed(model, 1)
    reference = perturbed(model, 2)

    logp = grpo.token_logprobs(model, ids, mask)
    A = grpo.advantages(rewards).flatten()
    with torch.no_grad():
        old_logp = grpo.token_logprobs(old, ids, mask) if policy_has_moved else logp.detach()
        ref_logp = grpo.token_logprobs(reference, ids, mask) if kl_coef else None
    loss = grpo.grpo_loss(logp, old_logp, A, mask, ref_logp, kl_coef)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    if policy_has_moved:
        ratio = (logp - old_logp).exp()[mask]
        assert ratio.min() < 1 - grpo.CLIP
        assert ratio.max() > 1 + grpo.CLIP

    packed = Packing(pack(completions))
    with torch.no_grad():
        batch = RolloutBatch(
            examples=[Example("", "")] * len(completions),
            completions=completions,
            texts=[[]] * len(completions),
            advantages=advantages(rewards),
            reference_logp=reference(packed)[0] if kl_coef else None,
        )
        if policy_has_moved:
            batch = replace(batch, old_logp=old(packed)[0])
    config = Config.of(loss="grpo", kl_coef=kl_coef)
    learner = make_learner(config, model, losses.LossSpec())
    metrics = learner.gradient(*learner.prepare(batch))

    assert float(metrics["loss"]) == pytest.approx(loss.item(), rel=1e-10, abs=1e-14)
    scale = max(float(g.abs().max()) for g in gradient)
    assert scale > 1e-3
    for ours, parameter in zip(gradient, model.parameters(), strict=True):
        assert_close(ours, parameter.grad, rtol=1e-10, atol=1e-10 * scale)


def one_at_a_time(model: Transformer, prompt: list[int], u: Tensor | None, limit: int) -> list[int]:
    """The completion of one prompt, with a full forward per token and no cache."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        logits = model.logits(torch.tensor([ids]))[:, -1]
        ids.append(int(grpo.pick_token(logits, None if u is None else u[len(ids)].view(1))))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("model", ["gpt2", "grouped-query"], indirect=True)
@pytest.mark.parametrize("greedy", [False, True])
def test_a_sample_depends_on_its_prompt_and_numbers_alone(model: Transformer, greedy: bool) -> None:
    for block in model.h:
        block.attn.window = 0  # grpo.py has none
    with torch.no_grad():
        model.head_weight[EOS].mul_(6)  # some completions end early, at different lengths
    u = torch.rand(len(PROMPTS), 20, generator=torch.Generator().manual_seed(3)).double()
    ids, mask = grpo.sample(model, PROMPTS, EOS, None if greedy else u, 9)
    lengths = mask.sum(1).tolist()
    assert ids.shape == mask.shape
    for b, prompt in enumerate(PROMPTS):
        expected = one_at_a_time(model, prompt, None if greedy else u[b], 9)
        end = len(prompt) + lengths[b]
        assert ids[b, :end].tolist() == prompt + expected
        assert not ids[b, end:].any()
        assert mask[b].nonzero()[:, 0].tolist() == list(range(len(prompt), end))
    if not greedy:
        assert min(lengths) < 9


def test_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STEPS", "PROMPTS_PER_STEP", "GROUP_SIZE", "EVAL_EVERY", "UPDATES_PER_ROLLOUT"):
        monkeypatch.setattr(grpo, name, 2)
    monkeypatch.setattr(grpo, "EVAL_SIZE", 4)
    monkeypatch.setattr(grpo, "KL_COEF", 0.1)
    rates, step = [], torch.optim.AdamW.step

    def recorded(optimizer: torch.optim.AdamW) -> None:
        rates.append(optimizer.param_groups[0]["lr"])
        step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", recorded)
    grpo.main()
    first = grpo.LEARNING_RATE / grpo.WARMUP_STEPS
    assert rates == pytest.approx([first, first, 2 * first, 2 * first])


def test_it_is_read_in_one_sitting_and_takes_little_from_the_library() -> None:
    assert len(SOURCE.splitlines()) <= 260
    imported = re.findall(r"^\s*(?:from|import) (minigrpo\S*)", SOURCE, re.MULTILINE)
    assert {*imported} == LIBRARY_AS_DATA
