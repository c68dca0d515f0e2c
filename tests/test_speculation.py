"""Proposals change the number of rounds, never the tokens; what is looked up, and what is kept."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from minigrpo.model.transformer import Transformer
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.rng import uniforms
from minigrpo.runtime.rollout_metrics import decoding_metrics
from minigrpo.runtime.speculation import SOURCES, parse_sources
from minigrpo.sampling.contexts import TOKEN_BITS, ContextTable, hash_contexts, hash_recent
from minigrpo.sampling.cuda_graphs import CUDAGraphCache
from minigrpo.sampling.decoders import ReplicatedPrefixDecoder, SharedPrefixDecoder, UncachedDecoder
from minigrpo.sampling.drafts import KINDS, LONGEST
from minigrpo.sampling.generate import generate
from minigrpo.sampling.params import SamplingParams
from minigrpo.sampling.proposer import ProposalPauses
from minigrpo.types import Completions

from .conftest import EOS, VOCAB, make_completions

LENGTH, SAMPLES, PROMPTS = 20, 4, 5
STOPS = (EOS, 4)
CALM = SamplingParams(temperature=0.25)  # texts that repeat, so that proposals are accepted
SETS = [[name for i, name in enumerate(SOURCES) if bits >> i & 1] for bits in range(1, 8)]
DECODERS = {
    "replicated": lambda: ReplicatedPrefixDecoder,
    "shared": lambda: SharedPrefixDecoder,
    "uncached": lambda: UncachedDecoder,
    "graphs": lambda: CUDAGraphCache().decoder,
}


def sample(model: Transformer, prompts: Completions, step: int = 0, **options: Any) -> Completions:
    numbers = uniforms(0, "test", step, np.arange(len(prompts)), SAMPLES, LENGTH)
    defaults = {"stops": STOPS, "max_new_tokens": LENGTH, "num_samples": SAMPLES, "params": CALM}
    options = {**defaults, "u": torch.from_numpy(numbers), **options}
    return generate(model, prompts.prompt_ids, prompts.prompt_len, **options)


def nearly_right(plain: Completions) -> torch.Tensor:
    """`[P, S]`: one completion of each prompt, with a token that is wrong."""
    answers = plain.completion_ids[:, 1].clone()
    answers[:, 6:7] = 3
    return answers


def same(a: Completions, b: Completions) -> bool:
    return torch.equal(a.completion_ids, b.completion_ids) and torch.equal(
        a.completion_mask, b.completion_mask
    )


@pytest.fixture
def prompts(model: Transformer) -> Completions:
    """Prompts that hold text of the model, so that they, too, show how it goes on."""
    start = make_completions(0, prompts=PROMPTS)
    text = sample(model, start, max_new_tokens=12, u=None, stops=(), sources=())
    ids = torch.nn.functional.pad(start.prompt_ids, (0, 12))
    columns = start.prompt_len[:, None] + torch.arange(12)
    ids = ids.scatter(1, columns, text.completion_ids[:, 0])
    return replace(start, prompt_ids=ids, prompt_len=start.prompt_len + 12)


# --- the tokens stay ------------------------------------------------------------------------------


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize("kind", DECODERS)
def test_no_combination_of_sources_changes_a_token(
    model: Transformer, prompts: Completions, kind: str
) -> None:
    """In float64, for each set of sources and window, with truncation, other stops, greedily."""
    ways: dict[str, dict[str, Any]] = {
        "calm": {},
        "top-p": {"params": SamplingParams(0.4, top_p=0.8)},
        "one stop, batches": {"stops": [EOS], "prompts_at_once": 2, "params": SamplingParams()},
        "greedy": {"u": None, "params": SamplingParams()},
    }
    decoder, work = DECODERS[kind](), Counter[str]()
    for name, way in ways.items():
        plain = sample(model, prompts, decoder=UncachedDecoder, sources=(), **way)
        for number, sources in enumerate(SETS if name == "calm" else SETS[-1:]):
            options = {"sources": sources, "num_speculative_tokens": (15, 3, 1)[number % 3]}
            drafts = nearly_right(plain)
            found = sample(
                model, prompts, decoder=decoder, drafts=drafts, work=work, **options, **way
            )
            assert same(found, plain), (name, sources)
            assert found.sampler_logp is not None and plain.sampler_logp is not None
            assert (found.sampler_logp - plain.sampler_logp).abs().max() < 1e-6
            if plain.log_kept_mass is not None and found.log_kept_mass is not None:
                assert (found.log_kept_mass - plain.log_kept_mass).abs().max() < 1e-6
    assert all(work[f"accepted/{source}"] for source in SOURCES), work


def test_texts_that_were_proposed_have_the_distribution_of_the_model(model: Transformer) -> None:
    """Chi-square test of the first two tokens of 8,000 completions, at the 99.99 % quantile."""
    number, ids, work = 8000, torch.tensor([[3, 5]]), Counter[str]()
    p = model.logits(ids)[0, -1].softmax(-1)
    after = torch.stack([ids.new_tensor([3, 5, token]) for token in range(VOCAB)])
    joint = p[:, None] * model.logits(after)[:, -1].softmax(-1)
    draft = torch.tensor([[0, int(joint.sum(0).argmax()), 0]])  # the likeliest second token
    u = torch.from_numpy(uniforms(0, "chi-square", 0, np.arange(1), number, 3))
    options = {"stops": (), "max_new_tokens": 3, "num_samples": number, "u": u}
    options |= {"sources": [*SOURCES], "drafts": draft, "work": work}
    sampled = generate(model, ids, torch.tensor([2]), **options)
    assert work["accepted/answer"] > 100
    found = np.zeros((VOCAB, VOCAB))
    np.add.at(found, tuple(sampled.completion_ids[0, :, :2].T.numpy()), 1)
    expected, found = number * joint.detach().numpy().ravel(), found.ravel()
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    found = np.append(found[~rare], found[rare].sum())
    chi_square, freedom = ((found - expected) ** 2 / expected).sum(), len(expected) - 1
    assert freedom > 50
    assert chi_square <= freedom + 3.72 * (2 * freedom) ** 0.5 + 9


@pytest.mark.parametrize("kind", DECODERS)
def test_a_round_runs_as_many_tokens_of_each_slot_as_it_is_asked_to(
    model: Transformer, prompts: Completions, kind: str
) -> None:
    tokens = torch.randint(0, EOS, (2 * PROMPTS, 12), generator=torch.Generator().manual_seed(0))
    whole, ragged = (DECODERS[kind]()(model, 16) for _ in range(2))
    for decoder in (whole, ragged):
        decoder.prefill(prompts.prompt_ids, prompts.prompt_len, 2)
    columns = torch.zeros(2 * PROMPTS, dtype=torch.int64)
    rows = torch.arange(2 * PROMPTS)[:, None]
    for turn in range(3):
        counts = 1 + (np.arange(2 * PROMPTS) + turn) % 3
        window = tokens[rows, columns[:, None] + torch.arange(3)]
        bound = int(columns.max()) + 3
        every = whole.step(window, columns, bound).clone().unflatten(0, (-1, 3))
        junk = window.where(torch.arange(3) < torch.from_numpy(counts)[:, None], 7)
        some = ragged.step(junk, columns, bound, counts)
        expected = every[torch.arange(3) < torch.from_numpy(counts)[:, None]]
        torch.testing.assert_close(some, expected, rtol=1e-10, atol=1e-12)
        columns = columns + torch.from_numpy(counts)
    if kind in ("replicated", "shared"):
        assert ragged.tokens_run < whole.tokens_run


# --- fewer rounds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_that_is_right_takes_fewer_rounds(
    model: Transformer, prompts: Completions, source: str
) -> None:
    """The answer is the completion; siblings and prompts show how the model goes on."""
    params, rounds = SamplingParams(temperature=0.05), list[int]()
    for sources in ([], [source]):
        work = Counter[str]()
        plain = sample(model, prompts, params=params, sources=(), stops=())
        drafts = plain.completion_ids[:, 0]
        options = {"params": params, "drafts": drafts, "stops": (), "work": work}
        sample(model, prompts, sources=sources, **options)
        rounds.append(work["row_rounds"])
    assert rounds[1] < rounds[0]


def test_proposing_rests_where_the_answer_is_wrong(
    model: Transformer, prompts: Completions
) -> None:
    options = {"params": SamplingParams(), "stops": (), "num_speculative_tokens": 1}
    plain, work = sample(model, prompts, sources=(), **options), Counter[str]()
    wrong = (plain.completion_ids[:, 0] + 1) % 4
    found = sample(model, prompts, drafts=wrong, sources=["answer"], work=work, **options)
    assert same(found, plain)
    assert 0 < work["proposed/answer"] < 0.4 * work["row_rounds"]


def test_pauses_get_longer_until_proposing_pays() -> None:
    pauses, proposing = ProposalPauses(), list[int]()
    for number in range(1, 40):
        if not pauses.paused:
            proposing.append(number)
        pauses.update(number, proposed=not pauses.paused, pays=number > 20)
    assert proposing == [1, 10, *range(27, 40)]


def test_metrics_of_decoding_are_shares_and_means_per_completion_and_round() -> None:
    work = Counter(rounds=5, rows=4, row_rounds=10, tokens=40, kept=25)
    work |= Counter({"proposed/answer": 20, "accepted/answer": 15})
    assert decoding_metrics(work, ("answer", "lookup")) == {
        "rollout/rounds": 5.0,
        "rollout/rounds_each": 2.5,
        "rollout/tokens": 40.0,
        "rollout/kept_per_round": 2.5,
        "speculation/answer/accepted": 0.75,
        "speculation/answer/kept_per_round": 1.5,
        "speculation/lookup/accepted": 0.0,
        "speculation/lookup/kept_per_round": 0.0,
    }


# --- what is looked up ----------------------------------------------------------------------------


def test_a_proposal_is_the_token_at_its_share_of_those_that_followed_the_context() -> None:
    context, other, unknown = (np.uint64(number << TOKEN_BITS) for number in (5, 6, 7))
    table = ContextTable(np.array([context] * 4 + [other]), np.array([9, 2, 9, 2, 3]))
    contexts = np.array([[context, other, unknown]] * 4)
    found = table.find(contexts, np.array([0.0, 0.49, 0.51, 0.999]))
    assert found.tolist() == [[2, 3, -1], [2, 3, -1], [9, 3, -1], [9, 3, -1]]


def test_draws_from_a_table_have_the_shares_of_what_followed() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.choice(5, size=1000, p=[0.5, 0.2, 0.2, 0.1, 0.0])
    table = ContextTable(np.zeros(1000, dtype=np.uint64), tokens)
    u = (np.arange(1000) + 0.5) / 1000
    found = table.find(np.zeros((1000, 1), dtype=np.uint64), u)[:, 0]
    assert np.array_equal(np.bincount(found), np.bincount(tokens))


def test_the_context_of_a_place_has_one_hash_however_it_is_computed() -> None:
    tokens = np.random.default_rng(0).integers(-1, 9, (3, LONGEST + 5))
    for size in (LONGEST, 3, 1, 0):
        hashes = hash_contexts(tokens, size, LONGEST)
        assert hashes.shape == (3, 5)
        for s in range(5):
            assert np.array_equal(hashes[:, s], hash_recent(tokens[:, s : s + LONGEST])[:, size])
    assert len(np.unique(hash_contexts(tokens, LONGEST, LONGEST))) == 15


def test_the_table_of_contexts_covers_the_sources() -> None:
    assert {kind.source for kind in KINDS} == {*SOURCES}
    assert max(kind.size for kind in KINDS) == LONGEST


@pytest.mark.parametrize(
    ("text", "sources"),
    [("auto", tuple(SOURCES)), ("none", ()), ("lookup,answer", ("answer", "lookup"))],
)
def test_sources_are_read_in_any_order(text: str, sources: tuple[str, ...]) -> None:
    assert parse_sources(text) == sources


@pytest.mark.parametrize("text", ["", "answers", "answer,", "auto,answer"])
def test_unknown_sources_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--speculate must be auto, none or a comma-separated"):
        parse_sources(text)
