"""Failures of one process: kills, full disks, two runs in one folder, non-finite numbers."""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

import minigrpo.runtime.run_dir
from minigrpo import Config, Trainer
from minigrpo.runtime import accel
from minigrpo.runtime.checkpoint import State, save_checkpoint
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.failures import Diverged, RunFailed
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.guard import BAD_STEPS_TO_HALVE, BAD_STEPS_TO_STOP, NonFiniteGuard

from .gradients import TINY
from .killing import OPTIONS, SUMS, fingerprint

ROOT = Path(__file__).parent.parent
CHEAP = {**TINY, "data": SUMS, "eval_every": 0}


def make(folder: Path, **changes: Any) -> Trainer:
    return Trainer(Config.of(**{**CHEAP, **changes, "out_dir": str(folder)}), quiet=True)


def test_killed_anywhere_and_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Nine kinds of places; a hundred kills with --hypothesis-profile=thorough."""
    kills = 14 if settings().max_examples <= 100 else 100
    command = [sys.executable, "-m", "tests.killing", str(tmp_path), "--kills", str(kills)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["kills"] == kills and not result["differ"]
    assert (
        OPTIONS["num_iterations"] == 2 and OPTIONS["micro_batch_size"] == 2
    )  # so that there is an inside


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """While a checkpoint of one of these steps is saved no file may grow beyond 12 KB, which is
    less than it needs.

    Only meanwhile: the limit is the process's, and what pytest writes to is a file, too.
    """

    def save(folder: Path, step: int, state: State, **options: Any) -> Path:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if step in steps:
            resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, before[1]))
        try:
            return save_checkpoint(folder, step, state, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(minigrpo.runtime.run_dir, "save_checkpoint", save)


def test_a_full_disk_is_said_loudly_and_training_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = make(tmp_path / "calm", save_every=1)
    undisturbed.fit()
    fill_the_disk(monkeypatch, {3, 4})
    trainer = make(tmp_path / "run", save_every=1, keep_last=2)
    trainer.fit()
    assert trainer.step == 6
    said = capfd.readouterr().err
    assert said.count("NOT SAVED") == 2 and "step 3: NOT SAVED" in said
    folders = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert folders[-2:] == ["step_000005", "step_000006"]
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert fingerprint(trainer) == fingerprint(undisturbed)


def test_a_disk_that_is_full_at_the_end_fails_the_run_and_keeps_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_the_disk(monkeypatch, {6})
    with pytest.raises(RunFailed, match="step 6: NOT SAVED .File too large.; older checkpoints"):
        make(tmp_path / "run", save_every=2).fit()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    again = make(tmp_path / "run", resume="auto", save_every=2)
    assert again.step == 4


def test_two_runs_in_one_folder_are_refused_and_the_lock_goes_with_the_first(
    tmp_path: Path,
) -> None:
    first = make(tmp_path / "run")
    with pytest.raises(ConfigError, match="--out-dir .*run: another run is writing to it"):
        make(tmp_path / "run", resume="auto")
    first.fit()
    make(tmp_path / "run", resume="auto").fit()


def poison(trainer: Trainer, steps: set[int]) -> None:
    """Make the gradient of some steps infinite."""
    trainer.model.ln_f.weight.register_hook(
        lambda grad: grad * (torch.inf if trainer.step in steps else 1.0)
    )


def test_a_bad_step_changes_no_weight_and_no_moment_and_keeps_its_batch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = make(tmp_path / "run")
    poison(trainer, {2})
    seen = []
    one_step = trainer.one_step

    def step() -> None:
        one_step()
        seen.append(fingerprint(trainer))

    trainer.one_step = step  # type: ignore[method-assign]
    summary = trainer.fit()
    assert summary["skipped_steps"] == 1 and trainer.step == 6
    assert seen[2] == seen[1] and len(set(seen)) == 5
    assert (
        "step 3: loss" in (said := capfd.readouterr().err)
        and "the weights stay as they are; the batch is in" in said
    )
    dumped = torch.load(
        tmp_path / "run" / "bad_batches" / "step_000003_rank_0.pt", weights_only=True
    )
    assert len(dumped["prompts"]) == 4 and dumped["rewards"].shape == (4, 3)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 6


def test_three_bad_steps_in_a_row_halve_the_learning_rate_for_good_and_end_autocast(
    tmp_path: Path,
) -> None:
    trainer = make(tmp_path / "run", use_amp=True, max_steps=8, warmup_steps=0, save_every=1)
    poison(trainer, {0, 2, 3, 4})
    trainer.fit()
    rates = [
        json.loads(line)["learning_rate"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    calm = make(tmp_path / "calm", max_steps=8, warmup_steps=0)
    calm.fit()
    expected = [
        json.loads(line)["learning_rate"]
        for line in (tmp_path / "calm" / "metrics.jsonl").read_text().splitlines()
    ]
    assert BAD_STEPS_TO_HALVE == 3
    assert rates == pytest.approx([*expected[:5], *(rate / 2 for rate in expected[5:])])
    with trainer.learner.autocast():
        assert not torch.is_autocast_enabled("cpu")
    resumed = make(tmp_path / "run", use_amp=True, max_steps=9, warmup_steps=0, resume="auto")
    assert resumed.learner.guard == NonFiniteGuard(skipped=4, in_a_row=0, halvings=1)


def test_six_bad_steps_in_a_row_stop_the_run_with_a_clear_error(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", max_steps=20)
    poison(trainer, set(range(2, 20)))
    with pytest.raises(
        Diverged, match="6 steps in a row had a loss or gradient that is not finite"
    ):
        trainer.fit()
    assert BAD_STEPS_TO_STOP == 6 and trainer.step == 7
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and "6 steps in a row" in summary["exit_reason"]


def test_what_was_learnt_before_the_bad_steps_is_saved_and_ends_again_when_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"max_steps": 20, "save_every": 100}
    trainer = make(tmp_path / "run", **options)
    poison(trainer, set(range(2, 20)))
    with pytest.raises(Diverged):
        trainer.fit()
    assert "the run fails; its 7 steps are in" in capfd.readouterr().err
    again = make(tmp_path / "run", **options, resume="auto")
    assert again.step == 7 and again.learner.guard.in_a_row == BAD_STEPS_TO_STOP - 1
    assert fingerprint(again) == fingerprint(trainer)
    poison(again, set(range(2, 20)))
    with pytest.raises(Diverged):
        again.fit()


def test_updates_before_a_bad_one_of_the_same_step_stay_and_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The sixth such step left the weights between two steps, and nothing was saved."""
    options = {"max_steps": 20, "save_every": 100, "num_iterations": 2}
    trainer = make(tmp_path / "run", **options)
    gradient, calls = trainer.learner.gradient, [0]

    def second_is_bad(*args: Any) -> Any:
        metrics = gradient(*args)
        calls[0] += 1
        for parameter in trainer.model.parameters() if calls[0] % 2 == 0 else ():
            if parameter.grad is not None:
                parameter.grad.fill_(torch.nan)
        return metrics

    monkeypatch.setattr(trainer.learner, "gradient", second_is_bad)
    before = fingerprint(trainer)
    with pytest.raises(Diverged, match="the last finite ones"):
        trainer.fit()
    said = capfd.readouterr().err
    assert "the updates before it stay" in said and "the weights stay as they are" not in said
    assert f"its {BAD_STEPS_TO_STOP} steps are in" in said
    again = make(tmp_path / "run", **options, resume="auto")
    assert again.step == BAD_STEPS_TO_STOP and fingerprint(again) == fingerprint(trainer) != before
    with pytest.raises(Diverged):
        again.fit()


