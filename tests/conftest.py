"""Markers, models and completions, and one finished run that tests copy instead of training."""

import os

# before torch is imported: tiny tensors gain nothing from threads, and the processes that tests
# start would compete for the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
# a path that does not exist may have the form of a model's name: no test asks the network for it
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import re
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from minigrpo.model.transformer import Transformer
from minigrpo.sampling.decoder import Decoder
from minigrpo.types import Completions

from . import steps

settings.register_profile("quick", max_examples=50, deadline=None)
settings.register_profile("thorough", max_examples=5000, deadline=None)
settings.load_profile("quick")  # --hypothesis-profile, which is read later, wins


def pytest_configure(config: pytest.Config) -> None:
    """No GPU but for `-m gpu`: the exact tests are exact on the CPU.

    A background job of a shell ignores SIGINT, and so would the programs that tests interrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def missing() -> dict[str, str]:
    """Marker -> why its tests cannot run here, or are not run by default."""
    peers = ("math_verify", "openai", "peft", "trl")  # transformers may be there for `gguf`
    has = {"gpu": torch.cuda.is_available(), "peer": all(map(find_spec, peers)), "slow": False}
    return {
        marker: f"{marker}: something is missing, or MUST_RUN={marker} pytest -m {marker}"
        for marker, found in has.items()
        if not found
    }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that cannot run here, and those that take long.

    A marker that the variable MUST_RUN names ("peer slow") is never a reason to skip: its tests
    run, and fail where something is missing.
    """
    required = os.environ.get("MUST_RUN", "").split()
    for marker, reason in missing().items():
        for item in items:
            if marker not in required and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=steps.SHAPES)
def model(request: pytest.FixtureRequest) -> Transformer:
    return Transformer(steps.SHAPES[request.param], seed=1).double()


@pytest.fixture(params=[0, 1])
def completions(request: pytest.FixtureRequest) -> Completions:
    return steps.make_completions(request.param)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Slots, tokens per slot, and the spread of columns, of every round of a decoder."""
    seen, step = [], Decoder.step

    def watched(self: Decoder, tokens: Tensor, columns: Tensor, *args: Any) -> Tensor:
        seen.append((*tokens.shape, int(columns.max() - columns.min())))
        return step(self, tokens, columns, *args)

    monkeypatch.setattr(Decoder, "step", watched)
    return seen


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of chess-env: four steps, evaluations and checkpoints at 0, 2 and 4.

    Do not change it: `tiny_run` is a copy.
    """
    run = tmp_path_factory.mktemp("finished") / "run"
    steps.tiny_trainer(run).fit()
    return run


@pytest.fixture
def tiny_run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, for a test alone."""
    copy = tmp_path / "tiny-run"
    shutil.copytree(finished_run, copy)
    return copy
