"""The files of a model's folder that say which tokens end a text, and how a chat is written."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .chat import ChatTemplate
from .weight_files import CONFIG, read_json

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
# merges file -> vocabulary file in the same folder: OpenAI's names, then Hugging Face's
GPT2_FILES = {"vocab.bpe": "encoder.json", "merges.txt": "vocab.json"}
# what belongs to a tokenizer, for other programs too
FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG, CHAT_TEMPLATE),
    *("special_tokens_map.json", "added_tokens.json"),
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


def added_in_config(folder: Path) -> list[dict[str, Any]]:
    """The added tokens of tokenizer_config.json, in the form of those of tokenizer.json."""
    entries = read_json(folder / TOKENIZER_CONFIG).get("added_tokens_decoder") or {}
    try:
        return [{**entry, "id": int(number)} for number, entry in entries.items()]
    except (TypeError, ValueError, AttributeError):
        raise ValueError(f"{TOKENIZER_CONFIG}: added_tokens_decoder is malformed") from None


def named_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token, ... -> the token, as tokenizer_config.json names them."""
    settings = read_json(folder / TOKENIZER_CONFIG)
    found = {}
    for name, token in settings.items():
        if name.endswith("_token") and not name.startswith("add_"):
            token = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(token, str):
                found[name] = token
    return found


def control_tokens(folder: Path) -> set[str | int]:
    """The tokens, by text or number, that tokenizer_config.json names or that end a text.

    They are special even if their entries do not say so, as in transformers.
    """
    more = read_json(folder / TOKENIZER_CONFIG).get("additional_special_tokens")
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
