"""Tokenizers: the shipped one for chess, GPT-2's, or one from a file or a model's folder.

All are byte-level BPE, which tiktoken runs. What differs is a Vocabulary, and which tokens end a
text. chess_tokens.py, vocabulary.py and tokenizer_json.py read vocabularies.
"""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import regex
import tiktoken

from .chat import ChatTemplate
from .chess_tokens import CHESS_PATTERN, shipped_ranks
from .fingerprint import fingerprint
from .hub import local_folder
from .nfc import nfc
from .tokenizer_files import (
    GPT2_FILES,
    TOKENIZER,
    added_in_config,
    control_tokens,
    end_numbers,
    end_of_text,
    named_tokens,
    read_chat_template,
)
from .tokenizer_json import read_tokenizer_json
from .vocabulary import END_OF_TEXT, GPT2_PATTERN, Vocabulary, parse_gpt2, parse_ranks, ranked


class Tokenizer:
    """Turns texts into tokens and back. tiktoken does the merging.

    Attributes:
        name: what --tokenizer calls it.
        n_vocab: how many tokens there are; their numbers are 0 to n_vocab - 1.
        special: control tokens and their numbers. `encode` never gives them.
        eot: ends a true answer in training.
        turn_end: ends a true answer to messages: as the chat template does, else eot.
        stops: tokens that end a completion; eot and turn_end are among them.
        unknown_stops: numbers that end a completion of the model, but of no token here.
        prefix: what a prompt without a chat template starts with; mostly nothing.
        chat: writes prompts from messages; None if the model has no template.
        is_lossless: every text is decoded as it was; otherwise some are normalised.
        tokens: number -> bytes.
        fingerprint: a digest of each part that decides what the tokens of a text are.
        source: the file or folder that it was read from; None if it came with a package.
    """

    source: Path | None = None

    def __init__(
        self,
        name: str,
        vocabulary: Vocabulary,
        *,
        eot: int,
        stops: Iterable[int] = (),
        chat: ChatTemplate | None = None,
    ) -> None:
        self.name, self.eot, self.chat = name, eot, chat
        self.n_vocab, self.special = vocabulary.size, vocabulary.special
        self.prefix = vocabulary.prefix
        end = chat.turn_end([*self.special]) if chat else None
        self.turn_end = self.special[end] if end else eot
        everything = frozenset({eot, self.turn_end, *stops})
        self.stops = everything & frozenset(range(self.n_vocab))
        self.unknown_stops = everything - self.stops
        self.fingerprint = fingerprint(vocabulary, self.eot, self.turn_end, self.stops, chat)
        self.tokens = vocabulary.bytes_by_number()
        hidden = self.stops & {*self.special.values()}
        self._texts = {**self.tokens, **dict.fromkeys(hidden, b"")}
        self._engine = tiktoken.Encoding(
            name,
            pat_str=vocabulary.pattern,
            mergeable_ranks=dict(vocabulary.ranks),
            special_tokens={},
        )
        self._nfc, self._pattern = vocabulary.nfc, vocabulary.pattern
        self._added, self._dropped = vocabulary.added, vocabulary.missing
        # Special tokens are looked for too: an added token inside one of them is text.
        strings = sorted([*self._added, *self.special], key=len, reverse=True)
        self._strings = re.compile("|".join(map(re.escape, strings)))
        self.is_lossless = not (self._nfc or self._dropped)
        self._as_it_is = self.is_lossless and not self._added

    def __repr__(self) -> str:
        return f"<Tokenizer {self.name}, {self.n_vocab} tokens>"

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. What spells a special token is text like any other."""
        if self._as_it_is:
            return self._engine.encode_ordinary(text)
        if not self._added:
            return self._encode_part(text)
        ids, start = list[int](), 0
        for found in self._strings.finditer(text):
            if found[0] in self._added:
                ids += self._encode_part(text[start : found.start()])
                ids.append(self._added[found[0]])
                start = found.end()
        return ids + self._encode_part(text[start:])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, as `encode` does."""
        encode = self._engine.encode_ordinary if self._as_it_is else self.encode
        return [encode(text) for text in texts]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt without a chat template: with `prefix` before it."""
        return [*self.prefix, *self.encode(text)]

    def decode(self, ids: Iterable[int], *, show_stops: bool = False) -> str:
        """Return the text of tokens, see `decode_bytes`. Bytes not in UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, show_stops=show_stops).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int], *, show_stops: bool = False) -> bytes:
        """Return the text of tokens as bytes, which may end within a character.

        Special tokens that are stops end a text and are not part of it: they are left out, unless
        `show_stops`. Other special tokens are shown by their name, so that a completion with one in
        its middle is not taken for one without.

        Raises KeyError for a number outside of 0 to n_vocab - 1.
        """
        table = self.tokens if show_stops else self._texts
        return b"".join([table[number] for number in ids])

    def with_system(self, text: str) -> "Tokenizer":
        """A copy that puts a system message before messages, as --system does.

        Raises ValueError if there is no chat template.
        """
        changed = copy.copy(self)
        changed.chat = replace(self.template(f"--system {text!r:.40}"), system=text)
        return changed

    def template(self, what: str) -> ChatTemplate:
        """The chat template. Raises ValueError, which begins with `what`, if there is none."""
        if self.chat is None:
            raise ValueError(
                f"{what}: --tokenizer {self.name} has no chat template; --chat-template FILE "
                "gives one"
            )
        return self.chat

    def _encode_part(self, text: str) -> list[int]:
        """The tokens of a text without added tokens."""
        if self._nfc:
            text = nfc(text)
        if self._dropped:
            # half of a surrogate pair becomes U+FFFD, as in tiktoken
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            data = text.encode()
            if len(data.translate(None, self._dropped)) < len(data):
                return self._encode_without(text)
        return self._engine.encode_ordinary(text)

    def _encode_without(self, text: str) -> list[int]:
        """The tokens of a text with bytes that have no token: they are dropped.

        SmolLM2's vocabulary lacks 21 bytes. The text is split before they are dropped, and what
        stood on both sides of one can be merged, as in Hugging Face's implementation.
        """
        ids = list[int]()
        for piece in regex.findall(self._pattern, text):
            kept = piece.encode().translate(None, self._dropped)
            ids += self._engine._encode_single_piece(kept) if kept else []
        return ids


