"""Runs with --lora-rank: training, the reference, checkpoints, tools and exports."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from minigrpo import Config, Trainer, Transformer
from minigrpo.learner import Learner
from minigrpo.model import logprobs, lora
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.model.transformer import Block
from minigrpo.runtime import accel, base_model
from minigrpo.runtime.build import make_model
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.logging import Screen
from minigrpo.runtime.trained import load_model
from minigrpo.tools import export
from minigrpo.tools.loading import ModelSelection, load

from .gradients import CHUNK, COMPILED, compile_with, with_settings
from .lora_ways import (
    LOW,
    OPTIONS,
    SHAPES,
    gradient,
    gradients_by_way,
    make,
    make_base,
    make_varied,
    randomise,
    two_low_steps,
)
from .test_invariance import assert_same

ROOT = Path(__file__).parent.parent
IDS = torch.arange(60).view(3, 20)
CHEAP = {"eval_every": 0, "max_steps": 4, "save_every": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "model.safetensors")


@pytest.fixture(scope="module")
def run(base: Path) -> Path:
    """A finished run of four steps."""
    make(base.parent / "run", base, **CHEAP).fit()
    return base.parent / "run"


def load_run(folder: Path) -> Transformer:
    return load_model(folder, pytest.fail)[1]


def everything(trainer: Trainer) -> list[Tensor]:
    """Weights and optimizer state."""
    optimizer = trainer.learner.optimizer.state_dict()["state"].values()
    return [
        *trainer.model.state_dict().values(),
        *(torch.as_tensor(state[name]) for state in optimizer for name in sorted(state)),
    ]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def storages(*models: nn.Module) -> dict[int, int]:
    """The memory of parameters: address -> bytes."""
    found = [p.untyped_storage() for model in models for p in model.parameters()]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SHAPES)
def test_a_step_has_the_gradient_of_full_training_by_the_chain_rule_in_all_ways(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W + s B A: the gradient of B is s dW A', that of A is s B' dW."""
    monkeypatch.setattr(logprobs, "CHUNK", CHUNK)
    trainer = make_varied(tmp_path / "run", make_base(tmp_path / "base", family))
    found = gradients_by_way(trainer)
    plain = lora.merge_adapters(copy.deepcopy(trainer.model))
    full = Learner(trainer.config.replace(lora_rank=0), plain)
    gradient(full, trainer.source.batch(0))
    expected = []
    for name, layer in lora.adapters(trainer.model).items():
        weight_grad = plain.get_parameter(f"{name}.weight").grad
        assert weight_grad is not None
        expected.append(layer.scale * layer.lora_B.detach().T @ weight_grad)
        expected.append(layer.scale * weight_grad @ layer.lora_A.detach().T)
    for way in found:
        assert_same(found[way], expected)


