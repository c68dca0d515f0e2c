"""Score a model's completions of held-out examples, greedy and sampled, in total and by kind.

minigrpo evaluate RUN_OR_MODEL [--data test.jsonl] [flags of minigrpo train]

It measures what the evaluations of a run measure, on more examples, with the settings of the run
unless flags change them. Intervals are 95 %, over examples.
"""

from collections.abc import Sequence
from typing import Annotated

import tyro
from pydantic import PositiveInt

from ..config import OnePath
from ..evaluate import measure
from ..run.console import Console
from ..run.logging import to_json
from ..run.run_dir import warn_of_known_questions
from .common import ModelArguments, config_of, open_parts, parse


class Arguments(ModelArguments):
    n: PositiveInt = 2000
    """Held-out examples, or as many as there are."""
    json_file: Annotated[OnePath | None, tyro.conf.arg(name="json")] = None
    """Write the figures here, as JSON."""


def main(argv: Sequence[str], prog: str) -> None:
    arguments, given = parse(Arguments, argv, prog, __doc__)
    config = config_of(arguments, given | {"eval_size": arguments.n})
    console = Console()
    parts = open_parts(config, console)
    warn_of_known_questions(arguments.run, parts.task.questions, console.warn)
    measures = measure(parts.sampler, parts.scorer).measures
    run = config.run
    console.say(f"{arguments.run}: {measures['n'].value:.0f} held-out examples, seed {run.seed}")
    console.measures({"": measures})
    if arguments.json_file:
        asked = {"model": arguments.run, "seed": run.seed, "samples": run.eval_samples}
        measured = {name: estimate._asdict() for name, estimate in measures.items()}
        arguments.json_file.write_text(to_json({**asked, "measures": measured}, indent=1))
        console.say(f"wrote {arguments.json_file}")
