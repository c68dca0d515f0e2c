"""The plan: counts, FLOPs, bytes and seconds against hand counts, with pretended rates."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from benchmarks import plan as benchmark
from benchmarks import plan_jobs
from minigrpo import Config, Trainer
from minigrpo.model.families import FAMILIES
from minigrpo.model.packing import PACKINGS
from minigrpo.model.shape import ModelShape
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.model.transformer import Transformer
from minigrpo.model.weight_files import WeightFiles
from minigrpo.runtime import kept_activations, planner, rates, step_memory
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.estimate import estimate_step
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.flops import step_flops
from minigrpo.runtime.line import Line
from minigrpo.runtime.machine import MOST_CALLS, memory_limit_mib, undisturbed_seconds
from minigrpo.runtime.planner import Planner, step_seconds
from minigrpo.runtime.published import published_shape
from minigrpo.runtime.rates import Probe, Rates
from minigrpo.runtime.step_counts import StepCounts, as_sampled, made_up_completions, nothing_shared
from minigrpo.runtime.step_memory import StepMemory
from minigrpo.runtime.student import student_shape
from minigrpo.tools import plan, train
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


def test_proposals_that_would_all_be_wrong_are_not_run() -> None:
    assert counts_of(job(speculative_decoding=True)).decoded == counts_of(job()).decoded


@pytest.mark.parametrize("packing", list(PACKINGS))
def test_counts_of_sampled_completions_are_those_of_their_packing(packing: str) -> None:
    completions = make_completions(0, prompts=2)
    config = job(packing=packing, group_size=4)
    work = {"rounds": 5, "tokens": 100.0, "rows": 8, "row_rounds": 24, "slot_rounds": 20}
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
    assert found["logits"] == 6 * 4 * 60 * 50
    returned = StepMemory(config.replace(keep_freed_memory=False), SHAPE, counts_of(config), "cpu")
    assert returned.by_kind()["logits"] == 3.5 * 4 * 60 * 50
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


def test_an_offloaded_reference_stays_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (step_memory, kept_activations):
        monkeypatch.setattr(module, "KERNELS", {})  # otherwise attention keeps less on a CPU
    config = job(kl_coef=0.1, offload_reference=True, keep_freed_memory=False)
    memories = [StepMemory(config, SHAPE, counts_of(config), device) for device in ("cpu", "cuda")]
    on_cpu, on_cuda = (memory.peak(memory.by_kind()) for memory in memories)
    assert on_cpu == on_cuda + 4 * SHAPE.num_parameters


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_student_is_counted_in_its_own_precision(offloaded: bool) -> None:
    """It has a larger vocabulary than the model, so that its logits are the peak."""
    own = {"base_dtype": "bfloat16", "offload_reference": offloaded, "use_amp": True}
    config = job(task="teach", **own)
    shape = replace(SHAPE, vocab_size=100_000)
    memory = StepMemory(config, SHAPE, counts_of(config), "cuda", student=shape)
    found = memory.by_kind()
    vectors = 2 * shape.layers * 2 * 8 + 2 * 8 + shape.layers * (3 * 8 + 8 + 4 * 8 + 8)
    bytes_ = 2 * shape.num_parameters + 2 * vectors  # norms and biases stay in float32
    assert found["student, in host memory" if offloaded else "student"] == bytes_
    alone = StepMemory(config, SHAPE, counts_of(config), "cuda").by_kind()
    assert alone == {name: x for name, x in found.items() if not name.startswith("student")} | {
        "student" + ", in host memory" * offloaded: 0.0
    }
    # its casts are those of the weights that stay in float32, its logits 3.5 copies in float32
    casts = 2.0 * shape.layers * (3 * 8 + 8 + 4 * 8 + 8)
    logits = 3.5 * 4 * counts_of(config).predictions * 100_000
    assert memory.peak(found) == found["weights"] + found["Adam"] + bytes_ + casts + logits


@pytest.mark.usefixtures("only_shapes")
def test_the_preset_of_rlt_fits_its_card_with_student_and_reference() -> None:
    found = Planner(Config.from_cli(["--config", "rlt-12gb", "--device", "cuda"])).job.worst
    assert plan.fits(found.peak_mib, 12)
    names = ("student, in host memory", "reference, in host memory", "Adam, in host memory")
    assert all(found.memory_mib[name] > 900 for name in names)


def test_the_student_of_a_job_is_found(tmp_path: Path) -> None:
    assert student_shape(job()) is None
    shipped = student_shape(Config.of(task="teach"))
    assert shipped and shipped.width == 64
    Transformer(SHAPE).save_pretrained(tmp_path / "a.safetensors")
    found = student_shape(Config.of(task="teach", student=str(tmp_path / "a.safetensors")))
    assert found == SHAPE
    published = student_shape(Config.of(task="teach", student="Qwen/Qwen2.5-1.5B-Instruct"))
    assert published == published_shape("Qwen/Qwen2.5-1.5B")
    with pytest.raises(ConfigError, match="--student .*nowhere"):
        student_shape(Config.of(task="teach", student=str(tmp_path / "nowhere")))


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


@pytest.mark.usefixtures("pretended_rates", "only_shapes")
def test_a_plan_makes_no_model_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert Planner(config).job.worst == trainer.estimate
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


@pytest.mark.parametrize(
    ("took", "expected", "calls"),
    [
        ([9.0, 1.0, 1.3, 1.1], 3.4 / 3, 4),  # the first call warms up
        ([9.0, 4.0, 4.4, 1.0, 5.0, 1.3, 1.1], 3.4 / 3, 7),
        ([9.0, 1.0, *[4.0] * 20], 1.0, 1 + MOST_CALLS),
    ],
)
def test_a_rate_leaves_disturbed_calls_out(
    took: list[float], expected: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, left = [0.0], iter(took)

    def call() -> None:
        clock[0] += next(left)

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    seconds = undisturbed_seconds(call, torch.device("cpu"), repeats=3)
    assert seconds == pytest.approx(expected)
    assert len(list(left)) == len(took) - calls


# --- what is not here -----------------------------------------------------------------------------

# as the publishers say, in millions
PARAMETERS = {
    "openai-community/gpt2": 124.44,
    "openai-community/gpt2-medium": 354.82,
    "openai-community/gpt2-large": 774.03,
    "openai-community/gpt2-xl": 1557.61,
    "Qwen/Qwen2.5-0.5B-Instruct": 494.03,
    "Qwen/Qwen2.5-1.5B-Instruct": 1543.71,
    "Qwen/Qwen2.5-3B": 3085.94,
    "Qwen/Qwen2.5-7B@main": 7615.62,
    "Qwen/Qwen3-0.6B-Base": 596.05,
    "meta-llama/Llama-3.2-1B": 1235.81,
    "meta-llama/Llama-3.2-3B-Instruct": 3212.75,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134.52,
    "HuggingFaceTB/SmolLM2-360M": 361.82,
    "HuggingFaceTB/SmolLM2-1.7B": 1711.38,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_shape_has_the_published_number_of_parameters(name: str) -> None:
    shape = published_shape(name)
    assert shape and shape.num_parameters / 1e6 == pytest.approx(PARAMETERS[name], abs=0.006)
    assert published_shape("Qwen/Qwen2.5-0.5C") is None


@pytest.fixture
def only_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have no memory, and no tensor is read."""
    make = Transformer.__init__

    def without_memory(model: Transformer, *args: Any, **options: Any) -> None:
        assert torch.get_default_device().type == "meta", "a plan needs shapes only"
        make(model, *args, **options)

    def read(files: WeightFiles, name: str) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Transformer, "__init__", without_memory)
    monkeypatch.setattr(WeightFiles, "tensor", read)


