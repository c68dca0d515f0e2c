"""The shape of --student, for the estimate: its weights are not read where that can be avoided."""

from pathlib import Path

from ..config import Config
from ..model.families import read_shape
from ..model.hub import cached_folder
from ..model.shape import ModelShape
from ..model.weight_files import INDEX, WEIGHTS, WeightFiles
from ..tasks.teach import TEACH, student_path
from .flags import ConfigError
from .published import published_shape
from .trained import load_model


def student_shape(config: Config) -> ModelShape | None:
    """The shape of the model that --task teach explains to; None for any other task.

    Raises ConfigError for a model that is neither here nor published.
    """
    if config.task.name != TEACH or not config.task.student:
        return None
    try:
        return _shape(student_path(config.task.student))
    except ValueError as error:
        raise ConfigError(f"--student {error}") from None


def _shape(name: str) -> ModelShape:
    """Raises ValueError."""
    path = cached_folder(name) or Path(name)
    if path.is_file() or any((path / file).is_file() for file in (WEIGHTS, INDEX)):
        shape, problems = read_shape(WeightFiles.open(path))
        if not problems:
            return shape
    elif not path.exists() and (published := published_shape(name)):
        return published
    return load_model(name, lambda text: None)[1].shape
