"""The gradient of a step does not depend on how the step is run.

Every pair of CHOICES is in a row of WAYS. Each row's gradient is compared, in float64 and relative
to its largest entry, with that of the formula: one completion at a time through the plain causal
forward, and one loss of the whole batch.
"""

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from minigrpo import losses
from minigrpo.config import Config
from minigrpo.learner import Learner
from minigrpo.model import logprobs, lora
from minigrpo.model.packing import Packing, pack
from minigrpo.model.transformer import Transformer, compiled_part
from minigrpo.optimizer import learning_rate_at
from minigrpo.runtime.distributed import DistContext
from minigrpo.shards import whole
from minigrpo.types import Completion, Example, RolloutBatch

from .steps import SHAPES, join, make_completions, run_together
from .steps import make_learner as make_learner_of
from .test_packing import naive

PROMPTS, LENGTH = 6, 9
# loss -> its settings; "off-policy": with old log-probs that differ from the policy's;
# "teacher_coef": with the log-probs of a teacher
LOSSES = {
    "grpo": {"kl_coef": 0.1, "temperature": 0.8, "off-policy": True},
    "dr_grpo": {"kl_coef": 0.1, "kl": "k2", "temperature": 0.7, "entropy_coef": 0.1},
    "dapo": {"kl_coef": 0.1, "kl": "k3_is", "off-policy": True, "teacher_coef": 0.5},
    "gspo": {"off-policy": True, "sampler_correction": "icepop", "sampler_cap": 1.8},
    "cispo": {"sampler_correction": "token-truncate", "sampler_cap": 1.5, "temperature": 0.7},
    "rloo": {"off-policy": True, "sampler_correction": "sequence-mask", "sampler_cap": 1.1},
    "maxrl": {"temperature": 0.9},
    "nll": {},
}
GROUPED = "grouped-query"


class Way(NamedTuple):
    """How a step is run."""

    loss: str
    packing: str = "prefix-tree"
    micro_batch_size: int = 0
    chunked: bool = False  # the log-probs
    gradient_checkpointing: bool = False
    lora_rank: int = 0
    shape: str = "gpt2"
    processes: str = "one"
    dialogue: bool = False


CHOICES = Way(
    loss=[*LOSSES],
    packing=["prefix-tree", "repeated"],
    micro_batch_size=[0, 1, 2],
    chunked=[False, True],
    gradient_checkpointing=[False, True],
    lora_rank=[0, 2],
    shape=["gpt2", GROUPED, "hybrid"],
    processes=["one", "two", "two with shards"],
    dialogue=[False, True],
)


def pairs(way: Way) -> set[Any]:
    """All pairs of choices of a row, as (field, choice)."""
    return set(itertools.combinations(enumerate(way), 2))


def is_possible(way: Way) -> bool:
    return way.processes != "two with shards" or way.lora_rank == 0


def covering_rows() -> list[Way]:
    """Rows with all pairs, of which each adds the most pairs that the earlier ones lack."""
    choices = itertools.product(*CHOICES)
    every_way = [way for way in itertools.starmap(Way, choices) if is_possible(way)]
    missing = set().union(*map(pairs, every_way))
    rows = []
    while missing:
        rows.append(max(every_way, key=lambda way: len(pairs(way) & missing)))
        missing -= pairs(rows[-1])
    return rows


WAYS = covering_rows()
# rows for what is compared more loosely
FEW_WAYS = [
    Way("grpo", micro_batch_size=2, gradient_checkpointing=True, shape=GROUPED, dialogue=True),
    Way("gspo", packing="repeated", micro_batch_size=2, chunked=True, lora_rank=2),
    Way("dapo", shape=GROUPED),
    Way("cispo", micro_batch_size=1, gradient_checkpointing=True, shape="hybrid"),
]


def name_of(way: Way) -> str:
    return "-".join(map(str, way))


def make_model(way: Way, dtype: torch.dtype = torch.float64) -> Transformer:
    model = Transformer(SHAPES[way.shape], seed=1)
    if way.lora_rank:
        if way.dialogue:  # a base in four bits, in half of the rows
            model.store("nf4")
        lora.add_adapters(model, rank=way.lora_rank, alpha=4)
    noise = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:  # biases begin at 0, and so does one of a pair of adapters
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=noise)
    return model.to(dtype)


