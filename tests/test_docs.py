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

from benchmarks import api_page
from benchmarks.cli import BENCHMARKS
from minigrpo.config import HUGE, LARGE, MEDIUM, TRL_WORDS, places, settings_for
from minigrpo.model.shape import Size
from minigrpo.run.logging import read_jsonl
from minigrpo.tools.cli import run_command
from minigrpo.tools.compare import CompareArguments
from minigrpo.tools.models import EvaluateArguments, ExportArguments, SampleArguments
from minigrpo.tools.report import ReportArguments

from .tiny import ROOT, tiny_chat_model, write_jsonl

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "configs").glob("*.toml"))]
CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# of every command, and of torchrun and other programs
OTHERS = {
    "memory",
    "help",
    "config",
    "nproc-per-node",
    "nnodes",
    "node-rank",
    "mem",
    "master-addr",
    "max-restarts",
}
OTHERS |= {"logdir", "no-deps", "processes", "model-args", "tasks", "apply-chat-template"}
FEW = {
    "train": ["--max-steps=1", "--prompts-per-step=2", "--max-new-tokens=4", "--eval-size=2"],
    "evaluate": ["--n=2"],
}


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, by GitHub's rule."""
    headings = re.findall(r"^#+ +(.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading(page: Path) -> None:
    text = CODE.sub("", page.read_text())
    for link in re.findall(r"\[[^\]]*\]\((?!\w+:)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@cache
def flags() -> set[str]:
    names = {"no_" + name for name in places()} | places().keys() | OTHERS
    tools = EvaluateArguments, SampleArguments, ExportArguments, ReportArguments, CompareArguments
    for arguments in tools:
        for name, info in arguments.model_fields.items():
            names |= {name, *(getattr(x, "name", None) or name for x in info.metadata)}
    for name in BENCHMARKS:
        settings = getattr(import_module(f"benchmarks.{name}"), name.title())
        names |= {field.name for field in dataclasses.fields(settings)}
    return {name.replace("_", "-") for name in names}


def test_every_flag_exists() -> None:
    for path in TEXTS:
        named = re.findall(r"(?<![\w-])--([a-z][\w-]*)", path.read_text())
        assert not {name.replace("_", "-") for name in named} - flags(), path


def commands() -> list[list[str]]:
    """The words of each command in the pages, with one model in place of each published one."""
    blocks = [block for page in PAGES for block in CODE.findall(page.read_text())]
    code = "".join(body for language, body in blocks if language == "bash").replace("\\\n", " ")
    code = code.replace("step_000300", "step_000001")
    code = re.sub(r"Qwen/\S+|models/qwen|sft-adapter|\badapters\b", "smollm2", code)
    lines = [shlex.split(line, comments=True) for line in code.splitlines()]
    return [words for words in lines if words[:1] == ["minigrpo"]]


def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the pages."""
    monkeypatch.chdir(tmp_path)
    for name in ("examples", "configs"):
        Path(name).symlink_to(ROOT / name)
    Path("rewards.py").symlink_to("examples/arithmetic.py")
    tiny_chat_model(Path("smollm2"), context=600)
    rows = [{"prompt": f"1 + {n} =", "answer": "#### 2"} for n in range(40)]
    for name in ("arithmetic", "rows", "other_rows", "train", "test"):
        write_jsonl(Path(f"{name}.jsonl"), rows)
    for _, command, *words in commands():
        for name, out in pairwise(words):
            if name == "--out" or (name == "--out-dir" and "auto" not in words):
                shutil.rmtree(out, ignore_errors=True)
        words += FEW.get(command, [])
        run_command(command, [path for word in words for path in glob(word) or [word]], "minigrpo")
        for copied in ("gsm8k", "a", "b", "a-0", "b-0"):
            shutil.copytree("runs/qwen", f"runs/{copied}", dirs_exist_ok=True)


def test_the_page_for_trls_users_agrees_with_the_messages() -> None:
    page = (ROOT / "docs/trl.md").read_text()
    for words, here in re.findall(r"^\| (`.+) \| (.+) \|$", page, re.MULTILINE):
        for word in re.findall(r"`(\w+)`", words):
            flags_said = re.findall(r"--[\w-]+", TRL_WORDS[word])
            assert {*flags_said} <= {*re.findall(r"--[\w-]+", here)}


def test_the_table_of_defaults_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    section = (ROOT / "docs/models.md").read_text().split("## Defaults")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)`(.*?) \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) > 9
    for name, when, cells in rows:
        given = {
            "lora_rank": int("LoRA" in when),
            "loss": "nll" if "nll" in when else "grpo",
            "device": "cpu" if "CPU" in when else "cuda",
        }
        large = HUGE if name == "base_dtype" else LARGE
        sizes = [(1, MEDIUM), (MEDIUM, LARGE), (large, 2 * HUGE)]
        for cell, (least, above) in zip(cells.split("|"), sizes, strict=True):
            for parameters in (least, above - 1):
                fit = settings_for(Size(int(parameters), 10**6), given)
                assert fit.keys() <= {name for name, *_ in rows}
                assert str(fit.get(name, "")) == cell.strip()


def test_a_page_explains_every_metric_of_a_run(finished_run: Path) -> None:
    page = (ROOT / "docs/running.md").read_text()
    for key in read_jsonl(finished_run / "metrics.jsonl")[0].keys() - {"step"}:
        assert f"`{re.sub(r'rewards/[a-z_]+', 'rewards/<name>', key)}`" in page, key


def test_the_page_of_the_api_is_that_of_the_docstrings() -> None:
    assert (ROOT / "docs/api.md").read_text() == api_page.page()


def test_pages_are_few_and_short() -> None:
    words = [len(page.read_text().split()) for page in PAGES]
    assert PAGES[0].stat().st_size <= 10_500
    assert len(PAGES) - 1 <= 12
    assert sum(words[1:]) <= 14_000
