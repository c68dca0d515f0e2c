"""Score a model's completions of held-out examples, greedy and sampled, in total and by kind.

minigrpo evaluate RUN --n 2000

It reports what the evaluations of a run report: the success of the task, every reward part (those
of the run's --rewards too), their weighted sum, and pass@k with --eval-samples K. Every figure has
a 95 % interval, see runtime/measures.py. All of them assume that examples are independent, which is
only nearly true of positions from one game.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ..evaluate import Graded, by_kind, grade, record_of, size_of
from ..model.encoding import encode_prompts
from ..runtime.build import make_scorer, make_token_scoring
from ..runtime.files import to_json
from ..runtime.flags import ConfigError, parse
from ..runtime.graded import doubts
from ..runtime.logging import Screen
from ..runtime.measures import PASS_AT, SAMPLED, Estimate, headline
from ..runtime.outputs import check_apart, check_output_file, write_output
from ..tasks.own import ALL_KINDS as ALL
from . import reliability
from .loading import Loaded, ModelSelection, check_is_no_input, load, warn_of_other_files
from .messages import one_line_errors

Record = Mapping[str, Estimate]


@dataclass(frozen=True)
class Arguments(ModelSelection):
    n: int = 2000
    """Held-out examples, or as many as there are."""
    eval_samples: int | None = None
    """Completions sampled per example; above 1 it also has pass@k."""
    rewards: str | None = None
    """A Python file with more reward parts, as for minigrpo train."""
    reward_weights: str | None = None
    """Weights of reward parts, as for minigrpo train."""
    json: Path | None = None
    """Write the figures here, as JSON."""
    plot: Path | None = None
    """With --confidence, draw a reliability diagram here (PNG, SVG or PDF); needs matplotlib."""

    def check(self) -> None:
        """Raises ConfigError, in one line, for what can be told before the model is loaded."""
        if self.n < 1:
            raise ConfigError(f"--n must be at least 1, got {self.n}")
        if self.json is not None:
            check_output_file("--json", self.json)
        if self.plot is not None:
            check_output_file("--plot", self.plot, reliability.FORMATS)
        check_apart({"--json": self.json, "--plot": self.plot})
        for name, path in (("--json", self.json), ("--plot", self.plot)):
            if path is not None:
                check_is_no_input(name, path, self)


def run(loaded: Loaded, number: int, screen: Screen) -> tuple[Graded, Graded]:
    """Complete and score `number` held-out examples, with progress on stderr.

    Returns:
        The greedy and the sampled completions.
    """
    task, config = loaded.task, loaded.config
    size = size_of(task, number)
    device, warn, seed = loaded.sampler.model.device, screen.warn, config.run.seed
    token_scoring = make_token_scoring(config, loaded.sampler.tokenizer, device, warn, loaded.asked)
    scorer = make_scorer(config, task, warn, token_scoring)
    with closing(scorer), Progress(console=screen.errors) as progress:
        examples = [task.held_out(i) for i in progress.track(range(size), description="examples")]
        room = loaded.sampler.model.shape.context - config.sampling.max_new_tokens
        encode_prompts(loaded.sampler.tokenizer, examples, room)  # refuses long ones before work

        def graded(name: str, **how: int) -> Graded:
            bar = progress.add_task(name, total=size)
            return grade(
                loaded.sampler, scorer, examples, advance=partial(progress.advance, bar), **how
            )

        greedy = graded("greedy")
        return greedy, graded("sampled", seed=seed, num_samples=config.run.eval_samples)


def measures(loaded: Loaded, greedy: Graded, drawn: Graded) -> dict[str, Record]:
    """The measures of all examples, by the name ALL, and of each kind of question."""
    summaries, seed = getattr(loaded.task, "summaries", None), loaded.config.run.seed
    records: dict[str, Record] = {ALL: record_of(greedy, drawn, summaries, seed)}
    for kind, rows in by_kind(greedy.examples).items():
        name = f"{kind} (kind)" if kind == ALL else kind  # data may name its kinds as it likes
        records[name] = record_of(greedy.select(rows), drawn.select(rows))
    return records


def table(record: Record) -> Table:
    """The measures, one row each, greedy and sampled."""
    out = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("", "sampled", "greedy"):
        out.add_column(name, justify="right" if name else "left", no_wrap=True)
    names = dict.fromkeys(name.removesuffix(SAMPLED) for name in record if "/" not in name)
    for name in names:
        if name.startswith(PASS_AT):
            out.add_row(Text(name), cell(record.get(name)), "")
        elif name != "n":
            out.add_row(Text(name), cell(record.get(name + SAMPLED)), cell(record.get(name)))
    return out


def table_of_kinds(records: Mapping[str, Record]) -> Table:
    """The success of the task, sampled and greedy, one row per kind of question."""
    success = headline(records[ALL])
    out = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in (success, "n", "sampled", "greedy"):
        out.add_column(Text(name), justify="left" if name == success else "right", no_wrap=True)
    for kind, record in records.items():  # as Text, because brackets in them are no markup
        shares = (cell(record.get(name)) for name in (success + SAMPLED, success))
        out.add_row(Text(kind), f"{record['n'].value:.0f}", *shares, end_section=kind == ALL)
    return out


def cell(found: Estimate | None) -> Text:
    return Text("" if found is None else str(found))


def write_json(path: Path, loaded: Loaded, records: Mapping[str, Record]) -> None:
    """Write the measures with their model and seed."""
    kinds = {
        kind: {name: x.value if name == "n" else asdict(x) for name, x in record.items()}
        for kind, record in records.items()
    }
    config = loaded.config.run
    result = {
        "model": loaded.name,
        "seed": config.seed,
        "samples": config.eval_samples,
        "kinds": kinds,
    }
    text = to_json(result, indent=1)
    write_output("--json", path, lambda partial: partial.write_text(text))


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    with one_line_errors("stopped; nothing was written"):
        score(parse(Arguments, argv, description=__doc__, prog=prog or "minigrpo evaluate"))


def score(arguments: Arguments) -> None:
    """Load, answer, print and write. Raises ValueError in one line."""
    arguments.check()
    screen = Screen(has_result=True)
    loaded = load(arguments, screen)
    if arguments.plot:
        reliability.check_parts(loaded.task.parts)
    graded, config = run(loaded, arguments.n, screen), loaded.config.run
    warn_of_other_files(arguments, loaded.asked, screen)
    for doubt in doubts(*graded):
        screen.warn(doubt)
    records = measures(loaded, *graded)
    if arguments.json:
        write_json(arguments.json, loaded, records)
    size = records[ALL]["n"].value
    screen.say(f"{loaded.name}: {size:.0f} held-out examples, seed {config.seed}")
    screen.console.print(table(records[ALL]))
    if len(records) > 1:
        screen.say("")
        screen.console.print(table_of_kinds(records))
    screen.say(
        "[95 % confidence intervals]: Wilson's for shares, Student's t for means; "
        f"{config.eval_samples} sampled at temperature 1 per example"
    )
    if arguments.plot:
        named = zip(("greedy", "sampled"), graded, strict=True)
        reliability.draw({name: one.rewards.parts for name, one in named}, arguments.plot)
    for path in filter(None, (arguments.json, arguments.plot)):
        screen.say(f"wrote {path}")


if __name__ == "__main__":
    main()
