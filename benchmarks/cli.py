"""`python benchmark.py [NAME] [flags]`: NAME defaults to steps; `NAME --help` lists its flags."""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from minigrpo.types import ConfigError

# Each names a module, which has a class of the same name with a capital.
BENCHMARKS = ("steps", "memory", "rewards", "peers", "scaling", "gpu")


def main(argv: Sequence[str], prog: str = "python benchmark.py") -> None:
    """Run one benchmark: print its tables, and write them to --out-dir and --json."""
    if [*argv] in (["-h"], ["--help"]):
        print(f"usage: {prog} [NAME] [flags]; NAME --help lists its flags\n")
        print(f"NAME: {', '.join(BENCHMARKS)}; steps if there is none")
        return
    name, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("steps", argv)
    if name not in BENCHMARKS:
        raise ConfigError(f"{prog}: NAME must be one of {', '.join(BENCHMARKS)}, got {name}")
    # relative, because an installed package has this folder under another name
    benchmark: Any = tyro.cli(
        getattr(import_module(f".{name}", __package__), name.title()),
        args=list(rest),
        prog=f"{prog} {name}",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    console = Console() if sys.stdout.isatty() else Console(width=170)  # the tables are wide
    result = benchmark.run(console)
    if benchmark.out_dir:
        folder = Path(benchmark.out_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join([f"# {result['device']}\n", *result["tables"], ""])
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
        console.print(f"wrote {folder / name}.md", markup=False)
    if benchmark.json:
        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        Path(benchmark.json).write_text(text, encoding="utf-8")
        console.print(f"wrote {benchmark.json}", markup=False)
