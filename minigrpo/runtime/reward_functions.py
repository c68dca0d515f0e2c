"""Reward parts that come from a user's functions, and what the name of any part may be."""

import inspect
import numbers
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from .files import NUM_NOT_FINITE
from .flags import ConfigError
from .measures import PASS_AT, SAMPLED
from .reward_calls import BATCHED, EACH, GROUPED, LARGEST, TOKENS, RewardSource
from .text import has_lone_surrogate, short

# what eval.jsonl has beside the parts; a part of the same name would overwrite it
RESERVED_PARTS = ("step", "n", "reward", NUM_NOT_FINITE)
# --reward-weights separates by the first two; with the third, `exact/x` would be a kind of question
FORBIDDEN_IN_PARTS = ",=/"
KINDS = (BATCHED, GROUPED, TOKENS)  # arguments of the decorator that change what a function takes
CALLED_WITH = {
    EACH: ("example", "text"),
    BATCHED: ("examples", "texts"),
    GROUPED: ("example", "texts"),
    TOKENS: ("batch",),
}


def check_part_name(name: object) -> None:
    """Raise ConfigError unless a reward part may have this name."""
    if not isinstance(name, str):
        raise ConfigError(f"the name of a reward part must be text, got {short(name)}")
    if name in RESERVED_PARTS or name.endswith(SAMPLED) or name.startswith(PASS_AT):
        raise ConfigError(
            f"a reward part must not be named {name}, because eval.jsonl has that for itself; "
            f"reserved: {', '.join(RESERVED_PARTS)}, ...{SAMPLED}, {PASS_AT}..."
        )
    if name == "<lambda>":
        raise ConfigError("a reward function needs a name; use def instead of lambda")
    bad = [x for x in name if x in FORBIDDEN_IN_PARTS or not x.isprintable()]
    if bad or not name.strip() or name != name.strip() or has_lone_surrogate(name):
        raise ConfigError(
            f"the name of a reward part must be printable text without {FORBIDDEN_IN_PARTS} and "
            f"without spaces around it, got {name!r}"
        )


def check_number(what: str, value: object) -> None:
    """Raise ConfigError, which begins with `what`, unless a value is a usable number."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and -LARGEST <= value <= LARGEST):  # type: ignore[operator]
        raise ConfigError(
            f"{what} must be a number from -{LARGEST:g} to {LARGEST:g}, got {short(value)}"
        )


def check_time_limit(what: str, seconds: object) -> None:
    """Raise ConfigError, which begins with `what`, unless this is a number of seconds above 0."""
    check_number(what, seconds)
    if not seconds > 0:  # type: ignore[operator]
        raise ConfigError(f"{what} must be above 0, got {seconds}")


@dataclass(frozen=True)
class RewardFunction:
    """A reward part that does not come from the task; made by the decorator `reward`.

    Raises ConfigError for a value that cannot work.
    """

    function: Callable[..., Any]
    name: str
    weight: float = 1.0
    timeout_s: float | None = None  # seconds per completion; None: the scorer's
    floor: float = 0.0  # the score of a completion on which the function failed
    batched: bool = False  # function(examples, texts) -> floats, else function(example, text)
    grouped: bool = False  # function(example, texts) -> floats, of all completions of a prompt
    tokens: bool = False  # function(TokenBatch) -> [P, G] floats
    success: bool = False  # 1 says that a completion is right, and anything else that it is not

    def __post_init__(self) -> None:
        check_part_name(self.name)
        if self.name == "exact":
            raise ConfigError(
                "a reward function must not be named exact, because `exact` in eval.jsonl is the "
                "share of completions that equal the true answer"
            )
        check_number(f"{self.name}: weight", self.weight)
        check_number(f"{self.name}: floor", self.floor)
        if self.timeout_s is not None:
            check_time_limit(f"{self.name}: timeout_s", self.timeout_s)
        for what in (*KINDS, "success"):
            if not isinstance(asked := getattr(self, what), bool):
                raise ConfigError(f"{self.name}: {what} must be True or False, got {short(asked)}")
        if len(asked_for := [what for what in KINDS if getattr(self, what)]) > 1:
            raise ConfigError(f"{self.name}: takes one of {' and '.join(asked_for)}, not both")
        if self.tokens and (self.timeout_s is not None or self.floor):
            raise ConfigError(
                f"{self.name}: timeout_s and floor do not go with tokens, because such a function "
                "has no time limit, and an error in it ends the run"
            )
        if self.success and (self.grouped or self.floor):
            raise ConfigError(
                f"{self.name}: success does not go with {'grouped' if self.grouped else 'floor'}, "
                "because it says of each completion whether it is right, and a failure is not"
            )
        self._check_call()

    @property
    def kind(self) -> str:
        """What the function is called with: a key of `CALLED_WITH`."""
        return next((what for what in KINDS if getattr(self, what)), EACH)

    def _check_call(self) -> None:
        """Raise ConfigError for a function whose every call would fail, so only give the floor."""
        if isinstance(self.function, RewardFunction):
            raise ConfigError(f"{self.function.name}: is decorated with @reward twice")
        for called in (self.function, getattr(self.function, "__call__", None)):  # noqa: B004
            if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
                raise ConfigError(f"{self.name}: must be a plain function, not async")
            if inspect.isgeneratorfunction(called):
                raise ConfigError(f"{self.name}: must return its scores, not yield them")
        try:
            inspect.signature(self.function).bind(*CALLED_WITH[self.kind])
        except TypeError:
            takes = ", ".join(CALLED_WITH[self.kind])
            raise ConfigError(f"{self.name}: must be a function that takes ({takes})") from None
        except ValueError:
            pass  # some built-in functions have no signature that can be read

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def source(self, timeout_s: float) -> RewardSource:
        """What the scorer calls; `timeout_s` is the limit if the function has none of its own."""

        def call(*args: Any) -> dict[str, Any]:
            return {self.name: self.function(*args)}

        limit = timeout_s if self.timeout_s is None else self.timeout_s
        # a function of tokens uses the device, so it cannot run in a thread that is given up
        timed = None if self.tokens else limit
        return RewardSource([self.name], call, self.kind, timed, self.floor, is_function=True)


def check_functions(functions: Sequence[object], parts: Collection[str]) -> None:
    """Raise ConfigError for functions that cannot be used together, or with a task's parts."""
    known = [function for function in functions if isinstance(function, RewardFunction)]
    if wrong := [function for function in functions if not isinstance(function, RewardFunction)]:
        raise ConfigError(
            "functions must be decorated with @minigrpo.reward(), "
            f"got {type(wrong[0]).__name__} {getattr(wrong[0], '__name__', '')}".rstrip()
        )
    names = [function.name for function in known]
    if twice := set(names) & set(parts):
        raise ConfigError(f"--rewards: the task already has a part {', '.join(sorted(twice))}")
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--rewards: two functions are named {', '.join(sorted(twice))}")
    success_among(known)


