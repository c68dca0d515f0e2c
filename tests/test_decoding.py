"""The decoder's cache, slots, drafts, and prompts that enter as others leave."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minigrpo.model.transformer import Transformer
from minigrpo.rng import uniforms
from minigrpo.sampling.decoder import Decoder
from minigrpo.sampling.generate import Generation
from minigrpo.sampling.sequences import assign_slots, propose
from minigrpo.types import Completions

from .steps import EOS, VOCAB, make_completions
from .test_sampling import begin, generate

LENGTH, SAMPLES = 20, 3
STOPS = (EOS, 4)


@pytest.fixture
def prompts() -> Completions:
    return make_completions(0, prompts=6)


def options(**changes: Any) -> dict[str, Any]:
    return {
        "stops": STOPS,
        "max_new_tokens": LENGTH,
        "num_samples": SAMPLES,
        "uniforms": torch.from_numpy(uniforms(0, "test", 0, np.arange(6), SAMPLES, LENGTH)),
        **changes,
    }


def started(model: Transformer, prompts: Completions, **changes: Any) -> Generation:
    return begin(model, prompts, **options(**changes))


def sample(model: Transformer, prompts: Completions, **changes: Any) -> Completions:
    return started(model, prompts, **changes).run()


def test_caches_stay_in_one_place_and_hold_what_runs(
    model: Transformer, prompts: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, stored, columns, places = [], [], [], set()
    step = Decoder.step

    def watched(self: Decoder, *args: Any) -> Tensor:
        assert len(self.prompt_of_slot) <= self.own_kv.shape[2]
        running.append(len(self.prompt_len))
        stored.append(self.prompt_kv.shape[2])
        columns.append(self.columns)
        caches = (self.prompt_kv, self.own_kv, self.layout, *self.states.caches())
        places.add(tuple(x.data_ptr() for x in caches))
        return step(self, *args)

    monkeypatch.setattr(Decoder, "step", watched)
    longest = sample(model, prompts).completion_mask.shape[-1]
    assert running[0] == 6 > running[-1]
    assert {*stored} == {6}
    assert len(places) == 1
    assert longest - 1 <= columns[-1] <= longest + 2
    running.clear()
    stored.clear()
    sample(model, prompts, prompts_at_once=2)
    assert max(running) <= 4  # what has entered and still runs
    assert {*stored} == {4}


@torch.no_grad()
def test_a_proposal_past_the_context_harms_nobody(model: Transformer) -> None:
    """A completion may end with the last position; what is proposed after it is not kept."""
    length = model.shape.context - 4
    ids = torch.arange(length)[None] % VOCAB
    prompt: Any = SimpleNamespace(prompt_ids=ids, prompt_len=torch.tensor([length]))
    drafts = torch.zeros(1, 9, dtype=torch.int64)
    plain, drafted = (
        generate(model, prompt, stops=(), max_new_tokens=4, **more)
        for more in ({}, {"drafts": drafts, "num_speculative_tokens": 8})
    )
    assert torch.equal(drafted.completion_ids, plain.completion_ids)


@given(st.integers(0, 10**6), st.integers(0, 20))
def test_no_slot_is_overwritten_that_another_slot_continues(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    slot = rng.integers(0, 8, rows)
    states = rng.integers(0, 2, (2, rows))
    slots, of_row, representatives = assign_slots(slot, *states)
    assert np.array_equal(slots[of_row], slot)
    assert np.array_equal(of_row[representatives], np.arange(len(slots)))
    assert len(slots) == len({*zip(slot.tolist(), *states.tolist(), strict=True)})
    for i, old in enumerate(slots):
        assert i == old or old >= len(slots) or slots[old] == old  # its source stays in place


@pytest.mark.parametrize("drafts", [None, torch.zeros(2, 1, dtype=torch.int64)])
def test_completions_of_a_prompt_share_a_slot_while_they_agree(
    model: Transformer, rounds: list[tuple[int, int, int]], drafts: Tensor | None
) -> None:
    prompts = make_completions(0, prompts=2)
    u = torch.full((2, 5, LENGTH), 0.3)  # five equal completions
    u[1, 4, 3:] = 0.9  # except one, from its fourth token on
    found = sample(model, prompts, uniforms=u, num_samples=5, drafts=drafts, stops=())
    assert not torch.equal(found.completion_ids[1, 3], found.completion_ids[1, 4])
    slots = [slots for slots, _, _ in rounds]
    assert slots[0] == 2
    assert max(slots) == 3


@pytest.mark.parametrize(
    ("recent", "length", "proposed"),
    [
        ([1, 2, 3], 3, [4, 5]),
        ([1, 2, 3], 7, [6, 7]),
        ([1, 2, 3], 5, [4, 5]),  # both matches are equally near: the first
        ([9, 9, 9], 4, [5, 1]),  # none: what is at the sequence's own length
        ([2, 3], 2, [3, 4]),  # too few tokens to match three
        ([2, 3, 6], 9, [7, 7]),  # past the end
    ],
)
def test_a_proposal_follows_the_match_in_the_draft_that_is_nearest_to_the_own_length(
    recent: list[int], length: int, proposed: list[int]
) -> None:
    draft = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3, 6, 7]])
    ids = torch.tensor([[0] * (length - len(recent)) + recent + [8, 8]])
    assert propose(draft, ids, torch.tensor([length]), 2).tolist() == [proposed]


def test_one_token_is_no_match_of_three_equal_ones() -> None:
    draft, ids = torch.tensor([[2, 2, 2, 6]]), torch.tensor([[2, 0]])
    assert propose(draft, ids, torch.tensor([1]), 1).tolist() == [[2]]
    assert propose(draft[:, :1], ids, torch.tensor([1]), 2).shape == (1, 2)


@pytest.mark.parametrize("width", [1, 5])
def test_a_completion_drafted_with_its_own_text_takes_the_fewest_rounds(
    model: Transformer, prompts: Completions, width: int
) -> None:
    plain = sample(model, prompts)
    for p, text in enumerate(plain.completion_ids[:, 0]):
        alone = started(
            model,
            prompts.select([p]),
            uniforms=options()["uniforms"][p : p + 1, :1],
            num_samples=1,
            drafts=text[None],
            num_speculative_tokens=width - 1,
        )
        again = alone.run()
        length = int(again.completion_mask.sum())
        assert torch.equal(again.completion_ids[0, 0], text[:length])
        # a text that repeats itself may be located in another place, and is then found again
        assert alone.rounds <= math.ceil((length - 1) / width) + 1


@pytest.mark.parametrize("width", [1, 3])
def test_the_counters_are_what_was_run(
    model: Transformer, prompts: Completions, rounds: list[tuple[int, int, int]], width: int
) -> None:
    drafts = torch.zeros(6, LENGTH, dtype=torch.int64) if width > 1 else None
    generation = started(model, prompts, drafts=drafts, num_speculative_tokens=2)
    found = generation.run()
    assert generation.rounds == len(rounds)
    if drafts is None:  # the prompt gives the first token
        assert len(rounds) == found.completion_mask.sum(-1).max() - 1
    widths = [tokens for _, tokens, _ in rounds]
    assert {*widths} == {1, width}
    assert widths[:5] == [width, 1, width, 1, 1]  # refused proposals rest, longer each time
    in_rounds = sum(slots * tokens for slots, tokens, _ in rounds)
    assert generation.tokens == prompts.prompt_len.sum() + in_rounds


def test_waiting_prompts_take_fewer_rounds_than_batch_after_batch(
    model: Transformer, prompts: Completions, rounds: list[tuple[int, int, int]]
) -> None:
    together = started(model, prompts, prompts_at_once=2)
    together.run()
    assert max(slots for slots, _, _ in rounds) <= 2 * SAMPLES
    # some have just entered, others are far along
    assert max(spread for _, _, spread in rounds) > 3
    pairs = [[0, 1], [2, 3], [4, 5]]
    u = options()["uniforms"]
    apart = [started(model, prompts.select(two), uniforms=u[two]) for two in pairs]
    for generation in apart:
        generation.run()
    assert together.rounds < 0.9 * sum(generation.rounds for generation in apart)
    assert together.tokens == sum(generation.tokens for generation in apart)
