"""--fast on pretended devices, and what is said of a device or a machine that does not fit."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minigrpo import Config, Trainer
from minigrpo.model.shape import ModelShape
from minigrpo.runtime import accel, announce, fast
from minigrpo.runtime.build import make_scorer
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.no_effect import Situation, without_effect
from minigrpo.runtime.startup import check_machine
from minigrpo.tasks.chess_env import ChessEnv
from minigrpo.tools import cli

from .gradients import TINY

Cards = Callable[..., None]
AMPERE, TURING, VOLTA, PASCAL = (8, 6), (7, 5), (7, 0), (6, 1)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    """Pretend that the machine has cards of these compute capabilities."""

    def pretend(*capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])

    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return pretend


def precision(config: Config) -> str:
    """What a run computes in."""
    speed = config.speed
    assert speed.low_precision_weights == speed.use_amp
    amp = speed.amp_dtype if speed.use_amp else "float32"
    return f"{amp} and TF32" if speed.use_tf32 else amp


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((9, 0), "bfloat16 and TF32"),
        (AMPERE, "bfloat16 and TF32"),
        (TURING, "float16"),
        (VOLTA, "float16"),
        (PASCAL, "float32"),
        ((6, 0), "float32"),
    ],
)
def test_fast_looks_at_the_card(cards: Cards, capability: Any, expected: str) -> None:
    cards(capability)
    made = (Config.from_cli(["--fast"]), Config.of(fast=True), Config().replace(fast=True))
    for config in made:
        assert precision(config) == expected
        assert config.speed.compile_model == (expected != "float32")
    assert precision(Config.of(fast=True, device="cpu")) == "float32"


def test_fast_leaves_alone_what_is_given(cards: Cards, tmp_path: Path) -> None:
    cards(VOLTA)
    assert precision(Config.of(fast=True, amp_dtype="float16")) == "float16"
    assert precision(Config.of(fast=True, amp_dtype="bfloat16")) == "float32"  # which it lacks
    assert not Config.of(fast=True, use_amp=False).speed.low_precision_weights
    cards(AMPERE)
    assert precision(Config.of(fast=True, amp_dtype="float16")) == "float16 and TF32"
    file = tmp_path / "a.toml"
    file.write_text("fast = true\nuse_tf32 = false\n")
    from_file = Config.from_toml(file)
    assert precision(from_file) == "bfloat16"
    assert precision(from_file.replace(out_dir="x")) == "bfloat16"
    assert precision(Config.of(fast=True).replace(use_tf32=False)) == "bfloat16"


def test_the_lowest_card_in_use_counts(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    cards(AMPERE, VOLTA)
    assert precision(Config.of(fast=True)) == "bfloat16 and TF32"
    assert precision(Config.of(fast=True, device="cuda:1")) == "float16"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # torchrun gives each process one of the two
    assert precision(Config.of(fast=True)) == "float16"


def test_the_preset_for_v100s_is_right_for_them(cards: Cards) -> None:
    cards(VOLTA, VOLTA)
    for argv in (["--config", "v100x2"], ["--config", "v100x2", "--fast"]):
        config = Config.from_cli(argv)
        assert config.speed.use_amp and config.speed.amp_dtype == "float16"
        assert not config.speed.use_tf32 and not config.speed.compile_model
        assert accel.grad_scaler(config.speed, torch.device("cuda:0")).is_enabled()
        assert not list(announce.warnings(here(config)))
        assert "--amp-dtype" not in without_effect(here(config))


def here(config: Config) -> Situation:
    device = torch.device("cuda:0")
    return Situation(config, device, 1, ModelShape(360, width=16, heads=2), ChessEnv(0))


@pytest.mark.parametrize(
    ("capability", "words"),
    [
        (AMPERE, ""),
        (TURING, "compute capability 7.5: it is emulated below 8.0; --amp-dtype float16 is faster"),
        (PASCAL, "compute capability 6.1: it is emulated below 8.0; --no-use-amp is faster"),
    ],
)
def test_bfloat16_and_tf32_on_a_card_without_them_are_said(
    cards: Cards, capability: Any, words: str
) -> None:
    cards(capability)
    situation = here(Config.of(use_amp=True, use_tf32=True))
    said = list(announce.warnings(situation))
    assert len(said) == bool(words) and words in " ".join(said)
    idle = "--use-tf32 (TF32 needs a card of compute capability 8.0)"
    assert (idle in without_effect(situation)) == bool(words)


def test_fast_in_python_trains_as_with_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has = {"avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has, raising=False)
    options = {**TINY, "max_steps": 1, "eval_every": 0, "eval_size": 1}
    trainer = Trainer(Config.of(**options, fast=True, out_dir=str(tmp_path / "run")))
    assert trainer.config.speed.use_amp and trainer.config.speed.low_precision_weights
    trainer.fit()
    assert "--fast on cpu with bfloat16: --packing prefix-tree" in capsys.readouterr().out
    again = Config.from_toml(tmp_path / "run" / "config.toml")
    # the file has the layers themselves, so that --no-fast has nothing to undo
    assert again.speed == dataclasses.replace(trainer.config.speed, fast=False)


@pytest.mark.parametrize(
    ("load", "running", "threads", "warns"),
    [
        ((0.3, 0.0, 0.0), 2, 2, False),  # an idle machine, and this process's own start
        ((1.1, 0.0, 0.0), 2, 2, True),
        ((2.2, 0.0, 0.0), 5, 2, True),
        ((1.1, 0.0, 0.0), 1, 2, False),  # what ran in the last minute has ended
        ((1.1, 0.0, 0.0), None, 2, True),  # not Linux
        ((7.0, 0.0, 0.0), 9, 1, False),  # a single thread waits for nobody
        ((1.1, 9.0, 9.0), 3, 1, False),
    ],
)
def test_cores_that_are_taken_are_said(
    load: tuple[float, ...],
    running: int | None,
    threads: int,
    warns: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if running is not None:
        (tmp_path / "loadavg").write_text(f"1.00 1.00 1.00 {running}/150 4711\n")
    monkeypatch.setattr("minigrpo.runtime.machine.LOAD", tmp_path / "loadavg")
    monkeypatch.setattr(os, "getloadavg", lambda: load)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    said = list(announce.busy_cores(threads))
    assert len(said) == warns and all("OMP_NUM_THREADS=1" in line for line in said)


def test_an_unknown_load_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> None:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", unknown)
    assert not list(announce.busy_cores(64))


@pytest.mark.parametrize(
    "flags",
    [
        ["--device", "cuda:7"],
        ["--use-amp", "--amp-dtype", "float16", "--device", "cpu"],
        ["--compile-model"],
    ],
    ids=" ".join,
)
def test_a_plan_refuses_what_a_run_refuses(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError) as error:
        Trainer(Config.from_cli(flags), quiet=True)
    for command in (["plan", *flags], ["train", "--plan", *flags]):
        with pytest.raises(SystemExit) as stop:
            cli.main(command)
        assert stop.value.code == 2
        assert capsys.readouterr() == ("", f"error: {error.value}\n")


def test_the_checks_of_a_start_look_at_processes_and_rewards() -> None:
    with pytest.raises(ConfigError, match="--prompts-per-step 16 does not divide among 3"):
        check_machine(Config(), DistContext(world_size=3))
    assert check_machine(Config.of(device="cpu"), DistContext()) == torch.device("cpu")
    with pytest.raises(ValueError, match="--reward-weights: no part nope"):
        make_scorer(Config.of(reward_weights="nope=1"), ChessEnv(0))
    assert fast.device_kind("cpu") in fast.LAYERS
