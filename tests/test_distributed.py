"""Two processes over gloo: what they exchange, and that they train as one."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minigrpo
from minigrpo import Config, Trainer, evaluate, userfiles
from minigrpo.build import Job
from minigrpo.build import digests as digests_of
from minigrpo.checkpoint import newest
from minigrpo.errors import RunFailed
from minigrpo.given import Given
from minigrpo.identity import record_checksum
from minigrpo.rewards.functions import RewardFunction
from minigrpo.rewards.scorer import RewardScorer
from minigrpo.run.logging import read_jsonl
from minigrpo.runtime import distributed
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.signals import StopRequest
from minigrpo.userfiles import load_file

from . import tiny
from .steps import join, run_together
from .tiny import ROOT, read_json, refused

TIMEOUT = timedelta(seconds=3)  # of a collective
STEPS = {"max_steps": 3, "prompts_per_step": 5, "micro_batch_size": 1, "eval_every": 0}
SOLVED = """import minigrpo
@minigrpo.reward(success=True)
def solved(example, text):
    return float(example.answer < "3")
"""


class BadError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def fails() -> None:
    raise BadError


def exchange(dist: DistContext) -> dict[str, Any]:
    """Every kind of exchange, once."""
    rank = dist.rank
    found = {
        "share": list(dist.share(6)),
        "sum": dist.sum(torch.tensor([1.0 + rank, 10.0])).tolist(),
        "max": dist.max(torch.tensor([rank, -rank])).tolist(),
        "gather": dist.gather(torch.tensor([[2 * rank], [2 * rank + 1]])).tolist(),
    }
    values = {
        "rollout/tokens": [3.0 + rank],
        "rewards/x/failures": [1.0],
        "reward": [1.0 + rank],
        "length": [5.0 + rank] * (1 + 2 * rank),
        "rare": [4.0] * rank,
        "never": [],
    }
    found["combine"] = dist.combine({name: np.array(x) for name, x in values.items()})

    calls = []
    found["on_main"] = dist.on_main(lambda: calls.append(rank) or "from 0")
    found["calls"] = [*calls]
    with pytest.raises((BadError, RunFailed)) as raised:
        dist.on_main(fails)
    found["raised"] = raised.type.__name__
    dist.refuse_differences({"rows": "a", f"/home/{rank}/rewards.py": str(rank)})
    refused(dist.refuse_differences, {"rows": "a", "rewards": str(rank)})
    # longer than a collective may take: the others wait without one
    dist.on_main(lambda: time.sleep(TIMEOUT.total_seconds() + 0.5))
    found["after"] = dist.sum(torch.ones(1)).item()

    with StopRequest(lambda text: None) as request:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        found["stop"] = request.agreed(dist)
    found["of_main"] = dist.of_main(torch.tensor([1 + rank])).tolist()
    return found


def work(folder: Path, rank: int, ports: list[int]) -> None:
    """One of two processes, which meet twice."""
    dist = join(rank, ports[0])
    train(folder, folder / "two", dist)
    stop_twice(folder, rank, dist)
    dist.close()
    distributed.TIMEOUT = TIMEOUT
    dist = join(rank, ports[1])
    (folder / f"{rank}.json").write_text(json.dumps(exchange(dist)))
    dist.close()


def stop_twice(folder: Path, rank: int, dist: DistContext) -> None:
    """Train to the end, with two stops: in the evaluation of one, by a reward of the other."""
    grade, scores = evaluate.grade, RewardFunction.scores

    def in_evaluation(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return grade(*args)

    def in_a_step(self: RewardFunction, examples: Any, texts: Any) -> Any:
        if examples[0].index >= 5:  # of the second step
            os.kill(os.getpid(), signal.SIGTERM)
            raise EOFError
        return scores(self, examples, texts)

    def go_on() -> int:
        return train(folder, folder / "stopped", dist, resume="auto")["step"]

    steps = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(evaluate, "grade", in_evaluation)
        steps.append(go_on())
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(RewardFunction, "scores", in_a_step)
        steps.append(go_on())
    steps.append(go_on())
    (folder / f"steps_{rank}.json").write_text(json.dumps(steps))


def train(
    folder: Path, out_dir: Path, dist: DistContext | None = None, **changes: Any
) -> dict[str, Any]:
    settings = {
        **tiny.TINY,
        **STEPS,
        "model": str(folder / "model"),
        "out_dir": str(out_dir),
        "data": str(folder / "rows.jsonl"),
        "eval_data": str(folder / "held_out.jsonl"),
        "task": "prompts",
        "rewards": str(folder / "solved.py"),
        **changes,
    }
    return Trainer(Config.of(**settings), dist=dist, quiet=True).fit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes have left."""
    folder = tmp_path_factory.mktemp("two")
    tiny.tiny_chess_model(folder / "model")
    rows = [{"question": f"What is {n}?", "answer": f"{n}, " * 4} for n in range(8)]
    tiny.write_jsonl(folder / "rows.jsonl", rows[:5])
    tiny.write_jsonl(folder / "held_out.jsonl", rows[5:])
    (folder / "solved.py").write_text(SOLVED)
    assert run_together(work, folder) == [0, 0]
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return [read_json(folder / f"{rank}.json") for rank in range(2)]


