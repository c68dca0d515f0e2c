"""Rounds that a CUDA graph could run again, shown without one."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minigrpo.model.lora import add_adapters
from minigrpo.model.transformer import Transformer
from minigrpo.sampling import sampler as sampler_module
from minigrpo.sampling.generate import MOST_UNSEEN, Generation
from minigrpo.sampling.graphs import RoundGraphs, next_size
from minigrpo.sampling.sequences import RoundState
from minigrpo.settings import SamplingConfig
from minigrpo.types import Completions

from .steps import EOS, SHAPES, VOCAB, make_completions
from .test_decoding import prompts as prompts
from .test_decoding import started
from .test_sampling import EXAMPLES, completed, make_sampler

READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"}


class Tape(TorchDispatchMode):
    """Records operations with their tensors, as a graph does, and refuses reads by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        masks = name.startswith("index") and any(
            x.dtype == torch.bool for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor)
        )
        assert name not in READS and not masks, name
        out = func(*args, **kwargs or {})
        if func._schema.is_mutable or not func.is_view:
            self.operations.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.operations:
            again = func(*args, **kwargs)
            if not func._schema.is_mutable:
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)


def recorded() -> tuple[RoundGraphs, Counter[str]]:
    """Graphs by tapes, and what was done how often."""
    done = Counter()

    def capture(round: Callable[[], object]) -> Callable[[], object]:
        with Tape() as tape:
            round()
        done["captured"] += 1

        def replay() -> None:
            done["replayed"] += 1
            tape.replay()

        return replay

    return RoundGraphs(capture), done


DRAFTS = {"drafts": torch.arange(120).reshape(6, 20) % VOCAB, "num_speculative_tokens": 4}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafts", [{}, DRAFTS], ids=["plain", "drafts"])
@pytest.mark.parametrize(
    "options",
    [{}, {"sampling": SamplingConfig(top_k=5, min_p=0.01)}, {"prompts_at_once": 2}, {"lora": 2}],
    ids=["plain", "truncated", "entering", "lora"],
)
def test_rounds_that_are_run_again_pick_the_same_tokens(
    prompts: Completions, shape: str, drafts: dict[str, Any], options: dict[str, Any]
) -> None:
    model = Transformer(SHAPES[shape], seed=4)
    more = {**drafts, **options}
    add_adapters(model, more.pop("lora", 0))
    graphs, done = recorded()
    without = started(model, prompts, **more)
    without.next_rest = 0  # proposals never rest, as with graphs
    with_graphs = started(model, prompts, graphs=graphs, **more)
    plain = without.run()
    found = with_graphs.run()
    assert done["replayed"] > 0
    assert 0 <= with_graphs.rounds - without.rounds < MOST_UNSEEN
    assert with_graphs.rounds == len(graphs.begun) + done["captured"] + done["replayed"]
    assert torch.equal(found.completion_ids, plain.completion_ids)
    assert torch.equal(found.completion_mask, plain.completion_mask)
    assert_close(found.sampler_logp, plain.sampler_logp, rtol=1e-4, atol=1e-5)


def test_sizes_are_few_and_hold_what_they_are_for() -> None:
    sizes = [next_size(n) for n in range(1, 1001)]
    assert all(n <= size <= 1.5 * n for n, size in enumerate(sizes, 1))
    assert len({*sizes}) == 20
    assert next_size(0) == 0


def test_a_run_that_used_graphs_is_asked_on_a_cpu_without_them() -> None:
    plain, sampler = (make_sampler(cuda_graphs=on) for on in (False, True))
    assert not sampler.has_graphs
    assert torch.equal(completed(sampler).completion_ids, completed(plain).completion_ids)


