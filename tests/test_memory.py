import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.layers import RowSpec
from benchmarks.rows import Row
from benchmarks.steps import _attempt
from minigrpo.model.transformer import Transformer
from minigrpo.runtime.oom import OOMBackoff, is_out_of_memory
from minigrpo.sampling.decoders import CachedDecoder

from .gradients import first_gradient, make_trainer


def test_the_size_is_halved_until_it_fits_and_stays() -> None:
    tried, said = list[int](), list[str]()

    def work(size: int) -> int:
        tried.append(size)
        if size > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return size

    backoff = OOMBackoff("update", "--micro-batch-size", 0, said.append)
    assert backoff.run(work, 14) == 3
    assert backoff.run(work, 14) == 3
    assert backoff.run(work, 2) == 2
    assert tried == [14, 7, 3, 3, 2]
    assert ["from here on 7" in said[0], "from here on 3" in said[1], len(said)] == [True, True, 2]

    def never(size: int) -> None:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        OOMBackoff("update", "--micro-batch-size", 0).run(never, 1)


@pytest.mark.parametrize("options", [{"kl_coef": 0.1}, {"num_iterations": 2}])
def test_out_of_memory_in_an_update_leaves_the_gradient_as_it_is(
    options: dict[str, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = first_gradient(tmp_path / "whole", **options)
    forward = Transformer.forward

    def small(self: Transformer, tokens: object, packing: object, *args: object) -> object:
        out = forward(self, tokens, packing, *args)  # type: ignore[arg-type]
        if len(packing.mask) > 2:  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("CUDA out of memory")
        return out

    monkeypatch.setattr(Transformer, "forward", small)
    cut = first_gradient(tmp_path / "cut", **options)
    assert "from here on 3 (see --micro-batch-size)" in (
        said := " ".join(capsys.readouterr().err.split())
    )
    assert "from here on 1 (see --micro-batch-size)" in said
    for a, b in zip(cut, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_out_of_memory_in_a_rollout_leaves_the_tokens_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_trainer(tmp_path / "whole").source.batch(0)
    prefill, sizes = CachedDecoder.prefill, list[int]()

    def small(self: CachedDecoder, ids: torch.Tensor, *args: object) -> torch.Tensor:
        sizes.append(len(ids))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prefill(self, ids, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(CachedDecoder, "prefill", small)
    trainer = make_trainer(tmp_path / "cut")
    cut = trainer.source.batch(0)
    assert cut.texts == whole.texts
    assert sizes == [6, 3, 1, 1, 1, 1, 1, 1]
    assert trainer.sampler.backoffs[4].size == 1


def _raise(error: BaseException) -> None:
    raise error


TOO_MUCH = 1 << 50  # more than an address space holds
OUT_OF_MEMORY: list[Callable[[], object]] = [
    lambda: torch.empty(TOO_MUCH),  # a plain RuntimeError on a CPU
    lambda: np.empty(TOO_MUCH),
    lambda: bytearray(TOO_MUCH),
    lambda: _raise(RuntimeError("std::bad_alloc")),
    lambda: _raise(torch.OutOfMemoryError("CUDA out of memory")),
    lambda: _raise(OSError(errno.ENOMEM, "Cannot allocate memory")),
]
OTHER_ERRORS: list[Callable[[], object]] = [
    lambda: torch.save(torch.zeros(1000), "/dev/full"),  # a plain RuntimeError too
    lambda: _raise(OSError(errno.ENOSPC, "No space left on device")),
    lambda: torch.zeros(2) @ torch.zeros(3),
]


@pytest.mark.parametrize("work", OUT_OF_MEMORY)
def test_out_of_memory_is_recognised_on_any_device(work: Callable[[], object]) -> None:
    sizes = list[int]()

    def fits_in_halves(size: int) -> int:
        sizes.append(size)
        if size > 2:
            work()
        return size

    assert OOMBackoff("update", "--micro-batch-size", 0).run(fits_in_halves, 4) == 2
    assert sizes == [4, 2]
    row = Row(RowSpec("a row", {}), "ok")
    _attempt(row, lambda row: work())
    assert row.status == "out of memory"


@pytest.mark.parametrize("work", OTHER_ERRORS)
def test_other_errors_are_raised_and_not_retried(work: Callable[[], object]) -> None:
    sizes = list[int]()

    def fails(size: int) -> None:
        sizes.append(size)
        work()

    with pytest.raises((RuntimeError, OSError)) as caught:
        OOMBackoff("update", "--micro-batch-size", 0).run(fails, 4)
    assert sizes == [4] and not is_out_of_memory(caught.value)
    with pytest.raises((RuntimeError, OSError)):
        _attempt(Row(RowSpec("a row", {}), "ok"), lambda row: work())


@pytest.mark.skipif(sys.platform != "linux", reason="limits on the address space are Linux's")
def test_a_step_that_fits_only_in_parts_has_the_same_tokens_and_gradient(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.little_memory", str(tmp_path)],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # the sizes are those of the parts; 0 would be all prompts at once
    assert found["same_texts"] and all(size in (1, 2, 4) for size in found["sizes"].values())
    assert found["gradient_difference"] < 1e-12
    said = " ".join(done.stderr.split())
    assert "sampling: out of memory with 8 prompts at a time" in said
    assert "update: out of memory with 8 prompts at a time" in said
