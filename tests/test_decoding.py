"""The decoder's cache, slots, drafts, and prompts that enter as others leave."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from minigrpo.model.transformer import Transformer
from minigrpo.runtime.rng import uniforms
from minigrpo.sampling import decoder as decoding
from minigrpo.sampling.decoder import Decoder, Room
from minigrpo.sampling.generate import assign_slots
from minigrpo.sampling.pick import propose
from minigrpo.types import Completions

from .steps import EOS, SHAPES, VOCAB, make_completions
from .test_sampling import generate

LENGTH, SAMPLES = 20, 3
STOPS = (EOS, 4)


@pytest.fixture
def prompts() -> Completions:
    return make_completions(0, prompts=6)


def options(**changes: Any) -> dict[str, Any]:
    u = torch.from_numpy(uniforms(0, "test", 0, np.arange(6), SAMPLES, LENGTH))
    return {"stops": STOPS, "max_new_tokens": LENGTH, "num_samples": SAMPLES, "u": u, **changes}


def sample(model: Transformer, prompts: Completions, **changes: Any) -> Completions:
    return generate(model, prompts.prompt_ids, prompts.prompt_len, **options(**changes))


# --- the cache ------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_enters_splits_and_leaves_the_logits_are_those_of_a_full_forward(
    shape: str, seed: int
) -> None:
    """Slots at different columns, several tokens at once, some of which are rejected."""
    rng, model = np.random.default_rng(seed), Transformer(SHAPES[shape], seed=1).double()
    most = 60
    decoder = Decoder(model, Room(21, 7, most, most, columns=21), few_sizes=bool(seed % 2))
    slots = []  # the whole text of each slot that the decoder has run
    starts = []  # how long its prompt is

    def check(logits: Tensor, texts: list[list[int]]) -> None:
        for row, text in zip(logits, texts, strict=True):
            expected = model.logits(torch.tensor([text]))[0, -len(row) :]
            assert_close(row, expected, rtol=1e-9, atol=1e-11)

    for _ in range(7):
        kind = rng.choice(["enter", "step", "step", "reorder"]) if slots else "enter"
        if kind == "enter":
            new = make_completions(int(rng.integers(100)), prompts=int(rng.integers(1, 4)))
            logits = decoder.prefill(new.prompt_ids, new.prompt_len)
            texts = [
                ids[:n].tolist() for ids, n in zip(new.prompt_ids, new.prompt_len, strict=True)
            ]
            check(logits[:, None], texts)
            slots, starts = slots + texts, starts + [len(text) for text in texts]
        elif kind == "step":
            width = int(rng.integers(1, 4))
            tokens = rng.integers(0, VOCAB, (len(slots), width)).tolist()
            columns = [len(text) - start for text, start in zip(slots, starts, strict=True)]
            padding = decoder.pad_to(len(slots)) - len(slots)
            usable = decoder.use_columns(max(columns) + width)
            logits = decoder.step(
                torch.tensor(tokens + padding * [width * [0]]),
                torch.tensor(columns + padding * [0]),
                usable,
            )[: len(slots)]
            texts = [text + more for text, more in zip(slots, tokens, strict=True)]
            check(logits, texts)
            dropped = rng.integers(0, width, len(slots))  # rejected tokens are overwritten later
            slots = [text[: len(text) - n] for text, n in zip(texts, dropped, strict=True)]
        else:
            kept = np.flatnonzero(rng.random(len(slots)) < 0.7)
            copies = np.repeat(kept, rng.integers(1, 4, len(kept)))[: most - 9]
            sources, _, _ = assign_slots(copies, np.arange(len(copies)), np.zeros_like(copies))
            decoder.reorder(sources)
            slots, starts = [slots[i] for i in sources], [starts[i] for i in sources]
        assert len(decoder.prompt_len) == len(np.unique(decoder.prompt_of_slot))


def test_caches_stay_in_one_place_and_hold_what_runs(
    model: Transformer, prompts: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "BLOCK", 3)
    sizes, step = [], Decoder.step

    def watched(self: Decoder, *args: Any) -> Tensor:
        assert len(self.prompt_of_slot) <= self.own_kv.shape[2]
        places = (x.data_ptr() for x in (self.prompt_kv, self.own_kv, self.layout))
        sizes.append((len(self.prompt_len), self.prompt_kv.shape[2], self.columns, *places))
        return step(self, *args)

    monkeypatch.setattr(Decoder, "step", watched)
    found = sample(model, prompts)
    running, stored, columns, *places = zip(*sizes, strict=True)
    assert running[0] == 6 > running[-1] and {*stored} == {6}
    assert all(len({*place}) == 1 for place in places)
    longest = found.completion_mask.shape[-1]
    assert longest - 1 <= columns[-1] <= longest + 2
    sizes.clear()
    sample(model, prompts, prompts_at_once=2)
    assert max(running for running, *_ in sizes) <= 4  # what has entered and still runs
    assert {stored for _, stored, *_ in sizes} == {4}


@torch.no_grad()
def test_a_proposal_past_the_context_harms_nobody(model: Transformer) -> None:
    """A completion may end with the last position; what is proposed after it is not kept."""
    context = model.shape.context
    ids, lengths = torch.arange(context - 4)[None] % VOCAB, torch.tensor([context - 4])
    plain = generate(model, ids, lengths, stops=(), max_new_tokens=4)
    drafts = torch.zeros(1, 9, dtype=torch.int64)
    more = {"drafts": drafts, "num_speculative_tokens": 8}
    found = generate(model, ids, lengths, stops=(), max_new_tokens=4, **more)
    assert torch.equal(found.completion_ids, plain.completion_ids)


# --- slots ----------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(0, 20))
def test_no_slot_is_overwritten_that_another_slot_continues(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    slot, states = rng.integers(0, 8, rows), rng.integers(0, 2, (2, rows))
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
    found = sample(model, prompts, u=u, num_samples=5, drafts=drafts, stops=())
    assert not torch.equal(found.completion_ids[1, 3], found.completion_ids[1, 4])
    assert rounds[0][0] == 2
    assert max(slots for slots, _, _ in rounds) == 3


# --- drafts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recent", "length", "proposed"),
    [
        ([1, 2, 3], 3, [4, 5]),
        ([1, 2, 3], 7, [6, 7]),
        ([1, 2, 3], 5, [4, 5]),  # both matches are equally near: the first
        ([9, 9, 9], 4, [5, 1]),  # none: what is at the sequence's own length
        ([2, 3], 2, [3, 4]),  # too few tokens to match three
        ([2, 3, 6], 9, [7, 7]),  # past the end
        ([9, 9, 9], 12, [7, 7]),
    ],
)
def test_a_proposal_follows_the_match_in_the_draft_that_is_nearest_to_the_own_length(
    recent: list[int], length: int, proposed: list[int]
) -> None:
    draft = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3, 6, 7]])
    ids = torch.tensor([[0] * (length - len(recent)) + recent + [8, 8]])
    assert propose(draft, ids, torch.tensor([length]), 2).tolist() == [proposed]
    assert propose(draft[:, :1], ids, torch.tensor([length]), 2).shape == (1, 2)
    # one token is not three equal ones
    few = propose(torch.tensor([[2, 2, 2, 6]]), torch.tensor([[2, 0]]), torch.tensor([1]), 1)
    assert few.tolist() == [[2]]


@pytest.mark.parametrize("window", [1, 5])
def test_a_completion_drafted_with_its_own_text_takes_as_few_rounds_as_the_window_allows(
    model: Transformer, prompts: Completions, window: int
) -> None:
    plain = sample(model, prompts)
    for p, text in enumerate(plain.completion_ids[:, 0]):
        work = Counter()
        more = {"drafts": text[None], "num_speculative_tokens": window - 1, "work": work}
        alone = options(u=options()["u"][p : p + 1, :1], num_samples=1, **more)
        again = generate(model, prompts.prompt_ids[[p]], prompts.prompt_len[[p]], **alone)
        length = int(again.completion_mask.sum())
        assert torch.equal(again.completion_ids[0, 0], text[:length])
        # a text that repeats itself may be located in another place, and is then found again
        assert work["rounds"] <= -(-(length - 1) // window) + 1


def test_the_counters_are_what_was_run(
    model: Transformer, prompts: Completions, rounds: list[tuple[int, int, int]]
) -> None:
    plain, lengths = sample(model, prompts), prompts.prompt_len.sum()
    never = (plain.completion_ids[:, 0] + 1) % VOCAB  # another token in every column
    never = torch.where((never == EOS) | (never == 4), 5, never)[:, :1].expand(-1, LENGTH)
    for drafts, window in ((None, 1), (never, 3)):
        rounds.clear()
        work = Counter()
        sample(model, prompts, drafts=drafts, num_speculative_tokens=2, work=work)
        assert work["rounds"] == len(rounds) and {w for _, w, _ in rounds} == {window}
        assert work["tokens"] == lengths + sum(slots * w for slots, w, _ in rounds)
        if drafts is None:  # the prompt gives the first token
            assert work["rounds"] == plain.completion_mask.sum(-1).max() - 1


# --- prompts enter and leave ----------------------------------------------------------------------


def test_waiting_prompts_take_fewer_rounds_than_batch_after_batch(
    model: Transformer, prompts: Completions, rounds: list[tuple[int, int, int]]
) -> None:
    together, apart = Counter(), Counter()
    sample(model, prompts, prompts_at_once=2, work=together)
    assert max(slots for slots, _, _ in rounds) <= 2 * SAMPLES
    # some have just entered, others are far along
    assert max(spread for _, _, spread in rounds) > 3
    u = options()["u"]
    for p in range(0, 6, 2):
        two = slice(p, p + 2)
        changes = options(u=u[two], work=apart)
        generate(model, prompts.prompt_ids[two], prompts.prompt_len[two], **changes)
    assert together["rounds"] < 0.9 * apart["rounds"]
    assert together["tokens"] == apart["tokens"]