def test_a_job_records_nothing_from_its_fourth_step_on() -> None:
    """Prompts, random numbers and weights change, and tokens are those of a generation anew."""
    model = Transformer(SHAPES["grouped-query"], seed=1)
    graphs, done = recorded()
    kept = None
    made = []
    for step in range(5):
        prompts = make_completions(step, prompts=4)
        draw = torch.Generator().manual_seed(step)
        numbers = torch.rand(4, 3, 20, generator=draw)
        if kept is None:
            kept = started(model, prompts, graphs=graphs, uniforms=numbers)
        else:
            kept.begin(prompts.prompt_ids, prompts.prompt_len, numbers, None)
        before = len(graphs.begun) + done["captured"]
        found = kept.run()
        made.append(len(graphs.begun) + done["captured"] - before)
        plain = started(model, prompts, uniforms=numbers).run()
        assert torch.equal(found.completion_ids, plain.completion_ids)
        assert torch.equal(found.completion_mask, plain.completion_mask)
        assert_close(found.sampler_logp, plain.sampler_logp, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=draw)
    assert made[0] > 0 == made[3] == made[4]


@pytest.mark.parametrize(("stops", "most_reads"), [((), 12), ((EOS,), 65)])
def test_the_host_looks_seldom_while_no_slot_can_split(
    prompts: Completions, monkeypatch: pytest.MonkeyPatch, stops: tuple[int, ...], most_reads: int
) -> None:
    """And what sequences that have ended do meanwhile is dropped."""
    length = 300
    options = {
        "max_new_tokens": length,
        "uniforms": torch.rand(6, 3, length, generator=torch.Generator().manual_seed(0)),
        "stops": stops,
    }
    reads = []
    read = Generation._read_state

    def watched(self: Generation) -> RoundState:
        reads.append(self.rounds)
        return read(self)

    monkeypatch.setattr(Generation, "_read_state", watched)
    model = Transformer(replace(SHAPES["gpt2"], context=length + 40), seed=1)
    with_graphs = started(model, prompts, graphs=recorded()[0], **options)
    found = with_graphs.run()
    assert sum(number > with_graphs.rounds - 64 for number in reads) <= most_reads
    assert len(reads) < with_graphs.rounds
    plain = started(model, prompts, **options).run()
    assert torch.equal(found.completion_ids, plain.completion_ids)
    assert torch.equal(found.completion_mask, plain.completion_mask)


@pytest.mark.parametrize("use_amp", [False, True])
def test_a_sampler_keeps_what_graphs_read_until_it_is_released(
    monkeypatch: pytest.MonkeyPatch, use_amp: bool
) -> None:
    graphs, done = recorded()
    monkeypatch.setattr(sampler_module, "capturing", lambda: graphs.capture)
    sampler = make_sampler(use_amp=use_amp)
    sampler.model.float()
    sampler.has_graphs = True
    sampler.num_kept = 3

    def of_step() -> tuple[int, int]:
        """Captures of a step; the completions are those of a sampler that keeps nothing."""
        before = done["captured"], done["replayed"]
        found = completed(sampler)
        work = done["captured"] - before[0], done["replayed"] - before[1]
        fresh = make_sampler(use_amp=use_amp)
        fresh.model.load_state_dict(sampler.model.float().state_dict())
        fresh.model.float()
        assert torch.equal(found.completion_ids, completed(fresh).completion_ids)
        with torch.no_grad():
            for parameter in sampler.model.parameters():
                parameter *= 1.01
        return work

    steps = [of_step() for _ in range(4)]
    assert steps[0][0] > 0
    assert steps[3][0] == 0 < steps[3][1]
    (training,) = sampler.generations.values()
    sampler.complete(
        EXAMPLES, num_samples=1, uniforms=None, sampling=SamplingConfig(), batch_size=0
    )
    assert len(sampler.generations) == 2
    assert training in sampler.generations.values()
    # memory that runs out in sampling frees what does not run, and changes nothing else
    assert sampler.backoffs[1].release()
    assert not sampler.generations
    sampler.num_kept = 1  # of rollouts alone
    for sampling, number in ((SamplingConfig(), 0), (sampler.config.sampling, 1)):
        sampler.complete(EXAMPLES, num_samples=1, uniforms=None, sampling=sampling, batch_size=0)
        assert len(sampler.generations) == number
    assert sampler.release()
    assert not sampler.release()
    assert of_step()[0] > 0
    assert not sampler.generations
    assert sampler.current_model.copy is None