def test_an_error_in_the_gradient_saves_the_steps_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as memory that runs out, where several processes cannot try again."""
    trainer = make(tmp_path / "run", save_every=100)
    backward = trainer.learner._backward

    def fails(*args: Any) -> Any:
        if trainer.step == 3:
            raise RuntimeError("out of memory")
        return backward(*args)

    monkeypatch.setattr(trainer.learner, "_backward", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.fit()
    calm, resumed = make(tmp_path / "calm"), make(tmp_path / "run", resume="auto")
    calm.fit()
    assert resumed.step == 3
    resumed.fit()
    assert fingerprint(resumed) == fingerprint(calm)


def test_under_float16_an_overflow_is_the_scalers_business_and_a_bad_loss_is_not(
    tmp_path: Path,
) -> None:
    """With the scaler on the CPU, which is the one that CUDA has."""
    trainer = make(tmp_path / "overflow")
    trainer.learner.scaler = torch.amp.GradScaler("cpu", enabled=True)
    poison(trainer, {0})
    scale = trainer.learner.scaler.get_scale()
    before = trainer.model.wte.weight.clone()
    trainer.learner.learn(trainer.source.batch(0), 0)
    assert torch.equal(trainer.model.wte.weight, before)
    assert trainer.learner.guard.skipped == 0 and trainer.learner.scaler.get_scale() == scale / 2

    trainer = make(tmp_path / "bad loss")
    trainer.learner.scaler = torch.amp.GradScaler("cpu", enabled=True)
    batch = trainer.source.batch(0)
    assert batch.advantages is not None
    trainer.learner.learn(replace(batch, advantages=batch.advantages * torch.nan), 0)
    assert trainer.learner.guard.skipped == 1


def test_a_bad_batch_that_cannot_be_kept_does_not_end_the_run(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run")
    poison(trainer, {2})
    (tmp_path / "run" / "bad_batches").write_text("in the way")
    assert trainer.fit()["skipped_steps"] == 1


def test_a_checkpoint_of_another_model_is_refused_with_the_keys_that_do_not_fit(
    tmp_path: Path,
) -> None:
    make(tmp_path / "run", stop_after=2).fit()
    path = next((tmp_path / "run" / "checkpoints").glob("*/state.pt"))
    state = torch.load(path, weights_only=True)
    state["model"]["wte.weight"] = state["model"]["wte.weight"][:100]
    save_checkpoint(tmp_path / "run" / "checkpoints", 3, {**state, "step": 3}, keep_last=1)
    with pytest.raises(ValueError, match="does not fit this model: .*wte.weight") as error:
        make(tmp_path / "run", resume="auto")
    assert "\n" not in str(error.value)


def test_another_number_of_threads_is_said_on_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "run", stop_after=2).fit()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        make(tmp_path / "run", resume="auto")
    finally:
        torch.set_num_threads(threads)
    assert f"was written by {threads} threads, this run has {threads + 1}" in capfd.readouterr().err


# --- float16 --------------------------------------------------------------------------------------


def with_scaler(monkeypatch: pytest.MonkeyPatch, scale: float = 2.0**16) -> None:
    """Give every run the scaler of float16, on the CPU, where it works as on CUDA."""

    def scaler(*_: object) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=scale, enabled=True)

    monkeypatch.setattr(accel, "grad_scaler", scaler)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_under_float16_an_overflow_while_the_scale_settles_is_said_and_logged_but_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with_scaler(monkeypatch)
    trainer = make(tmp_path / "run", max_steps=10)
    poison(trainer, {0, 1, 2, 3, 4, 5, 6})
    assert trainer.fit()["skipped_steps"] == 0
    found = metrics(tmp_path / "run")
    halved = [2.0**power for power in (15, 14, 13, 12, 11, 10, 9)]
    assert [record["scaler/scale"] for record in found] == [*halved, *(2.0**9,) * 3]
    assert [record["scaler/skipped_steps"] for record in found] == [1, 2, 3, 4, 5, 6, 7, 7, 7, 7]
    assert {record["skipped_steps"] for record in found} == {0}
    said = capfd.readouterr().err
    assert said.count("float16 overflow, no update") == 7 and "scale is now 512" in said
    assert not (tmp_path / "run" / "bad_batches").exists()


def test_under_float16_a_gradient_that_stays_nan_stops_the_run_below_the_scales_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two overflows take the scale from 4 to 1, which is the floor; then come six bad steps."""
    with_scaler(monkeypatch, scale=4.0)
    trainer = make(tmp_path / "run", max_steps=30)
    poison(trainer, set(range(3, 30)))
    with pytest.raises(Diverged, match="6 steps in a row"):
        trainer.fit()
    assert trainer.step == 3 + 2 + BAD_STEPS_TO_STOP - 1
    assert trainer.learner.scaler.get_scale() == 1.0
    assert trainer.learner.guard == NonFiniteGuard(skipped=5, in_a_row=5, halvings=1, overflows=2)
    dumped = sorted(path.name for path in (tmp_path / "run" / "bad_batches").iterdir())
    assert dumped == [f"step_{step:06d}_rank_0.pt" for step in range(6, 12)]
    assert [record["skipped_steps"] for record in metrics(tmp_path / "run")[-3:]] == [3, 4, 5]


