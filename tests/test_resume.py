"""Real runs that are killed, stopped or fail, and go on with the bits of an undisturbed run.

    python -m tests.test_resume FOLDER 100 3

forks processes that train, kills them 100 times, at random moments and at chosen ones, each run at
most 3 times, and starts them again.
A fork starts in milliseconds, because torch is imported; it is safe because the parent never runs a
tensor operation.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from itertools import count, cycle
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch

from minigrpo import Trainer, Transformer, evaluate, learner, trainer
from minigrpo.checkpoint import checkpoints, is_finite, load_checkpoint, newest
from minigrpo.errors import RunFailed
from minigrpo.guard import Diverged
from minigrpo.rewards.functions import RewardFunction, as_scores
from minigrpo.rewards.scorer import RewardScorer

from .steps import bits, tiny_trainer
from .tiny import ROOT, SUMS, TINY, TORCHRUN, flags, refused, tiny_chess_model, write_jsonl

OPTIONS = {
    **TINY,
    "eval_every": 4,
    "save_every": 1,
    "keep_last": 2,
    "max_steps": 6,
    "micro_batch_size": 2,
    "num_iterations": 2,
    "kl_coef": 0.1,
    "task": "prompts",  # quicker than chess
    "data": SUMS,
}
# where a run is killed: owner and name of a function, and whether it dies after the call or before
PLACES = {
    "inside num_iterations": (torch.optim.AdamW, "step", True),
    "before a rename": (os, "replace", False),
    "after an evaluation": (trainer, "measure", True),
    "after a rename": (os, "replace", True),
    "inside accumulation": (learner.Learner, "objective", True),
    "inside an evaluation": (RewardScorer, "score", False),
    "before a state is written": (torch, "save", False),
    "after a state is written": (torch, "save", True),
    "before a flush": (os, "fsync", False),
    "while files are removed": (os, "unlink", False),
}
SOLVED = """import minigrpo
@minigrpo.reward(success=True)
def solved(example, text):
    return float(int(example.answer) < 4 or len(text) % 3 == 0)
"""
FAILS = """import minigrpo
@minigrpo.reward
def fails(example, text):
    return 1 / (len(text) % 4)
