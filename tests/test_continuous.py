"""Stop tokens, caches that grow, and prompts that enter as others leave: the tokens stay."""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from minigrpo.model.transformer import Transformer
from minigrpo.runtime.rng import uniforms
from minigrpo.runtime.rollout_metrics import has_ended, rollout_metrics
from minigrpo.sampling import cached_decoder
from minigrpo.sampling.cached_decoder import CachedDecoder
from minigrpo.sampling.cuda_graphs import CUDAGraphCache
from minigrpo.sampling.decoders import ReplicatedPrefixDecoder, SharedPrefixDecoder, UncachedDecoder
from minigrpo.sampling.generate import generate, generate_parts
from minigrpo.sampling.kv_cache import KVCache
from minigrpo.sampling.params import pick_token
from minigrpo.sampling.sampler import Sampler
from minigrpo.types import Completions

from .conftest import EOS, SHAPES, make_completions
from .gradients import make_trainer
from .pretend import pretend_cuda

LENGTH, SAMPLES = 20, 3
STOPS = (EOS, 4)
pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")
# a decoder of CUDA graphs serves several rollouts with one cache
DECODERS = {
    "replicated": lambda: ReplicatedPrefixDecoder,
    "shared": lambda: SharedPrefixDecoder,
    "uncached": lambda: UncachedDecoder,
    "graphs": lambda: CUDAGraphCache().decoder,
}


@pytest.fixture
def model() -> Transformer:
    return Transformer(SHAPES["grouped-query"], seed=1).double()


@pytest.fixture
def prompts() -> Completions:
    return make_completions(0, prompts=6)


def sample(
    model: Transformer, prompts: Completions, *, greedy: bool = False, **options: object
) -> Completions:
    u = torch.from_numpy(uniforms(0, "test", 0, np.arange(len(prompts)), SAMPLES, LENGTH))
    options = {"stops": STOPS, "max_new_tokens": LENGTH, "num_samples": SAMPLES, **options}
    options["u"] = None if greedy else u
    return generate(model, prompts.prompt_ids, prompts.prompt_len, **options)


def token_by_token(model: Transformer, ids: list[int], u: torch.Tensor | None) -> list[int]:
    """One completion, without anything that makes it fast."""
    new = list[int]()
    while len(new) < LENGTH and not {*new[-1:]} & {*STOPS}:
        logp = model.logits(torch.tensor([ids + new]))[:, -1:].log_softmax(-1)
        number = None if u is None else u[len(new)].view(1, 1)
        new.append(int(pick_token(logp, number, torch.tensor([0]))))
    return new


