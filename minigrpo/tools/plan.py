"""Does a training step fit my card? `minigrpo plan`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import tyro
from pydantic import Field, PositiveInt

from ..build import Job, resolve
from ..config import read_flags, settle
from ..given import Given
from ..memory import MIB, components_of, fit_to_memory, mean_prompt, peak_of, sizes_of
from ..model.shape import ModelShape
from ..model.source import ModelSource
from ..run.console import Console
from ..settings import SCRATCH, Group

CUDA_CONTEXT = 2**29  # bytes that CUDA itself takes of a card


class PlanArguments(Group):
    """Estimate the memory of a training step, by component, and say whether it fits a card.

    minigrpo plan [--memory 24GiB] [--processes 2] [flags of minigrpo train]
    """

    memory: Annotated[str, Field(pattern=r"^(\d+(\.\d+)?(GiB)?)?$")] = ""
    """The memory of a card, which need not be here, such as 24GiB; by default this machine's."""
    processes: PositiveInt = 1
    """Processes of torchrun, each with a card."""


def plan_command(argv: Sequence[str], prog: str) -> None:
    own, flags = tyro.cli(PlanArguments, args=argv, prog=prog, return_unknown_args=True)
    card = float(own.memory.removesuffix("GiB") or 0) * 2**30
    if not card and torch.cuda.is_available():
        card = torch.cuda.mem_get_info()[1]  # the memory of this machine's card
    given = read_flags(flags, prog)
    if card:
        given = {"device": "cuda", **given}  # the defaults of a machine with a GPU
    config, why = settle(given)
    source = ModelSource.of(config.model.name)
    task = config.task
    files = [Path(name.strip()) for name in task.data.split(",")]
    are_here = all(map(Path.is_file, files)) if task.data else task.name != "auto"
    if source.size and not are_here:
        prompt = 256.0  # a guess: the examples of a published model are not here
    else:
        job = Job.of(resolve(config), Given())
        prompt = mean_prompt(job.tokenizer, job.task)
    shape = ModelShape(job.tokenizer.n_vocab) if source.name == SCRATCH else source.shape
    console = Console()
    if why:
        console.say(why)
    num_kept = 0
    if card:
        available = card - CUDA_CONTEXT
        config, num_kept = fit_to_memory(config, shape, prompt, available, own.processes)
        console.say(f"batch sizes for {card / 2**30:g} GiB: {sizes_of(config)}")
    components = components_of(config, shape, prompt, own.processes)
    peak = peak_of(components, num_kept)
    components["peak"] = peak
    components["on a card, with CUDA itself"] = peak + CUDA_CONTEXT
    rows = [[name, f"{size / MIB:,.0f}"] for name, size in components.items() if size]
    completions = f"{config.sampling.prompts_per_step} x {config.sampling.group_size} completions"
    lengths = f"{config.sampling.max_new_tokens} tokens, prompts of {prompt:.0f}"
    console.table(f"a step of {completions} of {lengths}", ["", "MiB"], rows)
    if card:
        fits = "fits" if peak <= available else "does NOT fit"
        console.say(f"it {fits} {card / 2**30:g} GiB by this estimate, which may be 15 % too low")
