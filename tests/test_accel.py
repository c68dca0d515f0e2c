"""Speed layers: each gives the same numbers as the plain path, or stops with an error."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import _dynamo

from minigrpo import Config, Trainer
from minigrpo.model.linear import linear, round_number
from minigrpo.model.shape import ModelShape
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.model.transformer import Block, Transformer
from minigrpo.runtime import accel, announce
from minigrpo.runtime.fast import LAYERS
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.logging import Screen
from minigrpo.runtime.no_effect import Situation
from minigrpo.runtime.rng import uniforms
from minigrpo.sampling.cached_decoder import CachedDecoder
from minigrpo.sampling.cuda_graphs import CapturedStep, CUDAGraphCache
from minigrpo.sampling.decoders import ReplicatedPrefixDecoder, SharedPrefixDecoder
from minigrpo.sampling.generate import generate
from minigrpo.sampling.kv_cache import KVCache
from minigrpo.sampling.sampler import Sampler
from minigrpo.tasks.chess_env import ChessEnv
from minigrpo.types import Example

from .conftest import EOS, SHAPES, VOCAB, make_completions
from .gradients import GROUPED, TINY

LENGTH = 20


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize("drafted", [False, True])
def test_captured_rounds_write_the_same_tokens_rollout_after_rollout(
    model: Transformer, drafted: bool
) -> None:
    """The cache and the captured rounds outlive a rollout.

    Later rollouts have other prompts, more of them, longer ones, and other weights.
    """
    graphs = CUDAGraphCache()
    for turn, (prompts, width) in enumerate([(3, 7), (6, 7), (2, 5), (6, 9), (6, 9)]):
        c = make_completions(turn, prompts=prompts, width=width)
        u = torch.from_numpy(uniforms(0, "test", turn, np.arange(prompts), 5, LENGTH))
        options: dict[str, object] = {
            "stops": [EOS],
            "max_new_tokens": LENGTH,
            "num_samples": 5,
            "u": u,
            "num_speculative_tokens": 3,
        }
        if drafted:
            first = generate(model, c.prompt_ids, c.prompt_len, **options)
            options["drafts"] = first.completion_ids[:, 0]
        plain = generate(model, c.prompt_ids, c.prompt_len, **options)
        captured = generate(model, c.prompt_ids, c.prompt_len, decoder=graphs.decoder, **options)
        assert torch.equal(captured.completion_ids, plain.completion_ids)
        torch.testing.assert_close(captured.sampler_logp, plain.sampler_logp, rtol=0, atol=1e-6)
        with torch.no_grad():
            next(model.h[0].mlp.parameters()).mul_(1.1)


def test_a_round_is_captured_once_per_shape(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, captured = CUDAGraphCache(), list[int]()
    init = CapturedStep.__init__
    monkeypatch.setattr(
        CapturedStep, "__init__", lambda self, *args: captured.append(1) or init(self, *args)
    )
    c = make_completions(0, prompts=6)
    for turn in range(3):
        u = torch.from_numpy(uniforms(0, "test", turn, np.arange(6), 5, LENGTH))
        options = {"stops": [EOS], "max_new_tokens": LENGTH, "num_samples": 5, "u": u}
        generate(model, c.prompt_ids, c.prompt_len, decoder=graphs.decoder, **options)
        if not turn:
            captured.clear()
    assert not captured


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_captured_rounds_on_cuda(shape: ModelShape) -> None:
    model = Transformer(shape, seed=1).cuda()
    graphs = {amp: CUDAGraphCache() for amp in (False, True)}
    for turn in range(3):
        c = make_completions(turn, prompts=6).to("cuda")
        u = torch.from_numpy(uniforms(0, "test", turn, np.arange(6), 5, LENGTH)).cuda()
        options = {"stops": [EOS], "max_new_tokens": LENGTH, "num_samples": 5, "u": u}
        first = generate(model, c.prompt_ids, c.prompt_len, **options)
        options["drafts"] = first.completion_ids[:, 0]
        for amp in (False, True):
            with torch.autocast("cuda", torch.bfloat16, enabled=amp):
                plain = generate(model, c.prompt_ids, c.prompt_len, **options)
                captured = generate(
                    model, c.prompt_ids, c.prompt_len, decoder=graphs[amp].decoder, **options
                )
            same = (
                (captured.completion_ids[..., :1] == plain.completion_ids[..., :1]).float().mean()
            )
            assert same > 0.8 if amp else torch.equal(captured.completion_ids, plain.completion_ids)
        with torch.no_grad():
            next(model.h[0].mlp.parameters()).mul_(1.1)


def options_of(folder: Path, **changes: object) -> Config:
    return Config.of(
        **{
            **TINY,
            "prompts_per_step": 4,
            "group_size": 4,
            "reward_weights": "",
            **changes,
            "out_dir": str(folder),
        }
    )  # type: ignore[arg-type]


def test_low_precision_copies_have_the_numbers_of_autocast_to_the_bit(tmp_path: Path) -> None:
    with_copies, without = (
        Trainer(
            options_of(tmp_path / str(low), use_amp=True, low_precision_weights=low, kl_coef=0.1),
            quiet=True,
        )
        for low in (True, False)
    )
    low = with_copies.sampler.low_precision
    assert {p.dtype for p in low.parameters()} == {torch.float32, torch.bfloat16}
    assert (
        sum(a is b for a, b in zip(low.parameters(), with_copies.model.parameters(), strict=True))
        > 0
    )
    for step in range(3):
        a, b = with_copies.source.batch(step), without.source.batch(step)
        assert a.texts == b.texts
        assert a.completions.sampler_logp is not None and b.completions.sampler_logp is not None
        assert torch.equal(a.completions.sampler_logp, b.completions.sampler_logp)
        assert a.ref_logp is not None and b.ref_logp is not None
        assert torch.equal(a.ref_logp, b.ref_logp)
        with_copies.learner.learn(a, step)
        without.learner.learn(b, step)
    # and when the guard has gone back to float32, they are not used
    for trainer in (with_copies, without):
        trainer.learner.guard.halvings = 1
    a, b = with_copies.source.batch(3), without.source.batch(3)
    assert torch.equal(a.completions.sampler_logp, b.completions.sampler_logp)  # type: ignore[arg-type]
    assert a.ref_logp is not None and a.ref_logp.dtype == torch.float32


def test_cuda_graphs_and_low_precision_say_what_they_need() -> None:
    with pytest.raises(ConfigError, match="--cuda-graphs needs --kv-cache"):
        Config.of(cuda_graphs=True, kv_cache=False)
    with pytest.raises(ConfigError, match="--low-precision-weights needs --use-amp"):
        Config.of(low_precision_weights=True)


def test_a_run_with_captured_rounds_samples_the_same(tmp_path: Path) -> None:
    a, b = (
        Trainer(options_of(tmp_path / str(on), cuda_graphs=on), quiet=True) for on in (True, False)
    )
    assert a.source.batch(0).texts == b.source.batch(0).texts


def test_fast_turns_on_what_helps_here_but_not_what_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert Config.from_cli(["--packing", "repeated"]).speed.packing == "repeated"
    for has in (False, True):
        monkeypatch.setattr(
            torch.cpu, "get_capabilities", lambda has=has: {"avx512_bf16": has}, raising=False
        )
        on_cpu = Config.from_cli(["--fast", "--no-kv-cache", "--device", "cpu"])
        assert (on_cpu.speed.packing, on_cpu.speed.kv_cache, on_cpu.speed.use_amp) == (
            LAYERS["cpu"]["packing"],
            False,
            has,
        )
    on_cuda = Config.from_cli(["--fast", "--device", "cuda", "--compile_model", "--no-use-tf32"])
    on_cuda = on_cuda.speed
    assert on_cuda.use_amp and on_cuda.compile_model and not on_cuda.use_tf32
    assert not Config.from_cli(
        ["--fast", "--device", "cuda", "--no-use-amp"]
    ).speed.low_precision_weights
    (tmp_path / "fast.toml").write_text("fast = true\ndevice = 'cuda'\nuse_tf32 = false\n")
    assert not Config.from_cli(
        ["--fast", "--device", "cpu", "--amp-dtype", "float16"]
    ).speed.use_amp
    from_toml = Config.from_toml(tmp_path / "fast.toml").speed
    assert from_toml.use_amp and not from_toml.use_tf32
    config = options_of(tmp_path / "run", fast=True)
    shape = ModelShape(VOCAB, context=40, layers=2, width=16, heads=2)
    here = Situation(config, torch.device("cpu"), 1, shape, ChessEnv(0))
    announce.introduce(Screen(), here, 10, {})
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "--fast on cpu with bfloat16: --packing prefix-tree --kv-cache --speculative-decoding"
        in said
    )


def test_profile_writes_a_trace_with_the_phases_named(tmp_path: Path) -> None:
    Trainer(options_of(tmp_path / "run", profile=True, max_steps=6, eval_every=0), quiet=True).fit()
    (trace,) = (tmp_path / "run" / "profile").glob("*.json")
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"rollout", "reward", "update", "data"} <= names
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["measured"]["tokens/run"] > 0


def test_a_resume_with_too_few_steps_for_a_trace_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, settings = tmp_path / "run", {"max_steps": 6, "eval_every": 0}
    Trainer(options_of(run, **settings, stop_after=1), quiet=True).fit()
    Trainer(options_of(run, **settings, resume="auto", profile=True), quiet=True).fit()
    assert "--profile: only 5 steps are left, 6 are needed" in capfd.readouterr().err
    assert not (tmp_path / "run" / "profile").exists()


@pytest.mark.parametrize("kind", ["replicated prefix", "shared prefix", "captured"])
def test_keys_and_values_are_cached_once_for_the_queries_that_share_them(
    model: Transformer, kind: str
) -> None:
    kinds: dict[str, Callable[..., CachedDecoder]] = {
        "replicated prefix": ReplicatedPrefixDecoder,
        "shared prefix": SharedPrefixDecoder,
        "captured": CUDAGraphCache().decoder,
    }
    made = list[CachedDecoder]()

    def decoder(*arguments: object) -> CachedDecoder:
        made.append(kinds[kind](*arguments))
        return made[-1]

    def look(ids: torch.Tensor, lengths: torch.Tensor) -> None:
        for caches in (made[-1].cache.pairs, getattr(made[-1], "prompt_kv", [])):
            seen.extend(tuple(x.shape) for keys_and_values in caches for x in keys_and_values)

    seen, c = list[tuple[int, ...]](), make_completions(0)
    options = {"stops": [EOS], "max_new_tokens": 4, "num_samples": 2, "decoder": decoder}
    generate(model, c.prompt_ids, c.prompt_len, **options, watch=look)
    assert seen
    for shape in seen:
        assert (shape[1], shape[3]) == (model.shape.kv_heads, model.shape.head_dim)


def test_without_amp_there_is_no_copy() -> None:
    config = Config.of(**{**TINY, "out_dir": ""})
    model = Transformer(ModelShape(360))
    assert accel.low_precision_copy(config.speed, model) is model
    sampler = Sampler(config, model, load_tokenizer("chess"))
    (part,) = sampler.complete([Example("A: ", "x")])
    assert len(part) == 1


@pytest.mark.parametrize(
    "kind",
    [{"layers": 9}, pytest.param(GROUPED, marks=pytest.mark.slow)],
    ids=["gpt2", "grouped queries"],
)
def test_compiled_blocks_serve_the_update_alone_and_are_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, object]
) -> None:
    """GPT-2 with more layers than torch.compile makes versions of a function; the front end alone,
    or this would take minutes.
    """
    compile_block = Block.compile
    monkeypatch.setattr(
        Block, "compile", lambda self, **options: compile_block(self, backend="eager", **options)
    )
    monkeypatch.setattr(accel, "check_compiler", lambda config, device: None)
    torch.compiler.reset()
    options = {"compile_model": True, "group_size": 6, **kind}
    with _dynamo.config.patch(optimize_ddp=True):
        trainer = Trainer(options_of(tmp_path / "run", **options), quiet=True)
        made = [accel.graphs_compiled()]
        for step in range(4):
            batch = trainer.source.batch(step)
            made.append(accel.graphs_compiled())
            trainer.learner.learn(batch, step)
            made.append(accel.graphs_compiled())
    assert (
        made[1] == made[0] and made[2] > made[1]
    )  # none for sampling, whose lengths are others in every round
    assert made[2:] == made[2:3] * (len(made) - 2)  # and none after the first step


def test_without_a_compiler_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        ConfigError, match=r"--compile-model needs a C\+\+ compiler, g\+\+; --no-compile-model"
    ):
        Trainer(options_of(tmp_path / "run", compile_model=True), quiet=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"needs a C compiler, gcc or clang"):
        accel.check_compiler(Config.of(compile_model=True).speed, torch.device("cuda"))


def test_an_overflow_in_one_rollout_does_not_reach_the_next(model: Transformer) -> None:
    graphs, c = CUDAGraphCache(), make_completions(0, prompts=6)
    u = torch.from_numpy(uniforms(0, "test", 0, np.arange(6), 5, LENGTH))
    options = {"stops": [EOS], "max_new_tokens": LENGTH, "num_samples": 5, "u": u}
    plain = generate(model, c.prompt_ids, c.prompt_len, **options)
    weight = next(model.h[0].attn.parameters())  # of the queries
    with torch.no_grad():
        kept = weight.clone()
        weight.fill_(1e200)
        generate(model, c.prompt_ids, c.prompt_len, decoder=graphs.decoder, **options)
        weight.copy_(kept)
    again = generate(model, c.prompt_ids, c.prompt_len, decoder=graphs.decoder, **options)
    assert torch.equal(again.completion_ids, plain.completion_ids)


def test_captured_rounds_follow_the_guard_to_float32_and_shrink_when_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"use_amp": True, "low_precision_weights": True, "cuda_graphs": True}
    trainer = Trainer(options_of(tmp_path / "run", **options), quiet=True)
    trainer.source.batch(0)
    trainer.learner.guard.halvings = 1
    trainer.source.batch(1)
    assert {k.dtype for k, _ in trainer.sampler.graphs.cache.pairs} == {torch.float32}

    resize, capacities = KVCache.resize, list[int]()

    def small(self: KVCache, capacity: int, length: int) -> None:
        capacities.append(capacity)
        if capacity > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        resize(self, capacity, length)

    monkeypatch.setattr(KVCache, "resize", small)
    trainer = Trainer(
        options_of(tmp_path / "small", cuda_graphs=True, speculative_decoding=False, group_size=8),
        quiet=True,
    )
    batch = trainer.source.batch(0)
    assert len(batch) == 4 and capacities[0] == 32 and trainer.sampler.backoffs[8].size == 2


def test_autocast_on_a_cpu_multiplies_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {round_number(count) for count in range(1, 4097)}
    assert len(sizes) <= 8 * 10
    assert all(count <= round_number(count) <= count * 9 / 8 for count in range(1, 4097))
    layer, x = torch.nn.Linear(6, 5), torch.randn(3, 7, 6)
    rows: list[int] = []
    product = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: rows.append(len(x)) or product(x, *rest))

    def run(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """The output, and the gradients of input, weight and bias."""
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = function(given, layer.weight, layer.bias)
        weights = torch.arange(out.numel()).view(out.shape) % 5
        parameters = [given, layer.weight, layer.bias]
        return [out, *torch.autograd.grad((out * weights).sum(), parameters)]

    assert all(map(torch.equal, run(linear), run(product)))
    assert rows == [22]
