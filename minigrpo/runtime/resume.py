"""What may differ between a checkpoint and the run that resumes it, and what is said about it."""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..config import Config
from ..model.lora import PEFT_CONFIG
from .distributed import DistContext
from .flags import ConfigError, flag
from .folder import LOGS
from .job_summary import JOB_SUMMARY
from .renamed import modern
from .settings import RECORD, is_run, places, read_record
from .summary import SUMMARY
from .text import parse_json

# Groups whose settings may differ when a run is resumed. They do not change training beyond
# rounding, except for --max-steps, which sets the learning-rate schedule, and bnpo's micro-batches.
MAY_DIFFER = {"speed", "memory", "run"}
MUST_AGREE = {"seed"}  # although its group may differ
# Settings of the groups speed and memory that change no bit. All others there choose what is
# computed in which order or precision, and a difference is said.
SAME_BITS = {
    "device",  # the device itself is compared, because `auto` is one or the other
    "fast",  # it sets the others
    "num_reward_workers",
    "offload_optimizer",
    "offload_reference",
    "overlap_rewards",
    "parallel_rewards",
}
LIBRARY = Path(__file__).parent.parent
ONLY_WITH = {
    "amp_dtype": "use_amp",
    "low_precision_weights": "use_amp",
    "num_speculative_tokens": "speculative_decoding",
}


def same_files(config: Config, dist: DistContext) -> dict[str, str]:
    """`contents_of_files`. Raises ConfigError, in all processes, if they find different ones."""
    found = contents_of_files(config)
    if not _named_files(config):  # the same in all processes, also if one cannot read a file
        return found
    digest = hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()
    number = torch.tensor(int(digest[:15], 16))
    if dist.max(number) != -dist.max(-number):
        raise ConfigError(
            f"{', '.join(found)}: not the same in all processes; each would train on other "
            "examples or rewards. Copy the files to all machines"
        )
    return found


def contents_of_files(config: Config) -> dict[str, str]:
    """The sha256 of each file of --task, --rewards and --data, by its flag and name.

    Saved in checkpoints, because a file may have the same name and other contents when a run is
    resumed. A file that cannot be read is left out; its reader refuses it with a better message.
    """
    named = _named_files(config)
    return {f"{by} {path}": digest for by, path in named if (digest := _sha256(path))}


def imported_files(config: Config) -> dict[str, str]:
    """The sha256 of the modules beside the files of --task and --rewards that have been imported.

    Installed packages and this one are left out: config.toml has their versions.
    """
    found = {}
    for by, path in _code_files(config):
        own = Path(path).resolve()
        for module in list(sys.modules.values()):
            file = Path(getattr(module, "__file__", None) or "")
            inside = own.parent in file.parents and file != own and file.suffix == ".py"
            if inside and not {LIBRARY} & {*file.parents} and "site-packages" not in file.parts:
                found[f"{by} {path}, {file.relative_to(own.parent)}"] = _sha256(str(file))
    return found


def _named_files(config: Config) -> list[tuple[str, str]]:
    """The files of --task, --rewards and --data, each with its flag."""
    data = [path.strip() for path in config.task.data.split(",")]
    return [*_code_files(config), *(("--data", path) for path in data if path)]


def _code_files(config: Config) -> list[tuple[str, str]]:
    """The Python files of --task and --rewards, each with its flag."""
    named = ("--task", config.task.name), ("--rewards", config.task.rewards)
    return [(by, path) for by, path in named if path.endswith(".py")]


def _sha256(path: str) -> str:
    """The sha256 of a file, read in pieces, or "" if it is no file that can be read."""
    try:
        if not Path(path).is_file():  # a pipe would never end
            return ""
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        return ""


def changed(now: Mapping[str, str], then: Mapping[str, str]) -> list[str]:
    """The names whose digests differ; what one of the two does not know is no difference."""
    return [name for name, digest in then.items() if now.get(name, digest) != digest]


def other_contents(now: Mapping[str, str], then: Mapping[str, str]) -> str:
    """What to say if files or models differ from those of the checkpoint, or ""."""
    if not (differ := changed(now, then)):
        return ""
    return (
        f"{', '.join(differ)}: other contents than when the checkpoint was written, so the run "
        "does not continue as it began"
    )


def abandoned(step: int, later: Sequence[Path], resume: str) -> str:
    """What to say if --resume `step` gives up steps that a run has done, or ""."""
    if not later or resume == "auto":
        return ""
    return (
        f"--resume {step} abandons the steps after it: their lines in the logs are removed now, "
        f"and their checkpoints ({', '.join(path.name for path in later)}) with the next save"
    )


def other_judge(now: str, then: str) -> str:
    """What to say if other software decides scores than when the checkpoint was written, or ""."""
    if not then or now == then:
        return ""
    return (
        f"answers were compared by {then} when the checkpoint was written, and are compared by "
        f"{now or 'nothing of that kind'} now, so the run does not continue as it began"
    )