# --- where tokenizers come from -------------------------------------------------------------------


@cache
def load_tokenizer(name: str, chat_template: str | None = None) -> Tokenizer:
    """Return the tokenizer of --tokenizer.

    Args:
        name: chess, gpt2, or a path: a model's folder or the tokenizer.json in it, a .tiktoken file
            of ranks, one of GPT-2's two files (see GPT2_FILES) with the other one in the same
            folder, or that folder; or ORG/NAME on the Hugging Face Hub.
        chat_template: a file with a chat template, which counts before the model's own.

    Raises:
        ValueError: in one line, for a path without a tokenizer, for one that is not supported, or
            if GPT-2's ranks or ORG/NAME are not cached and cannot be fetched.
    """
    own = _override(chat_template)
    if not name.strip():
        raise ValueError(f"--tokenizer must be auto, chess, gpt2 or a path, got {name!r}")
    if name == "chess":
        return _of_ranks(name, shipped_ranks(), own, CHESS_PATTERN)
    if name == "gpt2":
        return _of_ranks(name, _fetch_gpt2(), own)
    try:
        path = local_folder(name, weights=False)
    except ValueError as error:
        raise ValueError(f"--tokenizer {error}") from None
    try:
        tokenizer = _from_path(path, own)
        tokenizer.source = path
        if path != Path(name):  # a copy of ORG/NAME, whose folder is named for a commit
            tokenizer.name = name
        return tokenizer
    except FileNotFoundError as error:
        raise ValueError(
            f"--tokenizer {name}: must be auto, chess, gpt2 or a path; there is no {error.filename}"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"--tokenizer {name}: {error}") from None


