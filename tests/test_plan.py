"""The plan: hand counts, and the peaks that torch's allocator measures."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from minigrpo import Config, Transformer, memory
from minigrpo.memory import MIB, MOST_KEPT, components_of, fit_to_memory, peak_of
from minigrpo.model.lora import add_adapters
from minigrpo.model.packing import Packing, pack
from minigrpo.model.shape import GatedDeltaShape, ModelShape, Rope, ShortConvShape
from minigrpo.model.source import ModelSource
from minigrpo.runtime.device import autocast
from minigrpo.tools.plan import CUDA_CONTEXT
from minigrpo.types import Completions, ConfigError

from . import tiny
from .steps import attending
from .test_tools import call

SHAPE = ModelShape(vocab_size=50, context=64, layers=attending(2), width=8, heads=2)
NUM_PARAMETERS = 50 * 8 + 64 * 8 + 2 * (12 * 8 * 8 + 13 * 8) + 2 * 8
GPT2 = ModelShape(vocab_size=360)
GQA = ModelShape(
    vocab_size=300,
    layers=attending(3, rope=Rope()),
    width=64,
    family="qwen3",
    mlp_width=176,
    kv_heads=2,
    head_dim=24,
)
GEMMA3 = replace(
    GQA,
    family="gemma3_text",
    layers=attending(3, window=20, rope=Rope()) + attending(1, rope=Rope()),
    tied=True,
)
DELTA = GatedDeltaShape(key_heads=2, value_heads=4, key_dim=24, value_dim=20)
QWEN3_5 = replace(GQA, family="qwen3_5_text", layers=(DELTA, DELTA, *attending(1, rope=Rope())))
WIDE = replace(GQA, layers=attending(8, rope=Rope()), width=512, mlp_width=2048)
LFM2 = replace(GQA, family="lfm2", layers=(ShortConvShape(), *attending(1, rope=Rope())))
QWEN_7B = ModelShape(
    vocab_size=152_064,
    context=131_072,
    layers=attending(28, rope=Rope()),
    width=3_584,
    heads=28,
    family="qwen2",
    mlp_width=18_944,
    kv_heads=4,
    tied=False,
)


def job(**settings: Any) -> Config:
    base = {"prompts_per_step": 4, "group_size": 3, "max_new_tokens": 8, "model": "scratch"}
    return Config.of(**base | settings)


def bytes_of(config: Config, shape: ModelShape = SHAPE) -> dict[str, float]:
    return components_of(config, shape, prompt=10)


def measured(run: Callable[[], object]) -> float:
    """The most MiB that torch's allocator has given out while `run` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((x.start_ns(), x.nbytes()) for x in events if x.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in changes)) / MIB


def test_what_belongs_to_the_weights() -> None:
    found = bytes_of(job(kl_coef=0.1))
    for part in ("weights", "gradients", "reference"):
        assert found[part] == 4 * NUM_PARAMETERS
    assert found["AdamW's moments"] == 8 * NUM_PARAMETERS
    offloaded = bytes_of(job(kl_coef=0.1, offload_reference=True, offload_optimizer=True))
    assert offloaded["AdamW's moments"] == 0
    assert not offloaded["reference"]
    assert not bytes_of(job(kl_coef=0.1, lora_rank=2))["reference"]
    other = bytes_of(job(kl_coef=0.1, lora_rank=2, reference="minigrpo/assets/math.safetensors"))
    size = Path("minigrpo/assets/math.safetensors").stat().st_size
    assert other["reference"] == pytest.approx(size, rel=0.01)


def test_the_cache_stores_each_prompt_once_and_parts_grow_with_what_they_are_about() -> None:
    whole = bytes_of(job())
    assert whole["KV cache"] == 2 * 2 * 8 * 4 * (4 * 10 + 12 * 8)
    assert bytes_of(job(use_amp=True))["KV cache"] == whole["KV cache"] / 2
    assert "KV cache" not in bytes_of(job(loss="nll"))
    for part, share, settings in (
        ("activations", 0.25, {"micro_batch_size": 1}),
        ("logits", 0.5, {"micro_batch_size": 2}),
        ("KV cache", 0.25, {"rollout_batch_size": 1}),
        ("decoding round", 2.0, {"group_size": 6}),
        ("decoding round", 2.25, {"top_p": 0.9}),  # sorts
    ):
        assert bytes_of(job(**settings))[part] == pytest.approx(share * whole[part])


def test_a_plan_reads_no_weights_and_without_data_no_tokenizer(tmp_path: Path) -> None:
    model = tiny.tiny_chat_model(tmp_path)
    (model / "model.safetensors").rename(model / "shard.safetensors")
    for file in ("shard.safetensors", "tokenizer.json"):
        (model / file).write_text("damaged")
    with pytest.raises(ConfigError):
        ModelSource.of(str(model)).load("float32", 0, print)
    words = ["plan", "--config", "qwen2.5-7b-lora", "--model", model]
    assert call(*words) == 0
    own_task = tiny.ROOT / "examples" / "reverse.py"  # whose prompts need the tokenizer
    assert call(*words, "--data", "", "--task", own_task) == 2


