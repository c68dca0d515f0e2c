"""Tokenizers: a tokenizer.json, run by the `tokenizers` package, and the files beside it.

That of GPT-2 is made from tiktoken's vocabulary, see gpt2_vocabulary.py.

No text gives special tokens: what spells one stays text. Only a chat template writes them.

That for chess, in assets/chess, has a token for any character, so that any text round-trips. Longer
tokens are fields with a fixed form only: the prefix of a prompt, side to move, castling rights, en
passant square, the squares of a move, the ending. Piece placement has a token per character:
moves change single characters of it, and merged tokens would hide that.
"""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ..errors import refusing
from ..identity import digest
from .chat import Chat, try_out
from .gpt2_vocabulary import END_OF_TEXT, GPT2, gpt2_engine
from .hf import CONFIG, hub_folder, read_json

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG, CHAT_TEMPLATE),
    # files that converters to other formats read; they stay true: no run changes a vocabulary
    *("tokenizer.model", "added_tokens.json", "special_tokens_map.json"),
)
ASSETS = resources.files("minigrpo.assets")
SHIPPED = {name: str(ASSETS / name) for name in ("chess", "dialogue", GPT2)}  # the folders


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

    @cached_property
    def longest_token(self) -> int:
        """The most characters of a token, or bytes."""
        return max(map(len, self.engine.get_vocab()))

    @property
    def vocabulary(self) -> str:
        """A digest of the tokens and their ids: what log-probs of ids need to be alike."""
        return digest(self.engine.get_vocab())

    @property
    def fingerprint(self) -> str:
        """A digest of all that decides the tokens of a prompt, and the end of a completion."""
        engine = json.loads(self.engine.to_str())
        del engine["version"]  # of the format
        chat = self.chat and (self.chat.source, self.chat.tokens)
        return digest([engine, self.prefix, self.eot, self.turn_end, sorted(self.stops), chat])

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of a text. `special`: what spells a special token is that token."""
        self.engine.encode_special_tokens = not special  # so no two threads may encode at once
        return self.engine.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, without special ones that end it; bytes not in UTF-8 are U+FFFD."""
        # other special ones are shown: a completion with one must not pass for one without
        hidden = self.stops & {*self.special.values()}
        return self.text_of([number for number in ids if number not in hidden])

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of tokens, all special ones included."""
        return self.engine.decode(ids, skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer`, transformers and others load."""
        for file in filter(Path.is_file, [self.source / name for name in FILES]):
            shutil.copyfile(file, folder / file.name)
        if not (self.source / TOKENIZER).is_file():  # GPT-2's
            self.engine.save(str(folder / TOKENIZER), pretty=False)
        if self.chat:  # some readers prefer one place, some the other
            (folder / CHAT_TEMPLATE).write_text(self.chat.source, "utf-8")
            config = folder / TOKENIZER_CONFIG
            with_template = {**read_json(config), "chat_template": self.chat.source}
            config.write_text(json.dumps(with_template, indent=1))
        generation = folder / GENERATION_CONFIG  # says where `generate` has to stop
        ends = [self.eot, *sorted(self.stops - {self.eot})]
        settings = {"pad_token_id": self.eot, **read_json(generation), "eos_token_id": ends}
        generation.write_text(json.dumps(settings))


def load_tokenizer(
    name: str, chat_template: str = "", system: str = "", chat_args: Mapping[str, Any] = {}
) -> Tokenizer:
    """The tokenizer of --tokenizer. Raises ConfigError.

    `name`: chess, gpt2, a model's folder, the tokenizer.json in it, or ORG/NAME on the Hub;
    `chat_template`: a file instead of the model's own; `system`, `chat_args`: see `Chat`.
    """
    folder = hub_folder(SHIPPED.get(name, name), weights=False)
    if folder.name == TOKENIZER:
        folder = folder.parent
    with refusing(f"--tokenizer {name}"):
        engine = gpt2_engine() if name == GPT2 else _read_engine(folder)
        settings = read_json(folder / TOKENIZER_CONFIG)

        # 1. The tokens that end a text, by all files that say so; first the one that is named.
        named = {  # bos_token, eos_token, ... -> their texts
            key: token["content"] if isinstance(token, dict) else token
            for key, token in settings.items()
            if key.endswith("_token") and isinstance(token, str | dict)
        }
        stated: list[Any] = [engine.token_to_id(named.get("eos_token", END_OF_TEXT))]
        for file in (GENERATION_CONFIG, CONFIG):
            ids = read_json(folder / file).get("eos_token_id")
            stated += ids if isinstance(ids, list) else [ids]
        ends = [number for number in stated if number in range(engine.get_vocab_size())]
        if not ends:
            raise ValueError(f"no eos_token in {TOKENIZER_CONFIG} or {CONFIG}")

        # 2. Special tokens, also named ones.
        special = _special_tokens(engine, settings, {*named.values()}, ends)
        # what tokenizer.json puts before every text
        alone = engine.encode("a", add_special_tokens=False).ids
        whole = engine.encode("a").ids
        prefix = whole[: whole.index(alone[0])]

        # 3. The chat template: of --chat-template, of a file of its own, or of the settings.
        template = settings.get("chat_template")
        if isinstance(template, list):  # of several
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        template_file = Path(chat_template or folder / CHAT_TEMPLATE)
        if chat_template or template_file.is_file():
            template = template_file.read_text(encoding="utf-8-sig")  # some editors write a mark
        if (system or chat_args) and not template:
            raise ValueError("--system and --chat-args need a chat template: --chat-template")
        chat = None
        if template:
            where = f"the chat template of {chat_template or name}"
            try_out(template, where, named, chat_args)
            chat = Chat(template, where, named, [*special], system, chat_args)
        turn_end = special.get(chat.turn_end, ends[0]) if chat else ends[0]
    stops = frozenset({*ends, turn_end})
    return Tokenizer(name, folder, engine, special, prefix, ends[0], turn_end, stops, chat)


def _read_engine(folder: Path) -> tokenizers.Tokenizer:
    engine = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
    engine.no_truncation()  # some files were saved with both
    engine.no_padding()
    ids = set(engine.get_vocab().values())
    if max(ids) >= len(ids):
        # a model could sample an id without a token, and would learn from what nobody sees
        raise ValueError(f"{folder}: some ids below the largest have no token")
    return engine


def _special_tokens(
    engine: tokenizers.Tokenizer, settings: Mapping[str, Any], named: set[str], ends: Sequence[int]
) -> dict[str, int]:
    """The special tokens, which the engine knows after this: also named ones, and ends of a text.

    An entry of tokenizer.json does not always say that its token is special. Entries of
    tokenizer_config.json count above it, as in transformers.
    """
    stated = settings.get("added_tokens_decoder", {})
    known = [x for number, x in stated.items() if engine.token_to_id(x["content"]) == int(number)]
    engine.add_tokens([AddedToken(**entry) for entry in known])
    added = engine.get_added_tokens_decoder()
    control = named | {added[number].content for number in ends if number in added}
    marked: list[AddedToken] = []
    for text in control:
        number = engine.token_to_id(text)
        if number is not None:
            token = added.get(number, AddedToken(text, normalized=False))
            token.special = True  # its other flags stay: Phi's swallow white space beside them
            marked.append(token)
    engine.add_special_tokens(marked)
    added = engine.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if token.special}
