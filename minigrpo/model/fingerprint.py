"""Digests that tell whether two tokenizers give the same tokens and end texts alike."""

import hashlib
from collections.abc import Iterable
from operator import itemgetter

from .chat import ChatTemplate
from .vocabulary import Vocabulary


def fingerprint(
    vocabulary: Vocabulary, eot: int, turn_end: int, stops: Iterable[int], chat: ChatTemplate | None
) -> dict[str, str]:
    """A sha256 by part: the vocabulary, the tokens that end a text, the chat template.

    Args: as a Tokenizer has them.
    """
    tables = (vocabulary.ranks, vocabulary.special, vocabulary.added, vocabulary.unreachable)
    return {
        "vocabulary": _digest(
            *(sorted(table.items(), key=itemgetter(1)) for table in tables),
            *(vocabulary.pattern, vocabulary.nfc, vocabulary.prefix),
        ),
        "set of ends": _digest(eot, turn_end, sorted(stops)),
        "chat template": _digest(chat and (chat.source, sorted(chat.tokens.items()))),
    }


def _digest(*values: object) -> str:
    # `repr` would depend on Python's version of Unicode
    return hashlib.sha256(ascii(values).encode()).hexdigest()