def test_the_scalers_state_survives_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_scaler(monkeypatch)
    whole, cut = make(tmp_path / "whole"), make(tmp_path / "cut", stop_after=4)
    for trainer in (whole, cut):
        poison(trainer, {0, 1})
        trainer.fit()
    state = cut.learner.scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (2.0**14, 2)
    again = make(tmp_path / "cut", resume="auto")
    assert again.learner.scaler.state_dict() == state
    assert again.learner.guard.overflows == 2
    again.fit()
    assert again.learner.scaler.state_dict() == whole.learner.scaler.state_dict()
    assert fingerprint(again) == fingerprint(whole)


# --- checkpoints of other versions and settings ---------------------------------------------------


@pytest.fixture(scope="module")
def resumable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after two of six steps."""
    folder = tmp_path_factory.mktemp("resumable") / "run"
    make(folder, stop_after=2).fit()
    return folder


def resave(folder: Path, step: int, change: Callable[[State], object]) -> None:
    """Rewrite a checkpoint as another version of the library could have written it."""
    path = folder / "checkpoints" / f"step_{step:06d}"
    state = torch.load(path / "state.pt", weights_only=True)
    change(state)
    save_checkpoint(folder / "checkpoints", step, state, keep_last=9)


def test_an_older_run_resumes_where_newer_settings_have_their_defaults(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its checkpoint lacks settings, counts and records that came later, and has old names."""
    make(tmp_path / "run", stop_after=2, eval_every=2).fit()

    def older(state: State) -> None:
        config = state["config"]
        for name in ("top_p", "sampler_correction", "keep_last", "use_tf32", "overlong"):
            del config[name]
        config["layout"] = {"prefix-tree": "tree"}[config.pop("packing")]
        config["resample_dead_groups"] = config.pop("dynamic_sampling")
        state["made_by"] = {"processes": 1, "threads": torch.get_num_threads()}
        del state["guard"]

    resave(tmp_path / "run", 2, older)
    manifest = tmp_path / "run" / "checkpoints" / "step_000002" / "manifest.json"
    contents = json.loads(manifest.read_text())
    assert contents.pop("format") == 1
    manifest.write_text(json.dumps(contents))
    resumed = make(tmp_path / "run", resume="auto", eval_every=2)
    resumed.fit()
    assert resumed.step == 6 and "warning" not in capfd.readouterr().err
    calm = make(tmp_path / "calm")
    calm.fit()
    assert fingerprint(resumed) == fingerprint(calm)


