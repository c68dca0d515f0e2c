"""Whole tiny runs: what they leave behind, what changes them, and what is refused before work."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from minigrpo import Config, Trainer, Transformer
from minigrpo.evaluate import measure
from minigrpo.model.source import ModelSource
from minigrpo.model.transformer import ModelShape
from minigrpo.run.console import Console
from minigrpo.run.logging import read_jsonl
from minigrpo.tools.cli import main
from minigrpo.tools.models import ModelArguments, config_of, open_with_task
from minigrpo.types import ConfigError

from .steps import attending, bits
from .steps import tiny_trainer as make
from .tiny import SUMS, read_json, refused, tiny_chess_model

SFT = {"loss": "nll", "max_new_tokens": 96}


def train(folder: Path, **changes: Any) -> Trainer:
    trainer = make(folder, **changes)
    trainer.fit()
    return trainer


def test_a_run_leaves_everything_that_its_users_read(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = train(run, kl_coef=0.05, keep_last=2, max_steps=6)
    left = {path.name for path in run.iterdir()}
    assert left >= {"held_out.jsonl", "tensorboard", "model.safetensors"}
    saved = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert saved == ["step_000004", "step_000006"]
    first, *_, record = read_jsonl(run / "metrics.jsonl")
    assert record.keys() >= {
        *("step", "reward", "reward_std", "rewards/similarity/mean", "kl", "entropy", "loss"),
        *("grad_norm", "learning_rate", "clip_ratio/low_mean", "clip_ratio/high_mean"),
        *("completions/mean_length", "completions/clipped_ratio", "frac_reward_zero_std"),
        *("step_time", "time/rollout", "time/reward", "time/reference", "time/update"),
        *("memory/peak_mib", "sampling/logp_difference_mean", "sampling/logp_difference_max"),
        *("rollout/rounds", "rollout/tokens", "tokens/run", "skipped_steps"),
    }
    assert all(math.isfinite(value) for value in record.values())
    assert first["kl"] == pytest.approx(0, abs=1e-6)  # here the reference is the model itself
    evaluation, *_ = read_jsonl(run / "eval.jsonl")
    assert evaluation.keys() >= {"step", "n", "exact", "exact_sampled", "similarity", "reward"}
    sample, *_ = read_jsonl(run / "samples.jsonl")
    assert sample.keys() >= {"step", "prompt", "completion", "truth", "rewards", "reward"}
    assert read_json(run / "summary.json")["status"] == "finished"
    assert Config.from_toml(run / "config.toml") == trainer.config.replace(out_dir="")
    again = Transformer.from_pretrained(run / "model.safetensors")
    ids = torch.randint(0, 300, (2, 9))
    assert_close(again.logits(ids), trainer.model.logits(ids), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("flag", "device"),
    [
        ("use_amp", "cpu"),
        pytest.param("use_amp", "cuda", marks=pytest.mark.gpu),
        pytest.param("use_tf32", "cuda", marks=pytest.mark.gpu),  # a CPU has no TF32
        pytest.param("compile_model", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_a_speed_flag_trains_and_keeps_the_loss_near(
    tmp_path: Path, flag: str, device: str
) -> None:
    losses = []
    for on in (False, True):
        changes = {**SFT, "device": device, "max_steps": 2, "eval_every": 0, flag: on}
        trainer = train(tmp_path / str(on), **changes)
        losses.append(read_jsonl(trainer.run_dir.path / "metrics.jsonl")[-1]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_what_does_not_fit_is_refused_before_the_folder_is_made(tmp_path: Path) -> None:
    (tmp_path / "damaged.safetensors").write_bytes(b"junk" * 100)
    other = Transformer(ModelShape(50, layers=attending(1), width=16, heads=2))
    other.save_pretrained(tmp_path / "other.safetensors")
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    cases = [
        {"model": str(tmp_path / "damaged.safetensors")},
        {"model": str(tmp_path / "other.safetensors")},  # 50 tokens, the tokenizer has 360
        {"model": str(tmp_path / "nowhere")},
        {"max_new_tokens": 150},  # prompts are longer than what is left
        {"reward_weights": {"similarity": 0.0}},
        {"reward_weights": {"beauty": 1.0}},
        {"task": "math", "eval_data": SUMS, "reward_weights": {}},  # nothing to train on
        {"task": str(tmp_path / "exits.py")},
    ]
    for changes in cases:
        with pytest.raises((ConfigError, OSError)):
            make(tmp_path / "run", **changes)
        assert not (tmp_path / "run").exists(), changes
    with pytest.raises((ConfigError, OSError)):
        make(tmp_path / "file" / "run")


def test_a_trainer_can_be_stepped_and_then_finished(tmp_path: Path) -> None:
    """With evaluations or without, which change nothing but what is known."""
    whole = train(tmp_path / "whole")
    stepped = make(tmp_path / "stepped", eval_every=0)
    assert not (tmp_path / "stepped" / "config.toml").exists()
    metrics = [stepped.one_step() for _ in range(2)]
    assert stepped.fit()["step"] == 4
    assert bits(stepped) == bits(whole)
    logged = read_jsonl(tmp_path / "stepped" / "metrics.jsonl")
    assert [x["step"] for x in logged] == [1, 2, 3, 4]
    assert [x["loss"] for x in logged[:2]] == [x["loss"] for x in metrics]


@pytest.mark.slow
def test_reinforcement_raises_the_reward_of_a_task_that_it_can_solve(tmp_path: Path) -> None:
    """A learning test with its control: the same run on shuffled rewards."""

    def gain(shuffle: bool) -> float:
        trainer = train(
            tmp_path / str(shuffle),
            task="examples/sums.py",
            model="minigrpo/assets/math.safetensors",
            max_steps=25,
            eval_size=128,
            prompts_per_step=16,
            group_size=8,
            eval_every=0,
            max_new_tokens=32,
            reward_weights={},
            learning_rate=3e-4,
            shuffle_rewards=shuffle,
        )
        first, *_, last = trainer.evaluations
        return last["reward_sampled"] - first["reward_sampled"]

    assert gain(shuffle=False) > max(0.0, gain(shuffle=True))


@pytest.mark.parametrize("use_amp", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_adapters_beside_nf4_are_resumed_and_exported(tmp_path: Path, use_amp: bool) -> None:
    model = str(tiny_chess_model(tmp_path / "model"))
    settings = {
        "lora_rank": 2,
        "base_dtype": "nf4",
        "kl_coef": 0.1,
        "reference": model,
        "use_amp": use_amp,
        "gradient_checkpointing": True,
    }
    whole = train(tmp_path / "whole", **settings)
    train(tmp_path / "run", **settings, stop_after=2)
    again = train(tmp_path / "run", **settings, resume="auto")
    assert bits(again) == bits(whole)
    assert all("lora" in name for name in whole.learner.state_dict()["model"])
    assert not all(p.is_floating_point() for p in whole.model.parameters())
    assert {p.dtype for p in whole.reference.model.h.parameters() if p.dim() == 3} == {torch.uint8}
    main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    ids = torch.randint(0, 300, (2, 9))
    found = Transformer.from_pretrained(tmp_path / "out").logits(ids)
    assert_close(found, again.model.logits(ids), rtol=1e-4, atol=1e-5)

    # `evaluate` and `sample` hold what was trained, in as little memory, and find its last figures
    arguments = ModelArguments(run=str(tmp_path / "run"))
    sampler, scorer = open_with_task(config_of(arguments, {}), Console(quiet=True))
    pairs = zip(sampler.model.parameters(), again.model.parameters(), strict=True)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    measures = measure(sampler, scorer).measures
    assert again.evaluations[-1] == {"step": 4, **{name: x.value for name, x in measures.items()}}


def test_adapters_of_peft_are_trained_on_from_where_they_are(tmp_path: Path) -> None:
    """The reference is the model with them; a resume has the same bits; the base stays the base."""
    base = tiny_chess_model(tmp_path / "base")
    start = tmp_path / "start"
    train(tmp_path / "first", model=str(base), lora_rank=2)
    start.mkdir()
    for file in (tmp_path / "first").glob("adapter_*"):
        shutil.copy(file, start)
    settings = {"model": str(start), "lora_rank": 2, "kl_coef": 0.1}
    whole = train(tmp_path / "whole", **settings)
    first = read_jsonl(tmp_path / "whole" / "metrics.jsonl")[0]
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert whole.evaluations[0] == read_jsonl(tmp_path / "first" / "eval.jsonl")[-1] | {"step": 0}
    train(tmp_path / "run", **settings, stop_after=2)
    assert bits(train(tmp_path / "run", **settings, resume="auto")) == bits(whole)
    written = read_json(tmp_path / "run" / "adapter_config.json")
    assert written["base_model_name_or_path"] == str(base)
    merged = ModelSource.of(str(tmp_path / "run")).load("float32", 0, print)
    ids = torch.randint(0, 300, (2, 9))
    assert_close(merged.logits(ids), whole.model.logits(ids), rtol=1e-4, atol=1e-5)


def test_a_resume_takes_another_flag_of_the_optimizer(tmp_path: Path) -> None:
    train(tmp_path / "run", max_steps=2, stop_after=1)
    again = make(tmp_path / "run", max_steps=2, resume="auto", fused_optimizer=False)
    assert not any(group["fused"] for group in again.learner.optimizer.param_groups)


def test_supervised_training_needs_true_answers(tmp_path: Path) -> None:
    changes = {
        **SFT,
        "data": str(tmp_path / "rows.jsonl"),
        "eval_data": str(tmp_path / "rows2.jsonl"),
    }
    refused(make, tmp_path / "run", task="examples/countdown.py", reward_weights={}, **SFT)
    # one row lacks what the others have
    (tmp_path / "rows.jsonl").write_text('{"prompt": "3+4", "answer": "7"}\n{"prompt": "3+5"}\n')
    (tmp_path / "rows2.jsonl").write_text('{"prompt": "3+6", "answer": "9"}\n')
    changes |= {"task": "prompts", "task_args": "judge=none", "reward_weights": {}}
    refused(make, tmp_path / "run", **changes)


def test_a_loss_in_a_file_trains_and_tools_read_its_run_without_it(tmp_path: Path) -> None:
    file = tmp_path / "loss.py"
    file.write_text("def own(x):\n    return 0.1 * x.entropy\n")
    train(tmp_path / "own", loss=f"{file}:own", max_steps=1, eval_every=0)
    (metrics,) = read_jsonl(tmp_path / "own" / "metrics.jsonl")
    assert metrics["loss"] > 0
    assert str(file) in (tmp_path / "own" / "config.toml").read_text()
    refused(make, tmp_path / "other", loss=f"{file}:nobody")
    file.unlink()
    main(["evaluate", str(tmp_path / "own"), "--n", "4"])
    main(["doctor", str(tmp_path / "own")])
