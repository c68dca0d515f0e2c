"""The documentation names only what exists: files, headings, flags, presets and commands."""

import dataclasses
import re
import shlex
import shutil
from functools import cache
from glob import glob
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.cli import BENCHMARKS
from minigrpo import defaults
from minigrpo.config import TRL_WORDS, places
from minigrpo.tools.cli import run_command

from .tiny import tiny_chat_model, write_jsonl

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "configs").glob("*.toml"))]
CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# of every command, and of torchrun and other programs
OTHERS = {"help", "config", "nproc-per-node", "nnodes", "node-rank", "master-addr", "max-restarts"}
OTHERS |= {"logdir", "no-deps"}
FEW = ["--max-steps=1", "--prompts-per-step=2", "--max-new-tokens=4", "--eval-size=2"]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, by GitHub's rule."""
    headings = re.findall(r"^#+ +(.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = CODE.sub("", page.read_text())
        for link in re.findall(r"\[[^\]]*\]\((?!\w+:)([^)\s]+)\)", text):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists() and (not anchor or anchor in anchors(target)), (page, link)


@cache
def flags() -> set[str]:
    names = {"no_" + name for name in places()} | places().keys() | OTHERS
    for tool in ("evaluate", "sample", "report", "compare", "doctor", "export"):
        for name, info in import_module(f"minigrpo.tools.{tool}").Arguments.model_fields.items():
            names |= {name, *(getattr(x, "name", None) or name for x in info.metadata)}
    for name in BENCHMARKS:
        kind = getattr(import_module(f"benchmarks.{name}"), name.title())
        names |= {field.name for field in dataclasses.fields(kind)}
    return {name.replace("_", "-") for name in names}


def test_every_flag_exists() -> None:
    for path in TEXTS:
        named = re.findall(r"(?<![\w-])--([a-z][\w-]*)", path.read_text())
        assert not {name.replace("_", "-") for name in named} - flags(), path


def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the pages, with a tiny model in place of each published one."""
    monkeypatch.chdir(tmp_path)
    for name in ("examples", "configs"):
        Path(name).symlink_to(ROOT / name)
    tiny_chat_model(Path("smollm2"), context=600)
    Path("rewards.py").symlink_to("examples/arithmetic.py")
    rows = [{"prompt": f"1 + {n} =", "answer": "#### 2"} for n in range(40)]
    for name in ("arithmetic", "rows", "other_rows", "train", "test"):
        write_jsonl(Path(f"{name}.jsonl"), rows)
    found = [block for page in PAGES for block in CODE.findall(page.read_text())]
    code = "".join(body for kind, body in found if kind == "bash").replace("\\\n", " ")
    code = code.replace("step_000300", "step_000001")
    for line in re.sub(r"Qwen/\S+|models/qwen|sft-adapter", "smollm2", code).splitlines():
        program, command, *words = shlex.split(line, comments=True) or ["", ""]
        if program != "minigrpo":
            continue
        for name, out in pairwise(words):
            if name == "--out" or (name == "--out-dir" and "auto" not in words):
                shutil.rmtree(out, ignore_errors=True)
        words += FEW if command == "train" else ["--n", "2"] * (command == "evaluate")
        run_command(command, [path for word in words for path in glob(word) or [word]], "minigrpo")
        for copied in ("gsm8k", "a", "b", "a-0", "b-0"):
            shutil.copytree("runs/arithmetic", f"runs/{copied}", dirs_exist_ok=True)


def test_tables_in_the_pages_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = re.findall(r"^\| (.+) \|$", (ROOT / "docs/trl.md").read_text().replace("`", ""), re.M)
    assert rows[1:] == [f"{word} | {here}" for word, here in TRL_WORDS.items()]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    section = (ROOT / "docs/models.md").read_text().split("## Defaults")[1].split("\n## ")[0]
    rows = [row.split("|") for row in re.findall(r"^\| `(.+) \|$", section, re.M)]
    named = {words[0].split("`")[0] for words in rows}
    for words, parameters, *cells in rows:
        name, least = words.split("`")[0], int(float(parameters.split()[0]) * 10**6)
        for is_lora, cell in enumerate(cells):
            loss = "nll" if "nll" in words else "grpo"
            given = {"lora_rank": is_lora, "loss": loss}
            fit = defaults.settings_for(defaults.Size(least, 10**6), given)
            below = defaults.settings_for(defaults.Size(least - 1, 10**6), given)
            assert fit.keys() <= named
            assert str(fit.get(name, "")) == cell.strip()
            assert least == 0 or name not in fit or below.get(name) != fit[name]


def test_equal_bits_are_promised_for_cpus_and_v100s_are_told_their_build() -> None:
    """CUDA adds some gradients up in any order; from 2.11 on few builds of torch know V100s."""
    for page in PAGES:
        for paragraph in re.split(r"\n\n|\n(?=[-|])", page.read_text()):
            promises = re.search(r"bit[- ]equal|bit for bit|(same|equal) bits", paragraph)
            assert not promises or "CPU" in paragraph, (page, paragraph)
    assert "cu126" in (ROOT / "configs/mbpp-2xv100.toml").read_text()


def test_pages_are_few_and_short_and_pictures_are_used() -> None:
    words = [len(page.read_text().split()) for page in PAGES]
    assert PAGES[0].stat().st_size <= 10_500
    assert len(PAGES) - 1 <= 12
    assert sum(words[1:]) <= 14_000
    used = "".join(page.read_text() for page in PAGES)
    assert all(picture.name in used for picture in (ROOT / "docs").glob("*.png"))