def _override(file: str | None) -> ChatTemplate | None:
    """The template of --chat-template."""
    if file is None:
        return None
    try:
        text = Path(file).read_text(encoding="utf-8-sig")  # some editors write a mark in front
    except (OSError, ValueError) as error:
        raise ValueError(f"--chat-template {file}: cannot be read ({error})") from None
    return ChatTemplate(text, f"--chat-template {file}", {"eos_token": END_OF_TEXT})


def _from_path(path: Path, own: ChatTemplate | None) -> Tokenizer:
    """The tokenizer at a path. Raises ValueError, OSError."""
    if path.name == TOKENIZER or (path / TOKENIZER).is_file():
        return _from_folder(path.parent if path.name == TOKENIZER else path, own)
    if path.is_dir():
        if not (found := [path / merges for merges in GPT2_FILES if (path / merges).exists()]):
            names = (" and ".join(pair) for pair in GPT2_FILES.items())
            raise ValueError(f"there is neither {' nor '.join([TOKENIZER, *names])} in this folder")
        path = found[0]
    merges_of = {vocabulary: merges for merges, vocabulary in GPT2_FILES.items()}
    merges = path.with_name(merges_of.get(path.name, path.name))
    if merges.name in GPT2_FILES:
        vocabulary = merges.with_name(GPT2_FILES[merges.name])
        texts = (file.read_text(encoding="utf-8-sig") for file in (merges, vocabulary))
        if (eos := named_tokens(path.parent).get("eos_token", END_OF_TEXT)) != END_OF_TEXT:
            raise ValueError(f"eos_token {eos!r} is not in {vocabulary.name}")
        return _of_ranks(str(path.parent), parse_gpt2(*texts), own, stops=end_numbers(path.parent))
    return _of_ranks(str(path), parse_ranks(path.read_bytes().splitlines()), own)


def _of_ranks(
    name: str,
    ranks: Mapping[bytes, int],
    own: ChatTemplate | None,
    pattern: str = GPT2_PATTERN,
    stops: Iterable[int] = (),
) -> Tokenizer:
    """A tokenizer whose last token ends a text."""
    return Tokenizer(name, ranked(ranks, pattern), eot=len(ranks), stops=stops, chat=own)


def _from_folder(folder: Path, own: ChatTemplate | None) -> Tokenizer:
    """The tokenizer of a model in Hugging Face's layout."""
    vocabulary = read_tokenizer_json(
        folder / TOKENIZER, added_in_config(folder), control_tokens(folder)
    )
    named = {**vocabulary.added, **vocabulary.special}
    return Tokenizer(
        str(folder),
        vocabulary,
        eot=end_of_text(folder, named, vocabulary.size),
        stops=end_numbers(folder),
        chat=replace(own, tokens=named_tokens(folder)) if own else read_chat_template(folder),
    )


def _fetch_gpt2() -> dict[bytes, int]:
    """GPT-2's ranks, which tiktoken fetches and caches. Raises ValueError if it cannot."""
    try:
        published = tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken raises network and file system errors of many types
        fetch = "python -c 'import tiktoken; tiktoken.get_encoding(\"gpt2\")'"
        raise ValueError(
            f"--tokenizer gpt2: tiktoken cannot fetch its ranks ({type(error).__name__}); give "
            "them as a path (a file of ranks, or a folder with vocab.bpe and encoder.json or "
            "merges.txt and vocab.json), or run "
            f"`TIKTOKEN_CACHE_DIR=DIR {fetch}` on a machine with network, copy DIR here and set "
            "TIKTOKEN_CACHE_DIR to it"
        ) from error
    return {published.decode_single_token_bytes(n): n for n in range(published.eot_token)}
