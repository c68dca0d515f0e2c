"""List every figure in the documentation with what made it: `python docs/check_figures.py`.

A measured table or picture is followed, in its section, by a line that names its command and the
commit that it ran at. A section that quotes a measured number has such a line too. It is one of

    Made by `COMMAND` at COMMIT.
    Made by `COMMAND` and `COMMAND` at COMMIT, and anything else that a reader should know.
    Made by the commands above at COMMIT.              or below: the section's bash blocks
    Made by the commands in [PAGE](FILE.md#SECTION) at COMMIT.
    Recorded at COMMIT; no command makes it again.

Commands have today's names. `<!-- not measured: REASON -->` excuses the table after it, or the text
of a section without tables. The exit code is 1 if a figure has no such line, if a command does not
parse (with the parser of its program) or if a commit is not in the history. In a shallow clone, and
without git, commits are not checked.
"""

import contextlib
import importlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
GENERATED = ("flags.md",)
TOP = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]

CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
PICTURE = re.compile(r"^!\[.*\]\(\S+\)$", re.MULTILINE)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
NUMBER = re.compile(r"[*+-]*\d[\d.,/ ]*(%|x|ms|s|MiB|of \d+)?\**(\s*\(.*\))?")
QUANTITY = re.compile(r"\d ?(%|x\b|s\b|ms\b|µs\b|min\b|MiB\b|MB\b|points\b|minutes\b|seconds\b)")
COMMIT = r"(?:\s+at\s+)([0-9a-f]{7,40})\b"
MADE = re.compile(r"Made\s+by\s+((?:`[^`]+`|[^`.]|\.(?=\w))+?)" + COMMIT)
RECORDED = re.compile(r"Recorded" + COMMIT + r";\s+no\s+command\s+makes\s+it\s+again")
EXCUSED = re.compile(r"<!-- not measured: .+? -->")

ENDS = {";", "&&", "||", "|", "&", "do", "done", "then"}  # words between two commands of a line
SHELL = {"for", "set", "cd"}  # commands that belong to the shell
TRAINING = {"train.py", "distributed_train.py", "slurm/grpo.sbatch"}
TOOLS = ("evaluate", "sample", "report", "compare", "curves", "export", "annotate")


@dataclass(frozen=True)
class Figure:
    """A table, a picture or quoted numbers, with what made them."""

    where: str  # page:line
    kind: str
    commands: tuple[str, ...]  # as they are typed; empty if none makes it again
    commit: str = ""
    is_said: bool = True  # whether a line says what made it


def figures(path: Path) -> list[Figure]:
    """All figures of a page, in order."""
    text = path.read_text(encoding="utf-8")
    hidden = CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)  # same places, no code
    starts = [0, *(match.start() for match in HEADING.finditer(hidden)), len(text)]
    found = list[Figure]()
    for start, end in pairwise(starts):
        section = hidden[start:end]
        sources = sorted([*MADE.finditer(section), *RECORDED.finditer(section)], key=_place)
        blocks = [(place, kind, _next(sources, place)) for place, kind in measured(section)]
        used = [source for _, _, source in blocks]
        blocks += [(source.start(), "text", source) for source in sources if source not in used]
        if not blocks and (place := _unsourced(section)):
            blocks = [(place, "text", None)]
        for place, kind, source in sorted(blocks, key=lambda block: block[0]):
            where = f"{path.name}:{text.count(chr(10), 0, start + place) + 1}"
            found.append(_figure(where, kind, source, text[start:end]))
    return found


def measured(section: str) -> list[tuple[int, str]]:
    """Place and kind of each picture and measured table of a section, except those excused."""
    places = [(match.start(), "picture") for match in PICTURE.finditer(section)]
    places += [(m.start(), "table") for m in TABLE.finditer(section) if _has_numbers(m[0])]
    excuses, found, before = [m.start() for m in EXCUSED.finditer(section)], [], 0
    for place, kind in sorted(places):
        if not any(before <= excuse < place for excuse in excuses):
            found.append((place, kind))
        before = place
    return found


def _unsourced(section: str) -> int:
    """The place of a measured number in a section that says nowhere what made it; 0 if none."""
    prose = re.sub(r"`[^`\n]*`", lambda code: " " * len(code[0]), section)
    quantity = None if EXCUSED.search(section) else QUANTITY.search(prose)
    return quantity.start() if quantity else 0


def _next(sources: "Sequence[re.Match[str]]", place: int) -> "re.Match[str] | None":
    return next((source for source in sources if source.start() > place), None)


def _has_numbers(table: str) -> bool:
    cells = [line.strip("| \n").split("|")[1:] for line in table.splitlines()[2:]]
    return any(NUMBER.fullmatch(cell.strip()) for row in cells for cell in row)


def _place(match: "re.Match[str]") -> int:
    return match.start()


