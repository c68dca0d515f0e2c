"""Tokenizers: a tokenizer.json, run by the `tokenizers` package, and the files beside it.

The tokenizer for chess, in assets/chess, has a token for any character, so that any text
round-trips. Only fields with a fixed form are longer tokens: the prefix of a prompt, side to move,
castling rights, en passant square, the squares of a move, the ending. Piece placement has a token
per character, because moves change single characters, and merged tokens would hide that.
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
from tiktoken.load import read_file_cached
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from ..errors import refusing
from ..hub import CONFIG, read_json, settings_folder
from ..identity import digest
from .chat import Chat

# GPT-2's vocabulary, whose two files tiktoken fetches
GPT2 = "gpt2"
END_OF_TEXT = "<|endoftext|>"
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
IDS_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    GENERATION_CONFIG,
    CHAT_TEMPLATE,
    # files for converters to other formats; they stay true, because no run changes a vocabulary
    "tokenizer.model",
    "added_tokens.json",
    "special_tokens_map.json",
)
ASSETS = resources.files("minigrpo.assets")
BUNDLED = {name: str(ASSETS / name) for name in ("chess", "dialogue", GPT2)}  # name -> folder
PARTIAL = "\ufffd"  # the text of bytes that are not yet a whole character


@dataclass(frozen=True)
class Tokenizer:
    """Turns texts into token ids, which are 0 to n_vocab - 1, and back."""

    name: str  # the value of --tokenizer
    source: Path  # the folder that it was read from
    engine: tokenizers.Tokenizer
    special: Mapping[str, int]  # ids of control tokens, which are never read from a text
    prefix: Sequence[int]  # tokens that begin a plain prompt, such as <|begin_of_text|>
    eot: int  # token that ends a true answer in supervised fine-tuning
    turn_end: int  # token that ends a true answer to messages: the chat template's, else `eot`
    stops: frozenset[int]  # tokens that end a completion
    chat: Chat | None  # writer of prompts from messages

    @property
    def n_vocab(self) -> int:
        return self.engine.get_vocab_size()

    @property
    def fingerprint(self) -> str:
        """A digest of all that decides the tokens of a prompt, and the end of a completion."""
        ends = (self.eot, self.turn_end, sorted(self.stops))
        chat = self.chat and (self.chat.source, self.chat.tokens)
        return digest([self.engine.to_str(), self.prefix, ends, chat])

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of a text, in which `special` tokens are read or stay text.

        Not thread-safe: the choice is an attribute of the engine.
        """
        self.engine.encode_special_tokens = not special
        return self.engine.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens without special stop tokens; bytes that are not UTF-8 are U+FFFD."""
        # other special tokens are shown: a completion with one must not pass for one without
        hidden = self.stops & {*self.special.values()}
        return self.text_of([number for number in ids if number not in hidden])

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of tokens, all special ones included."""
        return self.engine.decode(ids, skip_special_tokens=False)

    @cached_property
    def letter_a(self) -> list[int]:
        return self.encode("a")

    def text_within(self, ids: Sequence[int]) -> str:
        """The text of tokens within a longer text (SentencePiece drops a space that begins one)."""
        return self.text_of([*self.letter_a, *ids])[1:]

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer`, transformers and others load."""
        for file in filter(Path.is_file, [self.source / name for name in FILES]):
            shutil.copyfile(file, folder / file.name)
        if not (self.source / TOKENIZER).is_file():  # GPT-2's tokenizer, made here
            self.engine.save(str(folder / TOKENIZER), pretty=False)
        if self.chat:  # some readers look in one place, some in the other
            (folder / CHAT_TEMPLATE).write_text(self.chat.source, "utf-8")
            config = folder / TOKENIZER_CONFIG
            with_template = {**read_json(config), "chat_template": self.chat.source}
            config.write_text(json.dumps(with_template, indent=1))
        generation = folder / GENERATION_CONFIG  # tells `generate` of transformers where to stop
        ends = [self.eot, *sorted(self.stops - {self.eot})]
        settings = {"pad_token_id": self.eot, **read_json(generation), "eos_token_id": ends}
        generation.write_text(json.dumps(settings))


def load_tokenizer(
    name: str,
    chat_template: str = "",
    system: str = "",
    chat_args: Mapping[str, Any] = {},
) -> Tokenizer:
    """Read the tokenizer named by --tokenizer. Raises ConfigError.

    `name` is chess, gpt2, a model's folder, the tokenizer.json in it, or ORG/NAME on the Hub.
    `chat_template` is a file that replaces the model's own. `Chat` explains the others.
    """
    folder = settings_folder(BUNDLED.get(name, name))
    if folder.name == TOKENIZER:
        folder = folder.parent
    with refusing(f"--tokenizer {name}"):
        engine = gpt2_engine() if name == GPT2 else _read_engine(folder)
        settings = read_json(folder / TOKENIZER_CONFIG)

        # 1. The tokens that tokenizer_config.json names, such as eos_token, and all special ones.
        named = {
            key: token["content"] if isinstance(token, dict) else token
            for key, token in settings.items()
            if key.endswith("_token") and isinstance(token, str | dict)
        }
        ends = _end_tokens(engine, named.get("eos_token", END_OF_TEXT), folder)
        special = _special_tokens(engine, settings, {*named.values()}, ends)

        # 2. The tokens that tokenizer.json puts before every text.
        alone = engine.encode("a", add_special_tokens=False).ids
        whole = engine.encode("a").ids
        prefix = whole[: whole.index(alone[0])]

        # 3. The chat.
        chat = None
        turn_end = ends[0]
        template = settings.get("chat_template")
        file = Path(chat_template or folder / CHAT_TEMPLATE)
        if chat_template or file.is_file():
            template = file.read_text("utf-8-sig")  # some editors write a byte order mark
        if template:
            where = f"the chat template of {chat_template or name}"
            chat = Chat(template, where, named, [*special], system, chat_args)
            turn_end = special.get(chat.turn_end, ends[0])
        elif system or chat_args:
            raise ValueError("--system and --chat-args need a chat template: give --chat-template")
    return Tokenizer(
        name,
        folder,
        engine,
        special=special,
        prefix=prefix,
        eot=ends[0],
        turn_end=turn_end,
        stops=frozenset({*ends, turn_end}),
        chat=chat,
    )


def _read_engine(folder: Path) -> tokenizers.Tokenizer:
    engine = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
    engine.no_truncation()  # some files were saved with truncation and padding
    engine.no_padding()
    ids = set(engine.get_vocab().values())
    if max(ids) >= len(ids):
        # a model could sample an id without a token, which no text would show
        raise ValueError(f"{folder}: some ids below the largest have no token")
    return engine


def _end_tokens(engine: tokenizers.Tokenizer, eos_token: str, folder: Path) -> list[int]:
    """The tokens that end a text, by all files that name some; the `eos_token` comes first."""
    stated: list[Any] = [engine.token_to_id(eos_token)]
    for file in (GENERATION_CONFIG, CONFIG):
        ids = read_json(folder / file).get("eos_token_id")
        stated += ids if isinstance(ids, list) else [ids]
    ends = [number for number in stated if number in range(engine.get_vocab_size())]
    if not ends:
        raise ValueError(f"no eos_token in {TOKENIZER_CONFIG} or {CONFIG}")
    return ends


def _special_tokens(
    engine: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    named: set[str],
    ends: Sequence[int],
) -> dict[str, int]:
    """Mark the named tokens and the ends of a text as special; return all special tokens.

    An entry of tokenizer.json does not always say that its token is special. Entries of
    tokenizer_config.json override it, as in transformers.
    """
    # 1. The entries of tokenizer_config.json.
    stated = [
        AddedToken(**entry)
        for number, entry in settings.get("added_tokens_decoder", {}).items()
        if engine.token_to_id(entry["content"]) == int(number)
    ]
    engine.add_tokens(stated)

    # 2. The named tokens, and the ends of a text.
    added = engine.get_added_tokens_decoder()
    control = named | {added[number].content for number in ends if number in added}
    marked: list[AddedToken] = []
    for text in control:
        number = engine.token_to_id(text)
        if number is not None:
            token = added.get(number, AddedToken(text, normalized=False))
            token.special = True  # other flags stay: tokens of Phi swallow the white space beside
            marked.append(token)
    engine.add_special_tokens(marked)
    added = engine.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if token.special}


def gpt2_engine() -> tokenizers.Tokenizer:
    """GPT-2's tokenizer. Raises ConfigError if its vocabulary is neither stored nor fetched."""
    with refusing("GPT-2's vocabulary cannot be fetched"):
        ids = read_file_cached(f"{GPT2_URL}/encoder.json", IDS_SHA256)
        merges = read_file_cached(f"{GPT2_URL}/vocab.bpe", MERGES_SHA256)
    pairs: list[Any] = [tuple(line.split()) for line in merges.decode().splitlines()[1:]]
    engine = tokenizers.Tokenizer(models.BPE(vocab=json.loads(ids), merges=pairs))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2's pattern
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([END_OF_TEXT])
    return engine
