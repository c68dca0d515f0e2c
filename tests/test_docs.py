"""README.md and docs/*.md name only what exists: files, headings, commands, presets and flags."""

import contextlib
import importlib.util
import io
import re
import runpy
import sys
import warnings
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from minigrpo import Config
from minigrpo.runtime.flags import flag
from minigrpo.runtime.settings import find_preset, places
from minigrpo.tools import plan

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FIGURES = runpy.run_path(str(ROOT / "docs" / "check_figures.py"))
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# where the flags of a command are declared: the Config, or a script or module with a --help
CONFIG = "the Config"
COMMANDS = {
    "train": CONFIG,
    "plan": CONFIG,
    "benchmark": "benchmark.py",
    **{name: f"minigrpo.tools.{name}" for name in ("evaluate", "sample", "compare", "curves")},
    "export": "minigrpo.tools.export",
    "doctor": "minigrpo.tools.doctor",
    "report": "minigrpo.tools.report",
    "annotate": "minigrpo.tools.annotate",
}
TRAINING = FIGURES["TRAINING"]


def prose(path: Path) -> str:
    """A page without its code blocks."""
    return CODE.sub("", path.read_text(encoding="utf-8"))


@cache
def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, by GitHub's rule."""
    headings = re.findall(r"^#+ +(.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading(path: Path) -> None:
    for link in LINK.findall(prose(path)):
        if re.match(r"[a-z]+:", link):
            continue  # another site: tests do not ask the network
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), f"{path.name}: {link} is not there"
        assert not anchor or anchor in anchors(target), f"{path.name}: {link} has no such heading"


def split_command(words: list[str]) -> tuple[str, list[str]] | None:
    """What a command runs (a script, a module, `CONFIG`) and its arguments; None if not ours."""
    if words[0] == "minigrpo":
        assert len(words) > 1 and words[1] in COMMANDS, f"no command {words[:2]}"
        return COMMANDS[words[1]], words[2:]
    if words[0] in ("torchrun", "sbatch"):
        script = next(word for word in words if word in TRAINING)
        return CONFIG, words[words.index(script) + 1 :]
    if words[0] != "python":
        return None
    if words[1] == "-m":
        assert importlib.util.find_spec(words[2]), f"no module {words[2]}"
        return words[2], words[3:]
    assert (ROOT / words[1]).is_file(), f"no script {words[1]}"
    return CONFIG if words[1] in TRAINING else words[1], words[2:]