def _figure(where: str, kind: str, source: "re.Match[str] | None", code: str) -> Figure:
    if source is None:
        return Figure(where, kind, (), is_said=False)
    if source.re is RECORDED:
        return Figure(where, kind, (), source[1])
    made, commit = source[1], source[2]
    if re.match(r"the\s+commands?\s+(above|below)", made):
        typed = (_typed(words) for words in bash_commands(code) if words[0] not in SHELL)
        return Figure(where, kind, tuple(typed), commit)
    if link := re.match(r"the\s+commands?\s+in\s+\[.*?\]\((\S+?)(#\S*)?\)", made, re.DOTALL):
        return Figure(where, kind, (f"see {link[1]}",), commit)
    return Figure(where, kind, tuple(re.findall(r"`([^`]+)`", made)), commit)


def _typed(words: Sequence[str]) -> str:
    """A command on one line, with 0 for the variables of a shell loop."""
    return " ".join(re.sub(r"\$\w+", "0", word) for word in words if word != "${@:2}")


def bash_commands(text: str) -> Iterator[list[str]]:
    """The commands in a text's bash blocks, as lists of words."""
    for language, code in CODE.findall(text):
        for line in code.replace("\\\n", " ").splitlines() if language == "bash" else ():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, ";"]:
                if word not in ENDS:
                    words.append(word)
                elif words:
                    yield words
                    words = []


# --- does a command still parse -------------------------------------------------------------------


@cache
def complaint(command: str) -> str:
    """Why a command cannot be run any more, or "" if its program accepts its flags."""
    words = shlex.split(command)
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        words = words[1:]
    try:
        return _parse(words)
    except (ValueError, SystemExit) as error:
        return str(error)


def _parse(words: Sequence[str]) -> str:
    """Parse a command with the parser of its program; nothing is run. Raises ValueError."""
    program, *rest = words
    if program == "see":
        return (
            "" if any((folder / rest[0]).exists() for folder in (ROOT, ROOT / "docs")) else "gone"
        )
    if program in ("torchrun", "sbatch"):
        script = next((i for i, word in enumerate(rest) if word in TRAINING), -1)
        return _config(rest[script + 1 :]) if script >= 0 else "starts no script of this project"
    if program == "python" and rest[0] == "-m":
        return "" if _has_module(rest[1]) else f"no module {rest[1]}"
    if program == "python" and not (ROOT / rest[0]).is_file():
        return f"no script {rest[0]}"
    if program == "pytest":
        gone = [word for word in rest if word.endswith(".py") and not (ROOT / word).exists()]
        return f"no file {gone[0]}" if gone else ""
    name = {"train.py": "train", "benchmark.py": "benchmark"}.get(rest[0], rest[0])
    if program == "minigrpo" or name != rest[0]:
        return _minigrpo(name, rest[1:])
    return "" if program == "python" else f"no program {program}"


def _minigrpo(name: str, flags: Sequence[str]) -> str:
    if name in ("train", "plan"):
        return _config(flags)
    if name == "benchmark":
        importlib.import_module("benchmarks.cli").parse_benchmark(list(flags))
        return ""
    if name not in TOOLS:
        return f"minigrpo has no command {name}"
    parse = importlib.import_module("minigrpo.runtime.flags").parse
    parse(importlib.import_module(f"minigrpo.tools.{name}").Arguments, list(flags))
    return ""


def _config(flags: Sequence[str]) -> str:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        importlib.import_module("minigrpo.config").Config.from_cli(list(flags))
    return said.getvalue().strip()


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


# --- is a commit there ----------------------------------------------------------------------------


def _git(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)


@cache
def has_history() -> bool:
    """Whether all commits of this checkout are here to be looked up."""
    try:
        return _git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"
    except OSError:
        return False


@cache
def in_history(commit: str) -> bool:
    return _git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0


# --- the report -----------------------------------------------------------------------------------


def problems(figure: Figure) -> list[str]:
    """What is wrong with a figure's source."""
    if not figure.is_said:
        return ["no line says what made it"]
    found = [f"`{command}`: {why}" for command in figure.commands if (why := complaint(command))]
    if has_history() and not in_history(figure.commit):
        found.append(f"commit {figure.commit} is not in the history")
    return found


def main() -> int:
    """Print all figures; return 1 if one has a problem."""
    wrong = 0
    for page in PAGES:
        for figure in figures(page) if page.name not in GENERATED else ():
            if figure.is_said:
                made = ", ".join(figure.commands) or "no command makes it again"
                print(f"{figure.where:22}{figure.kind:9}{figure.commit:9}{made}")
            for problem in problems(figure):
                wrong += 1
                print(f"{figure.where:22}{figure.kind:9}WRONG: {problem}")
    print(f"{wrong} problems" + ("" if has_history() else "; commits were not checked"))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
