"""The rows of the steps benchmark as tables on the terminal, Markdown, a chart and JSON."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COLORS = ("#4477aa", "#ccbb44", "#66ccee", "#ee6677")
Column = tuple[str, str, Callable[[Any], str]]  # heading, key in a row, formatter


def number(pattern: str) -> Callable[[Any], str]:
    return lambda value: "" if value is None else pattern.format(value)


def _share(value: float | None) -> str:
    return "" if value is None else "0" if value < 1e-9 else f"{value:.1e}"


TIMES: tuple[Column, ...] = (
    ("", "name", str),
    ("s/step", "s_per_step", number("{:.3f}")),
    ("spread", "samples", lambda times: f"{min(times):.2f}-{max(times):.2f}" if times else ""),
    ("rollout", "rollout", number("{:.3f}")),
    ("reward", "reward", number("{:.3f}")),
    ("reference", "reference", number("{:.3f}")),
    ("update", "update", number("{:.3f}")),
    ("tokens/s", "tokens_per_s", number("{:,.0f}")),
    ("speedup", "speedup", number("{:.1f}x")),
    ("gain", "gain", str),
)
COSTS: tuple[Column, ...] = (
    ("", "name", str),
    ("peak MiB", "peak_mib", number("{:,.0f}")),
    ("loss off by", "loss_difference", _share),
    ("gradient", "grad_difference", _share),
    ("x roofline", "roofline_multiple", number("{:.1f}")),
    ("x FLOPs", "flops_multiple", number("{:.1f}")),
    ("rounds", "rounds", number("{:,.0f}")),
    ("per completion", "rounds_each", number("{:,.1f}")),
    ("tokens: rollout", "tokens_rollout", number("{:,.0f}")),
    ("update", "tokens_update", number("{:,.0f}")),
    ("recompiles", "recompiles", number("{}")),
)


def gains(rows: Sequence[dict[str, Any]]) -> None:
    """Set each row's gain over the row that it adds a layer to, the last one above it whose layer
    was kept.
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
    """Headings and rows of text, without columns that are empty in all rows."""
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
        words = not i or heading == "gain"  # a status may be a long line; numbers never wrap
        table.add_column(
            heading,
            justify="right" if i else "left",
            no_wrap=not words,
            max_width=36 if words else None,
        )
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
        ("rows", "Each row adds a layer to the rows above; a layer in brackets is not kept below"),
        ("alone", "Each layer alone"),
    ):
        if key in result:
            gains(result[key])
            for heading, columns in (
                (title, TIMES),
                ("Cost, and effect on loss and gradient", COSTS),
            ):
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
    best, first = min(done, key=lambda row: row["s_per_step"]), rows[0]["name"]
    faster = (
        f"{best['speedup']:.1f}x as fast as {first}"
        if best["speedup"]
        else f"{first} could not run"
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
        total = done[0]["completions"]
        texts.append(
            f"completions that differ from those of {done[0]['name']}, of {total}: "
            f"{', '.join(f'{n}: {c}' for n, c in different.items())}"
        )
    else:
        texts.append("all rows sampled the same tokens")
    return "\n".join(texts)


def pyplot(console: Console) -> Any:
    try:
        import matplotlib.pyplot
    except ImportError:
        console.print("no chart: matplotlib is not installed (pip install -e '.[plots]')")
        return None
    return matplotlib.pyplot


def bars(rows: Sequence[Mapping[str, Any]], path: Path, title: str, console: Console) -> None:
    """A bar per row: seconds per step by phase."""
    if (plt := pyplot(console)) is None:
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
    axes.set_xlabel("seconds per step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    axes.set_title(title, fontsize=8, loc="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)
