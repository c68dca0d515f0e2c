"""Tiny models and batches that the tests share. Hypothesis: quick by default,
--hypothesis-profile=thorough on demand.
"""

import contextlib
import os

# before torch is imported: tiny tensors gain nothing from threads, and the processes that tests
# start would compete for the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
# a path that does not exist may have the form of a model's name: no test asks the network for it
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import re
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import torch
from hypothesis import settings

from minigrpo.model.shape import ModelShape
from minigrpo.model.transformer import Transformer
from minigrpo.runtime.flags import ConfigError
from minigrpo.tools.annotate import find_engine
from minigrpo.types import Completions

from . import browser

settings.register_profile("quick", max_examples=50, deadline=None)
settings.register_profile("thorough", max_examples=5000, deadline=None)
settings.load_profile("quick")  # --hypothesis-profile, which is read later, wins

VOCAB, EOS = 23, 22


def no_engine() -> str | None:
    try:
        find_engine()
    except ConfigError as error:
        return str(error)
    return None


def pytest_configure(config: pytest.Config) -> None:
    """No GPU but for `-m gpu`: there the order of additions differs from run to run, and the exact
    tests are exact on CPU.

    A background job of a shell ignores SIGINT, and so would the programs that tests interrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")):
        os.environ["CUDA_VISIBLE_DEVICES"] = (
            ""  # of this process, which has not looked yet, and of those that it starts
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that cannot run here, and those that take long.

    A marker that the variable MUST_RUN names ("engine slow") is never a reason to skip: its tests
    run, and fail where something is missing.
    """
    missing = {
        "gpu": None if torch.cuda.is_available() else "no CUDA device, or no -m gpu",
        "peer": None
        if find_spec("transformers")
        else "transformers is not installed: pip install 'minigrpo[peer]'",
        "tracker": None
        if find_spec("wandb") and find_spec("trackio")
        else "wandb or trackio is not installed: pip install 'minigrpo[wandb,trackio]'",
        "engine": no_engine(),
        "browser": browser.missing(),
        "wheel": "takes a minute: MUST_RUN=wheel pytest -m wheel",
        "slow": "takes minutes: MUST_RUN=slow pytest -m slow",
    }
    required = os.environ.get("MUST_RUN", "").split()
    for marker, reason in missing.items():
        for item in items:
            if reason and item.get_closest_marker(marker) and marker not in required:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def unwritten_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cache has not written must reach nobody."""

    def new_empty(x: torch.Tensor, *shape: int) -> torch.Tensor:
        return x.new_full(shape if isinstance(shape[0], int) else shape[0], torch.nan)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


SIZES: dict[str, int] = {"vocab_size": VOCAB, "context": 40, "layers": 2, "width": 16}
SHAPES = {
    "gpt2": ModelShape(**SIZES, heads=2),
    # every variant that GPT-2 does not have
    "grouped-query": ModelShape(
        **SIZES,
        heads=4,
        family="qwen3",
        kv_heads=2,
        head_dim=6,
        mlp_width=24,
        norm="rms",
        projections="separate",
        mlp="swiglu",
        head_norm=True,
        rope_theta=100.0,
        tied=False,
    ),
}


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest) -> Transformer:
    """Two layers in float64: what should be equal is equal to 1e-10."""
    return Transformer(SHAPES[request.param], seed=1).double()


def make_completions(
    seed: int, prompts: int = 3, samples: int = 4, width: int = 7, length: int = 9
) -> Completions:
    """Ragged prompts and completions, some of a group equal, one of one token, pads filled with
    junk.
    """
    rng = np.random.default_rng(seed)
    prompt_len = rng.integers(1, width + 1, prompts)
    prompt_len[0] = width
    lengths = rng.integers(1, length + 1, (prompts, samples))
    ids = rng.integers(0, EOS, (prompts, samples, length))
    lengths[0, 0], lengths[-1, -1] = length, 1
    lengths[:, 1], ids[:, 1] = lengths[:, 0], ids[:, 0]  # a completion written twice
    ids[:, 2, : length // 2] = ids[:, 0, : length // 2]  # and one with a common beginning
    mask = np.arange(length) < lengths[..., None]
    return Completions(
        torch.from_numpy(rng.integers(0, EOS, (prompts, width))),
        torch.from_numpy(prompt_len),
        torch.from_numpy(ids),
        torch.from_numpy(mask),
    )


@pytest.fixture(params=[0, 1, 2])
def completions(request: pytest.FixtureRequest) -> Completions:
    return make_completions(request.param)


@pytest.fixture(scope="session")
def process_mark() -> Iterator[bytes]:
    """An environment variable that only this session's own processes inherit, as `NAME=value`."""
    name, value = "MINIGRPO_TEST_SESSION", uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield f"{name}={value}".encode()


@pytest.fixture
def no_orphans(process_mark: bytes) -> Iterator[None]:
    """Kill what a failed test leaves running, and nothing else.

    torchrun starts each worker in a session of its own, so that killing the launcher's process
    group does not end them; but they inherit its environment. Needs /proc, and does nothing
    without it.
    """
    yield
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
            if process_mark in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)
