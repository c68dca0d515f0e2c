"""Questions from the generators of reasoning-gym, scored by its verifiers (the extra `gym`).

    --task gym --task-args name=chain_sum,max_digits=2,extract=last-number
    --task gym --task-args name=chain_sum:3,gcd:1          a mixture: three questions to one

`size` questions (2,000) are made, of which a tenth is held out. `extract` says what the verifier
gets of a text: what is in the last <answer> tags (tag), the last-number, the last line, or all of
it. Each generator takes those of the other arguments that it knows.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from ..errors import refusing
from ..types import ConfigError, Example
from .base import SourceTask, tagged_answer
from .data import Record, Row, Rows
from .prompts import REQUEST

BRIEF = "Give only the answer."
NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")
# what is asked for after the question, and how the answer is cut from a text
EXTRACTS: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "tag": (REQUEST, lambda text: tagged_answer(text, "")),
    "last-number": (BRIEF, lambda text: (NUMBER.findall(text) or [""])[-1].replace(",", "")),
    "line": (BRIEF, lambda text: text.strip().rpartition("\n")[2]),
    "all": (BRIEF, str.strip),
}


class Gym(SourceTask):
    parts: Mapping[str, float] = {"correct": 1.0}  # the verifier's score; 1 is right
    success = "correct"

    def __init__(
        self, seed: int, name: str, extract: str = "tag", size: int = 2000, **settings: Any
    ) -> None:
        if extract not in EXTRACTS:
            raise ConfigError(f"extract must be {', '.join(EXTRACTS)}, got {extract}")
        self.request, self.cut = EXTRACTS[extract]
        with refusing("pip install 'minigrpo[gym]'"):
            from reasoning_gym.composite import DatasetSpec
            from reasoning_gym.factory import DATASETS, create_dataset
        specs = []
        unread = {*settings}
        with refusing(f"name={name}"):  # such as a generator that there is not
            for part in name.split(","):
                generator, _, weight = part.partition(":")
                known = {field.name for field in fields(DATASETS[generator][1])}
                chosen = {key: settings[key] for key in known & settings.keys()}
                specs.append(DatasetSpec(generator, float(weight or 1), chosen))
                unread -= known
            self.gym = create_dataset("composite", seed=seed, size=size, datasets=specs)
            self.entries: list[Record] = [*self.gym]
        if unread:
            raise ConfigError(f"no generator takes {', '.join(sorted(unread))}")
        rows = [{"number": n, "question": x["question"]} for n, x in enumerate(self.entries)]
        super().__init__(Rows(seed, [rows], (), self._row))

    def _row(self, record: Record) -> Row:
        entry = self.entries[record["number"]]
        answer = str(entry["answer"])
        if self.request == REQUEST:
            answer = f"<answer>{answer}</answer>"
        messages = ({"role": "user", "content": f"{entry['question']}\n\n{self.request}"},)
        generator = entry["metadata"]["source_dataset"]
        example = Example(entry["question"], answer, 0, generator, messages, fields=record)
        return Row(entry["question"], example)

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        entry = self.entries[example.fields["number"]]
        correct = 0.0
        with suppress(Exception):  # of some verifiers, for a text of another form than the answer
            correct = float(self.gym.score_answer(self.cut(text), entry))
        return {"correct": correct}
