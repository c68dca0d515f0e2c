"""Files of models, on disk and on the Hugging Face Hub."""

import json
import re
from pathlib import Path
from typing import Any

from .errors import refusing

CONFIG = "config.json"
# ORG/NAME or ORG/NAME@REVISION
HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?", re.ASCII)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file."""
    with refusing(file):
        return json.loads(file.read_bytes()) if file.is_file() else {}


def settings_folder(name: str) -> Path:
    """The file or folder that a name stands for; an existing path comes first.

    For ORG/NAME[@REVISION] it fetches the settings and the tokenizer, without weights, into a
    folder whose name is the commit. Raises ConfigError.
    """
    on_hub = HUB_NAME.fullmatch(name)
    if Path(name).exists() or on_hub is None:
        return Path(name)
    return fetch(name, ["*.json", "*.jinja", "tokenizer.model"], on_hub[2])


def fetch(name: str, patterns: str | list[str], revision: str | None) -> Path:
    """Fetch the files of a repository's top folder that match the patterns. Raises ConfigError."""
    with refusing(f"{name} is not a folder, and the Hub (extra `hub`) does not give it"):
        from huggingface_hub import snapshot_download

        fetched = snapshot_download(
            name.partition("@")[0],
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns="*/*",
        )
    return Path(fetched)
