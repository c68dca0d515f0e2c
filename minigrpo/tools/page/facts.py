"""What the page says of a run in words and tables: the result, the settings, where it ran."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from ...config import Config
from ...runtime.flags import as_flags, flag
from ...runtime.measures import (
    OTHER_EXAMPLES,
    SAMPLED,
    Estimate,
    in_words,
    number_of,
    sizes,
    wilson,
)
from ...runtime.origins import versions_of
from ...runtime.settings import places
from ...runtime.tokenizers import AUTO, with_own_tokenizer
from ..records import Record, is_number
from ..run_data import RunData

NEW_FOLDER = ("out_dir", "resume", "stop_after", "plan")  # of no interest to another run


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    what: str  # is measured
    before: str
    after: str
    change: str  # with its sign; "" where there is none
    details: Sequence[str]


def result(run: RunData) -> Result:
    """The success of the first and the last evaluation, or the reward without evaluations."""
    name = run.success + SAMPLED
    measured = [r for r in run.evaluations if is_number(r.get(name)) and isfinite(r[name])]
    if not measured:
        metric = "loss" if run.supervised else "reward"
        start, end = run.start(metric), run.end(metric)
        what = f"Mean {metric} in training"
        if not (isfinite(start) and isfinite(end)):
            return Result(what, "", "unknown", "", ["this run has no evaluation"])
        details = ["the first and the last fifth of the steps; this run has no evaluation"]
        return Result(what, f"{start:.3g}", f"{end:.3g}", f"{end - start:+.3g}", details)
    first, last = measured[0], measured[-1]
    before, after = (_share(record, name) for record in (first, last))
    numbers = number_of(first), number_of(last)
    asked = sizes(*numbers, " held-out examples")
    of = f"of {asked}, sampled at temperature 1; 95 % interval"
    of += OTHER_EXAMPLES * (numbers[0] != numbers[1])
    if len(measured) == 1:
        greedy = f"greedy {_greedy(run, last)}"
        return Result(in_words(run.success), "", _shown(after), "", [of, greedy])
    details = [of, f"greedy {_greedy(run, first)} → {_greedy(run, last)}"]
    change = f"{100 * (after.value - before.value):+.1f} points"
    return Result(in_words(run.success), _shown(before), _shown(after), change, details)


def _share(record: Record, name: str) -> Estimate:
    value, n = float(record[name]), number_of(record)
    return wilson(value, n) if n and 0 <= value <= 1 else Estimate(value)


def _shown(share: Estimate) -> str:
    if not isfinite(share.low):
        return f"{share.value:.1%}"
    return f"{share.value:.1%} [{100 * share.low:.1f}, {100 * share.high:.1f}]"


def _greedy(run: RunData, record: Record) -> str:
    value = record.get(run.success)
    return f"{value:.1%}" if is_number(value) and isfinite(value) else "unknown"


def job(run: RunData) -> str:
    """What was trained on what, in words."""
    about = run.settings
    data = f" on {about['data']}" if about["data"] else ""
    return f"{about['loss']}, task {about['task']}{data}, model {about['init_from']}"


def status(run: RunData) -> str:
    """How far a run came, in words."""
    steps, planned = run.metrics[-1]["step"], run.settings["max_steps"]
    how = run.summary.get("status")
    if not how:
        return f"at step {steps} of {planned}; it is going, or was killed"
    seconds = run.summary.get("wall_seconds")
    took = f" in {_duration(seconds)}" if is_number(seconds) and isfinite(seconds) else ""
    reason = "" if how == "finished" else f" ({run.summary.get('exit_reason')})"
    return f"{how}{reason} after {steps} steps{took}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 100 else f"{hours:.1f} h"


def default_of(run: RunData) -> dict[str, Any]:
    """The settings that a run of the same job has if nobody changes them."""
    job = {name: run.settings[name] for name in ("task", "data", "confidence")}
    try:
        plain = Config.of(**job)
        if run.settings["tokenizer"] != AUTO:  # a run records what that was
            plain = with_own_tokenizer(plain)
    except (ValueError, OSError):  # such as a file that is not on this machine
        plain = Config()
    return plain.flat() | {name: Config().flat()[name] for name in job}


def changed(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """The settings that some run has changed: group, flag, default, and the value of each run."""
    defaults = [default_of(run) for run in runs]
    rows = []
    for name, (group, _) in places(Config).items():
        values = [run.settings[name] for run in runs]
        own = [default[name] for default in defaults]
        if name in NEW_FOLDER or values == own:
            continue
        shown = [_value(value) for value in values]
        marks = [value != default for value, default in zip(values, own, strict=True)]
        rows.append(
            {
                "group": group,
                "flag": flag(name),
                "default": _value(own[0]),
                "values": list(zip(shown, marks, strict=True)),
            }
        )
    return rows


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value) or "empty"


def command(run: RunData) -> str:
    """What makes the run again, as somebody would type it."""
    default = default_of(run)
    own = {
        name: value
        for name, value in run.settings.items()
        if value != default[name] and name not in NEW_FOLDER and value is not None
    }
    flags = [flag_of(name, value) for name, value in own.items()]
    return " ".join(["minigrpo train", *flags])


def flag_of(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return as_flags({name: value})[0]
    text = shlex.quote(str(value))
    return f"{flag(name)}={text}" if text.startswith(("--", "'--")) else f"{flag(name)} {text}"


def environment(folder: Path) -> dict[str, str]:
    """The table `versions` of a run's record; empty if it cannot be read."""
    hidden = ("tokenizer_", "-")  # digests, of a tokenizer and of files
    found = {name: x for name, x in versions_of(folder).items() if not name.startswith(hidden)}
    return {name.replace("_", " "): str(value) for name, value in found.items()}
