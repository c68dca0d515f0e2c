"""The plan: counts, FLOPs, bytes and seconds against hand counts, with pretended rates."""

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import plan as benchmark
from minigrpo import Config, Trainer
from minigrpo.model.packing import PACKINGS
from minigrpo.model.shape import ModelShape
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.model.transformer import Transformer
from minigrpo.runtime import planner, rates
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.estimate import estimate_step
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.flops import step_flops
from minigrpo.runtime.machine import memory_limit_mib
from minigrpo.runtime.planner import Planner, step_seconds
from minigrpo.runtime.rates import Line, Probe, Rates
from minigrpo.runtime.step_counts import (
    StepCounts,
    as_sampled,
    made_up_completions,
    nothing_shared,
    rounds_that_propose,
)
from minigrpo.runtime.step_memory import StepMemory
from minigrpo.tools import train
from minigrpo.types import Completions

from .conftest import make_completions
from .gradients import TINY

CPU = torch.device("cpu")
SHAPE = ModelShape(vocab_size=50, context=64, layers=2, width=8, heads=2)
PRETENDED = Rates(
    block_forward=Line(1.0, 0.1),
    block_gradient=Line(3.0, 0.3),
    head_forward=Line(0.5, 0.01),
    head_gradient=Line(1.5, 0.03),
    round=Line(2.0, 0.5),
    optimizer=0.001,
)


def job(**settings: Any) -> Config:
    sizes = {"prompts_per_step": 4, "group_size": 3, "max_new_tokens": 8, "init_from": "scratch"}
    return Config.of(**{**sizes, "speculative_decoding": False, **settings})


def counts_of(config: Config) -> StepCounts:
    return nothing_shared(config, prompt_len=10, completion_len=5, longest=7)


