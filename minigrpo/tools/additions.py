"""Write the pairs from which the two shipped models of `--task teach` start.

python -m minigrpo.tools.additions --role student --out student.jsonl

`minigrpo train --loss nll --data FILE` trains on them; docs/task-teach.md has the commands.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..runtime.flags import ConfigError, parse
from ..runtime.outputs import check_output_file, write_output
from ..tasks.additions import students_pairs, teachers_pairs
from .messages import one_line_errors

PAIRS = {"student": students_pairs, "teacher": teachers_pairs}


@dataclass(frozen=True)
class Arguments:
    role: Literal["student", "teacher"]
    """Whose pairs to write."""
    out: Path
    """The file, which ends with .jsonl."""
    n: int = 40_000
    """Number of pairs."""
    seed: int = 0
    """Of the questions and of random carries."""


def main(argv: Sequence[str] | None = None) -> None:
    with one_line_errors("stopped; nothing was written"):
        arguments = parse(Arguments, argv, description=__doc__)
        if arguments.n < 1:
            raise ConfigError(f"--n must be at least 1, got {arguments.n}")
        check_output_file("--out", arguments.out, (".jsonl",))
        pairs = PAIRS[arguments.role](arguments.n, arguments.seed)
        lines = [json.dumps({"prompt": a, "answer": b}) + "\n" for a, b in pairs]
        write_output("--out", arguments.out, lambda path: path.write_text("".join(lines)))


if __name__ == "__main__":
    main()
