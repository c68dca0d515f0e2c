"""Score a model's completions of held-out examples, greedy and sampled, in total and by kind.

minigrpo evaluate RUN_OR_MODEL [--data test.jsonl] [flags of minigrpo train]

It measures what the evaluations of a run measure, on more examples, with the settings of the run
unless flags change them. Intervals are 95 %, over examples.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from pydantic import Field

from ..build import Parts, resolve
from ..config import Config, Group
from ..evaluate import measure
from ..run.console import Console
from ..run.logging import to_json
from ..run.run_dir import RECORD, warn_of_known_questions
from ..runtime.device import pick_device, set_up_process


class ModelArguments(Group):
    """What evaluate, sample and export have in common."""

    run: Annotated[str, tyro.conf.Positional]
    """First: a run's folder, a model's folder or file, ORG/NAME on the Hub, or shipped."""
    data: str = ""
    """Files of questions; all of them are held out."""


def parse(
    kind: type, argv: Sequence[str], prog: str, about: str | None = None
) -> tuple[Any, Config]:
    """The command's own flags, and the settings of the run, or the defaults, with other flags."""
    found: tuple[Any, list[str]] = tyro.cli(
        kind, args=argv, prog=prog, description=about, return_unknown_args=True
    )
    arguments, flags = found
    record = Path(arguments.run) / RECORD
    of_run = ["--config", str(record)] if record.is_file() else []
    # a run's adapters are merged when it is loaded; it may be of another machine
    of_run += ["--model", arguments.run, "--lora-rank", "0", "--device", "auto"]
    if arguments.data:
        of_run += ["--data", "", "--eval-data", arguments.data]
    return arguments, resolve(Config.from_cli([*of_run, *flags], prog=prog), models=["model"])


def load(config: Config, console: Console) -> Parts:
    """The parts of a config, on its device."""
    device = pick_device(config.speed.device)
    set_up_process(config.speed, device)
    return Parts(config, device, console)


class Arguments(ModelArguments):
    n: int = Field(2000, ge=1)
    """Held-out examples, or as many as there are."""
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Write the figures here, as JSON."""


def main(argv: Sequence[str], prog: str) -> None:
    arguments, config = parse(Arguments, argv, prog, __doc__)
    console = Console()
    parts = load(config.replace(eval_size=arguments.n), console)
    warn_of_known_questions(arguments.run, parts.task.questions, console.warn)
    record, *_ = measure(parts.sampler, parts.scorer)
    run = config.run
    console.say(f"{arguments.run}: {record['n'].value:.0f} held-out examples, seed {run.seed}")
    console.measures({"": record})
    if arguments.json_file:
        measures = {name: x._asdict() for name, x in record.items()}
        made = {"model": arguments.run, "seed": run.seed, "samples": run.eval_samples}
        arguments.json_file.write_text(to_json({**made, "measures": measures}, indent=1))
        console.say(f"wrote {arguments.json_file}")
