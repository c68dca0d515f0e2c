"""Does a training step fit my card? `minigrpo plan [--memory 24GiB] [--processes 2] [flags]`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from ..build import Job, resolve
from ..config import read_flags, settle
from ..given import Given
from ..memory import MIB, components_of, fit_to_memory, mean_prompt, peak_of, sizes_of
from ..model.shape import ModelShape
from ..model.source import ModelSource
from ..run.console import Console
from ..settings import SCRATCH

CUDA_CONTEXT = 2**29  # bytes that CUDA itself takes of a card


def plan_command(argv: Sequence[str], prog: str) -> None:
    parser = argparse.ArgumentParser(prog=prog, add_help=False)
    parser.add_argument("--memory", type=lambda text: float(text.removesuffix("GiB")) * 2**30)
    parser.add_argument("--processes", type=int, default=1)  # of torchrun, each with a card
    own, flags = parser.parse_known_args(argv)
    if not own.memory and torch.cuda.is_available():
        own.memory = torch.cuda.mem_get_info()[1]  # the memory of this machine's card
    given = read_flags(flags, prog)
    if own.memory:
        given = {"device": "cuda", **given}  # the defaults of a machine with a GPU
    config, why = settle(given)
    source = ModelSource.of(config.model.name)
    files = config.task.data.split(",")
    if source.size and not all(Path(file).is_file() for file in files):
        prompt = 256.0  # a guess: the data of a published model is not here
    else:
        job = Job.of(resolve(config), Given())
        prompt = mean_prompt(job.tokenizer, job.task)
    shape = ModelShape(job.tokenizer.n_vocab) if source.name == SCRATCH else source.shape
    console = Console()
    if why:
        console.say(why)
    num_kept = 0
    if own.memory:
        available = own.memory - CUDA_CONTEXT
        config, num_kept = fit_to_memory(config, shape, prompt, available, own.processes)
        console.say(f"batch sizes for {own.memory / 2**30:g} GiB: {sizes_of(config)}")
    components = components_of(config, shape, prompt, own.processes)
    peak = peak_of(components, num_kept)
    components["peak"] = peak
    components["on a card, with CUDA itself"] = peak + CUDA_CONTEXT
    rows = [[name, f"{size / MIB:,.0f}"] for name, size in components.items() if size]
    console.table(
        f"memory of a process in a step, with prompts of {prompt:.0f} tokens", ["", "MiB"], rows
    )