@torch.no_grad()
@pytest.mark.parametrize("greedy", [False, True])
def test_a_completion_ends_with_any_of_the_stop_tokens(
    model: Transformer, prompts: Completions, greedy: bool
) -> None:
    u = torch.from_numpy(uniforms(0, "test", 0, np.arange(len(prompts)), SAMPLES, LENGTH))
    starts = [
        ids[:n].tolist() for ids, n in zip(prompts.prompt_ids, prompts.prompt_len, strict=True)
    ]
    expected = [
        [token_by_token(model, ids, None if greedy else row) for row in rows]
        for ids, rows in zip(starts, u, strict=True)
    ]
    if not greedy:
        assert {row[-1] for group in expected for row in group if len(row) < LENGTH} == {*STOPS}
    answers = make_completions(0, prompts=6, length=LENGTH).completion_ids[:, 0]
    answers[:, :4] = torch.tensor(
        [[(row + [0] * 4)[:4] for row in group[:1]] for group in expected]
    )[:, 0]
    for kind in DECODERS.values():
        for drafts in (None, answers):
            found = sample(model, prompts, greedy=greedy, decoder=kind(), drafts=drafts)
            ids, mask = found.completion_ids, found.completion_mask
            for p, g in np.ndindex(ids.shape[:2]):
                assert ids[p, g][mask[p, g]].tolist() == expected[p][g]
            ended = [[row[-1] in STOPS for row in group] for group in expected]
            assert has_ended(found, STOPS).tolist() == ended
    assert not has_ended(found, ()).any()


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Caches grow by three columns; a list of the sizes that they get."""
    sizes, resize = list[tuple[int, int]](), KVCache.resize
    monkeypatch.setattr(cached_decoder, "BLOCK", {"cpu": 3})

    def watched(self: KVCache, capacity: int, length: int) -> None:
        sizes.append((capacity, length))
        resize(self, capacity, length)

    monkeypatch.setattr(KVCache, "resize", watched)
    return sizes


@pytest.mark.parametrize("kind", DECODERS)
def test_prompts_enter_as_others_leave_and_the_tokens_stay(
    model: Transformer, prompts: Completions, kind: str, tight: list[object]
) -> None:
    decoder = DECODERS[kind]()
    for greedy, sizes in ((True, [2]), (False, [1, 5])):
        plain = sample(model, prompts, greedy=greedy, decoder=UncachedDecoder)
        lengths = plain.completion_mask.sum(-1)
        assert greedy or (lengths.min() < 5 and lengths.max() >= LENGTH - 1)
        for size in sizes:
            for drafts in (None, plain.completion_ids[:, 0]):
                options = {"decoder": decoder, "drafts": drafts, "num_speculative_tokens": 3}
                found = sample(model, prompts, greedy=greedy, prompts_at_once=size, **options)
                assert torch.equal(found.completion_ids, plain.completion_ids)
                assert torch.equal(found.completion_mask, plain.completion_mask)
                assert torch.equal(found.prompt_ids, prompts.prompt_ids)
                difference = (found.sampler_logp - plain.sampler_logp).abs().max()  # type: ignore[operator]
                assert difference < 1e-6


def test_prompts_that_enter_have_nothing_on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured rounds too: some are captured with other numbers of slots, as prompts enter."""
    plain, found = list[torch.Tensor](), list[torch.Tensor]()
    with pretend_cuda(monkeypatch):
        model = Transformer(SHAPES["gpt2"], seed=1).cuda()
        prompts = make_completions(0, prompts=6)  # on the host
        u = torch.from_numpy(uniforms(0, "test", 0, np.arange(6), SAMPLES, LENGTH))
        options = {"stops": STOPS, "max_new_tokens": 6, "num_samples": SAMPLES, "u": u}
        ids, lengths = prompts.prompt_ids, prompts.prompt_len
        plain.append(generate(model, ids, lengths, **options).completion_ids.cpu())
        drafts = plain[0][:, 0]
        graphs = CUDAGraphCache()
        for decoder in (SharedPrefixDecoder, graphs.decoder):
            options |= {"decoder": decoder, "drafts": drafts}
            out = generate(model, ids, lengths, prompts_at_once=2, **options)
            found.append(out.completion_ids.cpu())
        assert graphs.captured
    assert all(torch.equal(ids, plain[0]) for ids in found)


