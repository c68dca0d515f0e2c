"""The files of a model's folder that say which tokens end a text, and how a chat is written."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .chat import ChatTemplate
from .vocabulary import END_OF_TEXT
from .weight_files import CONFIG, read_json

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
SPECIAL_TOKENS = "special_tokens_map.json"  # of older tokenizers, as is the next
ADDED_TOKENS = "added_tokens.json"
# merges file -> vocabulary file in the same folder: OpenAI's names, then Hugging Face's
GPT2_FILES = {"vocab.bpe": "encoder.json", "merges.txt": "vocab.json"}
# what belongs to a tokenizer, for other programs too
FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG, CHAT_TEMPLATE),
    *(SPECIAL_TOKENS, ADDED_TOKENS),
    *(file for pair in GPT2_FILES.items() for file in pair),
)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has the files of a tokenizer."""
    pairs = [(TOKENIZER,), *GPT2_FILES.items()]
    return any(all((folder / name).is_file() for name in pair) for pair in pairs)


def copy_tokenizer_files(source: Path, target: Path) -> list[str]:
    """Copy a tokenizer into the folder `target`, which must exist; return the names of the files.

    Args:
        source: a folder, or a file of a tokenizer: then a .tiktoken file alone, or the files that
            lie beside it.

    Raises OSError if a file cannot be read or written.
    """
    folder = source if source.is_dir() else source.parent
    names = [name for name in FILES if (folder / name).is_file()]
    if source.is_file() and source.name not in FILES:
        names = [source.name]
    for name in names:
        if (folder / name).resolve() != (target / name).resolve():
            shutil.copyfile(folder / name, target / name)
    return names


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with special_tokens_map.json.

    As in transformers, what the latter says counts, unless the former lists the added tokens, as
    it does in all newer tokenizers. Older ones may name their tokens in the latter alone.
    """
    files = [read_json(folder / name) for name in (SPECIAL_TOKENS, TOKENIZER_CONFIG)]
    later = files if "added_tokens_decoder" in files[1] else files[::-1]
    return {name: x for found in later for name, x in found.items() if x is not None}


def added_in_config(folder: Path) -> list[dict[str, Any]]:
    """The added tokens of tokenizer_config.json, in the form of those of tokenizer.json.

    If it lists none, those of added_tokens.json, as in transformers.
    """
    entries = read_json(folder / TOKENIZER_CONFIG).get("added_tokens_decoder")
    if entries is None:
        older = read_json(folder / ADDED_TOKENS)
        if wrong := [text for text, number in older.items() if type(number) is not int]:
            raise ValueError(f"{ADDED_TOKENS}: the number of {wrong[0]!r} is not 0, 1, 2, ...")
        return [{"content": text, "id": number} for text, number in older.items()]
    try:
        return [{**entry, "id": int(number)} for number, entry in entries.items()]
    except (TypeError, ValueError, AttributeError):
        raise ValueError(f"{TOKENIZER_CONFIG}: added_tokens_decoder is malformed") from None


def named_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token, ... -> the token, as the tokenizer's settings name them."""
    settings = _settings(folder)
    found = {}
    for name, token in settings.items():
        if name.endswith("_token") and not name.startswith("add_"):
            token = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(token, str):
                found[name] = token
            elif name == "eos_token":
                raise ValueError(f"{name} of the tokenizer is {token!r:.60}, not a token")
    return found


def control_tokens(folder: Path) -> set[str | int]:
    """The tokens, by text or number, that the tokenizer's settings name or that end a text.

    They are special even if their entries do not say so, as in transformers.
    """
    more = _settings(folder).get("additional_special_tokens")
    listed = {token for token in more if isinstance(token, str)} if isinstance(more, list) else ()
    return {*named_tokens(folder).values(), *listed, *end_numbers(folder)}


def end_numbers(folder: Path) -> Iterator[int]:
    """eos_token_id of generation_config.json, then of config.json; each is a number or a list."""
    for name in (GENERATION_CONFIG, CONFIG):
        found = read_json(folder / name).get("eos_token_id")
        for number in found if isinstance(found, list) else [found]:
            if type(number) is int:
                yield number
            elif number is not None:
                raise ValueError(f"{name}: eos_token_id is {found!r}, not a number or a list")


def end_of_text(folder: Path, numbers: Mapping[str, int], size: int) -> int:
    """eos_token of the tokenizer's settings, else the first end in the model's.

    Args:
        numbers: of the added tokens, special ones included, by their text.
        size: how many tokens there are.

    Raises ValueError if there is none, or if it is no added token.
    """
    name = named_tokens(folder).get("eos_token")
    if name is not None and name not in numbers:
        raise ValueError(
            f"eos_token {name!r} in {TOKENIZER_CONFIG} or {SPECIAL_TOKENS} is no added token of "
            f"{TOKENIZER}"
        )
    known = [number for number in end_numbers(folder) if 0 <= number < size]
    if name is None and not known and END_OF_TEXT not in numbers:
        raise ValueError(
            f"no end of text: neither {TOKENIZER_CONFIG} nor {SPECIAL_TOKENS} has an eos_token"
        )
    return numbers[name] if name else known[0] if known else numbers[END_OF_TEXT]


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a model's folder; None if there is none.

    chat_template.jinja counts before tokenizer_config.json; of a list of templates, the one that is
    named default. Raises ValueError and OSError.
    """
    file, settings = folder / CHAT_TEMPLATE, folder / TOKENIZER_CONFIG
    tokens = named_tokens(folder)
    if file.is_file():
        return ChatTemplate(file.read_text(encoding="utf-8"), CHAT_TEMPLATE, tokens)
    name = f"chat_template in {TOKENIZER_CONFIG}"
    found = _default(read_json(settings).get("chat_template"), name)
    return ChatTemplate(found, name, tokens) if found else None


def _default(found: Any, name: str) -> str | None:
    if isinstance(found, list):
        try:
            templates = {entry["name"]: entry["template"] for entry in found}
        except (TypeError, KeyError):
            raise ValueError(f"{name}: is not a list of names and templates") from None
        if "default" not in templates:
            listed = ", ".join(map(str, templates))
            raise ValueError(f"{name}: has no template named default, only {listed or 'none'}")
        found = templates["default"]
    if found is not None and not isinstance(found, str):
        raise ValueError(f"{name}: is not a text")
    return found
