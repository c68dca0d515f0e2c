"""The tasks that ship. A task gives prompts and judges answers; the protocol is `minigrpo.types.Task`."""

from collections.abc import Callable

from ..types import Task
from .chess_env import ChessEnv

TASKS: dict[str, Callable[..., Task]] = {"chess-env": ChessEnv}  # each takes (seed, history)
