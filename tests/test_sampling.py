"""Sampling: caches, drafts and batching change nothing but the time it takes."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minigrpo.model.packing import PACKINGS
from minigrpo.model.shape import ModelShape
from minigrpo.model.transformer import Transformer
from minigrpo.runtime.rng import stream, uniforms
from minigrpo.sampling.cached_decoder import CachedDecoder
from minigrpo.sampling.cuda_graphs import CUDAGraphCache
from minigrpo.sampling.decoders import ReplicatedPrefixDecoder, SharedPrefixDecoder, UncachedDecoder
from minigrpo.sampling.drafts import COST_OF_ROUND, COST_OF_SLOT, ProposalWindow, propose
from minigrpo.sampling.generate import ROUNDS_BETWEEN_CHECKS, generate
from minigrpo.sampling.params import SamplingParams, pick_token, truncate
from minigrpo.sampling.running import assign_slots
from minigrpo.tools.loading import Loaded, config_of
from minigrpo.tools.sample import Arguments, complete
from minigrpo.types import Completions, Example

from .conftest import EOS, SHAPES, VOCAB, make_completions

LENGTH = 20
pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")
DECODERS = [ReplicatedPrefixDecoder, SharedPrefixDecoder, UncachedDecoder]


def sample(
    model: Transformer, prompts: Completions, rows: list[int], **options: object
) -> Completions:
    u = torch.from_numpy(uniforms(0, "test", 0, np.array(rows), 3, LENGTH))
    return generate(
        model,
        prompts.prompt_ids[rows],
        prompts.prompt_len[rows],
        stops=[EOS],
        max_new_tokens=LENGTH,
        num_samples=3,
        u=u,
        **options,
    )


@pytest.fixture
def prompts() -> Completions:
    return make_completions(0, prompts=6)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", DECODERS[:2])
def test_with_and_without_cache_the_tokens_and_log_probs_are_the_same(
    model: Transformer, prompts: Completions, kind: type, temperature: float
) -> None:
    everyone = list(range(6))
    cached = sample(model, prompts, everyone, params=SamplingParams(temperature), decoder=kind)
    plain = sample(
        model, prompts, everyone, params=SamplingParams(temperature), decoder=UncachedDecoder
    )
    assert torch.equal(cached.completion_ids, plain.completion_ids)
    assert torch.equal(cached.completion_mask, plain.completion_mask)
    assert cached.sampler_logp is not None
    torch.testing.assert_close(cached.sampler_logp, plain.sampler_logp, rtol=0, atol=1e-6)
    lengths = cached.completion_mask.sum(-1)
    assert (
        lengths.min() < 8 < lengths.max()
    )  # else neither ragged lengths nor early exit was tested


@pytest.mark.parametrize("window", [1, 2, 5, 16])
@pytest.mark.parametrize("kind", DECODERS)
def test_drafts_change_the_number_of_rounds_and_not_the_tokens(
    model: Transformer,
    prompts: Completions,
    window: int,
    kind: type,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = sample(model, prompts, list(range(6)), decoder=kind)
    rounds = []
    step = kind.step
    monkeypatch.setattr(kind, "step", lambda self, *args: rounds.append(1) or step(self, *args))
    # the draft of a prompt is its second sample without one token: right for that sample up to
    # there, then shifted
    drafts = torch.cat([plain.completion_ids[:, 1, :4], plain.completion_ids[:, 1, 5:]], dim=1)
    for draft in (drafts, torch.zeros_like(drafts), drafts[:, :1]):
        drafted = sample(
            model,
            prompts,
            list(range(6)),
            decoder=kind,
            drafts=draft,
            num_speculative_tokens=window - 1,
        )
        assert torch.equal(drafted.completion_ids, plain.completion_ids)
        assert torch.equal(drafted.completion_mask, plain.completion_mask)
        torch.testing.assert_close(drafted.sampler_logp, plain.sampler_logp, rtol=0, atol=1e-6)
    # drafted with its own text, a completion takes as few rounds as the window allows
    rounds.clear()
    one = [sample(model, prompts, [p], decoder=kind) for p in range(6)]
    for p, alone in enumerate(one):
        rounds.clear()
        text = plain.completion_ids[p, :1]
        u = torch.from_numpy(uniforms(0, "test", 0, np.array([p]), 1, LENGTH))
        options = {"stops": [EOS], "max_new_tokens": LENGTH, "u": u, "decoder": kind}
        again = generate(
            model,
            prompts.prompt_ids[[p]],
            prompts.prompt_len[[p]],
            drafts=text,
            num_speculative_tokens=window - 1,
            **options,
        )
        length = int(again.completion_mask.sum())
        assert torch.equal(again.completion_ids[0, 0], alone.completion_ids[0, 0, :length])
        # without proposals, the host checks less often and sees the end later
        late = ROUNDS_BETWEEN_CHECKS - 1 if window == 1 else 0
        assert len(rounds) <= -(-(length - 1) // window) + 1 + late


def test_a_proposal_follows_the_match_in_the_draft_that_is_nearest_to_the_own_column() -> None:
    draft = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3, 6, 7]])

    def at(recent: list[int], column: int) -> list[int]:
        return propose(draft, torch.tensor([recent]), torch.tensor([column]), 2)[0].tolist()

    assert at([1, 2, 3], 3) == [4, 5]
    assert at([1, 2, 3], 7) == [6, 7]
    assert at([1, 2, 3], 5) == [4, 5]  # both matches are equally near: the first
    assert at([9, 9, 9], 4) == [5, 1]
    assert at([1, 2, 3], 2) == [3, 4]  # only two tokens so far: too few to match three
    assert at([2, 3, 6], 9) == [7, 7]


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_in_float64_no_draft_changes_a_token(data: st.DataObject) -> None:
    def draw(*choices: Any) -> Any:
        return data.draw(st.sampled_from(choices))

    seed, samples, at_once = draw(0, 1, 2), draw(1, 2, 5), draw(0, 1, 2, 4)
    model = Transformer(SHAPES[draw(*SHAPES)], seed=seed).double()
    with torch.no_grad():
        model.head_weight.mul_(draw(1, 3, 6))  # the surer, the more completions are alike
    prompts = make_completions(seed, prompts=5)
    params = SamplingParams(draw(1.0, 0.6), draw(0, 5), draw(1.0, 0.9), draw(0.0, 0.1))
    u = torch.from_numpy(uniforms(seed, "test", 0, np.arange(5), samples, LENGTH))
    options: dict[str, Any] = {
        "stops": draw([], [EOS], [EOS, 3]),
        "max_new_tokens": LENGTH,
        "num_samples": samples,
        "params": params,
        "u": draw(u, None),
    }
    ids, lengths = prompts.prompt_ids, prompts.prompt_len
    plain = generate(model, ids, lengths, **options, decoder=UncachedDecoder)
    assert plain.sampler_logp is not None
    drafts = plain.completion_ids[:, draw(0, -1)].clone()
    changed = torch.from_numpy(np.random.default_rng(seed).random(drafts.shape)) < draw(0, 0.2, 1)
    drafts[changed] = draw(0, 5, EOS)
    drafts = torch.cat([drafts[:, : draw(0, 7, LENGTH)], drafts[:, draw(0, 2) :]], dim=1)
    graphs = CUDAGraphCache()
    decoder = draw(*DECODERS, graphs.decoder)
    options |= {"num_speculative_tokens": draw(0, 1, 4, 7, 30), "prompts_at_once": at_once}
    found = generate(model, ids, lengths, drafts=drafts, decoder=decoder, **options)
    assert torch.equal(found.completion_ids, plain.completion_ids)
    assert torch.equal(found.completion_mask, plain.completion_mask)
    torch.testing.assert_close(found.sampler_logp, plain.sampler_logp, rtol=0, atol=1e-6)


def test_the_window_gains_the_most_tokens_for_its_cost() -> None:
    def chosen(right: int, slots: int, largest: int = 8) -> int:
        window = ProposalWindow(largest)
        for _ in range(20):
            window.update(right, 1000, slots)
        return window.size

    assert [chosen(0, slots) for slots in (1, 1000)] == [1, 1]  # nothing is ever right
    assert [chosen(1000, slots) for slots in (1, 1000)] == [8, 8]
    assert chosen(1000, 1, largest=6) == 6 and chosen(1000, 1, largest=1) == 1
    # some are right: many slots make tokens expensive, few make rounds expensive
    assert chosen(300, 10_000) == 1 < chosen(300, 1)
    for right, slots in ((300, 10), (700, 40), (900, 200), (950, 5)):
        p, draws = right / 1000, np.random.default_rng(0).random((20_000, 7)) < right / 1000
        gained = {w: 1 + draws[:, : w - 1].cumprod(1).sum(1).mean() for w in (1, 2, 4, 8)}
        gained_per_cost = {
            w: gained[w] / (COST_OF_ROUND + slots * (COST_OF_SLOT + w)) for w in gained
        }
        best = max(gained_per_cost, key=lambda w: gained_per_cost[w])
        assert gained_per_cost[chosen(right, slots)] > 0.98 * gained_per_cost[best], (p, slots)


def test_the_window_follows_what_was_right_lately() -> None:
    window = ProposalWindow(8)
    window.update(1000, 1000, 1)
    assert window.size == 8
    for _ in range(12):
        window.update(0, 1000, 1)
    assert window.size == 1
    window.update(990, 1000, 1)  # proposals are judged although none was run
    assert window.size > 1


@pytest.mark.parametrize("kind", DECODERS[:2])
def test_drafts_that_are_never_right_cost_no_tokens(
    model: Transformer, prompts: Completions, kind: type
) -> None:
    everyone = list(range(6))
    u = torch.from_numpy(uniforms(0, "test", 0, np.arange(6), 1, LENGTH))

    def tokens_run(drafts: Tensor | None) -> tuple[Completions, int]:
        work = Counter[str]()
        options = {"stops": [EOS], "max_new_tokens": LENGTH, "u": u, "decoder": kind}
        completions = generate(
            model,
            prompts.prompt_ids[everyone],
            prompts.prompt_len[everyone],
            drafts=drafts,
            work=work,
            **options,
        )
        return completions, work["tokens"]

    plain, without = tokens_run(None)
    never = (plain.completion_ids[:, 0] + 1) % VOCAB  # another token in every column
    never = torch.where(never == EOS, VOCAB - 1, never)
    for drafts in (never, never[:, :0]):
        again, run = tokens_run(drafts)
        assert torch.equal(again.completion_ids, plain.completion_ids)
        assert run <= without  # slots of completions that have ended are dropped at once


def test_a_round_of_several_tokens_at_different_columns_equals_the_full_forward(
    model: Transformer, prompts: Completions
) -> None:
    """Speculative decoding needs it: slots stand at different columns and run W tokens at once."""
    tokens = torch.randint(0, EOS, (12, 8), generator=torch.Generator().manual_seed(0))
    decoders = [kind(model, 10) for kind in DECODERS]
    first = [decoder.prefill(prompts.prompt_ids, prompts.prompt_len, 2) for decoder in decoders]
    for other in first[1:]:
        torch.testing.assert_close(first[0], other, rtol=1e-10, atol=1e-12)
    columns = torch.zeros(12, dtype=torch.int64)
    rows = torch.arange(12)[:, None]
    for _ in range(3):
        window = tokens[rows, columns[:, None] + torch.arange(3)]
        step = [decoder.step(window, columns, int(columns.max()) + 3) for decoder in decoders]
        for other in step[1:]:
            torch.testing.assert_close(step[0], other, rtol=1e-10, atol=1e-12)
        columns = columns + 1 + torch.arange(12) % 2  # slots keep one or two of the three tokens


@torch.no_grad()
def test_sampler_log_probs_are_the_training_forwards_in_fp32(device: str) -> None:
    model = Transformer(ModelShape(VOCAB, context=40, layers=2, width=16, heads=2), seed=1).to(
        device
    )
    prompts = make_completions(0, prompts=6).to(device)
    u = torch.from_numpy(uniforms(0, "test", 0, np.arange(6), 3, LENGTH)).to(device)
    options = {
        "stops": [EOS],
        "max_new_tokens": LENGTH,
        "num_samples": 3,
        "u": u,
        "params": SamplingParams(0.8),
    }
    c = generate(model, prompts.prompt_ids, prompts.prompt_len, **options)
    for build in PACKINGS.values():
        packing = build(c.to("cpu")).to(device)
        logp, _ = model(packing.tokens, packing, 0.8)
        torch.testing.assert_close(logp, c.sampler_logp, rtol=0, atol=1e-5)


def test_a_completion_does_not_depend_on_what_else_is_in_the_batch(
    model: Transformer, prompts: Completions
) -> None:
    together = sample(model, prompts, list(range(6)))
    for row in range(6):
        alone = sample(model, prompts, [row])
        length = alone.completion_ids.shape[-1]
        assert torch.equal(together.completion_ids[row, :, :length], alone.completion_ids[0])
        assert torch.equal(together.completion_mask[row, :, :length], alone.completion_mask[0])
        assert not together.completion_mask[row, :, length:].any()


def test_a_completion_ends_with_its_first_end_of_text(
    model: Transformer, prompts: Completions
) -> None:
    c = sample(model, prompts, list(range(6)))
    lengths = c.completion_mask.sum(-1)
    for p, g in np.ndindex(lengths.shape):
        tokens = c.completion_ids[p, g, : lengths[p, g]].tolist()
        assert EOS not in tokens[:-1]
        assert tokens[-1] == EOS or lengths[p, g] == LENGTH


def test_greedy_takes_the_most_likely_token(model: Transformer, prompts: Completions) -> None:
    c = generate(model, prompts.prompt_ids, prompts.prompt_len, stops=[EOS], max_new_tokens=6)
    for p in range(6):
        ids = prompts.prompt_ids[p, : prompts.prompt_len[p]].tolist()
        for token in c.completion_ids[p, 0][c.completion_mask[p, 0]].tolist():
            assert model.logits(torch.tensor([ids]))[0, -1].argmax() == token
            ids.append(token)


CHOICES = {
    "all": SamplingParams(),
    "top-k": SamplingParams(top_k=5),
    "top-p": SamplingParams(top_p=0.8),
    "both": SamplingParams(top_k=8, top_p=0.6),
    "min-p": SamplingParams(min_p=0.2),
    "all three": SamplingParams(top_k=12, top_p=0.9, min_p=0.15),
    "one": SamplingParams(top_k=1),
    "more than there are": SamplingParams(top_k=10**6),
}


def naive_truncation(p: list[float], params: SamplingParams) -> dict[int, float]:
    """The tokens that remain and their probabilities: sort, then top-k, top-p, min-p in turn."""
    order = sorted(range(len(p)), key=lambda i: -p[i])[: params.top_k or len(p)]
    total, kept, mass = sum(p[i] for i in order), [], 0.0
    for i in order:
        kept.append(i)
        mass += p[i] / total
        if mass >= params.top_p:
            break
    kept = [i for i in kept if p[i] >= params.min_p * p[order[0]]]
    return {i: p[i] / sum(p[j] for j in kept) for i in kept}


@pytest.mark.parametrize("name", CHOICES)
def test_tokens_are_drawn_with_their_probabilities(name: str) -> None:
    """Chi-square test of 100,000 draws against the truncated softmax, at the 99.99 % quantile."""
    logp = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)).mul(1.5).log_softmax(-1)
    expected = naive_truncation(logp.exp().tolist(), CHOICES[name])
    n = 100_000
    u = torch.from_numpy(stream(0, "chi-square").random(n, dtype=np.float32))
    allowed = truncate(logp[None], CHOICES[name])
    found = torch.bincount(
        pick_token(allowed[None], u[:, None], torch.zeros(n, dtype=torch.int64))[:, 0],
        minlength=VOCAB,
    ).tolist()
    assert {i for i, count in enumerate(found) if count} <= set(expected)
    assert (
        len(expected) == VOCAB if name in ("all", "more than there are") else len(expected) < VOCAB
    )
    chi_square = sum((found[i] - n * p) ** 2 / (n * p) for i, p in expected.items())
    freedom = len(expected) - 1
    # this bound is above the 99.99 % quantile for 0 to 30 degrees of freedom
    assert chi_square <= freedom + 3.72 * (2 * freedom) ** 0.5 + 9


@pytest.mark.parametrize("params", CHOICES.values(), ids=CHOICES)
def test_truncation_is_the_naive_formula_in_float64(params: SamplingParams) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(VOCAB, generator=generator, dtype=torch.float64).mul(1.5)
        logp = logits.log_softmax(-1)
        expected = naive_truncation(logp.exp().tolist(), params)
        left = truncate(logp, params)
        assert set(left.isfinite().nonzero()[:, 0].tolist()) == set(expected)
        renormalised = left.softmax(-1)
        for i, p in expected.items():
            assert float(renormalised[i]) == pytest.approx(p, rel=1e-12)


def test_min_p_comes_after_top_p_and_keeps_ties() -> None:
    def kept(*p: float, **params: float) -> list[int]:
        logp = torch.tensor(p, dtype=torch.float64).log()
        return truncate(logp, SamplingParams(**params)).isfinite().nonzero()[:, 0].tolist()

    assert kept(0.4, 0.2, 0.2, 0.1, 0.1, min_p=0.45) == [0, 1, 2]
    assert kept(0.4, 0.4, 0.2, min_p=1.0) == [0, 1]
    # Top-p counts 0.4, 0.65, 0.8. After min-p it would count 0.4 / 0.8 and 0.65 / 0.8, and stop.
    assert kept(0.4, 0.25, 0.15, 0.1, 0.1, min_p=0.3, top_p=0.75) == [0, 1, 2]
    assert SamplingParams(min_p=0.1).truncates and not SamplingParams().truncates


@pytest.mark.parametrize("kind", DECODERS)
def test_min_p_is_the_same_in_all_decoders_and_with_drafts(
    model: Transformer, prompts: Completions, kind: type
) -> None:
    everyone, params = list(range(6)), SamplingParams(0.8, min_p=0.3)
    plain = sample(model, prompts, everyone, params=params, decoder=UncachedDecoder)
    free = sample(model, prompts, everyone, params=SamplingParams(0.8), decoder=UncachedDecoder)
    assert plain.log_kept_mass is not None
    assert not torch.equal(plain.completion_ids, free.completion_ids)
    for drafts in (None, plain.completion_ids[:, 0]):
        out = sample(model, prompts, everyone, params=params, decoder=kind, drafts=drafts)
        assert torch.equal(out.completion_ids, plain.completion_ids)
        torch.testing.assert_close(out.log_kept_mass, plain.log_kept_mass, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.9, top_k=6, top_p=0.9),
        SamplingParams(temperature=0.9, min_p=0.4),
    ],
    ids=["top-k and top-p", "min-p"],
)
def test_with_truncation_the_log_probs_stay_untruncated_and_the_kept_mass_is_recorded(
    model: Transformer, prompts: Completions, params: SamplingParams
) -> None:
    u = torch.from_numpy(uniforms(0, "test", 0, np.arange(len(prompts)), 3, LENGTH))
    options = {"stops": [EOS], "max_new_tokens": LENGTH, "num_samples": 3, "u": u, "params": params}
    out = generate(model, prompts.prompt_ids, prompts.prompt_len, **options)
    packing = PACKINGS["shared-prompt"](out)
    logp, _ = model(packing.tokens, packing, 0.9)
    assert out.sampler_logp is not None and out.log_kept_mass is not None
    torch.testing.assert_close(out.sampler_logp, logp.detach().float(), rtol=0, atol=1e-5)
    kept = out.log_kept_mass[out.completion_mask].exp()
    assert 0 < kept.min() < kept.max() < 1
    tokens = out.completion_ids[0, 0].tolist()
    plain = (
        model.logits(
            torch.tensor([prompts.prompt_ids[0, : prompts.prompt_len[0]].tolist() + tokens])
        )[0]
        / 0.9
    )
    for s, token in enumerate(tokens[: int(out.completion_mask[0, 0].sum())]):
        p = plain[int(prompts.prompt_len[0]) - 1 + s].softmax(-1).tolist()
        remaining = naive_truncation(p, params)
        assert token in remaining
        assert float(out.log_kept_mass[0, 0, s].exp()) == pytest.approx(
            sum(p[i] for i in remaining), rel=1e-5
        )


def test_the_sample_tool_takes_the_truncation_of_the_run_and_its_own() -> None:
    asked: list[SamplingParams] = []

    class Sampler:
        tokenizer = None

        def complete(self, *_: object, params: SamplingParams, **__: object) -> list[object]:
            asked.append(params)
            return []

    for own in ({}, {"top_k": 5, "top_p": 0.8, "min_p": 0.3}):
        config = config_of(Arguments(Path("nowhere"), temperature=0.7, **own))
        loaded = Loaded("", config, None, Sampler())  # type: ignore[arg-type]
        complete(loaded, [Example("", "")], 2)
    assert asked == [SamplingParams(0.7), SamplingParams(0.7, 5, 0.8, 0.3)]


def test_uniforms_at_both_ends_of_the_interval_pick_tokens_of_positive_probability() -> None:
    logp = torch.tensor([[-torch.inf, 0.5, 0.5, -torch.inf]]).log_softmax(-1)
    picked = pick_token(logp[None], torch.tensor([[0.0], [1 - 2**-24]]), torch.tensor([0, 0]))
    assert picked.tolist() == [[1], [2]]


def test_sequences_that_agree_share_a_slot_and_slots_stay_in_place_if_they_can() -> None:
    # sequences 0-2 share slot 0, and 2 now differs; sequence 3 is in slot 1, sequence 4 in slot 5
    slots, slot, representatives = assign_slots(
        np.array([0, 0, 0, 1, 5]), np.array([[4, 4, 4, 4, 9], [7, 7, 8, 7, 7]])
    )
    # slots 0 and 1 stay in place, the others fill the places that are left
    assert slots.tolist() == [0, 1, 0, 5]
    assert slot.tolist() == [0, 0, 2, 1, 3]
    assert representatives.tolist() == [0, 3, 2, 4]


@given(st.integers(0, 10**6), st.integers(1, 20))
def test_no_slot_is_overwritten_that_another_slot_continues(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    slot, states = rng.integers(0, 8, rows), rng.integers(0, 2, (2, rows))
    slots, of_row, representatives = assign_slots(slot, states)
    assert np.array_equal(slots[of_row], slot)
    assert np.array_equal(of_row[representatives], np.arange(len(slots)))
    assert len(slots) == len(
        {(c, *s) for c, s in zip(slot.tolist(), states.T.tolist(), strict=True)}
    )
    for i, old in enumerate(slots):
        assert i == old or old >= len(slots) or slots[old] == old  # its source stays in place


def test_completions_of_a_prompt_share_a_slot_while_they_agree(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_completions(0, prompts=2)
    u = torch.full((2, 5, LENGTH), 0.3)  # five equal completions
    u[1, 4, 3:] = 0.9  # except one, from its fourth token on
    slots = []
    step = CachedDecoder.step
    monkeypatch.setattr(
        CachedDecoder, "step", lambda self, *args: slots.append(self.num_slots) or step(self, *args)
    )
    options = {"stops": [EOS], "max_new_tokens": LENGTH, "num_samples": 5, "u": u}
    plain = generate(model, prompts.prompt_ids, prompts.prompt_len, **options)
    slots.clear()
    drafts = torch.zeros(2, 1, dtype=torch.int64)
    shared = generate(
        model,
        prompts.prompt_ids,
        prompts.prompt_len,
        drafts=drafts,
        num_speculative_tokens=1,
        **options,
    )
    assert torch.equal(shared.completion_ids, plain.completion_ids)
    assert slots[0] == 2
    assert max(slots) == 3


def test_uniforms_belong_to_the_prompt_and_the_sample() -> None:
    a = uniforms(0, "sample", 3, np.array([7, 9]), 4, 6)
    b = uniforms(0, "sample", 3, np.array([9]), 2, 12)
    assert np.array_equal(a[1, :2], b[0, :, :6])
    assert len(np.unique(a)) == a.size
    others = [
        uniforms(1, "sample", 3, np.array([7]), 4, 6),
        uniforms(0, "evaluate", 3, np.array([7]), 4, 6),
    ]
    others.append(uniforms(0, "sample", 4, np.array([7]), 4, 6))
    assert all(not np.array_equal(a[:1], other) for other in others)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", x) for x in (0, -1, float("nan"), float("inf"), "1")),
        *(("top_k", x) for x in (-1, 2.5, True)),
        *(("top_p", x) for x in (0, -0.1, 1.1, float("nan"))),
        *(("min_p", x) for x in (-0.1, 2, float("nan"))),
    ],
)
def test_parameters_that_no_flag_allows_are_refused(name: str, value: Any) -> None:
    """Temperature 0 made every token the first of the vocabulary."""
    with pytest.raises(ValueError, match=rf"^--{name.replace('_', '-')} must be .*, got .*\Z"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda u: u.transpose(1, 2), r"shape \[2, 3, S\] with S at least 20, got \[2, 20, 3\]"),
        (lambda u: u[:, :, :19], r"got \[2, 3, 19\]"),
        (lambda u: u[:1], r"got \[1, 3, 20\]"),
        (lambda u: u[:, 0], r"got \[2, 20\]"),
        (lambda u: u * torch.nan, r"in \[0, 1\), got nan to nan"),
        (lambda u: u + 1, r"in \[0, 1\), got 1"),
        (lambda u: u - 1, r"in \[0, 1\), got -0.99"),
        (torch.ones_like, r"in \[0, 1\), got 1 to 1"),
    ],
)
def test_uniform_numbers_that_cannot_be_are_refused(
    model: Transformer, change: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    prompts = make_completions(0, prompts=2)
    u = torch.from_numpy(uniforms(0, "test", 0, np.arange(2), 3, LENGTH))
    options: Any = {"stops": [EOS], "max_new_tokens": LENGTH, "num_samples": 3}
    with pytest.raises(ValueError, match=words):
        generate(model, prompts.prompt_ids, prompts.prompt_len, u=change(u), **options)
