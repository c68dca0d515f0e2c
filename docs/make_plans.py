"""Write the plans of the presets for chat models into docs/models.md: `python docs/make_plans.py`.

Each table follows a line `<!-- plan of PRESET -->`. Nothing is measured or downloaded: a plan needs
only the shape of a model. tests/test_docs.py checks that the committed tables are up to date.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from minigrpo.config import Config
from minigrpo.runtime.estimate import Estimate
from minigrpo.runtime.planner import Planner

PAGE = Path(__file__).with_name("models.md")
MARK = re.compile(r"^(<!-- plan of (\S+) -->\n)(?:\|.*\n)*", re.MULTILINE)
# preset -> what a column plans, the GB that it must fit in, and the flags besides the preset
PLANS: dict[str, tuple[tuple[str, int, str], ...]] = {
    "qwen2.5-0.5b": (
        ("12 GB", 12, ""),
        ("24 GB", 24, "--micro-batch-size 4"),
        ("24 GB, 1.5B", 24, "--init-from Qwen/Qwen2.5-1.5B-Instruct --offload-optimizer"),
    ),
    "qwen3-0.6b": (
        ("12 GB", 12, ""),
        ("24 GB", 24, "--rollout-batch-size 8 --micro-batch-size 2 --no-offload-optimizer"),
    ),
    "llama3.2-1b-lora": (("12 GB", 12, ""), ("24 GB", 24, "--micro-batch-size 4")),
    "qwen2.5-7b-lora": (("24 GB", 24, ""),),
}


def plan(preset: str, flags: str) -> Estimate:
    """The estimate for a CUDA card, without seconds."""
    argv = ["--config", preset, "--device", "cuda", *flags.split()]
    return Planner(Config.from_cli(argv)).job.worst


def table(preset: str) -> str:
    """The plans of a preset as a Markdown table, a column per card."""
    columns = PLANS[preset]
    found = [plan(preset, flags) for _, _, flags in columns]
    rows = [["", *(name for name, _, _ in columns)], ["---"] * (1 + len(columns))]
    rows.append(["flags", *(f"`{flags}`" if flags else "" for _, _, flags in columns)])
    rows.append(["parameters", *(f"{x.parameters / 1e6:,.0f} M" for x in found)])
    rows.append(["trained", *(f"{x.trained / 1e6:,.0f} M" for x in found)])
    rows.append(["tokens in the update", *(f"{x.tokens['update']:,.0f}" for x in found)])
    rows.append(["TFLOP per step", *(f"{sum(x.flops.values()) / 1e12:,.0f}" for x in found)])
    kinds = dict.fromkeys(kind for x in found for kind in x.memory_mib)
    for kind in kinds:
        sizes = (x.memory_mib.get(kind) for x in found)
        rows.append([f"MiB: {kind}", *(f"{size:,.0f}" if size else "" for size in sizes)])
    rows.append(["**MiB: peak**", *(f"**{x.peak_mib:,.0f}**" for x in found)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def page() -> str:
    """docs/models.md with the tables of today."""
    text = PAGE.read_text(encoding="utf-8")
    return MARK.sub(lambda found: found[1] + table(found[2]), text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