@pytest.mark.usefixtures("only_shapes")
def test_a_plan_needs_neither_the_model_nor_the_data_nor_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    settings = ["--use-amp", "--gradient-checkpointing", "--chunked-logprobs", "--device", "cuda"]
    lora = ["--lora-rank", "16", "--base-dtype", "bfloat16", "--group-size", "4"]
    plan.main(["--init-from", "Qwen/Qwen2.5-7B", "--micro-batch-size", "1", *lora, *settings])
    out = capsys.readouterr().out
    assert "--init-from Qwen/Qwen2.5-7B is not here" in out
    assert "assumed: prompts of 256 tokens, completions of --max-new-tokens 96" in out
    assert "seconds: left out, because this machine has no CUDA device" in out
    assert "seconds: step" not in out and "does not fit in 12 GB, fits in 24 GB" in out
    rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines()]
    cells = {row[1]: row[2] for row in rows if len(row) == 4}
    # 196 layers, of which 7 are in a block; norms and biases stay in float32
    adapters = 28 * 16 * (2 * (2 * 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert cells["trained parameters"] == f"{adapters / 1e6:,.2f} M"
    small = 28 * (3584 + 2 * 512 + 2 * 3584) + 3584
    weights = 2 * (published_shape("Qwen/Qwen2.5-7B").num_parameters - small)  # type: ignore[union-attr]
    assert cells["MiB: weights"] == f"{(weights + 4 * small + 4 * adapters) / 2**20:,.1f}"
    assert cells["MiB: Adam"] == f"{8 * adapters / 2**20:,.1f}"


@pytest.mark.usefixtures("only_shapes", "pretended_rates")
def test_a_plan_of_a_folder_reads_no_weights_and_assumes_lengths_without_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(plan_jobs.QWEN_120M, vocab_size=360, layers=2, context=512)
    tensors = {
        FAMILIES["qwen2"].theirs(name): torch.zeros(x.shape, dtype=torch.bfloat16)
        for name, x in Transformer.empty(shape, device="meta").state_dict().items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["qwen2"].write(shape)))
    monkeypatch.setattr(planner, "SECONDS_OF_SAMPLING", 0.0)
    small = {"init_from": str(tmp_path), "prompts_per_step": 4, "group_size": 4}
    here = Planner(Config.of(**small))
    assert here.job.shape == shape and not here.job.assumed and here.job.task
    away = Planner(Config.of(**small, data="nowhere.jsonl"))
    assert "--data nowhere.jsonl: not here; assumed: prompts of 256" in away.job.assumed
    (found,) = away.estimates().values()
    assert found.seconds and found.counts.prompt_len == 256 and found.counts.completion_len == 96
    with pytest.raises(ConfigError, match="leaves less than 256 tokens for a prompt"):
        Planner(Config.of(**small, data="nowhere.jsonl", max_new_tokens=300))


def test_where_users_score_completions_are_as_long_as_they_may_be() -> None:
    rewards = str(Path(__file__).parent.parent / "examples" / "rewards.py")
    plain, scored = (
        Planner(Config.of(max_new_tokens=90, rewards=file, reward_weights="similarity=1")).job
        for file in ("", rewards)
    )
    assert plain.worst.counts.completion_len < 90 == scored.worst.counts.completion_len


# --- offloading -----------------------------------------------------------------------------------


def test_an_offloaded_optimizer_leaves_the_device_but_for_one_parameters_moments() -> None:
    config = job(offload_optimizer=True, micro_batch_size=1)
    memory = {
        device: StepMemory(config, SHAPE, counts_of(config), device) for device in ("cpu", "cuda")
    }
    on_cpu, on_cuda = (memory[device].by_kind() for device in ("cpu", "cuda"))
    assert on_cpu["Adam"] == on_cuda["Adam, in host memory"] == 8 * SHAPE.num_parameters
    peaks = [memory["cpu"].peak(on_cpu), memory["cuda"].peak(on_cuda)]
    assert peaks[0] - peaks[1] == 8 * SHAPE.num_parameters
    # with next to no activations, the moments of the embedding are the most
    wide = replace(SHAPE, vocab_size=10**6, layers=1)
    lean = replace(config, memory=replace(config.memory, chunked_logprobs=True))
    peak = StepMemory(lean, wide, replace(counts_of(lean), slots=0.0), "cuda")
    kinds = peak.by_kind()
    moved = kinds["gradients"] + 8 * wide.vocab_size * wide.width
    assert peak.peak(kinds) >= kinds["weights"] + moved


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


def test_a_made_up_job_has_the_model_and_the_lengths_that_it_says(tmp_path: Path) -> None:
    shape = replace(plan_jobs.QWEN_120M, vocab_size=9000, layers=1, width=24, mlp_width=16)
    job = plan_jobs.Job({**plan_jobs.OPEN, **plan_jobs.LORA}, shape, prompt_len=80)
    planned = Planner(Config.of(**job.prepare(tmp_path), device="cpu")).job
    assert planned.shape == replace(shape, context=planned.shape.context)
    assert (planned.worst.counts.prompt_len, planned.worst.counts.completion_len) == (80, 48)
    assert planned.worst.trained == 8 * (4 * 24 + 2 * 768 + 2 * 256 + 3 * (24 + 16))


def test_made_up_completions_share_nothing() -> None:
    counts = counts_of(job())
    made: Completions = made_up_completions(counts, 50)
    assert made.completion_ids.shape == (4, 3, 5) and made.prompt_ids.shape == (4, 10)
    assert len(PACKINGS["prefix-tree"](made).tokens.ids) == counts.packed
