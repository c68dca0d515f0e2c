"""Where the model and the tokenizer of a run come from: fetched at its start, compared at a resume.

Checkpoints record the commits of models on the Hugging Face Hub and a fingerprint of the tokenizer,
because a name, as well as a folder, may stand for something else later.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import Config
from ..model.hub import cached_folder, local_folder
from ..model.tokenizer import Tokenizer
from .failures import reason_of
from .files import write_whole
from .flags import ConfigError, flag
from .resume import changed
from .settings import RECORD, toml_lines, toml_value

NAMES = ("init_from", "tokenizer", "student")  # the settings that may name a model on the Hub
SHOWN_DIGITS = 16  # of a file's sha256 in config.toml


def fetch_models(config: Config) -> None:
    """Fetch what --init-from, --tokenizer and --student name on the Hub, if it is not here.

    For the main process: the others find it in the cache afterwards. A plan fetches nothing.
    Raises ConfigError if that is not possible.
    """
    for name in NAMES:
        try:
            local_folder(config.flat()[name], weights=name != "tokenizer")
        except ValueError as error:
            raise ConfigError(f"{flag(name)} {error}") from None


def commits_of_models(config: Config) -> dict[str, str]:
    """The commit of each model on the Hub that is in the cache, by flag and name.

    Saved in checkpoints beside `contents_of_files`.
    """
    named = {flag(name): config.flat()[name] for name in NAMES}
    folders = {f"{by} {name}": cached_folder(name) for by, name in named.items()}
    return {shown: folder.name for shown, folder in folders.items() if folder}


def recorded(fingerprint: Mapping[str, str]) -> dict[str, str]:
    """A tokenizer's fingerprint as entries of the table `versions` in a run's config.toml."""
    return {key(part): digest for part, digest in fingerprint.items()}


def key(part: str) -> str:
    return f"tokenizer_{part.replace(' ', '_')}"


def versions_of(run: Path) -> dict[str, Any]:
    """The table `versions` of a run's config.toml; empty if it cannot be read."""
    try:
        found = tomllib.loads((run / RECORD).read_text("utf-8-sig")).get("versions")
    except (OSError, ValueError):  # whoever reads its settings says so
        return {}
    return found if isinstance(found, dict) else {}


def recorded_files(files: Mapping[str, str]) -> dict[str, str]:
    """The digests of a run's files as entries of the table `versions`."""
    # TOML has no room for half of a surrogate pair, which stands for a byte of a file's name
    named = {name.encode(errors="backslashreplace").decode(): x for name, x in files.items()}
    return {name: digest[:SHOWN_DIGITS] for name, digest in named.items()}


def other_files(run: Path, digests: Mapping[str, str]) -> str:
    """What to say if files, or models of rewards, are not those that a run had, or "".

    `digests` has them by flag and name, as `contents_of_files` does.
    """
    differ = changed(recorded_files(digests), versions_of(run))
    return f"{', '.join(differ)}: other contents than when {run} was trained" if differ else ""


def check_tokenizer_of_run(run: Path, tokenizer: Tokenizer, *, own_template: bool = False) -> None:
    """Raise ConfigError if a run was trained with another tokenizer than this one.

    Args:
        own_template: the chat template was given for this command, and may differ.
    """
    then = versions_of(run)
    parts = {"vocabulary"} if own_template else {*tokenizer.fingerprint}
    now = {part: x for part, x in tokenizer.fingerprint.items() if part in parts}
    known = {part: then[key(part)] for part in now if key(part) in then}
    if differ := changed(now, known):
        raise ConfigError(
            f"--tokenizer {tokenizer.name}: {run} was trained with another "
            f"{' and another '.join(differ)}"
        )


def check_same_tokenizer(name: str, now: Mapping[str, str], then: Mapping[str, str]) -> None:
    """Raise ConfigError unless two fingerprints of tokenizers agree.

    Args:
        name: of --tokenizer.
        then: the checkpoint's; empty in older ones.
    """
    if differ := changed(now, then):
        raise ConfigError(
            f"--resume: --tokenizer {name} has changed since the checkpoint was written: another "
            f"{' and another '.join(differ)}; bring its files back, or start a new run"
        )


def _toml_key(name: str) -> str:
    return name if name.replace("_", "").isalnum() and name.isascii() else toml_value(name)


def write_record(folder: Path, config: Config, found: Mapping[str, str]) -> None:
    """Write a run's `config.toml`, which --config can read; `found` is its table `versions`.

    Raises ConfigError if it cannot be written.
    """
    file = folder / RECORD
    # the layers of --fast are written out, so that --no-fast has nothing to undo
    lines = toml_lines(config.replace(fast=False), leave_out=("out_dir", "resume", "stop_after"))
    lines += [
        "",
        "[versions]",
        *(f"{_toml_key(name)} = {toml_value(x)}" for name, x in found.items()),
    ]
    text = "\n".join(lines) + "\n"
    try:
        tomllib.loads(text)  # fail now rather than leave a file that cannot be read
        write_whole(file, lambda aside: aside.write_text(text, "utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be written ({reason_of(error)})") from None