@pytest.mark.slow
def test_compiled_blocks_have_the_gradient_of_plain_ones(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the compiler's front end alone, and a base in bfloat16 under float32 compute."""
    monkeypatch.setattr(Block, "compile", Block.compile)  # restored after the test
    monkeypatch.setattr(accel, "check_compiler", lambda config, device: None)
    compile_with("eager")
    torch.compiler.reset()
    options = {"base_dtype": "bfloat16", "dtype": torch.float32}
    trainer = make_varied(tmp_path / "run", base, **options)
    batch = trainer.source.batch(0)
    expected = gradient(trainer.learner, batch)
    before = accel.graphs_compiled()
    for way in ("compiled", "compiled, checkpointing"):
        found = gradient(with_settings(trainer, **COMPILED[way]), batch)
        assert_same(found, expected, tolerance=1e-5)
    assert accel.graphs_compiled() > before


@pytest.mark.parametrize("changes", [{}, LOW], ids=["float32", "low"])
def test_the_adapters_alone_are_trained_and_in_float32(
    base: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    trainer = make(tmp_path / "run", base, lora_targets="c_attn,c_fc", **changes)
    model, stored = trainer.model, torch.bfloat16 if changes else torch.float32
    assert set(lora.adapters(model)) == {
        f"h.{n}.{part}" for n in (0, 1) for part in ("attn.c_attn", "mlp.c_fc")
    }
    frozen = {name: p.clone() for name, p in lora.frozen_weights(model).items()}
    assert {p.dtype for p in frozen.values() if p.dim() > 1} == {stored}
    before = [p.clone() for p in lora.trained_state(model).values()]
    for step in range(2):  # in the first one B is 0, so A has no gradient
        trainer.learner.learn(trainer.source.batch(step), step)
    after = lora.trained_state(model)
    assert all(name.endswith(lora.ADAPTERS) for name in after) and len(after) == 8
    assert {p.dtype for p in after.values()} == {torch.float32}
    assert not any(map(torch.equal, after.values(), before))
    assert same([*lora.frozen_weights(model).values()], [*frozen.values()])
    assert len(trainer.learner.optimizer.state) == 8


def test_copies_in_low_precision_share_the_frozen_weights_and_follow_the_adapters(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the numbers of autocast, which casts adapters in every forward."""
    with_copy, without = (
        make(tmp_path / str(low), base, **{**LOW, "low_precision_weights": low})
        for low in (True, False)
    )
    low = with_copy.sampler.low_precision
    extra = storages(with_copy.model, low).keys() - storages(with_copy.model).keys()
    matrices = {x.untyped_storage().data_ptr() for x in low.parameters() if x.dim() > 1}
    adapters = [p for part in lora.adapters(low).values() for p in (part.lora_A, part.lora_B)]
    assert extra & matrices == {p.untyped_storage().data_ptr() for p in adapters}
    for step in range(3):
        a, b = with_copy.source.batch(step), without.source.batch(step)
        assert a.completions.sampler_logp is not None and b.completions.sampler_logp is not None
        assert torch.equal(a.completions.sampler_logp, b.completions.sampler_logp)
        assert a.ref_logp is not None and b.ref_logp is not None
        assert torch.equal(a.ref_logp, b.ref_logp)
        assert with_copy.learner.learn(a, step) == without.learner.learn(b, step)
    copied: list[Tensor] = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: copied.extend(to))
    wide = make(tmp_path / "wide", base, **{**LOW, "base_dtype": "float32"})
    accel.refresh(wide.sampler.low_precision, wide.model)
    assert len(copied) == len(lora.trained_state(wide.model))  # and not the frozen weights


# --- the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, LOW], ids=["float32", "low"])
def test_the_reference_shares_all_memory_and_is_what_a_copy_of_the_base_is(
    base: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    shared, copied = (make(tmp_path / name, base, **changes) for name in ("shared", "copied"))
    one = sum(storages(shared.model).values())
    reference = shared.reference.model  # type: ignore[attr-defined]
    assert sum(storages(shared.model, shared.learner.trained, reference).values()) == one
    frozen = copy.deepcopy(copied.model).requires_grad_(False)
    for layer in lora.adapters(frozen).values():
        layer.lora_B.zero_()
    copied.reference.model = frozen  # type: ignore[attr-defined]
    for trainer in (shared, copied):
        randomise(trainer.model)
    for step in range(2):
        a, b = (trainer.source.batch(step) for trainer in (shared, copied))
        assert a.ref_logp is not None and b.ref_logp is not None
        assert torch.equal(a.ref_logp, b.ref_logp) and a.ref_logp.any()
        metrics = shared.learner.learn(a, step)
        assert metrics == copied.learner.learn(b, step) and metrics["kl"] > 0


def test_a_run_from_a_run_with_adapters_starts_and_keeps_to_the_merged_model(
    run: Path, tmp_path: Path
) -> None:
    first, second = load_run(run), make(tmp_path / "second", run, lora_rank=3)
    torch.testing.assert_close(second.model.logits(IDS), first.logits(IDS), rtol=0, atol=1e-5)
    assert {layer.lora_A.shape[0] for layer in lora.adapters(second.model).values()} == {3}
    completions = second.source.batch(0).completions
    merged = make(tmp_path / "plain", run, lora_rank=0)
    expected, found = (trainer.reference.logp(completions) for trainer in (merged, second))
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    second.fit()
    assert lora.adapters(load_run(tmp_path / "second"))


# --- checkpoints and what reads them --------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {**LOW, "micro_batch_size": 2}], ids=["float32", "low"])
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(
    base: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    options = {**CHEAP, "num_iterations": 2, **changes}
    whole = make(tmp_path / "whole", base, **options)
    whole.fit()
    first = make(tmp_path / "cut", base, **options, stop_after=2)
    first.fit()
    second = make(tmp_path / "cut", base, **options, resume="auto")
    assert second.step == 2 and same(everything(second), everything(first))
    second.fit()
    assert same(everything(second), everything(whole))
    assert not same(everything(second), everything(first))


@pytest.mark.slow
def test_killed_anywhere_and_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    words = [str(tmp_path), "--kills", "9", "--lora-rank", "2"]
    command = [sys.executable, "-m", "tests.killing", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not json.loads(done.stdout)["differ"]


def test_a_run_saves_adapters_alone_and_its_tools_put_them_on_the_base(
    base: Path, run: Path, tmp_path: Path
) -> None:
    (newest,) = (run / "checkpoints").glob("step_000004/state.pt")
    state = torch.load(newest, weights_only=True)
    assert all(name.endswith(lora.ADAPTERS) for name in state["model"])
    names = {path.name for path in run.iterdir()}
    assert names >= {"adapter_model.safetensors", "adapter_config.json"}
    assert "model.safetensors" not in names
    resumed = make(run, base, **CHEAP, resume="auto")
    resumed.run_dir.close()
    expected = resumed.model.logits(IDS)
    assert torch.equal(load_run(run).logits(IDS), expected)
    loaded = load(ModelSelection(run), Screen(quiet=True))
    assert torch.equal(loaded.sampler.model.logits(IDS), expected)
    assert not torch.equal(load_run(base).logits(IDS), expected)

    export.main([str(run), "--out", str(tmp_path / "merged")])
    merged = Transformer.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged.logits(IDS), expected, rtol=0, atol=1e-5)
    export.main([str(run), "--adapters", "--out", str(tmp_path / "peft")])
    settings = "adapter_config.json"
    assert (tmp_path / "peft" / settings).read_bytes() == (run / settings).read_bytes()
    theirs, ours = (load_file(x / "adapter_model.safetensors") for x in (tmp_path / "peft", run))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[x], ours[x]) for x in ours)
    assert json.loads((run / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        base
    )


def test_random_weights_under_adapters_are_made_again_from_the_seed(tmp_path: Path) -> None:
    options = {**CHEAP, "layers": 1, "width": 16, "heads": 2, "max_steps": 1, "seed": 2**40}
    trainer = make(tmp_path / "run", Path("scratch"), **options)
    trainer.fit()
    assert torch.equal(load_run(tmp_path / "run").logits(IDS), trainer.model.logits(IDS))


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    with pytest.raises(SystemExit, match="2"):
        export.main([str(word) for word in argv])
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_adapters_and_merged_weights_are_not_mixed_in_one_folder(
    base: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merged, peft = tmp_path / "merged", tmp_path / "peft"
    export.main([str(run), "--out", str(merged)])
    export.main([str(run), "--out", str(peft), "--adapters"])
    capsys.readouterr()
    words = refused(capsys, run, "--adapters", "--out", merged)
    assert f"--out {merged}: holds model.safetensors; take another folder" in words
    words = refused(capsys, run, "--out", peft)
    assert f"--out {peft}: holds adapter_model.safetensors" in words
    words = refused(capsys, base, "--adapters", "--out", tmp_path / "new")
    assert f"--adapters: {base} is no run" in words and not (tmp_path / "new").exists()


def test_a_base_that_is_gone_or_another_one_is_one_line_that_names_it(
    base: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = base.read_bytes()
    try:
        make_base(base, seed=4)
        with pytest.raises(ConfigError) as error:
            make(run, base, **CHEAP, resume="auto")
        assert f"--resume: --init-from {base} has other weights than when" in str(error.value)
        capsys.readouterr()
        assert f"belong to --init-from {base}, which has other weights than when" in refused(
            capsys, run, "--out", tmp_path / "new"
        )
        base.unlink()
        words = f"--init-from {base}, which cannot be loaded from this folder: {base}: there is no"
        assert words in refused(capsys, run, "--out", tmp_path / "new")
        with pytest.raises(ConfigError, match=rf"--init-from {re.escape(str(run))}.*{base.name}"):
            make(tmp_path / "second", run)
    finally:
        base.write_bytes(original)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kl_coef", [0.1, 0.0])
def test_without_adapters_another_file_is_noticed_where_the_reference_needs_it(
    tmp_path: Path, kl_coef: float, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_base(tmp_path / "base")
    options = {**CHEAP, "lora_rank": 0, "kl_coef": kl_coef}
    make(tmp_path / "run", base, **options, stop_after=1).fit()
    make(tmp_path / "run", base, **options, resume="auto").run_dir.close()
    capsys.readouterr()
    words = refused(capsys, tmp_path / "run", "--adapters", "--out", tmp_path / "new")
    assert f"--adapters: {tmp_path / 'run'} was trained without --lora-rank" in words
    make_base(base, seed=4)
    if kl_coef:
        with pytest.raises(ConfigError, match="and the reference of --kl-coef must be those"):
            make(tmp_path / "run", base, **options, resume="auto")
    else:  # a resume loads all weights
        make(tmp_path / "run", base, **options, resume="auto")


def test_a_digest_is_that_of_names_shapes_and_values() -> None:
    weights = {"a": torch.randn(5, 4), "b": torch.randn(3).bfloat16()}
    digest = lora.weights_digest(weights)
    assert digest == lora.weights_digest({name: x.clone() for name, x in weights.items()})
    changed = weights["a"].clone()
    changed[2, 1] += 1e-6
    for other in (
        {**weights, "a": changed},
        {**weights, "a": weights["a"].T.contiguous()},
        {"a": weights["a"], "c": weights["b"]},
        {**weights, "b": weights["b"].float()},
    ):
        assert lora.weights_digest(other) != digest


def test_a_base_in_bfloat16_is_loaded_as_such(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not first in float32, which would need twice the memory."""
    monkeypatch.setattr(base_model, "cast_frozen", lambda model, dtype: None)
    config = Config.of(**{**OPTIONS, "init_from": str(base), "base_dtype": "bfloat16"})
    model = make_model(config, load_tokenizer("chess"))
    exact = Transformer.from_pretrained(base).state_dict()
    for name, weight in lora.frozen_weights(model).items():
        stored = torch.bfloat16 if weight.dim() >= 2 else torch.float32
        assert torch.equal(weight, exact[name].to(stored)) and weight.dtype == stored


# --- wrong settings -------------------------------------------------------------------------------


def test_wrong_settings_are_one_line_that_says_what_is_allowed(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--base-dtype bfloat16 needs frozen weights"):
        Config.of(base_dtype="bfloat16")
    listed = "has no layer 'q_proj', ''; it has c_attn, c_proj, c_fc"
    with pytest.raises(ConfigError, match=f"--lora-targets: the model {listed}"):
        make(tmp_path / "run", base, lora_targets="c_fc,q_proj,")
    assert not (tmp_path / "run").exists()


def test_a_run_resumes_with_its_own_adapters_only(base: Path, run: Path) -> None:
    for changes, words in (
        ({"lora_rank": 3}, "--lora-rank was 2, is 3"),
        ({"lora_rank": 0}, "--lora-rank was 2, is 0"),
        ({"lora_targets": "c_fc"}, "--lora-targets was '', is 'c_fc'"),
        ({"base_dtype": "bfloat16"}, "--base-dtype was 'float32', is 'bfloat16'"),
    ):
        with pytest.raises(ConfigError, match=words):
            make(run, base, **{**CHEAP, **changes}, resume="auto")


# --- two processes --------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_train_the_adapters_of_one(base: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.lora_ways", str(base), str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    trainer = make_varied(tmp_path / "ways", base)
    whole, low = gradients_by_way(trainer), two_low_steps(tmp_path / "low", base)
    trained = lora.trained_state(trainer.model)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for way in whole:
            assert_same(found[way], whole[way])
        assert found["reduced"] == sum(x.numel() for x in trained.values())
        for a, b in zip(found["metrics"], low["metrics"], strict=True):
            assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
        for name, expected in low["weights"].items():  # of rank 1 too, which read another base
            close = {"rtol": 0, "atol": 1e-3} if name in trained else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(found["weights"][name], expected, **close)


# --- peers ----------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("base_dtype", ["float32", "bfloat16"])
def test_peft_loads_the_adapters_of_a_run_and_transformers_the_merged_weights(
    tmp_path: Path, base_dtype: str
) -> None:
    import peft
    import transformers

    plain = make_base(tmp_path / "plain" / "model.safetensors", "grouped-query")
    export.main([str(plain), "--out", str(tmp_path / "base")])
    run = tmp_path / "run"
    make(run, tmp_path / "base", **CHEAP, base_dtype=base_dtype).fit()
    export.main([str(run), "--out", str(tmp_path / "merged")])
    export.main([str(run), "--out", str(tmp_path / "adapters"), "--adapters"])
    with torch.no_grad():
        logits = load_run(run).logits(IDS)
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(merged(IDS).logits, logits, rtol=0, atol=1e-4)
        for folder in (tmp_path / "adapters", run):  # a run's folder is one of PEFT's, too
            rounded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
            for p in rounded.parameters():
                if p.dim() >= 2 and base_dtype == "bfloat16":
                    p.data = p.data.bfloat16().float()
            theirs = peft.PeftModel.from_pretrained(rounded, folder)
            torch.testing.assert_close(theirs(IDS).logits, logits, rtol=0, atol=1e-4)
            with theirs.disable_adapter():
                assert (theirs(IDS).logits - logits).abs().max() > 1e-3
