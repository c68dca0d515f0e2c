"""The rows of the memory benchmark as tables on the terminal, Markdown, charts and JSON."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .report import COLORS, Column, folder_for, markdown, number, print_table, pyplot

MEMORY: tuple[Column, ...] = (
    ("completions per prompt", "group_size", str),
    ("sampling", "name", str),
    ("logits", "logits", str),
    ("peak MiB", "peak_mib", number("{:,.0f}")),
    ("s/step", "s_per_step", number("{:.2f}")),
    ("rollout", "rollout", number("{:.2f}")),
    ("update", "update", number("{:.2f}")),
    ("different completions", "different_completions", number("{}")),
    ("", "status", lambda status: "" if status == "ok" else status),
)


LOGPROBS: tuple[Column, ...] = (
    ("logits", "logits", str),
    ("peak MiB", "peak_mib", number("{:,.0f}")),
    ("seconds", "seconds", number("{:.2f}")),
)


def write_memory(result: dict[str, Any], out_dir: Path | None, console: Console) -> None:
    """The table and the charts of `benchmark.py memory`."""
    folder = folder_for(result, out_dir)
    title = f"Memory is {result['measures']}; all rows have the same loss on the same rollout"
    print_table(console, title, result["rows"], MEMORY)
    alone = result["logprobs"]
    heading = (
        f"Log-probs alone: {alone['tokens']:,} tokens, vocabulary {alone['vocab_size']:,}, width "
        f"{alone['width']}; gradients differ by {alone['gradient_difference']:.1e} of their "
        "largest entry"
    )
    print_table(console, heading, alone["rows"], LOGPROBS)
    tables = [markdown(title, result["rows"], MEMORY), markdown(heading, alone["rows"], LOGPROBS)]
    intro = f"# {result['device']}\n\n{result['work']['text']}\n\n{result['made_by']}\n"
    text = "\n".join([intro, *tables])
    (folder / "memory.md").write_text(text)
    (folder / "memory.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    draw_memory(result, folder / "memory.png", console)
    console.print(f"wrote {folder}/memory.md, .json, .png")


def draw_memory(result: Mapping[str, Any], path: Path, console: Console) -> None:
    """Peak and seconds by group size, and memory over time within a step."""
    if (plt := pyplot(console)) is None:
        return
    figure, (peaks, seconds, timeline) = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    colors = dict(zip(dict.fromkeys(row["name"] for row in result["rows"]), COLORS, strict=False))
    _plot_sizes(result["rows"], colors, {"peak_mib": peaks, "s_per_step": seconds})
    peaks.set_ylabel("peak, MiB")
    seconds.set_ylabel("seconds per step")
    peaks.legend(frameon=False, fontsize=8, title="dashed: logits in chunks", title_fontsize=8)
    _plot_timelines(result["timelines"], colors, timeline)
    for axes in (peaks, seconds, timeline):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.suptitle(f"{result['device']}: {result['work']['text']}", fontsize=8)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _plot_sizes(
    rows: Sequence[Mapping[str, Any]], colors: Mapping[str, str], axes_of: Mapping[str, Any]
) -> None:
    """A line per way of sampling, dashed for logits in chunks."""
    sizes = sorted({row["group_size"] for row in rows})
    styles = {"all": "-", "in chunks": "--"}
    for key, axes in axes_of.items():
        for name, logits in itertools.product(colors, styles):
            same = [row for row in rows if (row["name"], row["logits"]) == (name, logits)]
            points = [(row["group_size"], row[key]) for row in same if row["status"] == "ok"]
            label = name if logits == "all" else None
            options = {"color": colors[name], "label": label, "marker": "o", "ms": 3}
            axes.plot(
                *(zip(*points, strict=True) if points else ([], [])), styles[logits], **options
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, labels=map(str, sizes))
        axes.set_yscale("log")
        axes.set_xlabel("completions per prompt")


def _plot_timelines(
    timelines: Mapping[str, Mapping[str, Any]], colors: Mapping[str, str], axes: Any
) -> None:
    """Memory over time, with the phases of the last way marked."""
    if not timelines:
        return
    for name, line in timelines.items():
        times, used, phases = zip(*line["readings"], strict=True)
        axes.plot(times, used, color=colors[name], linewidth=1)
    for i, phase in enumerate(phases):
        if phase and (not i or phase != phases[i - 1]):
            axes.axvline(times[i], color=colors[name], linewidth=0.6, linestyle=":")
            top = axes.get_ylim()[1]
            axes.text(times[i], top, f" {phase}", fontsize=7, rotation=90, va="top")
    axes.set_xlabel(f"seconds within a step, {line['group_size']} completions per prompt")
    axes.set_ylabel("MiB above the start of the step")