def test_a_newer_setting_that_is_not_at_its_default_is_another_run(
    tmp_path: Path, resumable: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(resumable, run)
    resave(run, 2, lambda state: state["config"].pop("top_p"))
    with pytest.raises(ConfigError, match=r"--top-p was 1.0, is 0.5"):
        make(run, resume="auto", top_p=0.5)
    resave(run, 2, lambda state: state["config"].update(from_the_future=3))
    make(run, resume="auto").run_dir.close()
    assert "settings that this version ignores: from_the_future" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_amp": True}, "--use-amp was False, is True"),
        ({"use_tf32": True}, "--use-tf32 was False, is True"),
        ({"packing": "repeated"}, "--packing was prefix-tree, is repeated"),
        ({"fused_optimizer": False}, "--fused-optimizer was True, is False"),
        ({"micro_batch_size": 2}, "--micro-batch-size was 0, is 2"),
        ({"chunked_logprobs": True}, "--chunked-logprobs was False, is True"),
        ({"max_steps": 7}, "--max-steps was 6, is 7"),
        ({"amp_dtype": "float16"}, ""),  # without --use-amp
        ({"num_reward_workers": 1, "save_every": 1, "device": "cpu"}, ""),
    ],
)
def test_layers_that_change_bits_are_said_on_resume(
    resumable: Path, changes: dict[str, Any], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        make(resumable, resume="auto", **changes).run_dir.close()
    finally:
        torch.set_float32_matmul_precision("highest")
    said = capfd.readouterr().err
    if words:
        assert f"warning: {words}: the batches are the same, but results may not be equal" in said
    else:
        assert "bit for bit" not in said


def test_the_peak_memory_is_that_of_the_largest_process() -> None:
    """Two processes, whose sums are exchanged by hand."""

    @dataclass(frozen=True)
    class Two(DistContext):
        others: Callable[[torch.Tensor], torch.Tensor] = torch.clone

        def sum(self, x: torch.Tensor) -> torch.Tensor:
            return self.others(x)

    sent: list[torch.Tensor] = []
    own = {"memory/peak_mib": 100.0, "reward": 0.25, "tokens/repeated": 3.0, "x/failures": 1.0}
    larger = {"memory/peak_mib": 900.0, "reward": 0.75, "tokens/repeated": 4.0, "x/failures": 2.0}
    Two(1, 1, 2, others=lambda x: sent.append(x) or x).combine(larger)
    combined = Two(0, 0, 2, others=lambda x: x + sent[0]).combine(own)
    assert combined == {
        "memory/peak_mib": 900.0,
        "reward": 0.5,
        "tokens/repeated": 7.0,
        "x/failures": 3.0,
    }