"""
VARY = ("time", "memory/")  # metrics that begin with these, or are called step_time
SLOWEST = 3.0  # seconds within which a process is killed at a random moment


def make(folder: Path, **changes: Any) -> Trainer:
    return tiny_trainer(folder, **{**OPTIONS, **changes})


def half_solved(folder: Path) -> dict[str, Any]:
    """Settings of a run with 7 questions, of which half are always right and teach nothing."""
    (folder / "solved.py").write_text(SOLVED)
    rows = [{"question": f"What is {n}?", "answer": str(n)} for n in range(8)]
    return {
        "data": str(write_jsonl(folder / "rows.jsonl", rows[:7])),
        "eval_data": str(write_jsonl(folder / "held_out.jsonl", rows[7:])),
        "rewards": str(folder / "solved.py"),
    }


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """The records of a log, without what differs from run to run."""
    records = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [
        {key: x for key, x in record.items() if not key.startswith(VARY) and key != "step_time"}
        for record in records
    ]


def result(folder: Path, run: Trainer) -> str:
    """The bits of a run, and all that it has logged."""
    names = ("metrics.jsonl", "eval.jsonl", "samples.jsonl", "held_out.jsonl")
    return json.dumps([bits(run), *(lines(folder, name) for name in names)])


def work(folder: Path) -> None:
    """What a forked process does: train to the end, unless it is killed."""
    more = {"dynamic_sampling": 1, "teacher": "initial", "teacher_context": "answer"}
    run = make(folder, resume="auto", **half_solved(folder.parent), **more)
    run.fit()
    metrics = lines(folder, "metrics.jsonl")
    assert any(line["frac_reward_zero_std/drawn"] for line in metrics)  # some were replaced
    (folder / "result").write_text(result(folder, run))


def die_at(place: str, call: int) -> None:
    """Make this process kill itself at the `call`-th call of a function."""
    owner, name, after = PLACES[place]
    original = getattr(owner, name)
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = original(*args, **kwargs)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, counted)


def fork(folder: Path, place: str = "", call: int = 0) -> int:
    """Start a child that trains; its process id. Its errors go to the file `errors`."""
    folder.mkdir(exist_ok=True)
    pid = os.fork()
    if pid:
        return pid
    os.dup2(os.open(folder / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    try:
        if place:
            die_at(place, call)
        work(folder)
    except BaseException as error:
        os.write(2, repr(error).encode())
        os._exit(1)
    os._exit(0)


def disturbed(folder: Path, rng: random.Random, place: str, kills: int) -> int:
    """Train to the end, with up to `kills` kills on the way. Returns the number of kills."""
    done = 0
    while True:
        again = done < kills
        pid = fork(folder, place if again else "", rng.randint(1, 12))
        if again and not place:
            time.sleep(rng.uniform(0, SLOWEST))
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 0 or (folder / "result").exists():
            return done
        assert status == -signal.SIGKILL, (folder / "errors").read_text()
        done += 1


def main() -> None:
    root, kills, each = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # imports what takes a second
    calm = root / "calm"
    assert os.waitpid(fork(calm), 0)[1] == 0, (calm / "errors").read_text()
    expected = (calm / "result").read_text()
    rng = random.Random(0)
    total = 0
    for number, place in enumerate(cycle(("", *PLACES))):
        if total == kills:
            break
        folder = root / f"run_{number:03d}"
        total += disturbed(folder, rng, place, min(each, kills - total))
        if (folder / "result").read_text() != expected:
            sys.exit(f"{place or 'at a random moment'}: {folder} differs from {calm}")
        shutil.rmtree(folder)
    print(f"{total} kills, no difference")


@pytest.mark.parametrize("kills", ["3 1", pytest.param("100 3", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_has_the_same_bits_and_logs(tmp_path: Path, kills: str) -> None:
    command = [sys.executable, "-m", "tests.test_resume", str(tmp_path), *kills.split()]
    subprocess.run(command, cwd=ROOT, check=True)


def ask_to_stop(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """Have the `call`-th call of a function begin with a signal to this process."""
    original, calls = getattr(owner, name), count(1)

    def signalled(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, signalled)


def test_a_signal_breaks_off_an_evaluation_which_a_resume_makes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first, one on the way and the last; `call` counts their greedy and sampled parts."""
    calm = make(tmp_path / "calm")
    calm.fit()
    for call, step in ((1, 0), (4, 4), (6, 6)):
        folder = tmp_path / f"run_{call}"
        with monkeypatch.context() as patch:
            ask_to_stop(patch, evaluate, "grade", call)
            stopped = make(folder).fit()
        assert stopped["exit_reason"] == "SIGTERM"
        assert stopped["step"] == step
        assert [line["step"] for line in lines(folder, "eval.jsonl")] == [*range(0, step, 4)]
        again = make(folder, resume="auto")
        assert again.fit()["status"] == "finished"
        assert result(folder, again) == result(tmp_path / "calm", calm)


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_step_whose_reward_was_cut_off_by_a_stop_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_noticed: bool
) -> None:
    """A signal may end what a reward has started; the groups that fail would be replaced."""
    (tmp_path / "fails.py").write_text(FAILS)
    settings = {"rewards": str(tmp_path / "fails.py"), "reward_weights": {}, "dynamic_sampling": 1}
    calm = make(tmp_path / "calm", **settings)
    calm.fit()
    assert any(line["rewards/fails/failures"] for line in lines(tmp_path / "calm", "metrics.jsonl"))
    run = make(tmp_path / "run", **settings)
    scores = RewardFunction.scores

    def cut_off(*args: Any) -> Any:
        if run.step == 3:
            if not run.stop_request.reason:
                os.kill(os.getpid(), signal.SIGTERM)
            if is_noticed:
                raise EOFError
            return as_scores([0.0], 1)  # of a program that did not end well
        return scores(*args)

    with monkeypatch.context() as patch:
        patch.setattr(RewardFunction, "scores", cut_off)
        assert run.fit()["step"] == 3
    again = make(tmp_path / "run", **settings, resume="auto")
    assert again.fit()["status"] == "finished"
    assert result(tmp_path / "run", again) == result(tmp_path / "calm", calm)


def poison(run: Trainer, steps: set[int]) -> Trainer:
    """Make the gradient of some steps infinite."""
    weight = run.model.ln_f.weight
    weight.register_hook(lambda grad: grad * (torch.inf if run.step in steps else 1.0))
    return run


def test_skipped_steps_are_counted_across_a_resume(tmp_path: Path) -> None:
    options = {"max_steps": 14, "num_iterations": 1}
    calm = poison(make(tmp_path / "calm", **options), {2, 3, 5, 6, 7})
    assert calm.fit()["skipped_steps"] == 5
    poison(make(tmp_path / "run", **options, stop_after=7), {2, 3, 5, 6}).fit()
    again = poison(make(tmp_path / "run", **options, resume="auto"), {7})
    again.fit()
    assert result(tmp_path / "run", again) == result(tmp_path / "calm", calm)


def test_a_run_that_diverges_keeps_its_last_finite_steps(tmp_path: Path) -> None:
    run = poison(make(tmp_path / "bad", num_iterations=1, max_steps=20), set(range(1, 20)))
    run.one_step()
    before = bits(run)
    with pytest.raises(Diverged):
        run.fit()
    assert bits(run) == before
    saved = load_checkpoint(newest(tmp_path / "bad", pytest.fail))
    assert saved["step"] == run.step == 7
    assert is_finite(saved)
    again = make(tmp_path / "bad", num_iterations=1, max_steps=20, resume="auto")
    assert again.one_step()["skipped_steps"] == 6
    huge = make(tmp_path / "huge", learning_rate=1e38, warmup_steps=0, kl_coef=0)
    with pytest.raises(RunFailed):
        huge.fit()
    assert [x.name for x in checkpoints(tmp_path / "huge" / "checkpoints")] == ["step_000000"]
    assert not (tmp_path / "huge" / "model.safetensors").exists()


