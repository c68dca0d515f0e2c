import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from minigrpo import Config, Trainer, Transformer
from minigrpo.learner import Learner
from minigrpo.model.shape import ModelShape
from minigrpo.runtime.checkpoint import load_checkpoint
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.optim import learning_rate_at
from minigrpo.tools import train as train_tool

from .gradients import TINY

ROOT = Path(__file__).parent.parent
WARM = {**TINY, "loss": "nll", "max_new_tokens": 96}


def train(folder: Path, **changes: Any) -> Trainer:
    trainer = Trainer(Config.of(**{**TINY, **changes, "out_dir": str(folder)}), quiet=True)
    trainer.fit()
    return trainer


def fingerprint(trainer: Trainer) -> str:
    """sha256 of weights and optimizer state."""
    digest = hashlib.sha256()
    tensors = list(trainer.model.state_dict().values())
    for state in trainer.learner.optimizer.state_dict()["state"].values():
        tensors += [torch.as_tensor(state[name]) for name in sorted(state)]
    for tensor in tensors:
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in record.items() if "time" not in name and "memory" not in name
    }


@pytest.mark.parametrize(
    "changes",
    [{}, {"kl_coef": 0.1, "num_iterations": 2}, WARM],
    ids=["grpo", "kl, 2 iterations", "nll"],
)
def test_interrupted_after_3_of_6_steps_and_resumed_equals_uninterrupted_bit_for_bit(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole = train(tmp_path / "whole", **changes)
    first = train(tmp_path / "cut", stop_after=3, **changes)
    assert first.step == 3
    assert (
        json.loads((tmp_path / "cut" / "summary.json").read_text())["exit_reason"] == "stop_after"
    )
    second = train(tmp_path / "cut", **changes, resume="auto")
    assert second.step == 6
    assert fingerprint(second) == fingerprint(whole) != fingerprint(first)
    for name in ("metrics.jsonl", "eval.jsonl"):
        a, b = (
            [without_times(record) for record in lines(tmp_path / run, name)]
            for run in ("whole", "cut")
        )
        assert a == b


def test_on_resume_what_a_lost_run_wrote_after_the_checkpoint_is_cut(tmp_path: Path) -> None:
    whole = train(tmp_path / "run", keep_last=3)
    again = train(tmp_path / "run", keep_last=3, resume="2")
    assert fingerprint(again) == fingerprint(whole)
    assert [record["step"] for record in lines(tmp_path / "run", "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert [record["step"] for record in lines(tmp_path / "run", "eval.jsonl")] == [0, 2, 4, 6]


def test_resuming_with_another_config_is_refused_and_with_other_speed_flags_is_not(
    tmp_path: Path,
) -> None:
    train(tmp_path / "run", stop_after=2)
    with pytest.raises(ConfigError, match=r"--learning-rate was 0.01, is 0.02"):
        train(tmp_path / "run", resume="auto", learning_rate=0.02)
    train(
        tmp_path / "run",
        resume="auto",
        packing="repeated",
        micro_batch_size=2,
        parallel_rewards=False,
    )


def test_resuming_from_before_the_newest_checkpoint_abandons_the_newer_ones(tmp_path: Path) -> None:
    train(tmp_path / "run", keep_last=9)
    train(tmp_path / "run", keep_last=9, resume="2", stop_after=3)
    assert [p.name for p in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        "step_000002",
        "step_000003",
    ]


def test_stopping_after_the_end_is_the_end(tmp_path: Path) -> None:
    trainer = train(tmp_path / "run", max_steps=2, stop_after=4, eval_every=0)
    assert trainer.step == 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


def test_a_finished_run_that_is_resumed_is_left_as_it_is(tmp_path: Path) -> None:
    train(tmp_path / "run")
    before = {
        name: (tmp_path / "run" / name).read_bytes() for name in ("eval.jsonl", "metrics.jsonl")
    }
    again = train(tmp_path / "run", resume="auto")
    assert again.step == 6
    assert {name: (tmp_path / "run" / name).read_bytes() for name in before} == before


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    train(tmp_path / "run", max_steps=1, warmup_steps=0)
    with pytest.raises(ConfigError, match="holds a run; --resume auto"):
        train(tmp_path / "run")


def test_a_run_leaves_everything_that_the_design_promises(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = train(run, kl_coef=0.05, max_steps=10)
    names = [
        "config.toml",
        "metrics.jsonl",
        "eval.jsonl",
        "samples.jsonl",
        "summary.json",
        "tensorboard",
        "model.safetensors",
    ]
    assert all((run / name).exists() for name in names)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_000008", "step_000010"]
    record = lines(run, "metrics.jsonl")[-1]
    assert set(record) >= {
        *(
            "step",
            "reward",
            "reward_std",
            "rewards/similarity/mean",
            "kl",
            "entropy",
            "loss",
            "grad_norm",
            "learning_rate",
        ),
        *(
            "clip_ratio/low_mean",
            "clip_ratio/high_mean",
            "completions/mean_length",
            "completions/clipped_ratio",
        ),
        *(
            "frac_reward_zero_std",
            "step_time",
            "time/rollout",
            "time/reward",
            "time/reference",
            "time/update",
        ),
        *("memory/peak_mib", "sampling/logp_difference_mean", "sampling/logp_difference_max"),
        "sampling/off_by_10_percent",
    }
    assert all(math.isfinite(value) for value in record.values())
    assert set(lines(run, "eval.jsonl")[0]) >= {
        "step",
        "exact",
        "valid",
        "similarity",
        "reward",
        "exact_sampled",
    }
    assert set(lines(run, "samples.jsonl")[0]) >= {
        "step",
        "prompt",
        "completion",
        "truth",
        "parts",
        "reward",
    }
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    assert Config.from_toml(run / "config.toml").replace(out_dir=str(run)) == trainer.config
    assert record["tokens/run"] <= record["tokens/repeated"]
    again = Transformer.from_pretrained(run)
    ids = torch.randint(0, 300, (2, 9))
    torch.testing.assert_close(again.logits(ids), trainer.model.logits(ids), rtol=0, atol=0)


def test_the_kl_to_the_model_itself_is_zero(tmp_path: Path) -> None:
    trainer = train(tmp_path / "a", kl_coef=0.5, max_steps=1, warmup_steps=0)
    assert lines(trainer.run_dir.path, "metrics.jsonl")[0]["kl"] == pytest.approx(0, abs=1e-6)


def test_k1_reward_takes_the_summed_log_ratio_off_the_rewards(tmp_path: Path) -> None:
    options = {
        **TINY,
        "kl": "k1_reward",
        "kl_coef": 0.5,
        "scale": "none",
        "out_dir": str(tmp_path / "run"),
    }
    trainer = Trainer(Config.of(**options), quiet=True)
    with torch.no_grad():
        trainer.reference.model.wte.weight.mul_(1.5)  # type: ignore[attr-defined]
    batch = trainer.source.batch(0)
    assert batch.rewards is not None and batch.ref_logp is not None and batch.advantages is not None
    log_ratio = (batch.completions.sampler_logp - batch.ref_logp).sum(-1)  # type: ignore[operator]
    penalised = torch.from_numpy(batch.rewards.total) - 0.5 * log_ratio
    assert log_ratio.abs().min() > 0
    torch.testing.assert_close(batch.advantages, penalised - penalised.mean(1, keepdim=True))
    with torch.no_grad():  # a KL that is not finite must reach the guard, which skips the step
        trainer.reference.model.wte.weight.fill_(torch.nan)  # type: ignore[attr-defined]
    batch = trainer.source.batch(0)
    assert batch.advantages is not None and batch.advantages.isnan().all()
    trainer.learner.learn(batch, 0)
    assert trainer.learner.guard.skipped == 1


@pytest.mark.parametrize(
    ("flag", "device", "changes"),
    [
        ("use_amp", "cpu", True),
        ("gradient_checkpointing", "cpu", False),
        pytest.param("use_amp", "cuda", True, marks=pytest.mark.gpu),
        pytest.param("gradient_checkpointing", "cuda", False, marks=pytest.mark.gpu),
        pytest.param("use_tf32", "cuda", True, marks=pytest.mark.gpu),  # a CPU has no TF32
    ],
)
def test_a_speed_flag_trains_and_keeps_the_loss_near(
    tmp_path: Path, flag: str, device: str, changes: bool
) -> None:
    """`changes`: whether the flag rounds differently, so that the losses are not quite equal."""
    plain = train(tmp_path / "plain", **{**WARM, "device": device})
    fast = train(tmp_path / "fast", **{**WARM, "device": device, flag: True})
    a, b = (lines(trainer.run_dir.path, "metrics.jsonl")[-1]["loss"] for trainer in (plain, fast))
    assert b == pytest.approx(a, rel=0.02 if changes else 1e-5)
    assert (b != a) or not changes
    assert {p.dtype for p in fast.model.parameters()} == {torch.float32}


def test_a_step_with_an_infinite_gradient_changes_nothing(tmp_path: Path) -> None:
    trainer = Trainer(Config.of(**{**WARM, "out_dir": str(tmp_path / "run")}), quiet=True)
    before = fingerprint(trainer)
    batch = trainer.source.batch(0)
    hook = trainer.model.ln_f.weight.register_hook(lambda grad: grad * torch.inf)
    trainer.learner.learn(batch, 0)
    assert fingerprint(trainer) == before
    hook.remove()
    trainer.learner.learn(batch, 0)
    assert fingerprint(trainer) != before


def test_a_run_that_fails_says_so_in_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Learner, batch: object, step: int) -> dict[str, float]:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Learner, "learn", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        train(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("failed", 0)
    assert "out of luck" in summary["exit_reason"]


def test_learning_rate_rises_then_falls_to_a_tenth() -> None:
    rates = [learning_rate_at(step, peak=1.0, warmup_steps=4, max_steps=20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_a_file_that_is_not_there_is_one_line_and_exit_code_2_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as stop:
        train_tool.main(["--init-from", str(tmp_path / "nowhere"), "--out-dir", str(run)])
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert err.startswith("error: --init-from") and err.count("\n") == 1
    assert not out
    assert not run.exists()


def test_what_does_not_fit_is_an_error_before_the_folder_is_made(tmp_path: Path) -> None:
    damaged, other, blocked = (
        tmp_path / "damaged.safetensors",
        tmp_path / "other.safetensors",
        tmp_path / "file",
    )
    damaged.write_bytes(b"junk" * 100)
    Transformer(ModelShape(50, layers=1, width=16, heads=2)).save_pretrained(other)
    blocked.write_text("in the way")
    cases: dict[str, dict[str, Any]] = {
        "not a whole safetensors file": {"init_from": str(damaged)},
        "has 50 tokens, --tokenizer chess has": {"init_from": str(other)},
        "--max-new-tokens must leave room for a prompt": {"max_new_tokens": 256},
        "--out-dir .* cannot be written": {"out_dir": str(blocked / "run")},
        "--device .* CUDA devices": {"device": "cuda:99"},
    }
    for words, changes in cases.items():
        with pytest.raises(ValueError, match=words):
            Trainer(Config.of(**{**TINY, "out_dir": str(tmp_path / "run"), **changes}), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_prompt_that_does_not_fit_is_an_error_that_says_how_long_it_may_be(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ConfigError, match="train.0.: the prompt has .* tokens; at most 20 leave room for"
    ):
        train(tmp_path / "run", context=30, max_new_tokens=10)
    assert not (tmp_path / "run").exists()


def test_ctrl_c_finishes_the_step_saves_says_where_and_exits_0(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in {**TINY, "max_steps": 10**6}.items()
    ]
    process = subprocess.Popen(
        [sys.executable, "train.py", *flags, "--out-dir", str(run)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            break
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["exit_reason"] == "SIGINT"
    assert f"step_{summary['step']:06d}" in out
    assert (run / "checkpoints" / f"step_{summary['step']:06d}" / "manifest.json").exists()


@pytest.mark.slow
def test_asked_twice_it_stops_at_once_and_what_was_saved_is_whole(tmp_path: Path) -> None:
    """In a step that never ends: the second Ctrl-C does not wait for it."""
    marker, folder = tmp_path / "marker", tmp_path / "run"
    flags = {
        **TINY,
        "reward_weights": "",
        "task": ROOT / "tests" / "faulty_task.py",
        "max_steps": 100,
        "save_every": 3,
    }
    words = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in {**flags, "out_dir": folder}.items()
    ]
    env = {**os.environ, "RANK": "1", "FAULT": "hang", "FAULT_MARKER": str(marker)}
    options: dict[str, Any] = {
        "cwd": ROOT,
        "env": env,
        "stderr": subprocess.PIPE,
        "stdout": subprocess.DEVNULL,
        "text": True,
    }
    process = subprocess.Popen([sys.executable, "train.py", *words], **options)
    manifest = folder / "checkpoints" / "step_000012" / "manifest.json"
    end = time.monotonic() + 60
    while not (manifest.exists() and marker.exists()):
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.7)  # now it has saved, and waits for the example that never comes
    process.send_signal(signal.SIGINT)
    time.sleep(1.3)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=20)[1]
    assert "SIGINT: finishing this step, then saving; a second signal stops at once" in stderr
    assert process.returncode != 0
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert load_checkpoint(manifest.parent)["step"] == 12


def test_evaluating_changes_nothing_but_what_is_known(tmp_path: Path) -> None:
    often, never = train(tmp_path / "often", eval_every=1), train(tmp_path / "never", eval_every=0)
    assert fingerprint(often) == fingerprint(never)
