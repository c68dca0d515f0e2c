"""A training step with the vocabulary of an open model stays within the planned memory."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from benchmarks.bench_step import BenchStep
from benchmarks.workload import QWEN, Workload, WorkloadFlags
from minigrpo.runtime.estimate import estimate_step
from minigrpo.runtime.machine import PeakMemory
from minigrpo.runtime.step_counts import nothing_shared

SIZES = {"layers": 2, "max_new_tokens": 24}  # 166M parameters, of which 136M are the vocabulary's
CPU = torch.device("cpu")


def planned_and_measured(settings: dict[str, Any]) -> tuple[float, float]:
    """MiB of two steps of Qwen2.5-0.5B's sizes with fewer layers."""
    torch.set_num_threads(2)
    small = WorkloadFlags(preset="tiny", device="cpu", prompts_per_step=1, group_size=2)
    work = Workload.of(small, CPU)
    BenchStep(work.config, work).step(0)  # the memory of what torch loads at first is not the job's
    flags = WorkloadFlags(preset=QWEN, device="cpu", **SIZES)
    with PeakMemory(CPU) as peak:
        work = Workload.of(flags, CPU)
        config = work.config.replace(**settings)
        bench = BenchStep(config, work, model=work.model)
        for number in range(2):
            bench.step(number)
    longest = float(config.sampling.max_new_tokens)
    counts = nothing_shared(
        config, prompt_len=work.prompt_len, completion_len=longest, longest=longest, world_size=1
    )
    return estimate_step(config, work.shape, counts, "cpu").peak_mib, peak.mib


@pytest.mark.slow
def test_a_step_with_152_thousand_tokens_stays_within_the_planned_memory() -> None:
    settings = {"chunked_logprobs": True}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        planned, measured = pool.submit(planned_and_measured, settings).result()
    assert 0.6 * planned < measured < 1.1 * planned
