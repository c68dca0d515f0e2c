"""The commands on a model: `minigrpo train`, `evaluate`, `sample` and `export`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import tyro
from pydantic import NonNegativeInt, PositiveInt

from ..build import FrozenModels, Job, make_sampler, make_scorer, make_tokenizer, resolve
from ..config import Config, read_flags, read_toml, settle
from ..evaluate import complete_prompt, grade, measure
from ..given import Given
from ..metrics import SAMPLED
from ..model.source import RECORD, ModelSource, fit_vocab
from ..model.transformer import Transformer
from ..rewards.scorer import RewardScorer
from ..run.console import Console
from ..run.logging import to_json
from ..runtime.device import pick_device, set_up_process
from ..runtime.distributed import DistContext
from ..runtime.parallel import Parallel
from ..sampling.sampler import Sampler
from ..settings import Group, OnePath, Paths
from ..task import Task
from ..text.encoding import prompt_text
from ..text.tokenizer import Tokenizer
from ..trainer import Trainer
from ..types import Warn
from .cli import printable


def train_command(argv: Sequence[str], prog: str) -> None:
    config, why = settle(read_flags(argv, prog))
    dist = DistContext.from_env()
    trainer = Trainer(config, dist=dist)
    if why:
        trainer.console.say(why)
    trainer.fit()
    dist.close()


class ModelArguments(Group):
    """The arguments of all commands on a model that there is."""

    run: Annotated[Paths, tyro.conf.Positional]
    """The first word: a run's folder, a model's folder or file, ORG/NAME on the Hub, or shipped."""
    data: Paths = ""
    """Files of questions, all of which are held out."""

    @classmethod
    def parse(cls, argv: Sequence[str], prog: str) -> tuple[Self, dict[str, Any]]:
        """The command's own flags, and the settings that the other flags give."""
        arguments, flags = tyro.cli(cls, args=argv, prog=prog, return_unknown_args=True)
        return arguments, read_flags(flags, prog)


def config_of(arguments: ModelArguments, given: Mapping[str, Any]) -> Config:
    """The settings of the run, or the defaults, with those that are given. Raises ConfigError."""
    record = Path(arguments.run) / RECORD
    settings = read_toml(record) if record.is_file() else {}
    # a run's adapters are loaded with it; it may be of another machine
    settings |= {"lora_rank": 0, "lora_alpha": 0.0, "lora_targets": "", "device": "auto"}
    own = {"model": arguments.run}
    if arguments.data:
        own |= {"data": "", "eval_data": arguments.data}
    return resolve(Config.of(**{**settings, **given, **own}), training=False)


def open_model(config: Config, tokenizer: Tokenizer, say: Warn) -> Transformer:
    """The model on its device. A run's adapters stay beside their base, as in training."""
    device = pick_device(config.speed.device)
    set_up_process(config.speed, device)
    source = ModelSource.of(config.model.name)
    if source.is_run:
        model = source.load_trained(say)
        fit_vocab(model, f"--model {source.name}", tokenizer)
    else:
        model = source.start(config, tokenizer, say, {})
    return model.to(device)


def open_with_task(config: Config, console: Console) -> tuple[Sampler, RewardScorer]:
    """The model of a config from `resolve`, to sample from, and the scorer of its task."""
    job = Job.of(config, Given())
    model = open_model(config, job.tokenizer, console.say)
    source = ModelSource.of(config.model.name)
    run = source.record.settings if source.record else config
    frozen_models = FrozenModels(job, model, Parallel(model.device), console, {}, run.model.name)
    sampler = make_sampler(job, model, console)
    return sampler, make_scorer(job, frozen_models, console.warn)


class EvaluateArguments(ModelArguments):
    """Score a model's completions of held-out examples, greedy and sampled, in total and by kind.

    minigrpo evaluate RUN_OR_MODEL [--data test.jsonl] [flags of minigrpo train]

    It measures the same as the evaluations of a run, on more examples, with the settings of the run
    unless flags change them. Its 95 % intervals are over examples.
    """

    n: PositiveInt = 2000
    """Held-out examples, or as many as there are."""
    json_file: Annotated[OnePath | None, tyro.conf.arg(name="json")] = None
    """Write the figures here, as JSON."""


