"""Rewards that look at tokens: spans found by tags, frozen models, and how such rewards are run."""

import doctest
import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minigrpo.model import spans as spans_module
from minigrpo.model.packing import PACKINGS
from minigrpo.model.spans import find_spans
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.model.transformer import Transformer
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.frozen_model import FrozenModel
from minigrpo.runtime.oom import OOMBackoff
from minigrpo.runtime.reward_calls import TOKENS, RewardSource
from minigrpo.runtime.token_rewards import TokenBatch, TokenScoring
from minigrpo.types import Completions, Example

from .conftest import SHAPES, make_completions
from .pretend import pretend_cuda
from .test_packing import naive_logp

CHESS = load_tokenizer("chess")


class Pieces:
    """A tokenizer whose tokens are the given pieces of text."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode_bytes(self, ids: list[int]) -> bytes:
        return b"".join(self.pieces[number] for number in ids)


def as_tokens(pieces: list[bytes]) -> tuple[Any, Completions]:
    """One completion of one prompt, whose tokens are the pieces."""
    ids = torch.arange(len(pieces))[None, None]
    return Pieces(pieces), Completions(ids[0], torch.ones(1), ids, ids >= 0)


def span(pieces: list[bytes], tag: str = "think", **options: bool) -> list[int]:
    result: list[int] = find_spans(*as_tokens(pieces), tag, **options)[0, 0].tolist()
    return result


# --- spans ----------------------------------------------------------------------------------------


def test_the_worked_example_of_spans_is_what_the_code_computes() -> None:
    result = doctest.testmod(spans_module)
    assert result.attempted == 2 and not result.failed


@given(st.sets(st.integers(1, 29)), st.sampled_from([b"", b"a", b"ab c", "\u00e9t\u00e9".encode()]))
def test_a_span_is_found_however_its_tags_are_split(cuts: set[int], inside: bytes) -> None:
    text = b"x<think>" + inside + b"</think>yz"
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    start, end = len(b"x<think>"), len(b"x<think>") + len(inside)
    first, last = span(pieces)
    # all tokens that lie between the tags, and no other
    wholly = [i for i, a in enumerate(places[:-1]) if start <= a and places[i + 1] <= end]
    assert list(range(first, last)) == wholly
    first, last = span(pieces, with_tags=True)
    covered = b"".join(pieces[first:last])
    assert b"<think>" + inside + b"</think>" in covered
    assert b"<think>" + inside + b"</think>" not in b"".join(pieces[first + 1 : last])
    assert b"<think>" + inside + b"</think>" not in b"".join(pieces[first : last - 1])


@pytest.mark.parametrize(
    "text",
    ["", "no tags", "<think>no end", "no start</think>", "</think>a<think>", "<think >a</think>"],
)
def test_a_missing_tag_is_minus_one(text: str) -> None:
    pieces = [text[i : i + 1].encode() for i in range(len(text))] or [b""]
    assert span(pieces) == span(pieces, with_tags=True) == [-1, -1]


def test_the_first_pair_of_tags_counts_and_padding_does_not() -> None:
    pieces = [b"<think>", b"a", b"</think>", b"<think>", b"b", b"</think>"]
    assert span(pieces) == [1, 2]
    tokenizer, completions = as_tokens(pieces)
    completions.completion_mask[..., 2:] = False
    assert find_spans(tokenizer, completions, "think").tolist() == [[[-1, -1]]]


@pytest.mark.parametrize("tag", ["", "<think>", "/think"])
def test_a_tag_is_a_name(tag: str) -> None:
    with pytest.raises(ValueError, match="tag must be a name"):
        span([b"a"], tag)


# --- frozen models --------------------------------------------------------------------------------


def frozen(model: Transformer, **changes: Any) -> FrozenModel:
    options: dict[str, Any] = {
        "name": "model m",
        "packing": PACKINGS["prefix-tree"],
        "temperature": 0.7,
        "backoff": OOMBackoff("reward", "--micro-batch-size", 2),
        "autocast": nullcontext,
    }
    return FrozenModel(model, CHESS, **{**options, **changes})


@pytest.mark.parametrize("packing", PACKINGS)
def test_log_probs_are_those_of_plain_forwards_in_every_packing(
    model: Transformer, completions: Completions, packing: str
) -> None:
    asked = frozen(model, packing=PACKINGS[packing])
    for temperature in (0.7, 1.0):
        expected = naive_logp(model, completions, temperature).detach()
        found = asked.at_temperature(temperature).logp(completions)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert asked.temperature == 0.7


def test_lists_of_tokens_become_completions() -> None:
    built = FrozenModel.completions([[5], [6, 7]], [[[1, 2, 3], [4]], [[8], []]])
    assert built.prompt_ids.tolist() == [[5, 0], [6, 7]]
    assert built.completion_ids.tolist() == [[[1, 2, 3], [4, 0, 0]], [[8, 0, 0], [0, 0, 0]]]
    assert built.completion_mask.sum(-1).tolist() == [[3, 1], [1, 0]]


def test_a_text_beyond_the_context_is_refused_and_one_that_fits_is_not() -> None:
    model = Transformer(SHAPES["gpt2"])  # a context of 40
    asked = frozen(model)
    fits = FrozenModel.completions([[1] * 20], [[[2] * 21]])  # the last token predicts nothing
    assert asked.logp(fits).shape == (1, 1, 21)
    with pytest.raises(
        ConfigError, match="model m: a text of 41 tokens is longer than its context"
    ):
        asked.logp(FrozenModel.completions([[1] * 20], [[[2] * 22]]))


def test_offloaded_weights_are_on_the_host_and_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    completions = make_completions(0)
    expected = frozen(Transformer(SHAPES["gpt2"], seed=1)).logp(completions)
    with pretend_cuda(monkeypatch):
        asked = frozen(Transformer(SHAPES["gpt2"], seed=1).to("cuda"), offload=True)
        assert not any(x.is_cuda for x in asked.model.parameters())
        assert torch.allclose(asked.logp(completions), expected, atol=1e-6)


def test_out_of_memory_halves_the_prompts_at_a_time() -> None:
    model, sizes, said = Transformer(SHAPES["gpt2"]), list[int](), list[str]()

    def packing(completions: Completions) -> Any:
        sizes.append(len(completions))
        if len(completions) > 1:
            raise torch.OutOfMemoryError
        return PACKINGS["prefix-tree"](completions)

    completions = make_completions(0)
    expected = frozen(model).logp(completions)
    asked = frozen(model, packing=packing, backoff=OOMBackoff("a", "--b", 0, said.append))
    assert torch.allclose(asked.logp(completions), expected, atol=1e-6)
    assert sizes == [3, 1, 1, 1] and len(said) == 1


def test_a_reward_that_changes_what_it_gets_changes_neither_the_run_nor_other_rewards() -> None:
    made = make_completions(0)
    logp = torch.full(made.completion_mask.shape, -1.0)
    completions = replace(made, sampler_logp=logp)
    size = completions.completion_mask.shape[:2]
    texts = [["a"] * size[1] for _ in range(size[0])]

    def change(batch: TokenBatch) -> Any:
        given: Any = batch.completions.sampler_logp
        given -= 1
        batch.texts[0].pop()  # type: ignore[attr-defined]
        return {"change": given[..., 0]}

    sources = [RewardSource(["change"], change, TOKENS, None)] * 2
    scoring = TokenScoring(load_tokenizer("chess"), torch.device("cpu"), load=no_model)
    examples = [Example("1", "1")] * size[0]
    found = scoring.parts(sources, examples, texts, completions, temperature=1.0)
    assert (found["change"] == -2).all() and (logp == -1).all()
    assert len(texts[0]) == size[1]


def no_model(name: str) -> FrozenModel:
    raise AssertionError(name)
