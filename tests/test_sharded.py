"""Three processes that hold a third of the weights each: they train as one, and stop as one."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from minigrpo import Transformer
from minigrpo.checkpoint import newest
from minigrpo.memory import weights_of
from minigrpo.model import frozen_model
from minigrpo.run.logging import read_jsonl
from minigrpo.shards import whole
from minigrpo.trainer import Trainer

from .steps import join, make_trainer, run_together
from .tiny import read_json, refused, tiny_chess_model

PROCESSES = 3
STEPS = 3
JOBS: dict[str, dict[str, Any]] = {
    "kl": {"kl_coef": 0.1, "num_iterations": 2, "micro_batch_size": 1, "loss": "gspo"},
    "teacher": {"teacher": "self", "dynamic_sampling": 2, "gradient_checkpointing": True},
    "uneven": {"prompts_per_step": 4, "micro_batch_size": 1, "teacher": "initial"},
}


def make(folder: Path, **settings: Any) -> Trainer:
    model = str(tiny_chess_model(folder.parent / "model"))
    changes = {"model": model, "max_steps": STEPS, "eval_size": 5, "eval_every": 0}
    return make_trainer(folder, **changes | settings)


def work(folder: Path, rank: int, ports: list[int]) -> None:
    """One of the processes. The last job ends them."""
    torch.set_num_threads(1)
    dist = join(rank, ports[0], PROCESSES)
    sharded = partial(make, dist=dist, fsdp=True)
    for name, settings in JOBS.items():
        sharded(folder / name, **settings).fit()
    sharded(folder / "begun", stop_after=2).fit()
    sharded(folder / "begun alone", resume="auto").fit()
    torch.save(
        bytes_of(sharded(folder / "bytes", dtype=torch.float32, use_amp=True)),
        folder / f"{rank}.pt",
    )
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(frozen_model, "whole", signalling(signal.SIGTERM))
        sharded(folder / "stopped").fit()
    dying = sharded(folder / "dead", save_every=1)
    if rank == 1:
        of_rollout = len(dying.model.state_dict())
        frozen_model.whole = signalling(signal.SIGKILL, after=3 * of_rollout + 3)
    dying.fit()


def signalling(number: signal.Signals, after: int = 3) -> Callable[..., Any]:
    """The function `whole`, which sends a signal to its process in the midst of a gather."""
    calls = []

    def gather(tensor: Any) -> Any:
        calls.append(tensor)
        if len(calls) == after:
            os.kill(os.getpid(), number)
        return whole(tensor)

    return gather


def bytes_of(trainer: Trainer) -> dict[str, int]:
    """What a process holds after a step, by component of a plan."""
    trainer.one_step()
    learner = trainer.learner
    moments = [x for of_one in learner.optimizer.state.values() for x in of_one.values()]
    with trainer.sampler.current_model as model:
        copied = sum(x.nbytes for x in model.parameters())
    held = [x.to_local().nbytes for x in trainer.model.parameters()]
    return {
        "weights": sum(held),
        "AdamW's moments": sum(x.to_local().nbytes for x in moments if x.dim()),
        "sampler's copy": copied,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    make(folder / "begun alone", stop_after=2).fit()
    assert run_together(work, folder, PROCESSES) == [1, -signal.SIGKILL, 1]
    return folder


def assert_same(found: Path, expected: Path) -> None:
    """Compare the last checkpoints of two runs, and the numbers that they logged."""
    one, other = (torch.load(newest(run, pytest.fail) / "state.pt") for run in (found, expected))
    moments = [state["optimizer"]["state"].values() for state in (one, other)]
    for a, b in [(one["model"], other["model"]), *zip(*moments, strict=True)]:
        for name, tensor in a.items():
            assert (tensor - b[name]).abs().max() < 1e-11, name
    for name in ("metrics.jsonl", "eval.jsonl"):
        logs = [read_jsonl(run / name) for run in (found, expected)]
        for a, b in zip(*logs, strict=True):
            for key in {"loss", "grad_norm", "reward", "similarity", "exact_fen"} & a.keys():
                assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", JOBS)
def test_shards_are_trained_as_the_whole(name: str, folder: Path, tmp_path: Path) -> None:
    make(tmp_path / name, **JOBS[name]).fit()
    assert_same(folder / name, tmp_path / name)
    model = Transformer.from_pretrained(folder / name / "model.safetensors")
    state = torch.load(newest(folder / name, pytest.fail) / "state.pt")
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, state["model"][key].float())


def test_another_number_of_processes_goes_on(folder: Path, tmp_path: Path) -> None:
    make(tmp_path / "whole").fit()
    make(folder / "begun", resume="auto").fit()
    for name in ("begun", "begun alone"):
        assert_same(folder / name, tmp_path / "whole")


def test_a_process_holds_what_a_plan_says(folder: Path) -> None:
    found = torch.load(folder / "0.pt")
    trainer = make(folder / "planned", dtype=torch.float32, use_amp=True, fsdp=True)
    planned = weights_of(trainer.config, trainer.model.shape, PROCESSES)
    for name, size in found.items():
        assert size == pytest.approx(planned[name], rel=0.05), name


def test_all_stop_with_a_whole_checkpoint_when_one_is_asked_or_dies(folder: Path) -> None:
    assert read_json(folder / "stopped" / "summary.json")["exit_reason"] == "SIGTERM"
    for name, step in (("stopped", 0), ("dead", 2)):
        assert newest(folder / name, pytest.fail).name == f"step_{step:06d}"


@pytest.mark.parametrize("other", [{"lora_rank": 2}, {"offload_optimizer": True}])
def test_what_shards_exclude_is_refused(other: dict[str, Any], tmp_path: Path) -> None:
    refused(make, tmp_path, fsdp=True, **other)
