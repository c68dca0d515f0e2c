"""A step under a limit on the address space, in which only a part of its prompts fits at a time.

Run as a program by test_memory.py, because the limit is the whole process's. Prints one line of
JSON, and the warnings on stderr.
"""

import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .gradients import make_trainer

ROLLOUT_MIB, UPDATE_MIB = 30, 25  # room for the work: too little for all prompts at a time


@contextmanager
def little_memory(mib: int) -> Iterator[None]:
    """In this context the process may grow by this much."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + mib * 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main(folder: Path) -> None:
    sizes = {"prompts_per_step": 8, "group_size": 16, "max_new_tokens": 16, "width": 128}
    # no reward threads: the stack of a thread needs address space
    trainer = make_trainer(folder, parallel_rewards=False, speculative_decoding=False, **sizes)
    learner, backoffs = trainer.learner, trainer.sampler.backoffs
    sizes_found = {}
    with little_memory(ROLLOUT_MIB):
        cut = trainer.source.batch(0)
    sizes_found["rollout"] = backoffs[16].size
    backoffs.clear()
    whole = trainer.source.batch(0)
    gradients = []
    for room in (UPDATE_MIB, 1 << 20):
        learner.backoff.size = 0
        with little_memory(room):
            learner.gradient(*learner.prepare(whole))
        sizes_found.setdefault("update", learner.backoff.size)
        gradients.append([p.grad.clone() for p in learner.model.parameters() if p.grad is not None])
    apart = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*gradients, strict=True)]
    found = {
        "same_texts": cut.texts == whole.texts,
        "sizes": sizes_found,
        "gradient_difference": max(apart),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
