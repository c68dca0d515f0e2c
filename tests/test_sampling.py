"""Sampling: every token is that of a loop without cache, batch or drafts, which is written here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from minigrpo import Config
from minigrpo.model.families import FAMILIES
from minigrpo.model.packing import Packing, pack
from minigrpo.model.transformer import ModelShape, Transformer
from minigrpo.rng import uniforms
from minigrpo.sampling import sampler as sampler_module
from minigrpo.sampling.decoder import Decoder
from minigrpo.sampling.generate import Generation, Sizes
from minigrpo.sampling.sampler import Sampler
from minigrpo.sampling.sequences import pick_token, truncate
from minigrpo.settings import SamplingConfig
from minigrpo.text.tokenizer import load_tokenizer
from minigrpo.types import Completions, Example

from .steps import EOS, SHAPES, VOCAB, attending, make_completions
from .test_packing import varied
from .tiny import tiny_tokenizer_folder

LENGTH = 12


def begin(model: Transformer, prompts: Completions, **changes: Any) -> Generation:
    options = {
        "stops": [EOS],
        "max_new_tokens": LENGTH,
        "uniforms": None,
        "drafts": None,
        "prompts_at_once": 0,  # all
        "dialogues": None,
        "sampling": SamplingConfig(),
        "num_samples": 1,
        "num_speculative_tokens": 4,
        **changes,
    }
    uniforms, drafts, at_once = (
        options.pop(name) for name in ("uniforms", "drafts", "prompts_at_once")
    )
    if drafts is None:
        options["num_speculative_tokens"] = 0
    number, longest = prompts.prompt_ids.shape
    sizes = Sizes(number, at_once or number, longest, 0 if drafts is None else drafts.shape[1])
    generation = Generation(model, sizes=sizes, **options)
    generation.begin(prompts.prompt_ids, prompts.prompt_len, uniforms, drafts)
    return generation


def generate(*args: Any, **options: Any) -> Completions:
    return begin(*args, **options).run()


def naive_truncation(p: list[float], params: SamplingConfig) -> dict[int, float]:
    """The tokens that remain and their probabilities: sort, then top-k, top-p, min-p in turn."""
    order = sorted(range(len(p)), key=lambda i: -p[i])[: params.top_k or len(p)]
    total = sum(p[i] for i in order)
    kept = []
    mass = 0.0
    for i in order:
        kept.append(i)
        mass += p[i] / total
        if mass >= params.top_p:
            break
    kept = [i for i in kept if p[i] >= params.min_p * p[order[0]]]
    total = sum(p[i] for i in kept)
    return {i: p[i] / total for i in kept}


def naive_pick(remaining: dict[int, float], u: float) -> int:
    """The first token whose CDF is above u."""
    mass = 0.0
    for token in sorted(remaining):
        mass += remaining[token]
        if mass > u:
            break
    return token


def naive_completion(
    model: Transformer, prompt: list[int], u: Tensor | None, stops: set[int], params: SamplingConfig
) -> list[tuple[int, float, float]]:
    """Token, log-prob and log of the kept mass at each position, one forward per token."""
    ids = [*prompt]
    found = []
    while len(found) < LENGTH and not (found and ids[-1] in stops):
        p = (model.logits(torch.tensor([ids]))[0, -1] / params.temperature).softmax(-1)
        remaining = naive_truncation(p.tolist(), params)
        token = int(p.argmax()) if u is None else naive_pick(remaining, float(u[len(found)]))
        kept = sum(float(p[i]) for i in remaining)
        found.append((token, float(p[token].log()), float(np.log(kept))))
        ids.append(token)
    return found


@settings(max_examples=15, deadline=None)
@given(st.data())
@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_in_float64_every_token_is_that_of_the_naive_loop(shape: str, data: st.DataObject) -> None:
    """Whatever the drafts, the number of prompts decoded together and the group size."""

    def draw(*choices: Any) -> Any:
        return data.draw(st.sampled_from(choices))

    # 1. The model, the prompts and the settings.
    seed, samples = draw(0, 1, 2), draw(1, 2, 5)
    model = Transformer(SHAPES[shape], seed=seed).double()
    model.head_weight.mul_(draw(1, 6, 20))  # the surer, the more completions are alike
    prompts = make_completions(seed, prompts=4)
    params = SamplingConfig(
        temperature=draw(1.0, 0.6),
        top_k=draw(0, 1, 5, 10**6),
        top_p=draw(1.0, 0.9, 0.6),
        min_p=draw(0.0, 0.1, 0.2),
    )
    stops = draw(set(), {EOS}, {EOS, 3, 5, 7})
    u = torch.from_numpy(uniforms(seed, "test", 0, np.arange(4), samples, LENGTH))
    u = draw(u, None)

    # 2. What is expected.
    expected = {}
    for p, g in np.ndindex(4, samples):
        prompt = prompts.prompt_ids[p, : prompts.prompt_len[p]].tolist()
        numbers = None if u is None else u[p, g]
        expected[p, g] = naive_completion(model, prompt, numbers, stops, params)

    # 3. Drafts that are right in part: a sample of each prompt, with tokens changed and left out.
    texts = [[token for token, _, _ in expected[p, 0]] for p in range(4)]
    drafts = torch.tensor([(text + [0] * LENGTH)[:LENGTH] for text in texts])
    changed = torch.from_numpy(np.random.default_rng(seed).random(drafts.shape)) < draw(0, 0.2, 1)
    drafts = torch.where(changed, draw(0, 5, EOS), drafts)
    drafts = torch.cat([drafts[:, : draw(0, 5, LENGTH)], drafts[:, draw(1, 7) :]], dim=1)

    found = generate(
        model,
        prompts,
        stops=stops,
        num_samples=samples,
        prompts_at_once=draw(0, 1, 3),
        uniforms=u,
        sampling=params,
        drafts=draw(drafts, None),
        num_speculative_tokens=draw(0, 1, 4, 20),
    )
    plain = SamplingConfig(temperature=params.temperature)
    assert (found.log_kept_mass is None) == (params == plain)
    tables = [found.completion_ids, found.sampler_logp]
    if found.log_kept_mass is not None:
        tables.append(found.log_kept_mass)
    for (p, g), rows in expected.items():
        n = int(found.completion_mask[p, g].sum())
        assert n == len(rows)
        assert found.completion_mask[p, g, :n].all()
        for table, right in zip(tables, zip(*rows, strict=True), strict=False):
            assert table[p, g, :n].tolist() == pytest.approx(list(right), abs=1e-6)
            assert not table[p, g, n:].any()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_decoded_as_by_the_naive_loop(family: str) -> None:
    model = varied(family)
    prompts = make_completions(0, width=12)
    found = generate(model, prompts, drafts=torch.arange(60).view(3, 20) % VOCAB)
    for p, length in enumerate(prompts.prompt_len):
        prompt = prompts.prompt_ids[p, :length].tolist()
        expected = naive_completion(model, prompt, None, {EOS}, SamplingConfig())
        tokens, logp, _ = zip(*expected, strict=True)
        assert found.completion_ids[p, 0, : len(tokens)].tolist() == [*tokens]
        assert found.sampler_logp[p, 0, : len(logp)].tolist() == pytest.approx(logp, abs=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sampler_log_probs_are_the_training_forwards_in_float32(device: str) -> None:
    model = Transformer(SHAPES["grouped-query"], seed=1).to(device)
    prompts = make_completions(0, prompts=6)
    sampled = generate(
        model,
        prompts,
        num_samples=3,
        uniforms=torch.from_numpy(uniforms(0, "test", 0, np.arange(6), 3, LENGTH)),
        sampling=SamplingConfig(temperature=0.8, top_k=6),
        prompts_at_once=4,
    )
    for name in ("repeated", "prefix-tree"):
        logp, _ = model(Packing(pack(sampled.to("cpu"), name), device), 0.8)
        assert_close(logp, sampled.sampler_logp, rtol=0, atol=1e-5)
    kept = sampled.log_kept_mass[sampled.completion_mask]
    assert -3 < kept.min() < kept.max() < 0


@pytest.mark.parametrize(
    ("p", "params", "kept"),
    [
        ([0.4, 0.4, 0.2], {"min_p": 1.0}, [0, 1]),
        ([0.4, 0.3, 0.3], {"top_k": 2}, [0, 1, 2]),
        ([0.5, 0.25, 0.25], {"top_p": 0.5}, [0]),  # the mass just reaches top_p
    ],
)
def test_tied_tokens_are_kept(p: list[float], params: dict[str, Any], kept: list[int]) -> None:
    left = truncate(torch.tensor(p, dtype=torch.float64).log(), SamplingConfig(**params))
    assert left.isfinite().nonzero()[:, 0].tolist() == kept


def test_uniforms_at_both_ends_of_the_interval_pick_tokens_of_positive_probability() -> None:
    logp = torch.tensor([[-torch.inf, 0.5, 0.5, -torch.inf]]).log_softmax(-1)
    picked = pick_token(logp[None], torch.tensor([[0.0], [1 - 2**-24]]), torch.tensor([0, 0]))
    assert picked.tolist() == [[1], [2]]
    broken = pick_token(logp[None] * torch.nan, torch.tensor([[0.5]]), torch.tensor([0]))
    assert 0 <= int(broken) < 4  # the step is skipped later; an index past the end would not be


def test_uniforms_belong_to_the_prompt_and_the_sample() -> None:
    of_two = uniforms(0, "sample", 3, np.array([7, 9]), 4, 6)
    of_one = uniforms(0, "sample", 3, np.array([9]), 2, 12)
    assert np.array_equal(of_two[1, :2], of_one[0, :, :6])
    assert len(np.unique(of_two)) == of_two.size
    for key in ((1, "sample", 3), (0, "evaluate", 3), (0, "sample", 4)):
        assert not np.array_equal(uniforms(*key, np.array([7, 9]), 4, 6), of_two)


class Letters:
    """A tokenizer of the letters a to k; the last token ends a text."""

    name = "letters"
    chat = None
    eot = turn_end = EOS
    stops = frozenset({EOS})
    prefix = ()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in ids)


EXAMPLES = [
    Example("abc", "aabb", index=0),
    Example("d", "c", index=1),
    Example("jih", "bbb", index=2),
    Example("ab", "k", index=3),
]


def make_sampler(*, speculate: bool = False, **settings: Any) -> Sampler:
    config = Config.of(**{"max_new_tokens": LENGTH, **settings})
    with torch.no_grad():
        model = Transformer(SHAPES["gpt2"], seed=1).double()
        model.head_weight.mul_(4)
    others = {"warn": print, "speculate": speculate}
    return Sampler(config, model, Letters(), **others)


def completed(sampler: Sampler, batch_size: int = 0) -> Completions:
    sampled = sampler.complete(
        EXAMPLES,
        num_samples=3,
        uniforms=uniforms(0, "test", 0, np.arange(len(EXAMPLES)), 3, LENGTH),
        sampling=SamplingConfig(),
        batch_size=batch_size,
    )
    return sampled.completions


@pytest.mark.parametrize(
    ("speculate", "num_speculative_tokens", "width"), [(True, 3, 4), (True, 0, 1), (False, 3, 1)]
)
def test_a_sampler_speculates_only_if_told(
    speculate: bool, num_speculative_tokens: int, width: int, rounds: list[tuple[int, int, int]]
) -> None:
    whole = completed(make_sampler())
    rounds.clear()
    settings = {"speculate": speculate, "num_speculative_tokens": num_speculative_tokens}
    found = completed(make_sampler(**settings), batch_size=3)
    assert torch.equal(found.completion_ids, whole.completion_ids)
    assert torch.equal(found.completion_mask, whole.completion_mask)
    assert {tokens for _, tokens, _ in rounds} == {1, width}


@pytest.mark.parametrize("family", ["qwen", "mistral", "chess"])
@pytest.mark.parametrize("drafts", [True, False])
def test_a_completion_ends_at_a_stop_text(family: str, drafts: bool, tmp_path: Path) -> None:
    """As a loop over the tokens of a completion without stop texts finds it."""
    folder = family if family == "chess" else str(tiny_tokenizer_folder(tmp_path, family))
    tokenizer = load_tokenizer(folder)
    with torch.no_grad():
        rows = tokenizer.n_vocab - (family == "qwen")  # one of its added tokens has no row
        model = Transformer(ModelShape(rows, 80, attending(1), 16, 2), seed=1).double()
        model.head_weight.mul_(30)
    size = 32

    def completed(answers: Sequence[str], stop: list[str]) -> Completions:
        config = Config.of(max_new_tokens=size, stop=stop)
        options = {"warn": print, "speculate": drafts}
        sampler = Sampler(config, model, tokenizer, **options)
        sampled = sampler.complete(
            [Example(f"{i} + {i}", answer, i) for i, answer in enumerate(answers)],
            num_samples=3,
            uniforms=uniforms(0, "test", 0, np.arange(6), 3, size),
            sampling=SamplingConfig(),
            batch_size=4,
        )
        return sampled.completions

    def text_of(ids: list[int]) -> str:
        return tokenizer.text_of([*tokenizer.encode("a"), *ids])[1:]

    # 1. Without stop texts; these are pieces of what is said.
    whole = completed([""] * 6, [])
    rows = [row[mask].tolist() for row, mask in zip(*rows_of(whole), strict=True)]
    pieces = [text_of(row)[12:15] for row in rows[::5]]
    stop = [piece for piece in pieces if "\ufffd" not in piece]
    assert stop

    # 2. With them.
    cut = completed([tokenizer.decode(row) for row in rows[::3]], stop)
    ended = cut.ended.flatten().tolist()
    lengths = []
    for row, ids, mask, is_ended in zip(rows, *rows_of(cut), ended, strict=True):
        shown = [text_of(row[: k + 1]) for k in range(len(row))]
        stops = [k + 1 for k, text in enumerate(shown) if any(x in text for x in stop)]
        length = stops[0] if stops else len(row)
        lengths.append(length)
        assert ids[mask].tolist() == row[:length]
        assert not ids[length:].any()
        assert is_ended == bool(stops or row[-1] in tokenizer.stops)
    assert min(lengths) < size == max(lengths)
    width = cut.completion_ids.shape[-1]
    logp = torch.where(cut.completion_mask, whole.sampler_logp[..., :width], 0)
    assert_close(cut.sampler_logp, logp, rtol=0, atol=1e-5)


def rows_of(completions: Completions) -> tuple[Tensor, Tensor]:
    return completions.completion_ids.flatten(0, 1), completions.completion_mask.flatten(0, 1)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_out_of_memory_changes_no_token(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    whole = completed(make_sampler())
    prefill, sizes = Decoder.prefill, []

    def small(self: Decoder, ids: Tensor, *args: Any) -> Tensor:
        sizes.append(len(ids))
        if len(sizes) == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prefill(self, ids, *args)

    monkeypatch.setattr(Decoder, "prefill", small)
    sampler = make_sampler()
    found = completed(sampler, batch_size=2)
    assert torch.equal(found.completion_ids, whole.completion_ids)
    assert sampler.backoffs[3].size == 1  # it stays: the next batch would not fit either
    assert len(sizes) > fails_at and sizes[fails_at] == 1


def test_under_autocast_the_low_precision_copy_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Transformer(ModelShape(VOCAB, context=40, layers=attending(1), width=16, heads=2))
    generation = Mock(wraps=Generation)
    monkeypatch.setattr(sampler_module, "Generation", generation)
    config = Config.of(max_new_tokens=LENGTH, use_amp=True)
    sampler = Sampler(config, model, Letters(), warn=print)
    completed(sampler)
    used = generation.call_args.args[0]
    assert used is sampler.current_model.copy.model is not model
