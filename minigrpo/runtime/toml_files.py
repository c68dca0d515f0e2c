"""Find and read TOML files: a user's, a shipped preset, and the record in a run's folder."""

import tomllib
from pathlib import Path
from typing import Any

from .flags import ConfigError

PACKAGE = Path(__file__).parent.parent
RECORD = "config.toml"  # that a run writes into its folder, with a table `versions`


def find_preset(path: str) -> Path:
    """The path of a file, or of a shipped preset given by name (`rtx4090`)."""
    presets = (PACKAGE / "configs", PACKAGE.parent / "configs")  # in a wheel, in a checkout
    names: list[str] = []
    if not path:
        raise ConfigError("--config must name a TOML file or a preset, got ''")
    file = Path(path)
    if file.is_file():
        return file
    for folder in presets:
        if (folder / f"{path}.toml").exists():  # a name may have a dot: qwen2.5-0.5b
            return folder / f"{path}.toml"
        names += sorted(preset.stem for preset in folder.glob("*.toml"))
    if file.suffix and not file.is_dir():
        return file
    if file.is_dir():
        hint = f"; did you mean {file / RECORD}?" if (file / RECORD).is_file() else ""
        raise ConfigError(f"--config {path}: is a folder, not a file{hint}")
    raise ConfigError(f"--config {path}: no such file or preset; presets: {', '.join(names)}")


def read_toml(path: str | Path, by: str) -> dict[str, Any]:
    """What a TOML file or a preset holds. Raises ConfigError."""
    try:
        text = find_preset(str(path)).read_text("utf-8-sig")
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{by}{path}: cannot be read ({reason})") from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also integers of more than 4,300 digits
        raise ConfigError(f"{by}{path}: is not TOML: {error}") from None
