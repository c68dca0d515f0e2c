"""Two processes over gloo: what they exchange, and that they train as one."""

import json
import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import minigrpo
from minigrpo import Config, evaluate, userfiles
from minigrpo.parts import Given, Parts
from minigrpo.rewards import RewardFunction, load_rewards
from minigrpo.run.logging import read_jsonl
from minigrpo.runtime import distributed
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.guard import RunFailed
from minigrpo.runtime.signals import StopRequest
from minigrpo.userfiles import load_file

from . import tiny
from .steps import join, run_two
from .tiny import read_json, refused

ROOT = Path(__file__).parents[1]
TIMEOUT = timedelta(seconds=3)  # of a collective
STEPS = {"max_steps": 3, "prompts_per_step": 4, "micro_batch_size": 1, "eval_every": 0}
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
    rank, found = dist.rank, {}
    found["share"] = list(dist.share(6))
    found["sum"] = dist.sum(torch.tensor([1.0 + rank, 10.0])).tolist()
    found["max"] = dist.max(torch.tensor([rank, -rank])).tolist()
    found["gather"] = dist.gather(torch.tensor([[2 * rank], [2 * rank + 1]])).tolist()
    values = {"rollout/tokens": [3.0 + rank], "rewards/x/failures": [1.0], "reward": [1.0 + rank]}
    values |= {"length": [5.0 + rank] * (1 + 2 * rank), "rare": [[torch.nan, 4.0][rank]]}
    values["never"] = [torch.nan]
    found["combine"] = dist.combine({name: np.array(x) for name, x in values.items()})

    calls = []
    found["on_main"] = dist.on_main(lambda: calls.append(rank) or "from 0")
    found["calls"] = list(calls)
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

    torch.manual_seed(rank)
    model = nn.Linear(3, 1)  # other weights in each process
    dist.wrap(model)
    found["weights"] = model.weight.tolist()
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
        if examples[0].index >= 4:  # of the second step
            os.kill(os.getpid(), signal.SIGTERM)
            raise EOFError
        return scores(self, examples, texts)

    steps = []
    for owner, name, stops, function in (
        (evaluate, "grade", 0, in_evaluation),
        (RewardFunction, "scores", 1, in_a_step),
        (None, "", None, None),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if rank == stops:
                patch.setattr(owner, name, function)
            steps.append(train(folder, folder / "stopped", dist, resume="auto")["step"])
    (folder / f"steps_{rank}.json").write_text(json.dumps(steps))


def train(
    folder: Path, out_dir: Path, dist: DistContext | None = None, **changes: Any
) -> dict[str, Any]:
    from minigrpo import Trainer

    settings = {**tiny.TINY, **STEPS, "model": str(folder / "model"), "out_dir": str(out_dir)}
    settings |= {"data": str(folder / "rows.jsonl"), "eval_data": str(folder / "held_out.jsonl")}
    settings |= {"task": "prompts", "rewards": str(folder / "solved.py")}
    return Trainer(Config.of(**settings, **changes), dist=dist, quiet=True).fit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes have left."""
    folder = tmp_path_factory.mktemp("two")
    tiny.tiny_chess_model(folder / "model")
    rows = [{"question": f"What is {n}?", "answer": f"{n}, " * 4} for n in range(6)]
    tiny.write_jsonl(folder / "rows.jsonl", rows[:5])
    tiny.write_jsonl(folder / "held_out.jsonl", rows[5:])
    (folder / "solved.py").write_text(SOLVED)
    run_two(work, folder)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return [read_json(folder / f"{rank}.json") for rank in range(2)]


def test_collectives_give_all_processes_the_same(found: list[dict[str, Any]]) -> None:
    assert [one["share"] for one in found] == [[0, 1, 2], [3, 4, 5]]
    for one in found:
        assert one["sum"] == [3, 20] and one["max"] == [1, 0]
        assert one["gather"] == [[0], [1], [2], [3]]
        assert one["stop"] == "SIGUSR1" and one["weights"] == found[0]["weights"]


def test_processes_with_other_contents_have_other_digests(tmp_path: Path) -> None:
    config = Config.of(task="prompts", task_args={"judge": "none"}, tokenizer="chess")
    rows = [{"prompt": f"{n}?"} for n in range(30)]
    right = minigrpo.reward(lambda example, text: 1.0)
    half = minigrpo.reward(lambda example, text: 1.0, weight=0.5)
    ours, theirs = tmp_path / "ours" / "paid.py", tmp_path / "theirs" / "paid.py"
    for path, value in ((ours, 1.0), (theirs, 2.0)):  # of the same name in other folders
        path.parent.mkdir()
        path.write_text(f"import minigrpo\n@minigrpo.reward\ndef paid(*_): return {value}\n")
    paid, paid_otherwise = (load_rewards(str(path))[0] for path in (ours, theirs))
    file = tmp_path / "solved_by_rank.py"

    def digests(rows: Any, reward: Any, text: str = SOLVED, weight: float = 1.0) -> dict[str, str]:
        parts = Parts(config, given=Given.of(data=rows, rewards=[reward]))
        parts.recognise("--teacher a", {"w": torch.full((3, 4), weight)})
        file.write_text(text)
        userfiles._read.clear()  # as another process has not read it yet
        load_file(file)
        return parts.digests()

    first = digests(rows, right)
    assert digests(list(rows), right) == first
    for name, other in [
        ("rows", digests(rows[::-1], right)),
        ("rows", digests(rows[1:], right)),
        ("rewards", digests(rows, half)),
        (str(file), digests(rows, right, text=f"{SOLVED}# edited")),
        ("the weights of --teacher a", digests(rows, right, weight=1.5)),
    ]:
        assert {key for key in first if first[key] != other[key]} == {name}
    assert digests(rows, paid)["code"] != digests(rows, paid_otherwise)["code"]


def test_metrics_are_sums_or_means_over_processes(found: list[dict[str, Any]]) -> None:
    expected = {"rollout/tokens": 7.0, "rewards/x/failures": 2.0}
    expected |= {"reward": 1.5, "length": (5.0 + 3 * 6.0) / 4, "rare": 4.0}
    assert found[0]["combine"] == found[1]["combine"] == expected
    alone = {"reward": np.array(0.1), "length": np.array([np.nan, 3.0])}
    assert DistContext().combine(alone) == {"reward": 0.1, "length": 3.0}


def test_the_main_process_works_while_no_collective_is_pending(found: list[dict[str, Any]]) -> None:
    main, other = found
    assert main["calls"] == [0] and other["calls"] == []
    assert main["on_main"] == other["on_main"] == "from 0"
    assert (main["raised"], other["raised"]) == ("BadError", "RunFailed")
    assert main["after"] == other["after"] == 2


def test_two_processes_log_the_metrics_of_one(folder: Path) -> None:
    train(folder, folder / "one")
    for name in ("metrics.jsonl", "eval.jsonl"):
        one, two = (read_jsonl(folder / way / name) for way in ("one", "two"))
        assert len(one) == len(two) == (3 if name == "metrics.jsonl" else 2)
        for a, b in zip(one, two, strict=True):
            assert a.keys() == b.keys()
            for key in a:
                if not any(word in key for word in ("time", "memory", "difference")):
                    assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-5), key


def test_what_a_stop_breaks_off_in_one_process_is_made_again_by_both(folder: Path) -> None:
    for rank in range(2):
        assert read_json(folder / f"steps_{rank}.json") == [0, 1, 3]
    assert [line["step"] for line in read_jsonl(folder / "stopped" / "eval.jsonl")] == [0, 3]
    found = [
        torch.load(folder / name / "checkpoints/step_000003/state.pt")["model"]
        for name in ("two", "stopped")
    ]
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())


NO_PLACES = [{"RANK": "2"}, {"RANK": "-1"}, {"RANK": "a"}, {"WORLD_SIZE": ""}, {"LOCAL_RANK": "b"}]


def test_settings_of_torchrun_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for changes in NO_PLACES:
        for name, value in (right | changes).items():
            monkeypatch.setenv(name, value)
        refused(DistContext.from_env)


@pytest.mark.slow
def test_torchrun_restarts_after_a_kill_and_ends_with_the_same_bits(folder: Path) -> None:
    def start(out_dir: Path) -> subprocess.Popen[bytes]:
        settings = {**tiny.TINY, **STEPS, "max_steps": 30, "save_every": 1, "resume": "auto"}
        settings |= {"model": folder / "model", "out_dir": out_dir, "reward_weights": "valid=1"}
        words = [*tiny.TORCHRUN, "--max-restarts=1", "distributed_train.py"]
        return subprocess.Popen([*words, *tiny.flags(settings)], cwd=ROOT, start_new_session=True)

    runs = [folder / "calm", folder / "killed"]
    for run in runs:
        process = start(run)
        try:
            if run.name == "killed":
                tiny.wait_until(lambda: list(runs[1].glob("checkpoints/*/manifest.json")))
                listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True)
                os.kill(int(listed.stdout.split()[-1]), signal.SIGKILL)
                assert not (run / "summary.json").exists()  # there was something left to do
            assert process.wait(180) == 0
        finally:  # a failed test leaves no processes behind
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    states = [torch.load(run / "checkpoints/step_000030/state.pt") for run in runs]
    for name, weight in states[0]["model"].items():
        assert torch.equal(weight, states[1]["model"][name])