def evaluate_command(argv: Sequence[str], prog: str) -> None:
    arguments, given = EvaluateArguments.parse(argv, prog)
    config = config_of(arguments, {"eval_size": arguments.n} | given)
    console = Console()
    record = ModelSource.of(config.model.name).record
    trained_on = Path(record.settings.task.data if record else "").absolute()
    if arguments.data and Path(arguments.data).absolute() == trained_on:
        console.warn("--data was trained on: without it, only what was held out is evaluated")
    sampler, scorer = open_with_task(config, console)
    measures = measure(sampler, scorer).measures
    run = config.run
    console.say(f"{arguments.run}: {measures['n'].value:.0f} held-out examples, seed {run.seed}")
    title = f"held out, with 95 % intervals; NAME{SAMPLED}: at temperature 1, else greedy"
    rows = [[name, str(estimate)] for name, estimate in measures.items() if name != "n"]
    console.table(title, ["", ""], rows)
    if arguments.json_file:
        figures = {
            "model": arguments.run,
            "seed": run.seed,
            "samples": run.eval_samples,
            "measures": {name: estimate._asdict() for name, estimate in measures.items()},
        }
        arguments.json_file.write_text(to_json(figures, indent=1))
        console.say(f"wrote {arguments.json_file}")


class SampleArguments(ModelArguments):
    """Prompt a model with a text of your own, or see what a question's answers earn.

    minigrpo sample MODEL (--prompt TEXT | --data rows.jsonl --rewards FILE.py) [flags of train]

    It samples with the settings of the run unless flags change them, such as --temperature 0.7.
    """

    prompt: str = ""
    """A user's message, or a plain text for a model without a chat template; without this, the
    first held-out question, as the model reads it, with the rewards of each completion."""
    raw: bool = False
    """Send --prompt as it is, without the chat template."""
    n: NonNegativeInt = 1
    """Completions to sample; 0: the greedy one."""


def sample_command(argv: Sequence[str], prog: str) -> None:
    arguments, given = SampleArguments.parse(argv, prog)
    config = config_of(arguments, given | ({"system": ""} if arguments.raw else {}))
    console = Console()
    if not arguments.prompt:
        show_question(config, arguments.n, console)
        return
    task: Task | None = None
    if config.task.environment and not arguments.raw:
        job = Job.of(config, Given())
        task = job.task
        sampler = make_sampler(job, open_model(config, job.tokenizer, console.say), console)
    else:  # the run's task is of no interest, and its files may be gone
        tokenizer = make_tokenizer(config)
        model = open_model(config, tokenizer, console.say)
        sampler = Sampler(config, model, tokenizer, warn=console.warn)
    texts = complete_prompt(sampler, arguments.prompt, arguments.n, arguments.raw, task)
    for number, text in enumerate(texts, 1):
        label = f"[{number}] " if len(texts) > 1 else ""
        console.say(label + printable(text))


def show_question(config: Config, n: int, console: Console) -> None:
    """The first held-out question as the model reads it, completions, and what each earns."""
    sampler, scorer = open_with_task(config, console)
    example = scorer.task.held_out(0)
    console.say(f"prompt\n{printable(prompt_text(sampler.tokenizer, example))}")
    graded = grade(sampler, scorer, [example], n, config.sampling)
    rewards = graded.rewards
    for number, text in enumerate(graded.texts[0]):
        earned = [f"{name} {x.values[0, number]:.4g}" for name, x in rewards.scores.items()]
        total = f"reward {rewards.total[0, number]:.4g}"
        console.say(f"\n[{number + 1}] {', '.join([total, *earned])}\n{printable(text)}")


class ExportArguments(ModelArguments):
    """Write a model as a folder that transformers loads, with the files of its tokenizer.

    minigrpo export RUN_OR_MODEL --out FOLDER

    The adapters of a run with --lora-rank are merged into the weights; the run's own folder has
    them as PEFT loads them. The folder must be new.
    """

    out: OnePath
    """The folder to write."""


def export_command(argv: Sequence[str], prog: str) -> None:
    arguments, given = ExportArguments.parse(argv, prog)
    console = Console()
    out = arguments.out
    config = config_of(arguments, given | {"lora_rank": 0})
    tokenizer = make_tokenizer(config)
    source = ModelSource.of(config.model.name)
    # before the folder is made: it may be refused
    model = source.start(config, tokenizer, console.say, {})
    out.mkdir(parents=True)  # an error if it is there
    model.export(out)
    tokenizer.save(out)
    args = config.model.chat_args
    note = f"; give its chat template what it was trained with: {args}" if args else ""
    console.say(f"{arguments.run} -> {out}{note}")
