"""Models by their name on the Hugging Face Hub: from ORG/NAME to a folder on this machine.

The rest of the library calls `local_folder` and sees folders. A copy in the Hub's own cache is
found without any package and without network. What is not there is fetched into that cache by the
package huggingface_hub, the optional extra `hub`. The cache, whose layout the Hub documents, holds

    models--ORG--NAME/refs/main           the commit of a branch or a tag
    models--ORG--NAME/snapshots/COMMIT/   the files of that commit, or some of them
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..runtime.text import one_line
from .families import check_settings
from .tokenizer_files import FILES, TOKENIZER, has_tokenizer
from .weight_files import CONFIG, INDEX, PICKLED, read_json, weight_names

ORG_NAME = re.compile(
    r"(?P<name>[a-z0-9][\w.-]{0,95}/[a-z0-9_][\w.-]{0,95})(?:@(?P<revision>\w[\w./-]{0,199}))?",
    re.ASCII | re.IGNORECASE,
)
FILE_NAME = re.compile(r".*\.(safetensors|tiktoken|json|bin|gguf|pt|pth|txt|bpe)", re.IGNORECASE)
COMMIT = re.compile("[0-9a-f]{40}")
TRUE = ("1", "ON", "YES", "TRUE")
# A class of huggingface_hub's errors -> what it means. That of the most special class counts.
REASONS: Mapping[str, str] = {
    "GatedRepoError": "its owner must allow it: ask on the model's page, then type `hf auth login`",
    "RepositoryNotFoundError": "the Hugging Face Hub has no such model, or it is private: then "
    "type `hf auth login`",
    "RevisionNotFoundError": "it has no such revision",
    "LocalEntryNotFoundError": "the Hugging Face Hub cannot be reached",
    "ConnectionError": "the Hugging Face Hub cannot be reached",
}


def local_folder(name: str | Path, *, weights: bool = True) -> Path:
    """The file or folder that a name stands for; a model on the Hub is fetched if need be.

    Args:
        name: a path, which counts if it exists; else ORG/NAME or ORG/NAME@REVISION. Any other
            name is returned as a path, and its reader says that it does not exist. What begins
            with ./, ../, / or ~ is always a path, as is a `Path`, which has lost its ./.
        weights: whether weights are needed, and not only the tokenizer.

    Raises:
        ValueError: in one line that begins with the name and says what to type.
    """
    model = HubModel.of(name)
    if model is None:
        return Path(name)
    folder = model.snapshot()
    if folder is None or _lacks(folder, weights):
        folder = _fetch(model, weights)
    return folder


def cached_folder(name: str | Path) -> Path | None:
    """The folder in the cache that a name stands for, whole or not; its own name is the commit.

    None for a path, and for what is not in the cache.
    """
    model = HubModel.of(name)
    return model.snapshot() if model else None


@dataclass(frozen=True)
class HubModel:
    """A model on the Hub at a revision: a branch, a tag or a commit."""

    name: str  # ORG/NAME
    revision: str = "main"

    def __str__(self) -> str:
        return self.name if self.revision == "main" else f"{self.name}@{self.revision}"

    @classmethod
    def of(cls, text: str | Path) -> "HubModel | None":
        """The model that a text names; None if it is a path, or not of this form."""
        if isinstance(text, Path):
            return None
        found = ORG_NAME.fullmatch(text)
        path = os.path.lexists(text) or FILE_NAME.fullmatch(text)
        if found is None or path or ".." in text or "--" in found["name"]:
            return None
        return cls(found["name"], found["revision"] or "main")

    def snapshot(self) -> Path | None:
        """The folder in the cache, which may lack files; None if there is none."""
        folder = cache_folder() / f"models--{self.name.replace('/', '--')}"
        try:
            commit = (folder / "refs" / self.revision).read_text().strip()
        except (OSError, ValueError):
            commit = self.revision
        found = folder / "snapshots" / commit
        return found if COMMIT.fullmatch(commit) and found.is_dir() else None

    def command(self) -> str:
        """What fetches the model."""
        more = "" if self.revision == "main" else f" --revision {self.revision}"
        return f"`hf download {self.name}{more}`"

    def download(self, files: Sequence[str], not_here: str, commit: str = "") -> Path:
        """Fetch the files of these names, as far as there are such, and return their folder.

        huggingface_hub shows progress on stderr.

        Args:
            not_here: what the cache lacks, for the error.
            commit: of the files; empty: that of the revision.

        Raises ValueError in one line.
        """
        if is_offline():
            raise ValueError(
                f"{self}: {not_here}; HF_HUB_OFFLINE is set, so it is not fetched; type "
                f"{self.command()} without it"
            )
        try:
            import huggingface_hub
        except ImportError:
            raise ValueError(
                f"{self}: {not_here}; type {self.command()}, or `pip install 'minigrpo[hub]'` to "
                "have it fetched"
            ) from None
        try:
            found = huggingface_hub.snapshot_download(
                self.name,
                revision=commit or self.revision,
                allow_patterns=list(files),
                cache_dir=cache_folder(),
            )
        except Exception as error:  # its own, of the network and of the file system
            why = f"it cannot be fetched: {_reason(error)}"
            raise ValueError(f"{self}: {not_here}; {why}") from error
        return Path(found)


def _fetch(model: HubModel, weights: bool) -> Path:
    """The settings and the tokenizer first: a model that is refused costs no gigabytes."""
    not_here = _not_here(model, weights)
    folder = model.download([CONFIG, INDEX, *FILES], not_here)
    if not weights:
        return folder
    _require(model, folder, [CONFIG])
    try:
        check_settings(read_json(folder / CONFIG))
        names = weight_names(folder)
    except ValueError as error:
        raise ValueError(f"{model}: {error}") from None
    # of the same commit, even if another one has just become the newest
    model.download(names, not_here, commit=folder.name)
    _require(model, folder, names, f"; if it has {PICKLED}")
    return folder


def _require(model: HubModel, folder: Path, names: Sequence[str], hint: str = "") -> None:
    """Raise ValueError for a file that has not been fetched."""
    if missing := _missing(folder, names):
        raise ValueError(
            f"{model}: has no {missing} on the Hugging Face Hub, or that cannot be reached{hint}"
        )


def _missing(folder: Path, names: Sequence[str]) -> str:
    """The first of these files that a folder does not have, or ""."""
    return next((name for name in names if not (folder / name).is_file()), "")


def _lacks(folder: Path, weights: bool) -> str:
    """The first file that a folder in the cache lacks, or ""."""
    if not has_tokenizer(folder):
        return TOKENIZER
    return _missing(folder, [CONFIG, *weight_names(folder)]) if weights else ""


def _not_here(model: HubModel, weights: bool) -> str:
    """What the cache lacks."""
    folder = model.snapshot()
    if folder is None:
        cache = f"the Hugging Face cache {cache_folder()}"
        return f"no such file or folder, and no such model in {cache}"
    lacks = _lacks(folder, weights)
    hint = "; give that folder itself if the model has none" if lacks == TOKENIZER else ""
    return f"its copy in the Hugging Face cache, {folder}, lacks {lacks}{hint}"


def _reason(error: Exception) -> str:
    """Why huggingface_hub failed, in a few words."""
    for kind in type(error).__mro__:
        if kind.__name__ in REASONS:
            return REASONS[kind.__name__]
    system = isinstance(error, OSError) and error.strerror  # such as a full disk
    return f"{system}: {cache_folder()}" if system else one_line(error)


# --- huggingface_hub's environment variables ------------------------------------------------------


def cache_folder() -> Path:
    """Where models from the Hub are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(home, "huggingface")
    found = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(os.path.expanduser(found or os.path.join(home, "hub"))))


def is_offline() -> bool:
    """Whether nothing may be fetched."""
    found = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return found.upper() in TRUE
