"""The gradient of a step does not depend on how the step is run.

In float64 it is equal to 1e-10, relative to its largest entry: for any micro-batch size,
accumulation and packing, with and without chunked log-probs, checkpointing, compiled blocks, a KV
cache and drafts, and on one to three processes; two processes combine with all that changes the
update. All of it holds for a GPT-2 and for a model in which query heads share keys and values. bnpo
is the exception, because by definition it averages over the micro-batch. An offloaded reference
does nothing on a CPU: test_device.py has it on a pretended GPU.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from minigrpo import Config, Trainer
from minigrpo.model import logprobs
from minigrpo.model.transformer import Block
from minigrpo.rollout import RolloutBatches
from minigrpo.runtime import accel
from minigrpo.types import RolloutBatch

from .gradients import (
    AUTOCAST,
    AUTOCAST_CASES,
    CASES,
    CHUNK,
    COMPILED,
    COMPILED_CASES,
    FEW,
    LOSSES,
    SLOW,
    TINY,
    compile_with,
    first_gradient,
    make_trainer,
)
from .gradients import WAYS as WAYS_OF_TWO

ROOT = Path(__file__).parent.parent
WAYS: dict[str, dict[str, Any]] = {
    "micro-batches of 1": {"micro_batch_size": 1},
    "micro-batches of 2": {"micro_batch_size": 2},
    "repeated": {"packing": "repeated"},
    "repeated, micro-batches of 2": {"packing": "repeated", "micro_batch_size": 2},
    "tree": {"packing": "prefix-tree"},
    "tree, micro-batches of 2": {"packing": "prefix-tree", "micro_batch_size": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "chunked log-probs": {"chunked_logprobs": True},
    "chunked, micro-batches of 1, repeated": {
        "chunked_logprobs": True,
        "micro_batch_size": 1,
        "packing": "repeated",
    },
    "no cache": {"kv_cache": False},
    "no drafts": {"speculate": "none"},
    "rollout batches of 1": {"rollout_batch_size": 1},
    "serial rewards": {"parallel_rewards": False},
    "overlapped rewards": {"overlap_rewards": True, "rollout_batch_size": 2},
}


EVERY_CASE = [
    pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES
]


class FirstGradients(dict[str, list[torch.Tensor]]):
    """The gradient of each case, all at once and in one process, computed when it is needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, case: str) -> list[torch.Tensor]:
        self[case] = first_gradient(self.folder / case, **CASES[case])
        return self[case]


def assert_same(
    found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-10
) -> None:
    assert len(found) == len(expected) > 0
    scale = max(g.abs().max() for g in expected)
    assert scale > 0
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= tolerance * scale


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FirstGradients:
    return FirstGradients(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("case", EVERY_CASE)
@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_does_not_depend_on(
    way: str, case: str, whole: FirstGradients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK", CHUNK)
    assert_same(first_gradient(tmp_path / "run", **CASES[case] | WAYS[way]), whole[case])


def test_the_losses_differ_from_one_another(whole: FirstGradients) -> None:
    """Or the comparisons above would compare nothing."""
    flat = {loss: torch.cat([g.flatten() for g in whole[loss]]) for loss in LOSSES}
    for a in flat:
        assert not any(torch.allclose(flat[a], flat[b], rtol=1e-3) for b in flat if a < b)


def test_bnpo_depends_on_the_micro_batch_by_definition(tmp_path: Path) -> None:
    whole, cut = (
        first_gradient(tmp_path / str(size), loss="bnpo", micro_batch_size=size) for size in (0, 1)
    )
    assert not all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(whole, cut, strict=True))


def test_several_inner_steps_use_the_old_log_probs_of_the_training_forward(tmp_path: Path) -> None:
    """The first of them has ratio 1, so its gradient is that of a single step."""
    once, twice = (first_gradient(tmp_path / str(n), loss="grpo", num_iterations=n) for n in (1, 2))
    assert_same(twice, once)
    trainer = make_trainer(
        tmp_path / "moved",
        loss="grpo",
        num_iterations=3,
        learning_rate=0.1,
        warmup_steps=0,
        reward_weights="",
    )
    metrics = trainer.learner.learn(trainer.source.batch(0), 0)
    assert (
        metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"] > 0
    )  # the third step is off-policy


@pytest.mark.parametrize(
    "options",
    [
        {"kl_coef": 0.1},
        {"kl_coef": 0.1, "loss": "cispo", "sampler_correction": True, "top_k": 50},
        {"kl_coef": 0.1, "num_iterations": 2, "micro_batch_size": 2},
    ],
    ids=["grpo", "sampler correction", "old log-probs"],
)
def test_padding_is_invisible(tmp_path: Path, options: dict[str, Any]) -> None:
    """More columns of junk to the right of prompts and completions change nothing at all."""
    trainer = make_trainer(tmp_path / "run", **options)
    batch = trainer.source.batch(0)
    c = batch.completions
    assert batch.ref_logp is not None and c.sampler_logp is not None
    junk = replace(
        c,
        prompt_ids=pad(c.prompt_ids, (0, 5), value=7),
        completion_ids=pad(c.completion_ids, (0, 3), value=9),
        completion_mask=pad(c.completion_mask, (0, 3)),
        sampler_logp=pad(c.sampler_logp, (0, 3), value=torch.nan),
    )
    if c.log_kept_mass is not None:
        junk = replace(junk, log_kept_mass=pad(c.log_kept_mass, (0, 3), value=torch.nan))
    padded = replace(batch, completions=junk, ref_logp=pad(batch.ref_logp, (0, 3), value=torch.inf))
    a, b = (make_trainer(tmp_path / name, **options).learner for name in "ab")
    plain, with_junk = a.learn(batch, 0), b.learn(padded, 0)
    assert with_junk == pytest.approx(plain, rel=1e-12)
    for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "gspo", "cispo", "rloo", "bnpo"])
