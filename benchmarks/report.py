"""A benchmark's rows as a table on the terminal, Markdown, charts and JSON."""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COLORS = ("#4477aa", "#ccbb44", "#66ccee", "#ee6677")
Column = tuple[str, str, Callable[[Any], str]]  # heading, key of a row, how it is shown


def _number(pattern: str) -> Callable[[Any], str]:
    return lambda value: "" if value is None else pattern.format(value)


def _share(value: float | None) -> str:
    return "" if value is None else "0" if value < 1e-9 else f"{value:.1e}"


TIMES: tuple[Column, ...] = (
    ("", "name", str),
    ("s/step", "s_per_step", _number("{:.3f}")),
    ("spread", "samples", lambda times: f"{min(times):.2f}-{max(times):.2f}" if times else ""),
    ("rollout", "rollout", _number("{:.3f}")),
    ("reward", "reward", _number("{:.3f}")),
    ("reference", "reference", _number("{:.3f}")),
    ("update", "update", _number("{:.3f}")),
    ("tokens/s", "tokens_per_s", _number("{:,.0f}")),
    ("speedup", "speedup", _number("{:.1f}x")),
    ("gain", "gain", str),
)
COSTS: tuple[Column, ...] = (
    ("", "name", str),
    ("peak MiB", "peak_mib", _number("{:,.0f}")),
    ("loss off by", "loss_difference", _share),
    ("gradient", "grad_difference", _share),
    ("x roofline", "roofline_multiple", _number("{:.1f}")),
    ("x FLOPs", "flops_multiple", _number("{:.1f}")),
    ("rounds", "rounds", _number("{:,.0f}")),
    ("of each", "rounds_each", _number("{:,.1f}")),
    ("tokens: rollout", "tokens_rollout", _number("{:,.0f}")),
    ("update", "tokens_update", _number("{:,.0f}")),
    ("J", "joules", _number("{:.1f}")),
    ("recompiles", "recompiles", _number("{}")),
)


