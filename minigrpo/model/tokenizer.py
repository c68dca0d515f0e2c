"""Tokenizers: a tokenizer.json, run by the `tokenizers` package, and the files beside it.

No text gives special tokens: what spells one stays text. Only a chat template writes them.

The tokenizer for chess, in assets/chess, is one of them. Any character is a token there, so that
any text round-trips. Longer tokens are fields with a fixed form only: the prefix of a prompt, side
to move, castling rights, en passant square, the squares of a move, the ending (reward and flags).
Piece placement stays at one character per token, because moves change single characters of it, and
merged tokens would hide that.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import tokenizers

from ..types import ConfigError
from .chat import Chat
from .hf import CONFIG, hub_folder, read_json

END_OF_TEXT = "<|endoftext|>"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
FILES = (TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG, CHAT_TEMPLATE)
# short names -> folder, or name on the Hub
SHIPPED = files("minigrpo.assets")
KNOWN = {"gpt2": "openai-community/gpt2"} | {x: str(SHIPPED / x) for x in ("chess", "dialogue")}


@dataclass(frozen=True)
class Tokenizer:
    """Turns texts into token ids, which are 0 to n_vocab - 1, and back."""

    name: str  # what --tokenizer calls it
    source: Path  # the folder that it was read from
    engine: tokenizers.Tokenizer
    special: Mapping[str, int]  # control tokens; a text never gives them
    prefix: Sequence[int]  # what a plain prompt starts with, such as <|begin_of_text|>
    eot: int  # ends a true answer in supervised fine-tuning
    turn_end: int  # ends a true answer to messages: as the chat template does, else `eot`
    stops: frozenset[int]  # tokens that end a completion
    chat: Chat | None  # writes prompts from messages

    @property
    def n_vocab(self) -> int:
        return self.engine.get_vocab_size()

    @property
    def fingerprint(self) -> str:
        """A sha256 of the vocabulary."""
        vocabulary = json.dumps(self.engine.get_vocab(), sort_keys=True)
        return hashlib.sha256(vocabulary.encode()).hexdigest()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of a text.

        What spells a special token is text like any other, unless `special`: in what a chat
        template wrote, it is the token.
        """
        self.engine.encode_special_tokens = not special  # so no two threads may encode at once
        return self.engine.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, without special ones that end it. Bytes not in UTF-8 become U+FFFD.

        Other special tokens are shown by their name: a completion with one in its middle must not
        be taken for one without.
        """
        hidden = self.stops & {*self.special.values()}
        return self.text_of([number for number in ids if number not in hidden])

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of tokens, all special ones included."""
        return self.engine.decode(ids, skip_special_tokens=False)


def load_tokenizer(name: str, chat_template: str | None = None, system: str = "") -> Tokenizer:
    """The tokenizer of --tokenizer. Raises ConfigError.

    Args:
        name: chess, gpt2, a model's folder, the tokenizer.json in it, or ORG/NAME on the Hub.
        chat_template: a file that is used instead of the model's own chat template.
        system: a system message for all messages without one.
    """
    folder = hub_folder(KNOWN.get(name, name), weights=False)
    folder = folder.parent if folder.name == TOKENIZER else folder
    try:
        return _read(name, folder, chat_template, system)
    except Exception as error:  # the package has no class of its own; values may have any type
        raise ConfigError(f"--tokenizer {name}: {type(error).__name__}: {error}") from None


def _read(name: str, folder: Path, chat_template: str | None, system: str) -> Tokenizer:
    engine = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
    engine.no_truncation()  # some files were saved with both
    engine.no_padding()
    texts = {number: text for text, number in engine.get_vocab().items()}
    if max(texts) >= len(texts):
        # a model could sample an id without a token, and would learn from what nobody sees
        raise ValueError(f"{folder}: some ids below the largest have no token")
    settings = read_json(folder / TOKENIZER_CONFIG)
    named = {  # bos_token, eos_token, ...
        key: token["content"] if isinstance(token, dict) else token
        for key, token in settings.items()
        if key.endswith("_token") and isinstance(token, str | dict)
    }
    ends: list[Any] = [engine.token_to_id(named.get("eos_token", END_OF_TEXT))]
    for more in (GENERATION_CONFIG, CONFIG):
        found = read_json(folder / more).get("eos_token_id")
        ends += found if isinstance(found, list) else [found]
    ends = [number for number in ends if number in texts]
    # a token that is named or ends a text is special, even if its entry does not say so
    added = engine.get_added_tokens_decoder()
    control = {*named.values(), *(texts[number] for number in ends if number in added)}
    engine.add_special_tokens([text for text in control if text in texts.values()])
    added = engine.get_added_tokens_decoder()
    special = {token.content: number for number, token in added.items() if token.special}
    if not ends:
        raise ValueError(f"no eos_token in {TOKENIZER_CONFIG} or {CONFIG}")

    source = settings.get("chat_template")
    if isinstance(source, list):  # of several
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    file = Path(chat_template or folder / CHAT_TEMPLATE)
    if chat_template or file.is_file():
        source = file.read_text(encoding="utf-8-sig")  # some editors write a mark
    if system and not source:
        raise ValueError("--system needs a chat template, such as that of --chat-template")
    where = f"the chat template of {chat_template or name}"
    chat = Chat(source, where, named, list(special), system) if source else None
    turn_end = special.get(chat.turn_end, ends[0]) if chat else ends[0]
    whole, plain = (engine.encode("a", add_special_tokens=on).ids for on in (True, False))
    return Tokenizer(
        name,
        folder,
        engine,
        special,
        prefix=whole[: whole.index(plain[0])],
        eot=ends[0],
        turn_end=turn_end,
        stops=frozenset({*ends, turn_end}),
        chat=chat,
    )
