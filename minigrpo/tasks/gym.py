"""Questions from the generators of reasoning-gym, scored by its verifiers (the extra `gym`).

    --task gym --task-args name=chain_sum,max_digits=2,extract=last-number
    --task gym --task-args name=chain_sum:3,gcd:1          a mixture: three questions to one

`size` questions (2,000) are made, and a tenth of them is held out. `extract` says which part of a
text the verifier gets: the content of the last <answer> tags (tag), the last-number, the last line,
or all of it. Each generator takes those of the other arguments that it knows.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from ..errors import refusing
from ..types import ConfigError, Example
from .base import Rows, SourceTask
from .prompts import REQUEST, tagged_answer
from .rows import Record, Row

BRIEF = "Give only the answer."
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")  # 1,234.5 is one, and 2,3 are two


def last_number(text: str) -> str:
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else ""


# extract -> (request after the question, function that cuts the answer from a text)
EXTRACTS: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "tag": (REQUEST, lambda text: tagged_answer(text, "").strip()),
    "last-number": (BRIEF, last_number),
    "line": (BRIEF, lambda text: text.strip().rpartition("\n")[2]),
    "all": (BRIEF, str.strip),
}


class Gym(SourceTask):
    reward_weights: Mapping[str, float] = {"correct": 1.0}  # the verifier's score; 1 is right
    success = "correct"

    def __init__(
        self,
        seed: int,
        name: str,
        extract: str = "tag",
        size: int = 2000,
        **settings: Any,
    ) -> None:
        if extract not in EXTRACTS:
            raise ConfigError(f"extract must be {' or '.join(EXTRACTS)}, got {extract}")
        self.request, self.cut_answer = EXTRACTS[extract]
        with refusing("pip install 'minigrpo[gym]'"):
            from reasoning_gym.composite import DatasetSpec
            from reasoning_gym.factory import DATASETS, create_dataset
        specs = []
        unread = {*settings}
        with refusing(f"name={name}"):  # such as an unknown generator
            for part in name.split(","):
                generator, _, weight = part.partition(":")
                _, settings_class = DATASETS[generator]
                known = {field.name for field in fields(settings_class)}
                chosen = {key: settings[key] for key in known & settings.keys()}
                specs.append(DatasetSpec(generator, float(weight or 1), chosen))
                unread -= known
            self.gym = create_dataset("composite", seed=seed, size=size, datasets=specs)
            self.entries: list[Record] = [*self.gym]
        if unread:
            raise ConfigError(f"no generator takes {', '.join(sorted(unread))}")
        rows = [{"number": number} for number in range(len(self.entries))]
        super().__init__(Rows(seed, [rows], (), self._row))

    def _row(self, record: Record) -> Row:
        entry = self.entries[record["number"]]
        question = entry["question"]
        answer = "" if entry["answer"] is None else str(entry["answer"])  # None: many are right
        if answer and self.request == REQUEST:
            answer = f"<answer>{answer}</answer>"
        example = Example(
            question,
            answer,
            kind=entry["metadata"]["source_dataset"],  # the generator
            messages=({"role": "user", "content": f"{question}\n\n{self.request}"},),
            fields=record,
        )
        return Row(question, example)

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        entry = self.entries[example.fields["number"]]
        correct = 0.0
        with suppress(Exception):  # some verifiers raise if the text has an unexpected form
            correct = float(self.gym.score_answer(self.cut_answer(text), entry))
        return {"correct": correct}