@pytest.fixture
def pretended_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timing: every machine has the same rates, and a reward takes no time."""
    monkeypatch.setattr(Probe, "rates", lambda self, counts, completions: PRETENDED)
    monkeypatch.setattr(Probe, "rates_at", lambda self, rates, counts, completions: rates)
    monkeypatch.setattr(Planner, "_score", lambda self, examples, texts: 0.0)
    monkeypatch.setattr(planner, "SECONDS_OF_SAMPLING", math.inf)


# --- counts ---------------------------------------------------------------------------------------


def test_counts_of_completions_that_share_nothing() -> None:
    counts = counts_of(job())
    assert counts.packed == 4 * 10 + 12 * 4  # a completion's last token is not run
    assert counts.predictions == 12 * 5
    assert counts.gathered == 12 * 15
    assert (counts.rounds, counts.decoded) == (6, 12 * 4)
    assert counts.tokens == {"update": 88, "rollout": 40 + 48}
    assert counts_of(job(packing="repeated")).packed == 12 * (10 + 4)
    in_parts = counts_of(job(rollout_batch_size=2, micro_batch_size=1))
    assert (in_parts.rounds, in_parts.rollout_batches, in_parts.micro_batches) == (12, 2, 4)
    supervised = counts_of(job(loss="nll"))
    assert supervised.tokens == {"update": 4 * 10 + 4 * 4} and supervised.rounds == 0


def test_rounds_propose_less_and_less_if_nothing_is_accepted() -> None:
    # round 1 proposes, the next after a pause of 8 is round 10, the next after one of 16 round 27
    found = [rounds_that_propose(rounds) for rounds in (0, 1, 9, 10, 26, 27)]
    assert found == [0, 1, 1, 2, 2, 3]
    proposed = counts_of(job(speculative_decoding=True)).decoded - counts_of(job()).decoded
    assert proposed == 12 * 1 * 7


@pytest.mark.parametrize("packing", list(PACKINGS))
def test_counts_of_sampled_completions_are_those_of_their_packing(packing: str) -> None:
    completions = make_completions(0, prompts=2)
    config = job(packing=packing, group_size=4)
    work = {"rounds": 5, "tokens": 100.0, "rows": 8, "row_rounds": 24}
    counts = as_sampled(counts_of(config), config, completions, work)
    built = PACKINGS[packing](completions)
    assert counts.packed == 2 * len(built.tokens.ids)  # 2 of 4 prompts were sampled
    assert counts.predictions == 2 * len(built.targets)
    assert counts.decoded == 2 * (100 - int(completions.prompt_len.sum()))
    assert counts.rounds == 5  # completions of a batch run side by side
    assert as_sampled(counts_of(config), config, completions).decoded == 12 * 4 / 3 * 4


# --- FLOPs and bytes ------------------------------------------------------------------------------


def test_flops_of_a_step_by_hand() -> None:
    config = job(kl_coef=0.1, num_iterations=2)
    counts = counts_of(config)
    per_token = 2 * 2 * 12 * 8**2 + 2 * 4 * 8 * (10 + 2.5)
    forward = per_token * 88 + 2 * 50 * 8 * 60
    rollout = per_token * 88 + 2 * 50 * 8 * (4 + 48)
    expected = {"update": 6 * forward, "old log-probs": forward}
    expected |= {"reference": forward, "rollout": rollout}
    assert step_flops(config, SHAPE, counts) == expected
    tokens = estimate_step(config, SHAPE, counts, "cpu").tokens
    assert tokens == {"update": 176, "rollout": 88, "old log-probs": 88, "reference": 88}


def test_memory_of_a_step_by_hand() -> None:
    assert SHAPE.num_parameters == sum(p.numel() for p in Transformer(SHAPE).parameters())
    config = job(kl_coef=0.1)
    memory = StepMemory(config, SHAPE, counts_of(config), "cpu")
    found = memory.by_kind()
    weights = 4 * SHAPE.num_parameters
    assert found["weights"] == found["gradients"] == found["reference"] == weights
    assert found["Adam"] == 2 * weights
    # keys and values of 12 slots: the prompt, 8 new tokens, 7 proposals and one more
    assert found["KV cache"] == 2 * 2 * 8 * 4 * 12 * (10 + 16)
    # a round runs 12 tokens, the prompts 40; 4 copies of the logits
    assert found["decoding round"] == 4 * (12 * 8 * 40 + 4 * 12 * 50)
    assert found["logits"] == 3.5 * 4 * 60 * 50
    head = 4 * 50 * 8
    update = found["activations"] + max(found["logits"], found["block's backward"]) + head
    assert memory.peak(found) == 4 * weights + update  # weights, reference, Adam


def test_the_logits_of_decoding_can_be_the_peak() -> None:
    """With a large vocabulary, chunked log-probs and small micro-batches."""
    shape = replace(SHAPE, vocab_size=100_000)
    small = {"chunked_logprobs": True, "micro_batch_size": 1}
    config = job(prompts_per_step=16, group_size=64, **small)
    memory = StepMemory(config, shape, counts_of(config), "cpu")
    found = memory.by_kind()
    stays = found["weights"] + found["Adam"]
    assert memory.peak(found) == stays + found["KV cache"] + found["decoding round"]
    assert found["decoding round"] > 16 * 16 * 64 * 100_000


def test_an_offloaded_reference_stays_on_a_cpu() -> None:
    config = job(kl_coef=0.1, offload_reference=True)
    memories = [StepMemory(config, SHAPE, counts_of(config), device) for device in ("cpu", "cuda")]
    on_cpu, on_cuda = (memory.peak(memory.by_kind()) for memory in memories)
    assert on_cpu == on_cuda + 4 * SHAPE.num_parameters


# --- seconds --------------------------------------------------------------------------------------


def test_a_line_goes_through_two_measurements() -> None:
    assert Line.through(1, 3.0, 5, 11.0) == Line(1.0, 2.0)
    assert Line.through(4, 8.0, 4, 8.0) == Line(0.0, 2.0)  # there is only one size
    assert Line.through(1, 3.0, 5, 2.0) == Line(3.0, 0.0)  # noise
    assert Line(1.0, 2.0).at(10) == 21
    assert Line(1.0, 2.0).times(3, unit=4) == Line(3.0, 1.5)


def test_seconds_are_the_sums_of_their_parts() -> None:
    config = job(kl_coef=0.1, micro_batch_size=2, num_iterations=2)
    counts = counts_of(config)
    found = step_seconds(config, SHAPE, counts, PRETENDED, score=0.25)
    # two micro-batches of 44 tokens and 30 predictions, in a model of 2 layers
    forward = 2 * (2 * (1 + 4.4) + 0.5 + 0.3)
    gradient = 2 * (2 * (3 + 13.2) + 1.5 + 0.9)
    optimizer = 0.001 * SHAPE.num_parameters
    prefill, rounds = 2 * (1 + 4.0), 6 * 2.0 + 48 * 0.5
    assert found == pytest.approx(
        {
            "rollout": prefill + rounds,
            "reward": 12 * 0.25,
            "reference": forward,
            "update": 2 * (gradient + optimizer) + forward,  # and the old log-probs
        }
    )
    supervised = step_seconds(job(loss="nll"), SHAPE, counts, PRETENDED, score=0.25)
    assert set(supervised) == {"update"}
    planned = replace(estimate_step(config, SHAPE, counts, "cpu"), seconds=found)
    assert planned.step_seconds == pytest.approx(sum(found.values()))
    assert planned.cells()["seconds: step"] == f"{sum(found.values()):,.3g}"


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_decoding": True},
        {"packing": "repeated", "kv_cache": False, "use_amp": True, "low_precision_weights": True},
        {"gradient_checkpointing": True, "chunked_logprobs": True, "share_prompt_kv": True},
        {"loss": "nll"},
    ],
)
def test_every_kind_of_step_is_probed(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "TARGET_SECONDS", 0.0)
    monkeypatch.setattr(rates, "MOST_PARAMETERS", 1 << 11)
    config = job(**settings)
    counts = counts_of(config)
    if config.speed.speculative_decoding:
        counts = replace(counts, window=8)
    probe = Probe(config, SHAPE, load_tokenizer("chess"), CPU)
    found = probe.rates(counts, made_up_completions(counts, SHAPE.vocab_size))
    lines = [x for x in vars(found).values() if isinstance(x, Line)]
    if config.supervised:
        assert lines.pop() == Line(0.0, 0.0)  # there is no decoding
    assert all(line.at(10) > 0 and math.isfinite(line.at(10)) for line in lines)
    assert found.optimizer > 0


def test_a_large_model_is_probed_on_a_small_one() -> None:
    shape = ModelShape(vocab_size=10**6, context=10**6, layers=100, width=65536, heads=4)
    probe = Probe(job(), shape, load_tokenizer("chess"), CPU)
    assert probe.small.num_parameters < 2e8
    assert probe.block_scale == (65536 / probe.small.width) ** 2
    assert probe.head_scale == 65536 * 10**6 / (probe.small.width * probe.small.vocab_size)


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("pretended_rates")
def test_a_plan_makes_no_model_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_model(*args: object) -> None:
        raise AssertionError("a plan needs shapes only")

    monkeypatch.setattr(Transformer, "__init__", no_model)
    train.main(["--plan", "--init-from", "scratch", "--width", "65536"])
    out, err = capsys.readouterr()
    assert "206,202.34 M" in out and "nothing shared" in out and "as sampled" not in out
    assert "this step does not fit: its peak of 3,07" in err
    assert memory_limit_mib(CPU) < 1e6


@pytest.mark.usefixtures("pretended_rates")
def test_a_plan_samples_a_few_prompts_if_that_takes_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 70}
    found = Planner(Config.of(**small)).estimates()
    assert list(found) == ["nothing shared", "as sampled"]
    worst, sampled = found.values()
    # the shipped model often agrees with itself, and with the true answers
    assert sampled.counts.packed < worst.counts.packed
    assert sampled.counts.rounds < worst.counts.rounds
    assert sampled.step_seconds < worst.step_seconds
    monkeypatch.setattr(planner, "SECONDS_OF_SAMPLING", 0.0)
    assert list(Planner(Config.of(**small)).estimates()) == ["nothing shared"]
    assert list(Planner(Config.of(**small, loss="nll")).estimates()) == ["true answers"]


@pytest.mark.parametrize("loss", ["grpo", "nll"])
def test_the_plan_and_the_trainer_estimate_the_same(loss: str, tmp_path: Path) -> None:
    config = Config.of(**{**TINY, "loss": loss, "out_dir": str(tmp_path / "run")})
    trainer = Trainer(config, quiet=True)
    assert Planner(config).worst == trainer.estimate
    trainer.scorer.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "cuda:7"}, "--device cuda:7"),
        ({"use_amp": True, "amp_dtype": "float16", "device": "cpu"}, "--amp-dtype float16"),
        ({"prompts_per_step": 5}, "--prompts-per-step 5 does not divide among 2 processes"),
        ({"rewards": "nowhere.py"}, "nowhere.py"),
        ({"reward_weights": "nonsense=1"}, "nonsense"),
        ({"max_new_tokens": 64, "context": 64}, "--max-new-tokens must leave room"),
        ({"max_new_tokens": 60, "context": 64}, "prompt"),
        ({"task": "nowhere.py"}, "nowhere.py"),
        ({"tokenizer": "nowhere"}, "--tokenizer nowhere"),
        ({"init_from": "nowhere"}, "--init-from nowhere"),
    ],
)
def test_a_plan_rejects_what_a_run_rejects(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        Planner(job(**settings), DistContext(world_size=2))
    assert "\n" not in str(refused.value)


# --- the benchmark --------------------------------------------------------------------------------


def test_the_benchmark_prints_predicted_beside_measured() -> None:
    close = {"seconds": {"rollout": 1.0, "reward": 0.001}, "step": 2.0, "peak_mib": 90.0}
    far = {"seconds": {"rollout": 1.0, "reward": 0.002}, "step": 4.0, "peak_mib": 100.0}
    row = {"job": "default", "predicted": {**close, "assumes": "as sampled"}, "measured": far}
    assert [name for name, *_ in benchmark.comparisons(row)] == [
        "seconds: rollout",  # the reward takes too little to be compared
        "seconds: step",
        "MiB: peak",
    ]
    console = Console(record=True, file=io.StringIO(), width=120)
    benchmark.show({"device": "a CPU", "memory_measures": "growth", "rows": [row]}, console)
    said = " ".join(console.export_text().split())
    assert "not within 30% of what was measured: default, step: 0.50" in said
    row["measured"] = close
    benchmark.show({"device": "a CPU", "memory_measures": "growth", "rows": [row]}, console)
    assert "step time and peak are within 30%" in " ".join(console.export_text().split())


@pytest.mark.usefixtures("pretended_rates")
def test_the_benchmark_predicts_and_measures_a_job() -> None:
    settings = {**benchmark.TINY, "device": "cpu"}
    predicted, measured = benchmark.predict(settings), benchmark.measure(settings, 2)
    assert predicted["assumes"] == "as sampled"
    assert set(predicted["seconds"]) == set(measured["seconds"]) == set(benchmark.PHASES)
    assert measured["step"] >= max(measured["seconds"].values()) > 0
    for wrong, words in (({"steps": 1}, "--steps"), ({"only": ("x",)}, "--only")):
        with pytest.raises(ConfigError, match=words):
            benchmark.Plan(**wrong).run(Console(quiet=True))


def test_the_made_up_vocabulary_has_the_size_of_gpt2s(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(benchmark.write_tokenizer(tmp_path / "made-up.tiktoken")))
    assert tokenizer.n_vocab == benchmark.GPT2_TOKENS


def test_made_up_completions_share_nothing() -> None:
    counts = counts_of(job())
    made: Completions = made_up_completions(counts, 50)
    assert made.completion_ids.shape == (4, 3, 5) and made.prompt_ids.shape == (4, 10)
    assert len(PACKINGS["prefix-tree"](made).tokens.ids) == counts.packed