def test_leaving_dead_groups_out_leaves_the_gradient_as_it_is(
    tmp_path: Path, loss: str, kl_coef: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is left out with a KL, whose gradient does not depend on the rewards."""
    options = {"loss": loss, "kl_coef": kl_coef}
    batch_of = RolloutBatches.batch
    half_dead_advantages = torch.tensor(
        [[1.0, -1, 0, 0], [0, 0, 0, 0], [0, -1, 3, -2], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, -1]]
    )

    def half_dead(self: RolloutBatches, step: int) -> RolloutBatch:
        return replace(batch_of(self, step), advantages=half_dead_advantages)

    monkeypatch.setattr(RolloutBatches, "batch", half_dead)
    kept = first_gradient(tmp_path / "kept", **options, skip_zero_variance_groups=False)
    assert_same(first_gradient(tmp_path / "left out", **options), kept)
    trainer = make_trainer(tmp_path / "live", **options)
    assert trainer.learner.prompts_with_gradient(trainer.source.batch(0)) == (
        [0, 1, 2, 3, 4, 5] if kl_coef or loss == "bnpo" else [0, 2, 5]
    )


def run_processes(out: Path, **suites: int) -> dict[str, list[dict[str, Any]]]:
    """What each of several processes over gloo says, by suite: see tests/gradients.py."""
    words = [f"{suite}={count}" for suite, count in suites.items()]
    command = [sys.executable, "-m", "tests.gradients", str(out), *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return {
        suite: [torch.load(out / suite / f"{rank}.pt") for rank in range(count)]
        for suite, count in suites.items()
    }


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run_processes(tmp_path_factory.mktemp("several"), all=2, few=3)


@pytest.fixture(scope="module")
def two(several: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return several["all"]


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_processes(tmp_path_factory.mktemp("rest"), rest=2)["rest"]


@pytest.fixture(scope="module")
def three(several: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return several["few"]


@pytest.fixture(params=["two", "three"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("loss", FEW)
def test_three_processes_have_the_gradient_of_one(
    loss: str, three: list[dict[str, Any]], whole: FirstGradients
) -> None:
    for found in three:
        assert_same(found[loss], whole[loss])


@pytest.mark.parametrize("case", EVERY_CASE)
@pytest.mark.parametrize("way", ["all at once", *WAYS_OF_TWO])
def test_two_processes_have_the_gradient_of_one(
    way: str, case: str, whole: FirstGradients, request: pytest.FixtureRequest
) -> None:
    for found in request.getfixturevalue("rest" if case in SLOW else "two"):
        assert_same(found[case if way == "all at once" else f"{case}, {way}"], whole[case])


@pytest.mark.parametrize("case", COMPILED_CASES)
@pytest.mark.parametrize("way", COMPILED)
def test_two_processes_have_the_gradient_of_one_when(
    way: str, case: str, two: list[dict[str, Any]], whole: FirstGradients
) -> None:
    """With the compiler's front end; the next test has all of it."""
    for found in two:
        assert_same(found[f"{case}, {way}"], whole[case])


@pytest.mark.slow
def test_blocks_of_the_real_compiler_have_the_gradient_of_plain_ones(
    whole: FirstGradients, tmp_path: Path
) -> None:
    """On one process and on two. Needs g++."""
    expected = {f"{case}, {way}": whole[case] for case in COMPILED_CASES for way in COMPILED}
    for case in COMPILED_CASES:
        for way, options in COMPILED.items():
            assert_same(first_gradient(tmp_path / case / way, **CASES[case] | options), whole[case])
    for ways in run_processes(tmp_path, compiler=2)["compiler"]:
        assert ways.keys() == expected.keys()
        for name, found in ways.items():
            assert_same(found, expected[name])


def test_compiled_blocks_have_the_gradient_of_plain_ones(
    whole: FirstGradients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the compiler's front end alone."""
    monkeypatch.setattr(Block, "compile", Block.compile)  # restored after the test
    monkeypatch.setattr(accel, "check_compiler", lambda config, device: None)
    compile_with("eager")
    torch.compiler.reset()
    before = accel.graphs_compiled()
    for way, options in COMPILED.items():
        assert_same(first_gradient(tmp_path / way, **CASES["grpo"] | options), whole["grpo"])
    assert accel.graphs_compiled() > before


@pytest.mark.parametrize("case", AUTOCAST_CASES)
def test_two_processes_have_the_gradient_of_one_under_autocast(
    case: str, two: list[dict[str, Any]], tmp_path: Path
) -> None:
    """In float32 and bfloat16, so to 1e-5; and autocast changes more than that."""
    half, full = (
        first_gradient(tmp_path / str(amp), dtype=torch.float32, **CASES[case] | AUTOCAST | amp)
        for amp in ({}, {"use_amp": False})
    )
    for found in two:
        assert_same(found[f"{case}, autocast"], half, tolerance=1e-5)
    with pytest.raises(AssertionError):
        assert_same(half, full, tolerance=1e-4)


def test_micro_batches_do_not_communicate_more(two: list[dict[str, Any]]) -> None:
    """DDP reduces gradients in the last backward pass of a step only."""
    for found in two:
        once, in_two, in_three = found["all-reduces"]
        assert once == in_two == in_three > 0


def test_several_processes_sample_what_one_does_and_keep_equal_weights(
    ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path / "run")
    for step in range(2):
        batch = trainer.source.batch(step)
        texts, rewards = ([x for found in ranks for x in found["batches"][step][i]] for i in (0, 1))
        assert texts == batch.texts
        assert batch.rewards is not None and rewards == batch.rewards.total.tolist()
        metrics = trainer.learner.learn(batch, step)
        assert metrics["sampling/logp_difference_max"] > 0
        for found in ranks:
            assert found["metrics"][step] == pytest.approx(metrics, rel=1e-6, abs=1e-12)
    for name, weight in trainer.model.state_dict().items():
        assert all(
            torch.equal(ranks[0]["weights"][name], found["weights"][name]) for found in ranks
        )
        torch.testing.assert_close(ranks[0]["weights"][name], weight, rtol=1e-8, atol=1e-10)


def test_an_infinity_in_one_process_is_a_bad_step_in_all(ranks: list[dict[str, Any]]) -> None:
    assert [found["poisoned"] for found in ranks] == [(1, True)] * len(ranks)


def test_fp32_on_this_device(tmp_path: Path, device: str) -> None:
    """The smoke test of what users run: float32, to 1e-5 (CUDA adds in any order), everything on
    against everything off.
    """
    gradients = []
    for name, ways in {
        "plain": {
            "packing": "repeated",
            "kv_cache": False,
            "speculate": "none",
            "micro_batch_size": 1,
        },
        "fast": {
            "chunked_logprobs": True,
            "offload_reference": True,
            "gradient_checkpointing": True,
        },
    }.items():
        config = {
            **TINY,
            "group_size": 4,
            "kl_coef": 0.1,
            "grad_clip": 1e9,
            **ways,
            "device": device,
        }
        trainer = Trainer(Config.of(**config, out_dir=str(tmp_path / name)), quiet=True)
        found: list[torch.Tensor] = []
        trainer.learner.optimizer.step = lambda *a, found=found, t=trainer, **k: found.extend(  # type: ignore[method-assign,assignment]
            p.grad.clone() for p in t.model.parameters()
        )
        trainer.learner.learn(trainer.source.batch(0), 0)
        gradients.append(found)
    assert_same(gradients[1], gradients[0], tolerance=1e-5 if device == "cpu" else 1e-4)
