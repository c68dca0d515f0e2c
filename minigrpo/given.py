"""What a run is given: Python objects of the caller's, or settings that name files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .config import Config
from .identity import checksum, digest
from .losses import LOSSES, LossInputs, LossSpec, Term, loss_spec
from .model.transformer import Transformer
from .rewards.functions import RewardFunction, load_rewards
from .settings import FROM_PYTHON, LOSS_NAMES
from .task import Task
from .tasks.rows import read_rows
from .turns.environments import EnvironmentSet
from .types import ConfigError
from .userfiles import load_name, name_of


@dataclass(frozen=True)
class Given:
    """Python objects of the caller's. None where the setting of its name is used."""

    model: Transformer | None = None
    data: Sequence[Mapping[str, Any]] | None = None
    eval_data: Sequence[Mapping[str, Any]] | None = None
    task: type[Task] | Task | None = None
    rewards: Sequence[RewardFunction] | None = None
    loss: LossSpec | Callable[[LossInputs], Term] | None = None
    environment: EnvironmentSet | None = None

    @classmethod
    def of(cls, **objects: Any) -> "Given":
        """Objects in the forms that `minigrpo.train` takes. Raises ConfigError."""
        given = {name: value for name, value in objects.items() if value is not None}
        for name in {"data", "eval_data"} & given.keys():
            given[name] = read_rows(name, given[name])
        rewards = given.pop("rewards", ())
        functions = [
            reward if isinstance(reward, RewardFunction) else RewardFunction(reward)
            for reward in ([rewards] if callable(rewards) else rewards)
        ]
        environment = given.get("environment")
        if not isinstance(environment, EnvironmentSet | None):
            given["environment"] = EnvironmentSet.of(environment)
        return cls(**given, rewards=functions or None)

    def asked(self, name: str, config: Config) -> Any:
        """The caller's object for a setting, or its text. Raises ConfigError if it is gone."""
        if (given := getattr(self, name)) is not None:
            return given
        text = config.flat()[name]
        if text.startswith(FROM_PYTHON):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {text}: run the script that gave it, or name a file")
        return text

    def reward_functions(self, config: Config) -> Sequence[RewardFunction]:
        """The reward functions of the caller, or those in the file of --rewards."""
        asked = self.asked("rewards", config) or ()
        return load_rewards(asked) if isinstance(asked, str) else asked

    def environments(self, config: Config) -> EnvironmentSet | None:
        """The environments and tools of the caller, or those of --environment."""
        asked = self.asked("environment", config) or None
        return EnvironmentSet.load(asked) if isinstance(asked, str) else asked

    def loss_spec(self, config: Config) -> LossSpec:
        """A row of the table of losses, or a function or LossSpec of the user's."""
        asked = self.asked("loss", config)
        is_in_file = isinstance(asked, str) and asked not in LOSS_NAMES
        spec = loss_spec(load_name("--loss", asked) if is_in_file else asked)
        if spec.surrogate is LOSSES["nll"].surrogate and not config.supervised:
            raise ConfigError("--loss: a row made of nll would learn samples, not true answers")
        return spec

    def as_settings(self) -> dict[str, str]:
        """A text for each object, which a resumed run compares as the setting of this name."""
        texts = {}
        for name, value in vars(self).items():
            if value is not None:
                text = digest(value) if name in ("data", "eval_data") else described(value)
                texts[name] = FROM_PYTHON + text
        return texts


def described(value: Any) -> str:
    """The names that tell an object of `Given` from others; of a model its weights."""
    if isinstance(value, Transformer):
        return checksum(dict(value.named_parameters()))
    if isinstance(value, EnvironmentSet):
        return ",".join([*value.specs, *value.tools])
    if isinstance(value, LossSpec | partial):
        return digest(value)
    if isinstance(value, list):
        return ",".join(f"{function.weight:g} x {function.name}" for function in value)
    return name_of(value)
