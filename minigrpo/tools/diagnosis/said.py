"""What a rule of a diagnosis says."""

from typing import NamedTuple


class Said(NamedTuple):
    """What is wrong, the numbers that show it, and what to do."""

    what: str  # a sentence
    evidence: str  # numbers and steps
    advice: str


def listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