def test_out_of_memory_halves_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = make(tmp_path / "small", micro_batch_size=1, kl_coef=0)
    small.fit()
    run = make(tmp_path / "run", micro_batch_size=0, kl_coef=0)
    forward = run.learner.forward

    def with_little_memory(batch: Any, entropy: str) -> Any:
        if len(batch) > 1:
            raise torch.OutOfMemoryError("no room")
        return forward(batch, entropy)

    monkeypatch.setattr(run.learner, "forward", with_little_memory)
    run.fit()
    assert bits(run) == bits(small)


@pytest.mark.parametrize("error", [TypeError("of the user's code"), SystemExit(0)])
@pytest.mark.parametrize(("where", "saved"), [("batch", [0, 3]), ("clip_grad_norm_", [0])])
def test_an_error_ends_the_run_with_whole_steps_saved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    saved: list[int],
    error: BaseException,
) -> None:
    """Between two updates of one step the weights belong to no step: nothing is saved."""
    run = make(tmp_path / "run", save_every=100)
    owner = run.batches if where == "batch" else learner
    effects = [*[DEFAULT] * 3, error]
    monkeypatch.setattr(owner, where, Mock(wraps=getattr(owner, where), side_effect=effects))
    with pytest.raises(TypeError if isinstance(error, TypeError) else RunFailed):
        run.fit()
    there = checkpoints(tmp_path / "run" / "checkpoints")
    assert [load_checkpoint(path)["step"] for path in there] == saved
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def write_model(folder: Path, seed: int) -> str:
    """A model's folder with random weights in it."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    model = Transformer.from_pretrained(tiny_chess_model(folder), seed=seed)
    model.save_pretrained(folder / "model.safetensors")
    return str(folder)


JUDGED = """import minigrpo
@minigrpo.reward(tokens=True)
def judged(batch):
    return batch.model({model!r}).logp(batch.completions, 1.0).sum(-1).numpy()
"""
FROZEN = {
    "the base of adapters": ("model", {"lora_rank": 2, "kl_coef": 0.0}),
    "the reference": ("other", {"reference": "OTHER"}),
    "the reference, as it began": ("model", {}),
    "the teacher": ("other", {"kl_coef": 0.0, "teacher": "OTHER"}),
    "a reward's model": ("other", {"kl_coef": 0.0, "rewards": "judged.py"}),
    "the initial model of a reward": ("model", {"kl_coef": 0.0, "rewards": "initial.py"}),
    "what is in the checkpoint": ("", {"kl_coef": 0.0}),
}


@pytest.mark.parametrize("what", FROZEN)
def test_a_run_goes_on_beside_the_frozen_weights_it_began_with(tmp_path: Path, what: str) -> None:
    """Only the weights that are trained are in a checkpoint: others are loaded again."""
    changed, options = FROZEN[what]
    write_model(tmp_path / "model", seed=1)
    other = write_model(tmp_path / "other", seed=1)
    (tmp_path / "judged.py").write_text(JUDGED.format(model=other))
    (tmp_path / "initial.py").write_text(JUDGED.format(model="initial"))
    paths = {file: str(tmp_path / file) for file in ("judged.py", "initial.py")}
    paths["OTHER"] = other
    options = {name: paths.get(str(x), x) for name, x in options.items()}
    options |= {"eval_every": 0, "eval_size": 2, "num_iterations": 1}
    make(tmp_path / "run", **options, stop_after=1).fit()
    write_model(tmp_path / (changed or "model"), seed=2)

    def go_on() -> int:
        return int(make(tmp_path / "run", **options, resume="auto", stop_after=2).fit()["step"])

    if changed:
        refused(go_on)
        write_model(tmp_path / changed, seed=1)
    assert go_on() == 2


@pytest.mark.slow
def test_an_error_in_one_of_two_processes_ends_both_with_the_steps_saved(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        "import os\n"
        "from minigrpo.tasks.prompts import Prompts\n"
        "class Fails(Prompts):\n"
        "    def train(self, number):\n"
        "        if number >= 72 and os.environ.get('RANK') == '1':\n"
        "            raise TypeError('of rank 1')\n"
        "        return super().train(number)\n"
    )
    settings = {
        **OPTIONS,
        "save_every": 100,
        "max_steps": 40,
        "reward_weights": "similarity=1",
        "task": tmp_path / "task.py",
        "model": tiny_chess_model(tmp_path / "model"),
        "out_dir": tmp_path / "run",
    }
    command = [*TORCHRUN, "distributed_train.py", *flags(settings)]
    assert subprocess.run(command, cwd=ROOT, timeout=90).returncode != 0
    assert 0 < load_checkpoint(newest(tmp_path / "run", pytest.fail))["step"] <= 18


if __name__ == "__main__":
    main()
