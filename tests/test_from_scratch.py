"""Models made from scratch: --arch, with its sizes, initial weights, runs and files."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from minigrpo import Config, Trainer, Transformer
from minigrpo.model.architectures import ARCHITECTURES, shape_from_scratch
from minigrpo.model.families import FAMILIES
from minigrpo.model.layers import INTO_RESIDUAL
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.planner import Planner
from minigrpo.tools import export

from .gradients import GROUPED, TINY

VOCAB = 360


def make(arch: str, **sizes: Any) -> Transformer:
    config = Config.of(arch=arch, init_from="scratch", **sizes)
    return Transformer(shape_from_scratch(config.model, VOCAB), seed=0)


def test_without_the_flag_it_is_a_gpt2() -> None:
    assert make("gpt2", kv_heads=2).shape == shape_from_scratch(Config().model, VOCAB)
    assert Config().model.arch == "gpt2"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("width", "heads"), [(128, 4), (768, 12)])
def test_families_of_the_same_sizes_have_about_the_same_number_of_parameters(
    arch: str, width: int, heads: int
) -> None:
    sizes = Config.of(arch=arch, init_from="scratch", width=width, heads=heads).model
    shape = shape_from_scratch(sizes, VOCAB)
    assert arch in FAMILIES and shape.family == arch
    assert shape.mlp_width % 8 == 0
    gpt2 = shape_from_scratch(Config.of(width=width, heads=heads).model, VOCAB)
    assert shape.num_parameters == pytest.approx(gpt2.num_parameters, rel=0.05)
    assert shape.block_weights == pytest.approx(gpt2.block_weights, rel=0.01)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_initial_weights_of_every_family_are_normal_and_small_into_the_residual_stream(
    arch: str,
) -> None:
    model = make(arch, layers=3, kv_heads=2)
    std = 0.02 * math.sqrt(768 / 128)
    matrices = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name
        elif name != "wpe.weight":  # sinusoids
            scale = 1 / math.sqrt(2 * 3) if name.endswith(INTO_RESIDUAL) else 1.0
            assert float(parameter.detach().std()) == pytest.approx(std * scale, rel=0.05), name
            assert abs(float(parameter.detach().mean())) < 0.05 * std, name
            matrices += 1
    assert matrices == {"gpt2": 1 + 4 * 3}.get(arch, 1 + 7 * 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_heads": 3}, "--kv-heads must divide --heads 4: one of 1, 2, 4 (0: all), got 3"),
        ({"kv_heads": 8}, "--kv-heads must divide --heads 4"),
        ({"width": 132, "heads": 44}, "even head size (--width / --heads), got 3"),
        ({"width": 130}, "--width must be even and a multiple of --heads, got 130 and 4"),
        ({"arch": "bert"}, "--arch must be gpt2 or llama or qwen3, got 'bert'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_the_names_of_their_flags(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Config.of(**{"arch": "llama", "init_from": "scratch", **settings})
    assert words in str(error.value)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    """A run of two steps of a model in which two query heads share a head of keys."""
    folder = tmp_path_factory.mktemp("scratch") / "run"
    config = Config.of(**{**TINY, **GROUPED, "max_steps": 2, "out_dir": str(folder)})
    trainer = Trainer(config, quiet=True)
    trainer.fit()
    return trainer, folder


def test_a_run_from_scratch_begins_another_run_and_its_plan_counts_its_parameters(
    run: tuple[Trainer, Path], tmp_path: Path
) -> None:
    trainer, folder = run
    shape = trainer.model.shape
    assert (shape.family, shape.kv_heads, shape.heads, shape.head_norm) == ("qwen3", 1, 2, True)
    for source in (folder, folder / "model.safetensors"):
        options = {**TINY, "init_from": str(source), "out_dir": str(tmp_path / source.name)}
        again = Trainer(Config.of(**options), quiet=True).model
        assert again.shape == shape
        for a, b in zip(again.parameters(), trainer.model.parameters(), strict=True):
            assert torch.equal(a, b)
    plan = Planner(Config.of(**{**TINY, **GROUPED}))
    assert plan.job.scorer
    plan.job.scorer.close()
    parameters = sum(p.numel() for p in trainer.model.parameters())
    assert plan.job.worst.parameters == trainer.estimate.parameters == parameters


def test_a_run_is_not_resumed_with_another_kind_of_model(run: tuple[Trainer, Path]) -> None:
    config = run[0].config
    for changed in ({"arch": "llama"}, {"kv_heads": 2}):
        with pytest.raises(ConfigError, match=f"--{next(iter(changed)).replace('_', '-')} was"):
            Trainer(config.replace(resume="auto", **changed), quiet=True)


@pytest.mark.peer
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_an_exported_model_from_scratch_is_read_by_transformers(arch: str, tmp_path: Path) -> None:
    import transformers

    changes = {**GROUPED, "arch": arch, "max_steps": 2, "out_dir": str(tmp_path / "run")}
    trainer = Trainer(Config.of(**{**TINY, **changes}), quiet=True)
    trainer.fit()
    export.main([str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert theirs.config.model_type == arch and theirs.config.num_key_value_heads == 1
    ids = torch.randint(0, VOCAB, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, trainer.model.logits(ids), rtol=0, atol=1e-4)
