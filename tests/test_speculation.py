"""Proposals change the number of rounds, never the tokens; what is looked up, and what is kept."""

import copy
from collections import Counter
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
from minigrpo.sampling.drafts import KINDS, LONGEST, NUM_CLASSES, new_history
from minigrpo.sampling.generate import generate
from minigrpo.sampling.history import History
from minigrpo.sampling.params import SamplingParams
from minigrpo.sampling.proposer import MOST_COMPARED
from minigrpo.types import Completions

from .conftest import EOS, VOCAB, make_completions

LENGTH, SAMPLES, PROMPTS = 20, 4, 5
STOPS = (EOS, 4)
CALM = SamplingParams(temperature=0.25)  # texts that repeat, so that proposals are accepted
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


def same(a: Completions, b: Completions) -> bool:
    return torch.equal(a.completion_ids, b.completion_ids) and torch.equal(
        a.completion_mask, b.completion_mask
    )


@pytest.fixture
def prompts() -> Completions:
    return make_completions(0, prompts=PROMPTS)


@pytest.fixture
def earlier(model: Transformer, prompts: Completions) -> History:
    """An earlier visit to the same prompts, and one to others."""
    history = new_history()
    history.add(sample(model, make_completions(1, prompts=2)))
    history.add(sample(model, prompts, step=1))
    return history


# --- the tokens stay ------------------------------------------------------------------------------


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize("kind", DECODERS)
def test_no_source_changes_a_token(
    model: Transformer, prompts: Completions, earlier: History, kind: str
) -> None:
    """In float64, for every source and window, with truncation, other stops, and greedily."""
    ways: dict[str, dict[str, Any]] = {
        "calm": {},
        "top-p": {"params": SamplingParams(0.4, top_p=0.8)},
        "one stop, batches": {"stops": [EOS], "prompts_at_once": 2, "params": SamplingParams()},
        "greedy": {"u": None, "params": SamplingParams()},
    }
    decoder, accepted = DECODERS[kind](), Counter[str]()
    for name, way in ways.items():
        plain = sample(model, prompts, decoder=UncachedDecoder, **way)
        answers = plain.completion_ids[:, 1].clone()
        answers[:, 6] = 3
        sets = [[source] for source in SOURCES] if name == "calm" else []
        for number, sources in enumerate([*sets, [*SOURCES]]):
            found = sample(
                model,
                prompts,
                decoder=decoder,
                sources=sources,
                drafts=answers,
                history=copy.copy(earlier),
                num_speculative_tokens=(15, 3, 1)[number % 3],
                work=accepted,
                **way,
            )
            assert same(found, plain), (name, sources)
            assert found.sampler_logp is not None and plain.sampler_logp is not None
            assert (found.sampler_logp - plain.sampler_logp).abs().max() < 1e-6
            if plain.log_kept_mass is not None and found.log_kept_mass is not None:
                assert (found.log_kept_mass - plain.log_kept_mass).abs().max() < 1e-6
    assert all(accepted[f"accepted/{source}"] for source in SOURCES), accepted


def test_texts_that_were_proposed_have_the_distribution_of_the_model(model: Transformer) -> None:
    """Chi-square test of the first two tokens of 8,000 completions, at the 99.99 % quantile."""
    number, ids = 4000, torch.tensor([[3, 5]])
    history, work, found = new_history(), Counter[str](), np.zeros((VOCAB, VOCAB))
    for step in range(3):
        u = torch.from_numpy(uniforms(0, "chi-square", step, np.arange(1), number, 2))
        options = {"stops": (), "max_new_tokens": 2, "num_samples": number, "u": u}
        options |= {"sources": [*SOURCES], "history": history, "work": work}
        sampled = generate(model, ids, torch.tensor([2]), **options)
        history.add(sampled)
        if step:
            first, second = sampled.completion_ids[0].T.numpy()
            np.add.at(found, (first, second), 1)
    p = model.logits(ids)[0, -1].softmax(-1)
    after = torch.stack([ids.new_tensor([3, 5, token]) for token in range(VOCAB)])
    joint = (p[:, None] * model.logits(after)[:, -1].softmax(-1)).detach().numpy().ravel()
    expected, found = 2 * number * joint, found.ravel()
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


def test_a_second_visit_to_a_prompt_takes_fewer_rounds(
    model: Transformer, prompts: Completions
) -> None:
    """The more so, the less the policy and the uniform numbers have changed."""
    history, rounds = new_history(), list[int]()
    for sources in ([], ["history"]):
        work = Counter[str]()
        history.add(sample(model, prompts, sources=sources, history=history, work=work))
        rounds.append(work["row_rounds"])
        assert work["kept"] > 0
    assert rounds[1] < 0.5 * rounds[0]