def test_adapters_on_qwen2_5_7b_fit_24_gb_and_not_12() -> None:
    config = job(
        lora_rank=16,
        base_dtype="bfloat16",
        micro_batch_size=1,
        group_size=4,
        use_amp=True,
        gradient_checkpointing=True,
        max_new_tokens=512,
    )
    parts = components_of(config, QWEN_7B, prompt=256)
    assert 2 * 7_615_616_512 < parts["weights"] < 2.03 * 7_615_616_512
    assert 12 * 1024 < (peak_of(parts) + CUDA_CONTEXT) / MIB < 24 * 1024
    assert bytes_of(job(), QWEN_7B)["weights"] == 4 * 7_615_616_512
    coded = components_of(config.replace(base_dtype="nf4"), QWEN_7B, prompt=256)
    saved = (2 - 34 / 64) * 28 * 3584 * (2 * 3584 + 2 * 512 + 3 * 18944)  # bytes, of the layers
    assert parts["weights"] - coded["weights"] == saved
    assert (peak_of(coded) + CUDA_CONTEXT) / MIB < 12 * 1024


def made_up(shape: ModelShape, prompts: int, group: int, prompt: int, length: int) -> Completions:
    """Random completions, which share nothing but their prompts."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(shape.vocab_size, (prompts, group, length), generator=draw)
    prompt_ids = torch.randint(shape.vocab_size, (prompts, prompt), generator=draw)
    return Completions(prompt_ids, torch.full((prompts,), prompt), ids, ids >= 0)


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        (GPT2, {}),
        (GPT2, {"gradient_checkpointing": True}),
        (GQA, {}),
        (GQA, {"lora_rank": 4}),
        (GQA, {"lora_rank": 4, "use_amp": True}),
        (GEMMA3, {}),
        (replace(GQA, family="olmo2"), {}),
        (QWEN3_5, {}),
        (LFM2, {}),
        (QWEN3_5, {"gradient_checkpointing": True}),
        (replace(GQA, family="granitemoehybrid"), {}),
        (WIDE, {"use_amp": True, "gradient_checkpointing": True}),
        (ModelShape(vocab_size=30_000, layers=attending(1), width=32), {}),
    ],
)
def test_the_update_takes_what_the_closed_forms_say(
    shape: ModelShape, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(memory.MAX_LOGITS, "cuda", memory.MAX_LOGITS["cpu"])  # a plan is for a card
    config = job(**settings, prompts_per_step=3, group_size=6, max_new_tokens=40)
    model = Transformer(shape)
    add_adapters(model, config.model.lora_rank)
    model.checkpointing = config.memory.gradient_checkpointing
    completions = made_up(shape, 3, group=6, prompt=30, length=40)
    packing = Packing(pack(completions, config.speed.packing))
    keeps_casts = not config.memory.gradient_checkpointing

    def update() -> None:
        with autocast(config.speed, model.device, keeps_casts):
            logp, _ = model(packing)
        logp.sum().backward()

    update()  # the gradients are there
    parts = components_of(config, shape, prompt=30)
    expected = parts["activations"] + parts["logits"] + parts["casts of weights"]
    assert expected / MIB == pytest.approx(measured(update), rel=0.2)


@pytest.mark.parametrize(
    ("shape", "settings"),
    [(GPT2, {}), (GQA, {"lora_rank": 4}), (GQA, {"cuda_graphs": True}), (GQA, {"loss": "nll"})],
)
def test_sizes_grow_with_a_card_and_fit_it(shape: ModelShape, settings: dict[str, Any]) -> None:
    config = job(**settings, prompts_per_step=6, group_size=4, max_new_tokens=2000)
    chosen = []
    for available in (2**29, 2**31, 2**32, 2**35, 2**38):
        fitted, num_kept = fit_to_memory(config, shape, 1000.0, available)
        peak = peak_of(components_of(fitted, shape, 1000.0), num_kept)
        memory = fitted.memory
        assert peak <= available or (memory.micro_batch_size == 1 and memory.gradient_checkpointing)
        sizes = memory.micro_batch_size, memory.rollout_batch_size
        chosen.append((not memory.gradient_checkpointing, *sizes))
        given = config.replace(micro_batch_size=3, rollout_batch_size=3)
        kept, _ = fit_to_memory(given, shape, 1000.0, available)
        assert kept.memory.micro_batch_size == kept.memory.rollout_batch_size == 3
    assert chosen == sorted(chosen)
    assert chosen[0][:2] == (False, 1)
    assert chosen[-1][:2] == (True, 6)
    assert num_kept == (MOST_KEPT if config.speed.cuda_graphs else 0)