def success_among(functions: Sequence[RewardFunction]) -> RewardFunction | None:
    """The function that says which completions are right, if any. Raises ConfigError for two."""
    found = [function for function in functions if function.success]
    if len(found) > 1:
        names = ", ".join(function.name for function in found)
        raise ConfigError(f"--rewards: one function may have success=True, got {names}")
    return found[0] if found else None


def reward(
    *,
    weight: float = 1.0,
    timeout_s: float | None = None,
    floor: float = 0.0,
    batched: bool = False,
    grouped: bool = False,
    tokens: bool = False,
    success: bool = False,
) -> Callable[[Callable[..., Any]], RewardFunction]:
    """Decorator: make a function a reward part, named after the function.

        @reward(weight=0.2)
        def brevity(example, text):
            return 1 / (1 + len(text))

    `--rewards FILE.py` adds the decorated functions of a file to the task's parts. A call that
    raises, exceeds its time limit, or returns anything but a finite number (None or NaN, say) has
    failed: the failure is counted, and the completion gets `floor`.

    Args:
        weight: of this part in the total. `[reward_weights]` in TOML and --reward-weights override
            it.
        timeout_s: seconds per completion; None for --reward-timeout.
        floor: the score of a completion on which the function failed.
        batched: the function takes lists of examples and texts and returns one float per text, as a
            reward model does. Which texts share a call depends on the number of processes and on
            --rollout-batch-size, so the score of a text should depend on that text alone.
        grouped: the function takes an example and all completions of its prompt, duplicates
            included, and returns one float per completion, for instance by ranking them. A greedy
            completion in an evaluation is a group of one.
        tokens: the function takes a `TokenBatch`: token ids, spans between tags, the policy's
            log-probs, its device, and other models. It returns `[P, G]` floats, as an array, a
            tensor or lists. It is trusted: there is no time limit, and an error ends the run.
        success: the function returns 1 for a right completion and 0 for any other. Evaluations,
            pass@k and --confidence count by it, in place of the task's own success.

    Raises:
        ConfigError: a value that is not allowed, or a function that cannot be called like this.
    """

    def decorate(function: Callable[..., Any]) -> RewardFunction:
        name = getattr(function, "__name__", type(function).__name__)
        kinds = {"batched": batched, "grouped": grouped, "tokens": tokens, "success": success}
        return RewardFunction(function, name, weight, timeout_s, floor, **kinds)

    return decorate