def test_rates_are_learnt_from_batch_to_batch_and_a_bad_answer_is_left_alone(
    model: Transformer, prompts: Completions
) -> None:
    plain, history = sample(model, prompts), new_history()
    wrong = (plain.completion_ids[:, 0] + 1) % 4  # no token that follows is right but by chance
    run = []
    for _ in range(4):
        work = Counter[str]()
        options = {"drafts": wrong, "sources": ["answer"], "history": history, "work": work}
        assert same(sample(model, prompts, **options), plain)
        run.append(work["proposed/answer"])
    assert history.hits[1].sum() > 0 and history.hits[1].max() <= MOST_COMPARED
    assert run[-1] < 0.5 * run[0]


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
    assert found.tokens.tolist() == [[2, 3, -1], [2, 3, -1], [9, 3, -1], [9, 3, -1]]
    assert found.margins[1, 0] < found.margins[0, 0] or found.margins[1, 0] == 0
    certain = ContextTable(np.full(100, context), np.full(100, 4)).find(
        np.array([[context]]), np.array([0.5])
    )
    assert certain.tokens[0, 0] == 4 and certain.margins[0, 0] > found.margins.max()


def test_draws_from_a_table_have_the_shares_of_what_followed() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.choice(5, size=1000, p=[0.5, 0.2, 0.2, 0.1, 0.0])
    table = ContextTable(np.zeros(1000, dtype=np.uint64), tokens)
    u = (np.arange(1000) + 0.5) / 1000
    found = table.find(np.zeros((1000, 1), dtype=np.uint64), u).tokens[:, 0]
    assert np.array_equal(np.bincount(found), np.bincount(tokens))


def test_the_context_of_a_place_has_one_hash_however_it_is_computed() -> None:
    tokens = np.random.default_rng(0).integers(-1, 9, (3, LONGEST + 5))
    sizes = [12, 6, 3, 0]
    hashes = hash_contexts(tokens, sizes, LONGEST)
    assert hashes.shape == (3, 5, 4)
    for s in range(5):
        recent = hash_recent(tokens[:, s : s + LONGEST], np.array(sizes))
        assert np.array_equal(hashes[:, s], recent)
    assert len(np.unique(hashes[..., 1])) == 15


def test_the_table_of_contexts_covers_the_sources() -> None:
    assert {kind.source for kind in KINDS} == {*SOURCES}
    assert max(kind.size for kind in KINDS) == LONGEST


@pytest.mark.parametrize(
    ("text", "sources"),
    [("auto", tuple(SOURCES)), ("none", ()), ("history,answer", ("answer", "history"))],
)
def test_sources_are_read_in_any_order(text: str, sources: tuple[str, ...]) -> None:
    assert parse_sources(text) == sources


@pytest.mark.parametrize("text", ["", "answers", "answer,", "auto,answer"])
def test_unknown_sources_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--speculate must be auto, none or a comma-separated"):
        parse_sources(text)


# --- what is kept ---------------------------------------------------------------------------------


def test_a_history_is_the_same_after_saving_and_loading(
    model: Transformer, prompts: Completions, earlier: History
) -> None:
    sample(model, prompts, sources=["history"], history=earlier)
    assert earlier.hits.any()
    loaded = new_history()
    loaded.load_state_dict(earlier.state_dict())
    assert np.array_equal(loaded.hits, earlier.hits) and loaded.num_tokens == earlier.num_tokens
    for (a, x), (b, y) in zip(loaded.visits.items(), earlier.visits.items(), strict=True):
        assert a == b
        for one, other in zip(vars(x).values(), vars(y).values(), strict=True):
            assert np.array_equal(one, other)
    work = Counter[str](), Counter[str]()
    for history, counts in zip((loaded, earlier), work, strict=True):
        sample(model, prompts, sources=["history"], history=history, work=counts)
    assert work[0] == work[1] and work[0]["accepted/history"]
    empty = new_history()
    empty.load_state_dict(new_history().state_dict())
    empty.load_state_dict({})
    empty.load_state_dict({**earlier.state_dict(), "hits": torch.zeros(2, 1)})  # another version's
    assert not empty.visits and not empty.hits.any()


def test_a_history_keeps_the_last_visits_within_its_bound(prompts: Completions) -> None:
    history = History(NUM_CLASSES, LONGEST, most_tokens=60)
    for seed in range(3):
        history.add(make_completions(seed, prompts=3))
    assert 0 < history.num_tokens <= 60
    assert history.num_tokens == sum(len(visit.tokens) for visit in history.visits.values())
    last = make_completions(2, prompts=3)
    (_, newest), *_ = history.newest(60)
    mask = last.completion_mask[2]
    assert newest.tokens.tolist() == last.completion_ids[2][mask].tolist()
    before = len(history.visits), history.num_tokens
    history.add(last.select(torch.tensor([2])))  # the same prompt again: in place of the earlier
    assert (len(history.visits), history.num_tokens) == before