def test_collectives_give_all_processes_the_same(found: list[dict[str, Any]]) -> None:
    assert [one["share"] for one in found] == [[0, 1, 2], [3, 4, 5]]
    for one in found:
        assert one["sum"] == [3, 20]
        assert one["max"] == [1, 0]
        assert one["gather"] == [[0], [1], [2], [3]]
        assert one["stop"] == "SIGUSR1"
        assert one["of_main"] == [1]


ROWS = [{"prompt": f"{n}?"} for n in range(30)]


def test_processes_with_other_contents_have_other_digests(tmp_path: Path) -> None:
    config = Config.of(task="prompts", task_args={"judge": "none"}, tokenizer="chess")
    right = minigrpo.reward(lambda example, text: 1.0)
    half = minigrpo.reward(lambda example, text: 1.0, weight=0.5)
    file = tmp_path / "solved_by_rank.py"

    def digests(
        rows: Any = ROWS, reward: Any = right, text: str = SOLVED, weight: float = 1.0
    ) -> dict[str, str]:
        job = Job.of(config, Given.of(data=rows, rewards=[reward]))
        scorer = RewardScorer(job.task, functions=job.functions)
        checksums: dict[str, str] = {}
        record_checksum(checksums, "--teacher a", {"w": torch.full((3, 4), weight)})
        file.write_text(text)
        userfiles._read.clear()  # as another process has not read it yet
        load_file(file)
        return digests_of(job, scorer, checksums)

    first = digests()
    assert digests(rows=[*ROWS]) == first
    for name, other in {
        "rows": digests(rows=ROWS[::-1]),
        "rewards": digests(reward=half),
        str(file): digests(text=f"{SOLVED}# edited"),
        "weights of --teacher a": digests(weight=1.5),
    }.items():
        assert {key for key in first if first[key] != other[key]} == {name}


def test_metrics_are_sums_or_means_over_processes(found: list[dict[str, Any]]) -> None:
    expected = {
        "rollout/tokens": 7.0,
        "rewards/x/failures": 2.0,
        "reward": 1.5,
        "length": (5.0 + 3 * 6.0) / 4,
        "rare": 4.0,
    }
    assert found[0]["combine"] == found[1]["combine"] == expected
    alone = {"reward": np.array(0.1), "length": np.array([3.0, 3.0]), "never": np.array([])}
    assert DistContext().combine(alone) == {"reward": 0.1, "length": 3.0}


def test_the_main_process_works_while_no_collective_is_pending(found: list[dict[str, Any]]) -> None:
    assert [one["calls"] for one in found] == [[0], []]
    assert [one["on_main"] for one in found] == ["from 0"] * 2
    assert [one["raised"] for one in found] == ["BadError", "RunFailed"]
    assert [one["after"] for one in found] == [2, 2]


def test_two_processes_log_the_metrics_of_one(folder: Path) -> None:
    """Of one whole batch, where theirs are in micro-batches."""
    train(folder, folder / "one", micro_batch_size=0)
    for name, number in (("metrics.jsonl", 3), ("eval.jsonl", 2)):
        one, two = (read_jsonl(folder / way / name) for way in ("one", "two"))
        assert len(one) == number
        for a, b in zip(one, two, strict=True):
            assert a.keys() == b.keys()
            for key in a:
                if not any(word in key for word in ("time", "memory", "difference")):
                    assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-5), key


def assert_same_weights(*runs: Path) -> None:
    """Compare the last checkpoints of two runs."""
    one, other = (torch.load(newest(run, pytest.fail) / "state.pt")["model"] for run in runs)
    for name, weight in one.items():
        assert torch.equal(weight, other[name])


def test_what_a_stop_breaks_off_in_one_process_is_made_again_by_both(folder: Path) -> None:
    for rank in range(2):
        assert read_json(folder / f"steps_{rank}.json") == [0, 1, 3]
    assert [line["step"] for line in read_jsonl(folder / "stopped" / "eval.jsonl")] == [0, 3]
    assert_same_weights(folder / "two", folder / "stopped")


@contextmanager
def torchrun(folder: Path, out_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run of two processes; a test that fails leaves none behind."""
    settings = {
        **tiny.TINY,
        **STEPS,
        "max_steps": 30,
        "save_every": 1,
        "resume": "auto",
        "model": folder / "model",
        "out_dir": out_dir,
        "reward_weights": "valid=1",
    }
    words = [*tiny.TORCHRUN, "--max-restarts=1", "distributed_train.py", *tiny.flags(settings)]
    process = subprocess.Popen(words, cwd=ROOT, start_new_session=True)
    try:
        yield process
        assert process.wait(180) == 0
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


@pytest.mark.slow
def test_torchrun_restarts_after_a_kill_and_ends_with_the_same_bits(folder: Path) -> None:
    calm, killed = folder / "calm", folder / "killed"
    with torchrun(folder, calm):
        pass
    with torchrun(folder, killed) as process:
        tiny.wait_until(lambda: list(killed.glob("checkpoints/*/manifest.json")))
        os.kill(tiny.descendants(process.pid)[-1], signal.SIGKILL)
        assert not (killed / "summary.json").exists()  # there was something left to do
    assert_same_weights(calm, killed)