def make_batch(way: Way, dtype: torch.dtype = torch.float64) -> RolloutBatch:
    """Six groups of four completions, of which two have no variance; padding is NaN."""
    completions = make_completions(5, PROMPTS, length=LENGTH, dialogue=way.dialogue)
    rng = torch.Generator().manual_seed(4)
    shape, mask = completions.completion_ids.shape, completions.completion_mask
    near, old, reference, teacher, kept = (
        (-2.5 + 0.4 * torch.randn(shape, generator=rng)).to(dtype).where(mask, torch.nan)
        for _ in range(5)
    )
    advantages = torch.randn(shape[:2], generator=rng).to(dtype)
    advantages[[1, 4]] = 0
    settings = LOSSES.get(way.loss, {})
    return RolloutBatch(
        [Example("")] * PROMPTS,
        replace(completions, sampler_logp=near, log_kept_mass=0.1 * kept),
        [[Completion("")] * 4] * PROMPTS,
        advantages=None if way.loss == "nll" else advantages,
        old_logp=old if "off-policy" in settings else None,
        reference_logp=reference if "kl_coef" in settings else None,
        teacher_logp=teacher if "teacher_coef" in settings else None,
    )


def make_learner(
    way: Way, model: Transformer, dist: DistContext | None = None, **changes: Any
) -> Learner:
    given = {name: x for name, x in LOSSES.get(way.loss, {}).items() if name != "off-policy"}
    config = Config.of(
        model="scratch",
        loss=way.loss,
        prompts_per_step=PROMPTS,
        max_new_tokens=LENGTH,
        packing=way.packing,
        micro_batch_size=way.micro_batch_size,
        gradient_checkpointing=way.gradient_checkpointing,
        fsdp=way.processes == "two with shards",
        **{**given, **changes},
    )
    return make_learner_of(config, model, losses.loss_spec(way.loss), dist)


def chunks_of(way: Way) -> AbstractContextManager[Any]:
    """Within it, the log-probs of a tiny batch have several chunks where a row says so."""
    if way.chunked:
        return patch.multiple(logprobs, SMALLEST_CHUNK=5, MAX_LOGITS={"cpu": 1})
    return nullcontext()


def trained_gradients(model: Transformer) -> list[Tensor]:
    gradients = [parameter.grad for parameter in model.parameters()]
    return [whole(gradient).clone() for gradient in gradients if gradient is not None]


def gradient(way: Way, dist: DistContext | None = None, **changes: Any) -> list[Tensor]:
    """The learner's gradient of the whole step, before clipping, in one process or in this one."""
    model, batch = make_model(way), make_batch(way)
    dist = dist or DistContext()
    learner = make_learner(way, model, dist, **changes)
    share = batch.select(list(dist.share(PROMPTS)))
    with chunks_of(way):
        learner.gradient(*learner.prepare(share))
    return trained_gradients(model)


def formula(way: Way) -> list[Tensor]:
    """The same, one completion at a time."""
    model, batch, given = make_model(way), make_batch(way), LOSSES.get(way.loss, {})
    completions, mask = batch.completions, batch.completions.completion_mask
    temperature, coef = given.get("temperature", 1.0), given.get("teacher_coef", 0.0)
    logp, entropy = naive(model, completions, temperature)
    old = logp.detach() if batch.old_logp is None else batch.old_logp
    weights, advantages = None, batch.advantages
    if batch.teacher_logp is not None and advantages is not None:
        advantages = advantages[..., None] + coef * (batch.teacher_logp - old)
    if row := given.get("sampler_correction"):
        weights = losses.sampler_weights(
            row, given["sampler_cap"], old, completions.truncated_sampler_logp, mask
        )
    loss, _ = losses.policy_loss(
        logp,
        batch.old_logp,
        advantages,
        mask,
        loss=way.loss,
        kl=given.get("kl", "k3"),
        kl_coef=given.get("kl_coef", 0.0),
        normalizer=losses.LossNormalizer.of(mask, LENGTH),
        ref_logp=batch.reference_logp,
        token_weights=weights,
        added=-given.get("entropy_coef", 0.0) * entropy,
    )
    loss.backward()
    return trained_gradients(model)


def assert_same(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-10) -> None:
    assert len(found) == len(expected) > 0
    scale = max(float(g.abs().max()) for g in expected)
    assert scale > 0
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("part", ["ratio", "surrogate", "weights"])
def test_the_rows_have_every_part_of_a_loss(part: str) -> None:
    every = {getattr(spec, part) for spec in losses.LOSSES.values()}
    assert every == {getattr(losses.LOSSES[loss], part) for loss in LOSSES}


def one_of_two(folder: Path, rank: int, ports: list[int]) -> None:
    """Write the gradients of all rows of two processes, in one of them."""
    torch.set_num_threads(1)
    dist = join(rank, ports[0])
    found = {name_of(way): gradient(way, dist) for way in WAYS if way.processes != "one"}
    torch.save(found, folder / f"{rank}.pt")
    dist.close()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Tensor]]]:
    """Row -> gradient, in each of two processes."""
    folder = tmp_path_factory.mktemp("two")
    assert run_together(one_of_two, folder) == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_the_gradient_is_that_of_the_formula(way: Way, request: pytest.FixtureRequest) -> None:
    expected = formula(way)
    if way.processes == "one":
        assert_same(gradient(way), expected)
        return
    for found in request.getfixturevalue("two"):
        assert_same(found[name_of(way)], expected)