def test_waiting_prompts_take_fewer_rounds_than_batch_after_batch(
    model: Transformer, prompts: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, step = list[tuple[int, int]](), CachedDecoder.step

    def watched(
        self: CachedDecoder, tokens: object, columns: torch.Tensor, *args: object
    ) -> object:
        slots.append((self.num_slots, int(columns.max() - columns.min())))
        return step(self, tokens, columns, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(CachedDecoder, "step", watched)
    together, apart = Counter[str](), Counter[str]()
    whole = sample(model, prompts, prompts_at_once=2, work=together)
    assert max(n for n, _ in slots) <= 2 * SAMPLES
    assert max(apart for _, apart in slots) > 3  # some have just entered, others are far along
    u = torch.from_numpy(uniforms(0, "test", 0, np.arange(6), SAMPLES, LENGTH))
    options = {"stops": STOPS, "max_new_tokens": LENGTH, "num_samples": SAMPLES}
    for p in range(0, 6, 2):
        two = slice(p, p + 2)
        ids, lengths = prompts.prompt_ids[two], prompts.prompt_len[two]
        generate(model, ids, lengths, u=u[two], work=apart, **options)
    assert together["rounds"] < 0.9 * apart["rounds"]
    assert together["rows"] == apart["rows"] == whole.completion_mask[..., 0].numel()
    assert together["tokens"] <= apart["tokens"]


def test_parts_are_those_of_batch_after_batch(model: Transformer, prompts: Completions) -> None:
    options = {"stops": STOPS, "max_new_tokens": LENGTH, "num_samples": SAMPLES}
    u = torch.from_numpy(uniforms(0, "test", 0, np.arange(6), SAMPLES, LENGTH))
    ids, lengths = prompts.prompt_ids, prompts.prompt_len
    parts = list(generate_parts(model, ids, lengths, u=u, prompts_at_once=4, **options))
    assert [len(part) for part in parts] == [4, 2]
    for part, rows in zip(parts, (slice(4), slice(4, 6)), strict=True):
        alone = generate(model, ids[rows], lengths[rows], u=u[rows], **options)
        assert torch.equal(part.prompt_ids, ids[rows])
        assert torch.equal(part.completion_ids, alone.completion_ids)


@pytest.mark.parametrize("kind", [ReplicatedPrefixDecoder, SharedPrefixDecoder])
def test_a_cache_follows_what_is_used(
    model: Transformer,
    prompts: Completions,
    kind: type[CachedDecoder],
    tight: list[tuple[int, int]],
) -> None:
    lengths = sample(model, prompts, decoder=UncachedDecoder).completion_mask.sum(-1)
    tight.clear()
    sample(model, prompts, decoder=kind)
    capacities, columns = zip(*tight, strict=True)
    assert capacities[0] == 6 * SAMPLES and list(capacities) == sorted(capacities, reverse=True)
    # rows are freed when the cache grows: those that are left are longer than it was before
    for capacity, before in zip(capacities[1:], columns, strict=False):
        own = before - (prompts.prompt_len.max() if kind is ReplicatedPrefixDecoder else 0)
        assert capacity <= int((lengths > own - 3).sum()) + SAMPLES
    assert capacities[-1] < capacities[0] / 2
    assert all(later - earlier <= 4 for earlier, later in itertools.pairwise(columns))
    tight.clear()
    short = {"max_new_tokens": LENGTH, "stops": range(EOS + 1), "decoder": kind}
    sample(model, prompts, **short)  # any token ends a completion
    assert tight[-1][1] <= columns[0] + 4


def test_a_watcher_sees_every_round(model: Transformer, prompts: Completions) -> None:
    seen = list[list[int]]()

    def watch(ids: torch.Tensor, lengths: torch.Tensor) -> None:
        assert len(ids) == len(lengths) == 1
        seen.append(ids[0, : lengths[0]].tolist())

    u = torch.from_numpy(uniforms(0, "test", 0, np.arange(1), 1, LENGTH))
    ids, lengths = prompts.prompt_ids[:1], prompts.prompt_len[:1]
    options = {"stops": STOPS, "max_new_tokens": LENGTH, "u": u, "watch": watch}
    tokens = generate(model, ids, lengths, **options).completion_ids[0, 0].tolist()
    assert seen[: len(tokens)] == [tokens[:n] for n in range(1, len(tokens) + 1)]
    assert {*map(tuple, seen[len(tokens) :])} <= {tuple(tokens)}


def test_a_rollout_in_parts_survives_running_out_of_memory_halfway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_trainer(tmp_path / "whole").source.batch(0)
    trainer = make_trainer(tmp_path / "parts", rollout_batch_size=2)
    prefill, complete, parts = CachedDecoder.prefill, Sampler.complete, list[int]()
    entered = list[int]()

    def small(self: CachedDecoder, ids: torch.Tensor, *args: object) -> torch.Tensor:
        entered.append(len(ids))
        if parts and self.num_slots:  # a part is done, other prompts are on their way
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prefill(self, ids, *args)  # type: ignore[arg-type]

    def watched(self: Sampler, *args: object, **options: object) -> Iterator[Completions]:
        for part in complete(self, *args, **options):  # type: ignore[arg-type]
            parts.append(len(part))
            yield part

    monkeypatch.setattr(CachedDecoder, "prefill", small)
    monkeypatch.setattr(Sampler, "complete", watched)
    cut = trainer.source.batch(0)
    assert cut.texts == whole.texts
    assert cut.metrics["rollout/rounds"] > whole.metrics["rollout/rounds"] > 0
    assert parts == [2, 1, 1, 1, 1] and sum(entered) > 6
    assert trainer.sampler.backoffs[4].size == 1


def test_every_stop_token_is_trained_as_an_end_and_padding_never(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", overlong="mask", kl_coef=0.0)
    first = trainer.source.batch(0).completions
    other = int(first.completion_ids[first.completion_mask].mode().values)
    stops = trainer.sampler.stops = {trainer.tokenizer.eot, other}
    batch = trainer.source.batch(0)
    c = batch.completions
    lengths = c.completion_mask.sum(-1)
    last = c.completion_ids.gather(-1, lengths[..., None] - 1)[..., 0]
    ended = torch.isin(last, torch.tensor([*stops]))
    assert (last == other).any() and (lengths < lengths.max()).any()
    assert batch.loss_mask is not None and torch.equal(batch.loss_mask, ended)
    metrics = rollout_metrics(batch, stops)
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 - float(ended.float().mean()))
    packing = trainer.learner.pack(batch.with_loss_mask_applied().completions)
    trained = packing.targets[packing.index][packing.mask]
    mask = c.completion_mask & ended[..., None]
    assert torch.equal(trained, c.completion_ids[mask])  # the ends too, and nothing behind them