@cache
def flags_of(program: str, argument: str) -> set[str]:
    """The flags that a program's --help shows, for benchmark.py by its first argument."""
    if program == CONFIG:
        names = {flag(no + name) for name in places(Config) for no in ("", "no_")}
        return names | {"--config", "--help"}
    arguments = [argument] if program == "benchmark.py" and argument else []
    shown, before = io.StringIO(), sys.argv
    sys.argv = [program, *arguments, "--help"]
    try:
        with contextlib.redirect_stdout(shown), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the module may be imported already
            run = runpy.run_path if program.endswith(".py") else runpy.run_module
            run(str(ROOT / program) if program.endswith(".py") else program, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"{program} --help fails") from end
    finally:
        sys.argv = before
    return set(re.findall(r"--[a-z][a-z0-9-]*", shown.getvalue()))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_and_every_flag_of_it_exists(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # so that --help does not wrap a flag
    for words in FIGURES["bash_commands"](path.read_text(encoding="utf-8")):
        if (found := split_command(words)) is None:
            continue
        program, arguments = found
        first = arguments[0] if arguments and not arguments[0].startswith("-") else ""
        given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
        if given:
            unknown = given - flags_of(program, first)
            assert not unknown, f"{path.name}: {' '.join(words)}: no flag {', '.join(unknown)}"
        for name, value in pairwise(arguments):
            if name == "--config" and "/" not in value and value != "FILE.toml":
                assert find_preset(value).is_file(), f"{path.name}: no preset {value}"


def test_the_page_of_flags_is_what_the_config_says() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_flags.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "run docs/make_flags.py"


def test_the_tables_of_plans_are_what_the_presets_say() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_plans.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "run docs/make_plans.py"
    assert {preset for _, preset in made["MARK"].findall(made["page"]())} == made["PLANS"].keys()
    for preset, columns in made["PLANS"].items():
        for name, gigabytes, flags in columns:
            assert plan.fits(made["plan"](preset, flags).peak_mib, gigabytes), f"{preset}: {name}"
            comment = re.sub(r"\s*\n# ?", " ", find_preset(preset).read_text(encoding="utf-8"))
            assert flags in comment and name.split(",")[0] in comment


def test_the_tables_of_steps_are_what_the_results_say() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_steps.py"))
    for path in made["PAGES"]:
        text = path.read_text(encoding="utf-8")
        assert text == made["page"](path) and made["TABLE"].search(text), "run docs/make_steps.py"


def test_the_tables_of_scaling_are_what_the_plans_say() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_scaling.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "run docs/make_scaling.py"
    assert {name for _, name in made["MARK"].findall(made["page"]())} == made["TABLES"].keys()


def test_a_ring_sends_what_its_definition_says() -> None:
    """2 (n - 1) / n of the data through every link; between machines, once per machine."""
    made = runpy.run_path(str(ROOT / "docs" / "make_scaling.py"))
    card = made["Card"](1.0, 1.0, 1, 4, inside=100.0, between=10.0, host=1.0)
    sizes = {1: 0.0, 2: 1.0, 4: 1.5, 8: 1.5 + 10.0, 16: 1.5 + 15.0}
    for cards, expected in sizes.items():
        assert made["exchange"](card, cards, 100.0) == pytest.approx(expected)


def test_every_figure_says_what_made_it_and_its_command_still_parses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = FIGURES["main"]()
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "python benchmark.py steps --natural" in printed and "WRONG" not in printed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("| | s |\n|---|---|\n| a | 3.2 |\n", "no line says what made it"),
        ("![A curve](curves.png)\n", "no line says what made it"),
        ("It takes 12 s.\n", "no line says what made it"),
        ("It takes 12 s.\n\n## Next\n\nMade by `python train.py` at HEAD.\n", "no line says"),
        ("Made by `python train.py` at HEAD.\n\n![A curve](c.png)\n", "no line says what made it"),
        ("12 s. Made by `python train.py --steps 3` at HEAD.\n", "unknown flag --steps"),
        ("12 s. Made by `python benchmark.py stepz` at HEAD.\n", "NAME must be one of"),
        ("12 s. Made by `python benchmark.py --repeats 0` at HEAD.\n", "--repeats must be"),
        ("12 s. Made by `minigrpo curves a --nope` at HEAD.\n", "--nope"),
        ("12 s. Made by `minigrpo juggle` at HEAD.\n", "no command juggle"),
        ("12 s. Made by `python docs/gone.py` at HEAD.\n", "no script docs/gone.py"),
        ("12 s. Made by `python -m tests.gone` at HEAD.\n", "no module tests.gone"),
        ("12 s. Made by `python grpo.py` at 0123456.\n", "commit 0123456 is not in the history"),
        ("12 s. Made by `python grpo.py` and\n`minigrpo train --seed 1` at HEAD.\n", ""),
        (
            "```bash\nminigrpo train --seed $s\n```\n\n12 s. Made by the command above at HEAD.\n",
            "",
        ),
        ("12 s. (Recorded at HEAD; no command makes it again.)\n", ""),
        ("<!-- not measured: settings -->\n| | w |\n|---|---|\n| a | 0.5 |\n", ""),
        ("Seed 3 of 4, in 2 columns; see arXiv 2506.09477 and `--x 12 s`.\n", ""),
    ],
)
def test_a_figure_without_a_source_is_found(tmp_path: Path, text: str, said: str) -> None:
    if not FIGURES["has_history"]() and "0123456" in text:
        pytest.skip("without the history no commit can be checked")
    page = tmp_path / "page.md"
    head = FIGURES["_git"]("rev-parse", "--short=8", "HEAD").stdout.strip() or "0" * 8
    page.write_text("# A page\n\n" + text.replace("HEAD", head))
    problems = [x for figure in FIGURES["figures"](page) for x in FIGURES["problems"](figure)]
    assert len(problems) == bool(said)
    assert not said or said in problems[0]
