"""The rows of the steps benchmark as tables on the terminal, Markdown, a chart and JSON."""

import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .intervals import RULE, gain
from .layers import AS_CONFIGURED, DEFAULTS, NO_LAYERS

RESULTS = Path("benchmarks/results")  # of the folder that the command is started in
LINE = 130  # characters in a chart's title
COLORS = ("#4477aa", "#ccbb44", "#66ccee", "#ee6677")
Column = tuple[str, str, Callable[[Any], str]]  # heading, key in a row, formatter


def number(pattern: str) -> Callable[[Any], str]:
    return lambda value: "" if value is None else pattern.format(value)


def _share(value: float | None) -> str:
    return "" if value is None else "0" if value < 1e-9 else f"{value:.1e}"


TIMES: tuple[Column, ...] = (
    ("", "label", str),
    ("s/step", "time", str),
    ("turns", "samples", lambda times: str(len(times)) if times else ""),
    ("rollout", "rollout", number("{:.3f}")),
    ("reward", "reward", number("{:.3f}")),
    ("reference", "reference", number("{:.3f}")),
    ("update", "update", number("{:.3f}")),
    ("tokens/s", "tokens_per_s", number("{:,.0f}")),
    ("speedup", "faster", str),
    ("gain over the row above", "verdict", str),
)
COSTS: tuple[Column, ...] = (
    ("", "label", str),
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
        words = not i or heading.startswith(
            "gain"
        )  # a status may be a long line; numbers never wrap
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
    folder = out_dir or RESULTS / f"{device}-{date.today().isoformat()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_report(result: dict[str, Any], out_dir: Path | None, console: Console) -> None:
    """The tables of `benchmark.py steps`, on the terminal and in a folder."""
    folder, work = folder_for(result, out_dir), result["work"]
    name = "steps-natural" if result["work"]["natural"] else "steps"
    texts = [f"# {result['device']}\n\n{work['text']}\n\n{result['made_by']}\n\n{RULE}\n"]
    for key, title in (
        ("rows", "Each row adds a layer to the rows above; a layer in brackets is not kept below"),
        ("alone", "Each layer alone"),
    ):
        if key in result:
            shown = [with_texts(row) for row in result[key]]
            for heading, columns in (
                (title, TIMES),
                ("Cost, and effect on loss and gradient", COSTS),
            ):
                print_table(console, heading, shown, columns)
                texts.append(markdown(heading, shown, columns))
    said = remarks(result["rows"])
    console.print("\n".join([RULE, *said]), highlight=False)
    bullets = [f"- {text}" for text in said]
    (folder / f"{name}.md").write_text("\n".join([*texts, *bullets, ""]))
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    bars(result["rows"], folder / f"{name}.png", f"{result['device']}\n{work['text']}", console)
    console.print(f"wrote {folder}/{name}.md, .json, .png")


def with_texts(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its name, its time and its speedup as they are shown, with their intervals."""
    time = with_interval(row["s_per_step"], row["s_per_step_interval"], "{:.3f}", "{:.2f}")
    faster = with_interval(row["speedup"], row["speedup_interval"], "{:.1f}x", "{:.1f}")
    over = ", over the defaults" if row["name"] == AS_CONFIGURED and row["gain"] else ""
    texts = {"label": label(row), "time": time, "faster": faster}
    return {**row, **texts, "verdict": row["verdict"] + over}


def with_interval(
    value: float | None, ends: Sequence[float] | None, pattern: str, end_pattern: str
) -> str:
    if value is None:
        return ""
    if not ends or ends[0] == ends[1]:  # the first row's speedup over itself is exactly 1
        return pattern.format(value)
    interval = " (" + "-".join(end_pattern.format(end) for end in ends) + ")"
    return pattern.format(value) + interval


def label(row: Mapping[str, Any]) -> str:
    """A row's name, and whether it is what train.py runs without flags."""
    named = not row["is_default"] or row["name"] == DEFAULTS
    return row["name"] if named else f"{row['name']} = {DEFAULTS}"


def remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The summary: first the defaults, then the fastest row that samples the same completions."""
    done = [row for row in rows if row["s_per_step"]]
    if not done:
        return ["no row could run here"]
    first = done[0]["name"]
    default = next((row for row in done if row["is_default"]), None)
    texts = [f"{DEFAULTS}: {_factor(default, first)}"] if default else []
    texts += _best(done, default)
    texts += [
        f"{row['different_completions']} of {row['completions']} completions differ from those of "
        f"{first}: {row['name']}"
        for row in done
        if row["different_completions"]
    ] or ["all rows sampled the same tokens"]
    return [*texts, f"memory is {rows[0]['memory_measures']}"]


def _best(done: Sequence[Mapping[str, Any]], default: Mapping[str, Any] | None) -> list[str]:
    """The fastest row that changes no completion, and what it gains over the defaults.

    The library adds numbers in another order than grpo.py, which may change a completion by
    rounding. What its row without speed layers changes is rounding.
    """
    changed = {row["name"]: row["different_completions"] for row in done if row["completions"]}
    rounding = changed.get(NO_LAYERS, 0)
    same = [row for row in done if changed.get(row["name"], rounding + 1) <= rounding]
    if not same:
        return []
    best = max(same, key=lambda row: row["speedup"] or 0.0)
    beyond = " beyond rounding" if rounding else ""
    text = f"fastest row that changes no completion{beyond}: {label(best)}"
    if default is None or best is default:
        return [f"{text}: {_factor(best, done[0]['name'])}"]
    pair = [dict(zip(row["turns"], row["samples"], strict=True)) for row in (default, best)]
    gained = gain(*pair)
    return [f"{text}; over {DEFAULTS}: {gained.verdict() if gained else 'no turn in common'}"]


def _factor(row: Mapping[str, Any], first: str) -> str:
    if not row["speedup"]:
        return f"no turn in common with {first}"
    ends = row["speedup_interval"]
    interval = f" ({ends[0]:.1f}-{ends[1]:.1f}x)" if ends else ""
    return (
        f"{row['speedup']:.1f}x as fast as {first}{interval}, {row['flops_multiple']:.1f}x the "
        "time of its FLOPs at the probed matmul rate"
    )


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
    ends = [row["s_per_step_interval"] or (row["s_per_step"],) * 2 for row in shown]
    longest = max([*left, *(high for _, high in ends)], default=1.0)
    for i, row in enumerate(shown):
        axes.plot(ends[i], (i, i), color="black", linewidth=1)
        faster = f"  {row['speedup']:.1f}x" if row["speedup"] else ""
        axes.text(
            max(left[i], ends[i][1]) + longest / 100,
            i,
            f"{row['s_per_step']:.2f} s{faster}",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(shown)), [label(row) for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.18)
    axes.set_xlabel("seconds per step; the line is the 95 % interval of the median")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    wrapped = "\n".join(textwrap.fill(line, LINE) for line in title.splitlines())
    axes.set_title(wrapped, fontsize=8, loc="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)
