"""Write a page about runs: results, findings, curves, settings and samples.

minigrpo report RUN [RUN ...] --out report.html

The page is one file that loads nothing else. The curves are figures of matplotlib (extra `report`);
report.html.j2 is the page, and jinja2 escapes every text of a run. Several runs share each figure.
"""

import fnmatch
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from jinja2 import Template

from ..config import Config
from ..runtime.logging import SAMPLES, Record, Warn, read_jsonl
from .doctor import diagnose
from .runs import ENDS, EVAL, Run, RunArguments, differing, draw, runs_of

Figures = dict[str, list[tuple[str, str]]]  # section -> pairs of an SVG and a note
MOST_SAMPLES = 24  # groups of a run's training, and held-out prompts: the last ones
# section -> its curves -> a note; SUCCESS is the headline of evaluations
PANELS = {
    "Held out": {
        "eval/SUCCESS_sampled": "Sampled.",
        "eval/SUCCESS": "Greedy.",
        "eval/SUCCESS/*": "Of one kind, greedy.",
        "eval/pass@*": "One of k samples is right.",
        "eval/*_sampled": "Mean of sampled completions.",
    },
    "Training": {
        "reward": "Mean over all completions of a step.",
        "rewards/*/mean": "Mean of a reward function, before its weight.",
        "frac_reward_zero_std": "Share of groups of equal rewards, which teach nothing.",
        "entropy": "Nats per token. A fall to 0 ends exploration.",
        "kl": "To the initial model, in nats per token.",
        "completions/mean_length": "Tokens.",
        "completions/clipped_ratio": "Share of completions cut off at --max-new-tokens.",
        "clip_ratio/*_mean": "Share of tokens whose ratio is clipped.",
        "grad_norm": "Before it is clipped.",
        "learning_rate": "",
        "loss": "About 0 is right with one update per rollout.",
        "sampling/logp_difference_mean": "Of log-probs, between sampler and trainer.",
        "rewards/*/failures": "Completions on which a reward function failed.",
        "skipped_steps": "So far.",
    },
    "Cost": {
        "step_time": "Seconds.",
        "time/*": "Seconds.",
        "memory/peak_mib": "MiB of the process, or of the GPU.",
        "tokens/run": "Distinct tokens per update, which the model runs.",
    },
}


def figures_of(runs: Sequence[Run]) -> Figures:
    """The figures of each section, without curves that are missing or always 0."""
    found: Figures = {}
    settings = {run.name: [run] for run in runs}
    names = dict.fromkeys(
        prefix + name
        for run in runs
        for prefix, log in (("", run.metrics), (EVAL, run.evaluations))
        for record in log
        for name in record
        if record[name]
    )
    for section, panels in PANELS.items():
        for pattern, note in panels.items():
            for name in fnmatch.filter([*names], pattern.replace("SUCCESS", runs[0].success)):
                del names[name]  # a metric has one figure
                draw(settings, name, out := StringIO())
                found.setdefault(section, []).append((out.getvalue(), note))
    return found


def samples_of(run: Run, warn: Warn) -> dict[str, list[list[Record]]]:
    """The last groups of training, and held-out prompts with their answers over the run."""
    records = read_jsonl(run.folder / SAMPLES, warn)
    found = {}
    for source, key in (("train", "step"), ("held_out", "prompt")):
        groups: dict[str, list[Record]] = {}
        for record in records:
            if record.get("source") == source:
                groups.setdefault(str(record.get(key)), []).append(record)
        found[source] = [*groups.values()][-MOST_SAMPLES:]
    return found


def render(runs: Sequence[Run], figures: Figures, warn: Warn) -> str:
    """The page."""
    page = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    return Template(page, autoescape=True, trim_blocks=True).render(
        runs=runs,
        ends=ENDS,
        results=[run.ends() for run in runs],
        diagnose=diagnose,
        samples=[samples_of(run, warn) for run in runs],
        figures=figures,
        changed=differing([Config().flat(), *(run.config.flat() | run.versions for run in runs)]),
    )


class Arguments(RunArguments):
    out: Path = Path("report.html")
    """The page."""


def main(argv: Sequence[str], prog: str) -> None:
    arguments, console, runs = runs_of(Arguments, argv, prog, __doc__)
    html = render(runs, figures_of(runs), console.warn)
    arguments.out.write_text(html, encoding="utf-8", errors="replace")
    console.say(f"wrote {arguments.out}")
