"""Fields of a short text, as JSON that a schema accepts: orders, appointments and addresses.

    minigrpo train --config fields

`python examples/from_gguf.py smollm2 smollm2` makes the model's folder. Texts say some values in
words: "half past two in the afternoon" is "14:30", and "a dozen" is 12. The reward is 1 if the
schema accepts the answer and all values are right + half of the fraction of values that are + a
quarter if the schema accepts it. A question has an example, or the model would hardly ever be
right. Each form has two wordings that training never has: `new wording` in the evaluations.
"""

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from minigrpo.rng import stream
from minigrpo.tasks.base import Generated, is_held_out
from minigrpo.types import Example

ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
WORDS: Mapping[str, list[str]] = ROWS["words"]
REQUEST = (
    "Read the text and answer with one JSON object, and nothing else. Its keys are {keys}. An "
    "example:\n\n{example}\n\nText: {text}"
)


class Fields(BaseModel, extra="forbid", strict=True):
    pass


class Order(Fields):
    customer: str
    item: str
    quantity: int = Field(ge=1)
    price: float = Field(gt=0)


class Appointment(Fields):
    person: str
    day: Literal["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
    time: str = Field(pattern=r"^\d\d:\d\d$")
    place: str


class Address(Fields):
    name: str
    street: str
    number: int = Field(ge=1)
    city: str


class Spoken(NamedTuple):
    """A value of a field, and the words that a text has for it."""

    value: Any
    words: str


def draw_quantity(rng: np.random.Generator) -> Spoken:
    index = int(rng.integers(len(WORDS["quantity"])))
    return Spoken(index + 2, WORDS["quantity"][index])


def draw_price(rng: np.random.Generator) -> Spoken:
    price = int(rng.integers(20, 600)) / 20
    return Spoken(price, f"${price:.2f}")


def draw_number(rng: np.random.Generator) -> Spoken:
    number = int(rng.integers(1, 200))
    return Spoken(number, str(number))


def draw_time(rng: np.random.Generator) -> Spoken:
    hour = int(rng.integers(1, 12))
    minutes, words = [("00", "{} o'clock"), ("15", "a quarter past {}"), ("30", "half past {}")][
        int(rng.integers(3))
    ]
    spoken = words.format(WORDS["hour"][hour - 1])
    if rng.integers(2):
        return Spoken(f"{hour:02}:{minutes}", f"{spoken} in the morning")
    part = "evening" if hour > 5 else "afternoon"
    return Spoken(f"{hour + 12}:{minutes}", f"{spoken} in the {part}")


FORMS: Mapping[str, type[Fields]] = {
    "order": Order,
    "appointment": Appointment,
    "address": Address,
}
# fields whose value is not a word of the text; the others have a list of words in fields.toml
DRAWS: Mapping[str, Callable[[np.random.Generator], Spoken]] = {
    "quantity": draw_quantity,
    "price": draw_price,
    "number": draw_number,
    "time": draw_time,
}


def draw(rng: np.random.Generator, field: str) -> Spoken:
    if field in DRAWS:
        return DRAWS[field](rng)
    word = str(rng.choice(WORDS[field]))
    return Spoken(word, word)


class Extraction(Generated):
    reward_weights: Mapping[str, float] = {
        "exact": 1.0,  # 1 if all values are right, else 0
        "values": 0.5,  # the fraction of them that are
        "accepted": 0.25,  # 1 if the answer is JSON that the schema accepts
    }
    success = "exact"

    def __init__(self, seed: int) -> None:
        self.seed = seed
        super().__init__(self.question, f"fields of {', '.join(FORMS)}")

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        wanted = example.fields["values"]
        block = json_of(text)
        accepted = has_form(block, FORMS[example.fields["form"]])
        found = read(block)
        values = sum(found.get(key) == value for key, value in wanted.items()) / len(wanted)
        exact = accepted and values == 1
        return {"exact": float(exact), "values": values, "accepted": float(accepted)}

    def question(self, number: int, split: str) -> Example:
        rng = stream(self.seed, f"fields/{split}", number)
        is_new = split == "held-out" and number % 2 == 0
        while True:
            form = str(rng.choice([*FORMS]))
            row = ROWS["forms"][form]
            spoken = {field: draw(rng, field) for field in FORMS[form].model_fields}
            wording = str(rng.choice(row["new" if is_new else "known"]))
            text = wording.format(**{key: words for key, (_, words) in spoken.items()})
            text = text[0].upper() + text[1:]
            request = REQUEST.format(keys=row["keys"], example=row["example"], text=text)
            if is_held_out(request) == (split == "held-out"):
                break
        values = {key: value for key, (value, _) in spoken.items()}
        return Example(
            request,
            json.dumps(values),
            number,
            kind="new wording" if is_new else "known wording",
            messages=({"role": "user", "content": request},),
            fields={"form": form, "values": values},
        )


def json_of(text: str) -> str:
    """What may be JSON in an answer: the text of its block, if it has one."""
    block = re.search(r"(?is)```(?:json)?(.*?)(?:```|$)", text)
    return block[1] if block else text


def has_form(block: str, schema: type[Fields]) -> bool:
    try:
        schema.model_validate_json(block)
    except ValidationError:
        return False
    return True


def read(block: str) -> Mapping[str, Any]:
    """The values of a JSON object; none of what is no object."""
    try:
        found = json.loads(block)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