@pytest.mark.parametrize("way", FEW_WAYS, ids=name_of)
@pytest.mark.parametrize(("use_amp", "least", "most"), [(False, 0, 1e-5), (True, 1e-3, 0.15)])
def test_in_lower_precision_the_gradient_is_close(
    way: Way, use_amp: bool, least: float, most: float
) -> None:
    """The distance is that of the whole gradient, relative to its length."""
    model = make_model(way, torch.float32)
    learner = make_learner(way, model, use_amp=use_amp)
    with chunks_of(way):
        learner.gradient(*learner.prepare(make_batch(way, torch.float32)))
    exact = torch.cat([g.flatten() for g in formula(way)])
    found = torch.cat([g.flatten() for g in trained_gradients(model)])
    assert least < float((found - exact).norm() / exact.norm()) < most


@pytest.mark.parametrize(("loss", "entropy_coef"), [("maxrl", 0.0), ("grpo", 0.0), ("maxrl", 0.1)])
def test_groups_that_have_no_gradient_are_left_out(loss: str, entropy_coef: float) -> None:
    """A KL, which grpo has here, and entropy have a gradient whatever the rewards."""
    batch = make_batch(Way(loss))
    learner = make_learner(Way(loss), make_model(Way(loss)), entropy_coef=entropy_coef)
    some = loss == "maxrl" and not entropy_coef
    assert learner.prompts_with_gradient(batch) == ([0, 2, 3, 5] if some else [0, 1, 2, 3, 4, 5])
    none = replace(batch, advantages=torch.zeros_like(batch.advantages), reference_logp=None)
    assert len(learner.prompts_with_gradient(none)) == (6 if entropy_coef else 1)


def regularised(inputs: losses.LossInputs) -> Tensor:
    return -inputs.ratio * inputs.advantages + 0.1 * inputs.logp


@pytest.mark.parametrize("weights", [losses.per_token, losses.constant])
def test_a_term_of_ones_own_keeps_its_gradient_on_groups_with_equal_rewards(weights: Any) -> None:
    model = make_model(Way("grpo"))
    batch = make_batch(Way("maxrl"))
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    mask = batch.completions.completion_mask
    scale = weights(mask.double(), losses.LossNormalizer.of(mask, 96))
    logp = model(Packing(pack(batch.completions))).logp
    (0.1 * scale * logp).sum().backward()
    expected = trained_gradients(model)
    spec = replace(losses.LOSSES["grpo"], surrogate=regularised, weights=weights)
    learner = make_learner_of(Config.of(model="scratch"), model, spec)
    learner.gradient(*learner.prepare(batch))
    assert_same(trained_gradients(model), expected)


def test_several_inner_steps_use_the_old_log_probs_of_the_training_forward() -> None:
    """The first of them has ratio 1, so its gradient is that of a single step, clipped."""
    way = Way("maxrl")
    model = make_model(way)
    clip = {"clip_low": 0.1, "clip_high": 0.3, "ratio_cap": 4.0, "grad_clip": 0.01}
    learner = make_learner(way, model, num_iterations=3, learning_rate=0.1, **clip)
    assert learner.spec.clip == losses.Clip(0.1, 0.3, 4.0)
    rates, steps = [], []
    step = learner.optimizer.step

    def recorded(*args: Any, **options: Any) -> Any:
        rates.append(learner.optimizer.param_groups[0]["lr"])
        steps.append(trained_gradients(model))
        return step(*args, **options)

    learner.optimizer.step = recorded  # type: ignore[method-assign]
    metrics = learner.learn(make_batch(way), 200)
    whole_one = formula(way)
    norm = float(torch.cat([g.flatten() for g in whole_one]).norm())
    assert_same(steps[0], [g * 0.01 / norm for g in whole_one], tolerance=1e-5)
    assert rates == [learning_rate_at(200, learner.config)] * 3
    assert not torch.equal(steps[1][0], steps[0][0])
    assert metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"] > 0


@pytest.fixture
def eager_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiler's front end alone; the default one needs minutes of a C++ compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compiled_part.cache_clear()
    torch.compiler.reset()
    yield
    compiled_part.cache_clear()
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("way", [*FEW_WAYS[:2], FEW_WAYS[3]], ids=name_of)
def test_compiled_blocks_have_the_gradient_of_plain_ones(way: Way, eager_compiler: None) -> None:
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    assert_same(gradient(way, compile_model=True), formula(way))
    assert counters["stats"]["unique_graphs"] > before
