"""Kill runs with SIGKILL at random moments and at chosen ones, and compare their final weights.

    python -m tests.killing FOLDER --kills 100

Each scenario forks a process that trains, kills it, and starts it again with --resume auto until it
finishes. The sha256 of its weights and optimizer state must then equal that of an undisturbed run.
A fork starts in milliseconds, because torch is already imported; it is safe because this process
itself never runs a tensor operation.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # each optimizer imports it, which takes a second: once here, not per child

from minigrpo import Config, Trainer, learner

from .gradients import TINY

SUMS = str(Path(__file__).parent.parent / "examples" / "sums.jsonl")  # cheaper than self-play
OPTIONS = {
    **TINY,
    "data": SUMS,
    "max_steps": 12,
    "eval_every": 4,
    "save_every": 1,
    "micro_batch_size": 2,
}
OPTIONS |= {"num_iterations": 2, "kl_coef": 0.1}
# where a run is killed: owner and name of a function, and whether it dies after the call or before
PLACES: dict[str, tuple[Any, str, bool]] = {
    "inside accumulation": (learner.Learner, "_backward", True),
    "inside num_iterations": (torch.optim.AdamW, "step", True),
    "before the state is written": (torch, "save", False),
    "after the state is written": (torch, "save", True),
    "before a flush": (os, "fsync", False),
    "before a rename": (os, "replace", False),
    "after a rename": (os, "replace", True),
    "while old checkpoints are removed": (shutil, "rmtree", False),
}


def fingerprint(trainer: Trainer) -> str:
    """sha256 of weights and optimizer state."""
    digest = hashlib.sha256()
    for part in (
        trainer.model.state_dict(),
        *trainer.learner.optimizer.state_dict()["state"].values(),
    ):
        for name in sorted(part):
            digest.update(torch.as_tensor(part[name]).numpy().tobytes())
    return digest.hexdigest()


def train(folder: Path) -> None:
    """The work of a child process: train to the end, unless it is killed."""
    trainer = Trainer(Config.of(**OPTIONS, out_dir=str(folder), resume="auto"), quiet=True)
    trainer.fit()
    (folder / "fingerprint").write_text(fingerprint(trainer))


def die_at(place: str, call: int) -> None:
    """Make this process kill itself at the `call`-th call of a function."""
    owner, name, after = PLACES[place]
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counted)


def fork(folder: Path, place: str = "", call: int = 0) -> int:
    """Start a child that trains; its process id. An error of its own goes to the file `error`."""
    pid = os.fork()
    if pid:
        return pid
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it warns of each damaged checkpoint
    try:
        if place:
            die_at(place, call)
        train(folder)
    except BaseException as error:
        (folder / "error").write_text(repr(error))
        os._exit(1)
    os._exit(0)


def disturbed(folder: Path, rng: random.Random, seconds: float, kills: int, place: str) -> int:
    """Run to the end, with up to `kills` kills on the way. Returns the number of kills."""
    done = 0
    while True:
        again = done < kills
        pid = fork(folder, place if again else "", rng.randint(1, 12))
        if again and not place:
            time.sleep(rng.uniform(0, seconds))
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 0 and (folder / "fingerprint").exists():
            return done
        if status != -signal.SIGKILL:
            raise RuntimeError(f"{folder}: exit code {status}: {(folder / 'error').read_text()}")
        done += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lora-rank", type=int, default=0)
    arguments = parser.parse_args()
    OPTIONS["lora_rank"] = arguments.lora_rank
    calm = arguments.folder / "calm"
    start = time.monotonic()
    assert os.waitstatus_to_exitcode(os.waitpid(fork(calm), 0)[1]) == 0, (
        calm / "error"
    ).read_text()
    seconds = time.monotonic() - start
    expected = (calm / "fingerprint").read_text()
    rng, total, results = random.Random(arguments.seed), 0, []
    while total < arguments.kills:
        number = len(results)
        place = ("", *PLACES)[number % (len(PLACES) + 1)]
        folder = arguments.folder / f"run_{number:03d}"
        kills = disturbed(folder, rng, seconds, min(3, arguments.kills - total), place)
        total += kills
        equal = (folder / "fingerprint").read_text() == expected
        results.append({"where": place or "at a random moment", "kills": kills, "equal": equal})
        shutil.rmtree(folder)
        sys.stderr.write(
            f"\r{total} kills in {len(results)} runs, {sum(not r['equal'] for r in results)} "
            "differ "
        )
    print(
        json.dumps(
            {
                "kills": total,
                "runs": len(results),
                "differ": [r for r in results if not r["equal"]],
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
