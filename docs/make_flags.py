"""Write docs/flags.md from the Config: `python docs/make_flags.py`.

Flags, defaults and help texts are read from minigrpo/config.py, so the page always agrees with
`minigrpo train --help`. tests/test_docs.py checks that the committed page is up to date.
"""

import ast
import inspect
import textwrap
import types
import typing
from itertools import pairwise
from pathlib import Path
from typing import Any

from minigrpo.config import Config
from minigrpo.runtime.constraints import Above, AtLeast, AtMost
from minigrpo.runtime.flags import flag
from minigrpo.runtime.renamed import NAMES, VALUES
from minigrpo.runtime.settings import as_flags, groups_of, places

PAGE = Path(__file__).with_name("flags.md")
INTRO = """\
# Flags

This page lists every flag of `minigrpo train`, with its values, its default and what it does.

It is generated from [minigrpo/config.py](../minigrpo/config.py) by `python docs/make_flags.py`.
`minigrpo train --help` prints the same flags.

- A flag that is on or off has two forms: `--kv-cache` and `--no-kv-cache`.
- `--config FILE.toml` reads settings from a file. It may be given several times, and the name of a
  shipped preset works too: `--config rtx4090`. Files override the defaults, later files override
  earlier ones, and the command line overrides all files. What comes out is checked as a whole.
- A task may change some defaults. These settings of the task are listed
  [below](#settings-of-the-tasks) and as the run starts; files and the command line override them.
- In TOML, a setting stands in the table of its group, without dashes: `group_size = 8` under
  `[sampling]`. `--task` and `--loss` are `name` in their tables. A file without tables is also
  read; its keys are the flags' names.
- In Python, `Config.of(group_size=8)` sets a flag and `config.sampling.group_size` reads it.
- A flag that does nothing in a run is listed as the run starts, with the reason:
  `no effect here: --use-tf32 (CPU)`.
- Wrong input ends the run before any work, with exit code 2 and one line that names the flag or
  the file and says what is allowed.
"""
TASKS = """\
## Settings of the tasks

| task | settings |
|---|---|
"""
OLD = """\
## Old names

These names and values are still read on the command line, in TOML files and in checkpoints.

| old | today |
|---|---|
"""
SAMPLE = 8  # shows how a renamed flag's value changes, where it does


def page() -> str:
    """The whole text of docs/flags.md."""
    groups = groups_of(Config)
    parts = [INTRO, *(_section(group, kind) for group, kind in groups.items())]
    parts += [f"{TASKS}{_of_tasks()}\n", OLD + _old_names()]
    return "\n".join(parts) + "\n"


def _section(group: str, kind: type) -> str:
    """A heading for a group, its sentence, and a table with a row per flag."""
    hints = typing.get_type_hints(kind, include_extras=True)
    helps, defaults = field_docs(kind), kind()
    lines = [f"## {group}", "", _one_line(kind.__doc__ or ""), ""]
    lines += ["| flag | values | default | what it does |", "|---|---|---|---|"]
    for name, (where, field) in places(Config).items():
        if where == group:
            default = _shown(getattr(defaults, field))
            cells = (f"`{flag(name)}`", _values(hints[field]), default, _escaped(helps[field]))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def field_docs(kind: type) -> dict[str, str]:
    """The docstring under each field of a class, which Python itself throws away."""
    tree: Any = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    return {
        field.target.id: _one_line(text.value.value)
        for field, text in pairwise(tree.body[0].body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _values(hint: Any) -> str:
    """What a field may be: its choices, or its type with the limits in its annotation."""
    limits: list[Any] = []
    if typing.get_origin(hint) is typing.Annotated:
        hint, *limits = typing.get_args(hint)
    words: list[str] = []
    for option in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
        if typing.get_origin(option) is typing.Literal:
            words += [f"`{choice}`" for choice in typing.get_args(option)]
        elif option is not types.NoneType:
            words.append({bool: "on, off", str: "text", int: "integer"}.get(option, "number"))
    signs = {AtLeast: "≥ {low:g}", Above: "> {low:g}", AtMost: "≤ {high:g}"}
    words += [signs[type(x)].format(**vars(x)) for x in limits if type(x) in signs]
    return ", ".join(words)


def _shown(value: Any) -> str:
    """A default, as a reader would type it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value == "":
        return "unset" if value is None else "empty"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _of_tasks() -> str:
    """A row for each task that changes defaults."""
    rows = [
        f"| `{name}` | {', '.join(f'`{x}`' for x in as_flags(own))} |"
        for name, own in Config.settings_by_task().items()
    ]
    return "\n".join(rows or ["| none | |"])


def _old_names() -> str:
    rows = []
    for old, now in NAMES.items():
        if now.kinds == (bool,):
            values = {flag(old): now.value(True), flag(f"no_{old}"): now.value(False)}
            rows += [f"| `{on}` | `{flag(now.name)} {x}` |" for on, x in values.items()]
            continue
        changed = now.value(SAMPLE) != SAMPLE
        before, after = (f" {SAMPLE}", f" {now.value(SAMPLE)}") if changed else ("", "")
        rows.append(f"| `{flag(old)}{before}` | `{flag(now.name)}{after}` |")
    for name, values in VALUES.items():
        rows += [f"| `{flag(name)} {old}` | `{flag(name)} {now}` |" for old, now in values.items()]
    return "\n".join(rows)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is: `<time>` would be taken for HTML."""
    return text.replace("<", r"\<").replace("|", r"\|").replace("*", r"\*")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