def made_by(processes: int, device: torch.device) -> dict[str, Any]:
    """What the bits of a run depend on besides its config; saved in its checkpoints."""
    return {
        "processes": processes,
        "threads": torch.get_num_threads(),
        "device": device.type,
        "torch": str(torch.__version__),  # of a class of its own, which is no plain type
    }


def check_same_run(config: Config, saved: Mapping[str, Any], where: object) -> None:
    """Raise ConfigError if a setting that affects results differs from the checkpoint's config."""
    differ = [
        f"{flag(name)} was {then!r}, is {now!r}"
        for name, (then, now) in differences(config, saved).items()
        if not may_differ(name)
    ]
    if differ:
        raise ConfigError(f"--resume: {where} was made with another config: {'; '.join(differ)}")


def check_same_shape(now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    """Raise ConfigError if the model's shape differs from the checkpoint's.

    Some of it, such as a rotary base in config.json, changes what is computed but no tensor. An
    older checkpoint lacks fields that are newer than itself.
    """
    differ = [
        f"{name} was {then[name]}, is {x}" for name, x in now.items() if then.get(name, x) != x
    ]
    if differ:
        raise ConfigError(
            f"--resume: the model of --init-from has changed since the checkpoint was written: "
            f"{'; '.join(differ)}; bring its config.json back, or start a new run"
        )


def check_nothing_trained(folder: Path, config: Config) -> None:
    """Raise ConfigError if a folder without checkpoints has the logs of a run that had some.

    Also if it has files that no run wrote, and that a run would replace: a user's eval.jsonl, say;
    or the logs of a run with another config.
    """
    names = (RECORD, *LOGS, SUMMARY, JOB_SUMMARY, PEFT_CONFIG)
    there = [name for name in names if (folder / name).exists()]
    if there and (not is_run(folder) or damage_of_record(folder)):
        raise ConfigError(
            f"--resume auto: {folder} has no checkpoint, and {there[0]} that no run wrote, which "
            "this run would replace; take another folder"
        )
    saved = Config.of(**read_record(Config, folder)) if there else config
    if any((folder / name).exists() and (folder / name).stat().st_size for name in LOGS):
        check_same_run(config, saved.flat(), folder)
    try:
        last = (folder / "metrics.jsonl").read_bytes().strip().rpartition(b"\n")[2]
        steps = parse_json(last)["step"] if last else 0
    except (OSError, ValueError, TypeError, KeyError):  # none, or cut off when the process died
        return
    # a run that was killed may have logged steps that it had not saved yet
    if type(steps) is int and steps > min(config.run.save_every, saved.run.save_every):
        raise ConfigError(
            f"--resume auto: {folder} has metrics of {steps} steps, but no checkpoint; bring the "
            "checkpoints back, or take another folder"
        )


def damage_of_record(run: Path) -> str:
    """What is wrong with the record of a run's settings; "" if nothing is, or if there is none."""
    try:
        if is_run(run):
            read_record(Config, run)
    except ConfigError as error:
        return str(error)
    return ""


def changes(
    config: Config, saved: Mapping[str, Any], now: Mapping[str, Any], then: Mapping[str, Any]
) -> list[str]:
    """What differs from the checkpoint and changes bits; `now` and `then` are `made_by`."""
    said = []
    for name, value in then.items():
        if now.get(name, value) != value:
            counted = isinstance(value, int)
            pair = f"{value} {name}" if counted else f"{name} {value}"
            said.append(f"the checkpoint was written by {pair}, this run has {now[name]}")
    differ = differences(config, saved)
    settings = [name for name in differ if changes_bits(name, config, saved)]
    said += [f"{flag(name)} was {differ[name][0]}, is {differ[name][1]}" for name in settings]
    if unknown := sorted(modern(saved).keys() - places(Config).keys()):
        said.append(f"the checkpoint has settings that this version ignores: {', '.join(unknown)}")
    return said


def differences(config: Config, saved: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that differ: name -> (in the checkpoint, in this run).

    An older checkpoint lacks settings that are newer than itself. It behaved like their defaults.
    """
    then = {**Config().flat(), **modern(saved)}
    return {name: (then[name], x) for name, x in config.flat().items() if then[name] != x}


def may_differ(name: str) -> bool:
    return places(Config)[name][0] in MAY_DIFFER and name not in MUST_AGREE


def changes_bits(name: str, config: Config, saved: Mapping[str, Any]) -> bool:
    """Whether a setting that may differ is one that changes results, if only by rounding."""
    needs = ONLY_WITH.get(name)
    if needs and not (config.flat()[needs] or modern(saved).get(needs)):
        return False
    in_group = places(Config)[name][0] in ("speed", "memory") and name not in SAME_BITS
    return in_group or name == "max_steps"
