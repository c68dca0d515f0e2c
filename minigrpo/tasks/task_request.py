"""What a built-in task is made from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..runtime.flags import ConfigError
from ..runtime.text import check_file_name
from .files import Listener, SilentListener


@dataclass(frozen=True)
class TaskRequest:
    """The settings of config.task that a built-in task may use, and a seed."""

    name: str
    seed: int
    data: str = ""  # files of examples, separated by commas; "" for the task's own generator
    history: int = 0  # earlier moves in a chess prompt
    chat: bool = False  # whether --system makes prompts the messages of a user
    student: str = ""  # the model that --task teach explains to
    timeout_s: float = 10.0  # --reward-timeout, for a task that runs code
    difficulty: str = ""  # of the problems that countdown makes; "": as the task has it
    listener: Listener = field(default_factory=SilentListener)  # gets progress and warnings

    @property
    def paths(self) -> Sequence[Path]:
        """The files of `data`. Raises ConfigError if there is none, or one is named twice."""
        names = [name.strip() for name in self.data.split(",") if name.strip()]
        if self.data and not names:
            raise ConfigError(
                f"--data must name a file, or several separated by commas, got {self.data!r}"
            )
        for name in names:
            check_file_name(name)
        files = [Path(name).resolve() for name in names]
        for i, file in enumerate(files):
            if file in files[:i]:  # the same questions would fill two of the turns
                raise ConfigError(f"--data {self.data}: names {names[i]} twice")
        return [Path(name) for name in names]
