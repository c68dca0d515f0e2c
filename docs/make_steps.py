"""Write the tables of the steps benchmark: `python docs/make_steps.py`.

Into docs/performance.md and README.md, from the results of `python benchmark.py steps` and
`python benchmark.py steps --natural`. tests/test_docs.py checks that they are up to date.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.layers import DEFAULTS
from benchmarks.report import number, with_interval

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "2-cpu-cores"
TABLE = re.compile(r"(<!-- steps table -->\n).*?(<!-- end of steps table -->)", re.DOTALL)
Row = Mapping[str, Any]

HEADINGS = (
    "| | default job: s/step | speedup | gain over the row above | tokens: rollout / update "
    "| peak MiB | made-up: s/step | speedup | gain over the row above |"
)
README_HEADINGS = "| | s/step | speedup | tokens run: rollout / update | peak MiB |"
README_ROWS = {
    "grpo.py": "`grpo.py`",
    "the library, no speed layers": "the library without its speed layers",
    "shared-prompt packing": "each prompt and distinct completion once",
    "speculative decoding": "speculative decoding from the known answers",
    "prefix-tree packing": "each distinct prefix once (the default)",
    "(bfloat16 autocast and weights)": "bfloat16 (`--fast`)",
}


def rows_of(name: str) -> dict[str, Row]:
    rows = json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]
    return {row["name"]: row for row in rows if row["name"] != DEFAULTS}


def time(row: Row) -> str:
    return with_interval(row["s_per_step"], row["s_per_step_interval"], "{:.2f}", "{:.2f}")


def speedup(row: Row) -> str:
    return with_interval(row["speedup"], row["speedup_interval"], "{:.1f}x", "{:.1f}")


def costs(row: Row) -> list[str]:
    count = number("{:,.0f}")
    tokens = [count(row[f"tokens_{phase}"]) for phase in ("rollout", "update")]
    return [" / ".join(tokens) if all(tokens) else "", count(row["peak_mib"])]


def table(headings: str, lines: list[list[str]]) -> str:
    rule = "|" + "---|" * (headings.count("|") - 1)
    return "\n".join([headings, rule, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def performance() -> str:
    natural, made_up = rows_of("steps-natural.json"), rows_of("steps.json")
    lines = []
    for name, row in natural.items():
        other = made_up[name]
        first = [name, time(row), speedup(row), row["verdict"], *costs(row)]
        lines.append([*first, time(other), speedup(other), other["verdict"]])
    return table(HEADINGS, lines)


def readme() -> str:
    rows = rows_of("steps-natural.json")
    lines = []
    for name, label in README_ROWS.items():
        seconds = number("{:.2f}")(rows[name]["s_per_step"])
        lines.append([label, seconds, speedup(rows[name]), *costs(rows[name])])
    return table(README_HEADINGS, lines)


PAGES = {ROOT / "docs" / "performance.md": performance, ROOT / "README.md": readme}


def page(path: Path) -> str:
    """The page with its table as the results say."""
    text = path.read_text(encoding="utf-8")
    return TABLE.sub(lambda found: f"{found[1]}\n{PAGES[path]()}\n{found[2]}", text)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path), encoding="utf-8")