def gains(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row what it bought, against the row that it adds to: the last one before it that
    stayed.
    """
    before = None
    for row in rows:
        now = row["s_per_step"]
        row["gain"] = row["status"] if row["status"] != "ok" else ""
        if now and before:
            change = before / now
            row["gain"] = (
                f"{change:.2f}x"
                if change > 1.03
                else "nothing"
                if change > 0.97
                else f"slower, {change:.2f}x"
            )
        if now and not row["name"].startswith("("):
            before = now


def cells(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]
) -> tuple[list[str], list[list[str]]]:
    """Headings and texts; a column that is empty in all rows is left out."""
    filled = [(heading, [show(row.get(key)) for row in rows]) for heading, key, show in columns]
    kept = [(heading, texts) for heading, texts in filled if any(texts)]
    return [heading for heading, _ in kept], [
        list(texts) for texts in zip(*(texts for _, texts in kept), strict=True)
    ]


def print_table(
    console: Console, title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]
) -> None:
    table = Table(title=title, title_justify="left")
    headings, lines = cells(rows, columns)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=i > 0)
    for line in lines:
        table.add_row(*line)
    console.print(table)


def markdown(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> str:
    headings, lines = cells(rows, columns)
    table = [headings, ["---"] + ["--:"] * (len(headings) - 1), *lines]
    return f"## {title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in table) + "\n"


def folder_for(result: Mapping[str, Any], out_dir: Path | None) -> Path:
    device = re.sub(r"[^a-z0-9]+", "-", result["device"].lower()).strip("-")
    folder = out_dir or Path("benchmarks/results") / f"{device}-{date.today().isoformat()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_report(result: dict[str, Any], out_dir: Path | None, console: Console) -> None:
    """The tables of `benchmark.py steps`, on the terminal and in a folder."""
    folder, work = folder_for(result, out_dir), result["work"]
    name = "steps-natural" if result["work"]["natural"] else "steps"
    texts = [f"# {result['device']}\n\n{work['text']}\n"]
    for key, title in (
        ("rows", "Each layer added to those above it; in brackets: not kept below"),
        ("alone", "Each layer alone"),
    ):
        if key in result:
            gains(result[key])
            for heading, columns in ((title, TIMES), ("What it costs, and what it changes", COSTS)):
                print_table(console, heading, result[key], columns)
                texts.append(markdown(heading, result[key], columns))
    console.print(_remarks(result["rows"]), highlight=False)
    (folder / f"{name}.md").write_text("\n".join([*texts, _remarks(result["rows"]), ""]))
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    bars(result["rows"], folder / f"{name}.png", f"{result['device']}\n{work['text']}", console)
    console.print(f"wrote {folder}/{name}.md, .json, .png")


def _remarks(rows: Sequence[Mapping[str, Any]]) -> str:
    done = [row for row in rows if row["s_per_step"]]
    if not done:
        return "no row could run here"
    best = min(done, key=lambda row: row["s_per_step"])
    faster = (
        f"{best['speedup']:.1f}x the naive step"
        if best["speedup"]
        else "the naive step could not run"
    )
    texts = [
        f"best: {best['name']}: {faster}, {best['flops_multiple']:.1f}x the time of its FLOPs at "
        "the probed matmul rate; "
        f"memory is {rows[0]['memory_measures']}"
    ]
    different = {
        row["name"]: row["different_completions"] for row in rows if row["different_completions"]
    }
    if different:
        total = rows[0]["completions"]
        texts.append(
            f"completions that are not the naive ones, of {total}: "
            f"{', '.join(f'{n}: {c}' for n, c in different.items())}"
        )
    else:
        texts.append("all rows sampled the same tokens")
    return "\n".join(texts)


def _pyplot(console: Console) -> Any:
    try:
        import matplotlib.pyplot
    except ImportError:
        console.print("no chart: matplotlib is not installed (pip install -e '.[plots]')")
        return None
    return matplotlib.pyplot


def bars(rows: Sequence[Mapping[str, Any]], path: Path, title: str, console: Console) -> None:
    """Seconds a step by phase, a bar a row, on a logarithmic scale of speedup beside it."""
    if (plt := _pyplot(console)) is None:
        return
    shown = [row for row in rows if row["s_per_step"]]
    figure, axes = plt.subplots(figsize=(11, 0.42 * len(shown) + 1.9), layout="constrained")
    left = [0.0] * len(shown)
    for phase, color in zip(("rollout", "reward", "reference", "update"), COLORS, strict=False):
        widths = [row[phase] or 0.0 for row in shown]
        axes.barh(range(len(shown)), widths, left=left, color=color, label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    longest = max(left, default=1.0)
    for i, row in enumerate(shown):
        faster = f"  {row['speedup']:.1f}x" if row["speedup"] else ""
        axes.text(
            left[i] + longest / 100,
            i,
            f"{row['s_per_step']:.2f} s{faster}",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(shown)), [row["name"] for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.18)
    axes.set_xlabel("seconds a step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    axes.set_title(title, fontsize=8, loc="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


MEMORY: tuple[Column, ...] = (
    ("completions a prompt", "group_size", str),
    ("way", "name", str),
    ("logits", "logits", str),
    ("peak MiB", "peak_mib", _number("{:,.0f}")),
    ("s/step", "s_per_step", _number("{:.2f}")),
    ("rollout", "rollout", _number("{:.2f}")),
    ("update", "update", _number("{:.2f}")),
    ("other completions", "different_completions", _number("{}")),
    ("", "status", lambda status: "" if status == "ok" else status),
)


LOGPROBS: tuple[Column, ...] = (
    ("logits", "logits", str),
    ("peak MiB", "peak_mib", _number("{:,.0f}")),
    ("seconds", "seconds", _number("{:.2f}")),
)


def write_memory(result: dict[str, Any], out_dir: Path | None, console: Console) -> None:
    """The table and the charts of `benchmark.py memory`."""
    folder = folder_for(result, out_dir)
    title = f"Memory is {result['measures']}; all have the same loss on the same rollouts"
    print_table(console, title, result["rows"], MEMORY)
    alone = result["logprobs"]
    sizes = f"Log-probs alone, {alone['tokens']:,} tokens of {alone['vocab_size']:,}, width {alone['width']}"
    heading = (
        f"{sizes}; gradients differ by {alone['gradient_difference']:.1e} of their largest entry"
    )
    print_table(console, heading, alone["rows"], LOGPROBS)
    tables = [markdown(title, result["rows"], MEMORY), markdown(heading, alone["rows"], LOGPROBS)]
    text = "\n".join([f"# {result['device']}\n\n{result['work']['text']}\n", *tables])
    (folder / "memory.md").write_text(text)
    (folder / "memory.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    draw_memory(result, folder / "memory.png", console)
    console.print(f"wrote {folder}/memory.md, .json, .png")


def draw_memory(result: Mapping[str, Any], path: Path, console: Console) -> None:
    """Peak and seconds over the group size, and memory over time within a step."""
    if (plt := _pyplot(console)) is None:
        return
    figure, (peaks, seconds, timeline) = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    colors = dict(zip(dict.fromkeys(row["name"] for row in result["rows"]), COLORS, strict=False))
    for axes, key, label in (
        (peaks, "peak_mib", "peak, MiB"),
        (seconds, "s_per_step", "seconds a step"),
    ):
        for (name, color), (logits, style) in itertools.product(
            colors.items(), (("all", "-"), ("in chunks", "--"))
        ):
            rows = [
                row
                for row in result["rows"]
                if (row["name"], row["logits"], row["status"]) == (name, logits, "ok")
            ]
            points = [row["group_size"] for row in rows], [row[key] for row in rows]
            axes.plot(
                *points,
                style,
                marker="o",
                ms=3,
                color=color,
                label=name if logits == "all" else None,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            sizes := sorted({row["group_size"] for row in result["rows"]}), labels=map(str, sizes)
        )
        axes.set_yscale("log")
        axes.set(xlabel="completions of a prompt", ylabel=label)
    peaks.legend(frameon=False, fontsize=8, title="dashed: logits in chunks", title_fontsize=8)
    for name, line in result["timelines"].items():
        times, used, phases = zip(*line["seen"], strict=True)
        timeline.plot(times, used, color=colors[name], linewidth=1)
        begins = [
            i for i in range(len(phases)) if phases[i] and (not i or phases[i] != phases[i - 1])
        ]
        for i in begins if name == list(result["timelines"])[-1] else ():
            timeline.axvline(times[i], color=colors[name], linewidth=0.6, linestyle=":")
            timeline.text(
                times[i], timeline.get_ylim()[1], f" {phases[i]}", fontsize=7, rotation=90, va="top"
            )
        size = line["group_size"]
    timeline.set(
        xlabel=f"seconds within a step, {size} completions a prompt",
        ylabel="MiB above the beginning",
    )
    for axes in (peaks, seconds, timeline):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.suptitle(f"{result['device']}: {result['work']['text']}", fontsize=8)
    figure.savefig(path, dpi=140)
    plt.close(figure)
