"""Users' files: each is a real module, run once in a process, for whatever it is asked for."""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from minigrpo.errors import RunFailed
from minigrpo.rewards.functions import load_rewards
from minigrpo.rewards.scorer import RewardScorer
from minigrpo.run.logging import read_jsonl
from minigrpo.task import Task
from minigrpo.tasks.loading import load_task
from minigrpo.tools import cli
from minigrpo.turns.environments import EnvironmentSet
from minigrpo.types import ConfigError, Example
from minigrpo.userfiles import load_file, load_name, place_of

from . import tiny
from .steps import group
from .tiny import ROOT, refused

# what breaks where a file is no module that its own names are looked up in
WHOLE = """
from __future__ import annotations
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
import minigrpo
from near_the_whole import LIMIT

with open(Path(__file__).with_name("runs.txt"), "a") as file:
    file.write("run\\n")

Unit = Literal["m", "km"]

@dataclass
class Route:
    stops: list[str] = field(default_factory=list)

class Walk:
    def reset(self, **row) -> str:
        self.route = Route()
        return "Walk."

    def add(self, name: str, far: int, unit: Unit = "m") -> str:
        self.route.stops.append(name)
        return f"{far + 1} {unit} {len(self.route.stops)}"

    def get_reward(self) -> float:
        return float(len(self.route.stops))

def twice(number: int) -> int:
    return 2 * number + LIMIT

@minigrpo.reward
def length(example, text):
    return min(len(text), LIMIT)

def loss(x):
    return -x.logp * x.advantages

class Own(minigrpo.Task):
    reward_weights = {"right": 1.0}

    def __init__(self, seed: int) -> None:
        self.route = Route([str(seed)])

    def train(self, number: int) -> minigrpo.Example:
        return minigrpo.Example(f"{number}+1=", str(number + 1))

    held_out = train

    def score(self, example, text):
        return {"right": float(text == example.answer)}

def breaks():
    return 1 / 0
"""


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A file with everything in it, and a file beside it that it imports."""
    (tmp_path / "near_the_whole.py").write_text("LIMIT = 5\n")
    sys.modules.pop("near_the_whole", None)  # that of another test
    file = tmp_path / "whole.py"
    file.write_text(WHOLE)
    return file


def test_a_file_is_run_once_whatever_it_is_asked_for(whole: Path) -> None:
    (reward,) = load_rewards(str(whole))
    environments = EnvironmentSet.load(f"{whole}:Walk,{whole}:twice")
    task = load_task(str(whole), seed=3)
    loss = load_name("--loss", f"{whole}:loss")
    assert loss is load_file(whole.parent / "." / "whole.py").loss
    assert reward(Example("?"), "long text") == 5
    assert task.source.route.stops == ["3"]
    assert task.train(4).index == 4
    assert environments.tools["twice"].call({"number": "4"}) == 13
    assert (whole.parent / "runs.txt").read_text() == "run\n"
    text = whole.read_text()
    whole.write_text(f"{text}\n")
    refused(load_file, whole)  # this process has it as it was
    whole.write_text(text)


def test_what_is_no_file_or_name_is_refused(whole: Path) -> None:
    for missing in (f"{whole}:nothing", "whole", ":loss"):
        refused(load_name, "--loss", missing)
    (whole.parent / "text.txt").touch()
    refused(load_file, whole.parent / "text.txt")
    with pytest.raises(OSError):
        load_file(whole.parent / "nowhere.py")


def test_a_neighbour_that_imports_the_file_gets_the_same_module(tmp_path: Path) -> None:
    """Whoever comes first."""
    paths = {}
    for name, other in (("first", "second"), ("second", ""), ("third", ""), ("fourth", "third")):
        paths[name] = tmp_path / f"{name}_of_four.py"
        paths[name].write_text(f"import {other}_of_four\n" if other else "NUMBERS = []\n")
    importer = load_file(paths["first"])
    assert load_file(paths["second"]) is importer.second_of_four
    imported = load_file(paths["third"])
    assert imported is load_file(paths["fourth"]).third_of_four


def test_a_file_hides_no_other_module(tmp_path: Path) -> None:
    """Not one of the standard library, and not the file of another folder."""
    for folder in ("a", "b.c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "statistics.py").write_text(f"WHERE = {folder!r}\n")
    modules = [load_file(tmp_path / folder / "statistics.py") for folder in ("a", "b.c")]
    assert [module.WHERE for module in modules] == ["a", "b.c"]
    import statistics

    assert statistics.mean([1, 2, 3]) == 2


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_process_unpickles_its_functions(whole: Path, method: str) -> None:
    twice = load_name("--loss", f"{whole}:twice")
    route = load_name("--loss", f"{whole}:Route")
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(twice, 4).result() == 13
        assert pool.submit(route, ["a"]).result() == route(["a"])


def test_postponed_annotations_are_the_types_of_tools(whole: Path) -> None:
    environments = EnvironmentSet.load(f"{whole}:Walk")
    walk = load_file(whole).Walk()
    walk.reset()
    add = environments.specs["Walk"].tools_of(walk)["add"]
    properties = add.schema["function"]["parameters"]["properties"]
    assert properties["far"]["type"] == "integer"
    assert properties["unit"]["enum"] == ["m", "km"]
    assert add.call({"name": "a", "far": "2"}) == "3 m 1"
    with pytest.raises(ValueError):
        add.call({"name": "a", "far": "2", "unit": "mile"})


def test_an_error_of_a_users_file_is_found_by_its_file_and_line(whole: Path) -> None:
    line = WHOLE.splitlines().index("    return 1 / 0") + 1
    with pytest.raises(ZeroDivisionError) as error:
        load_file(whole).breaks()
    assert f"{whole}, line {line}" in place_of(error.value)
    with pytest.raises(ConfigError) as own:
        load_name("--loss", "nowhere")
    assert str(ROOT / "minigrpo") not in place_of(own.value)


SLOW = """
import time
import minigrpo
from PAYS import PAY

@minigrpo.reward(process=True, timeout_s=1)
def paid(example, text):
    if text == "slow":
        time.sleep(60)
    return PAY
"""


@pytest.mark.parametrize("edited", ["PAY = 2.0\n", "PAY = "], ids=["whole", "not whole"])
def test_a_run_is_not_paid_by_a_file_that_has_changed(tmp_path: Path, edited: str) -> None:
    """A late call ends its process; the next process reads the files again, also those beside."""
    helper = tmp_path / f"pays_{len(edited)}.py"  # the path for imports has all these folders
    helper.write_text("PAY = 1.0\n")
    (tmp_path / "rewards.py").write_text(SLOW.replace("PAYS", helper.stem))
    scorer = RewardScorer(Task(), functions=load_rewards(str(tmp_path / "rewards.py")), workers=1)
    first = scorer.score([Example("?")], [group("a", "slow")])
    assert first.scores["paid"].failed.tolist() == [[False, True]]
    helper.write_text(edited)
    with pytest.raises(RunFailed):
        scorer.score([Example("?")], [group("a", "b")])


RUN = "--max-steps 1 --max-new-tokens 8 --eval-size 2 --prompts-per-step 2 --group-size 2"


@pytest.mark.parametrize(
    "top", ["open('missing.txt')", "1 / 0", "minigrpo.reward(lambda x: 1)", "raise SystemExit(0)"]
)
def test_an_error_at_the_top_of_a_file_names_it_and_its_line(
    top: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line for what the user's code refuses, and a traceback for a bug."""
    file = tmp_path / "bad.py"
    file.write_text(f"import minigrpo\n\n{top}\n")
    model = tiny.tiny_chess_model(tmp_path / "model")
    words = f"train --rewards {file} --model {model} --out-dir {tmp_path}/run {RUN}".split()
    is_bug = top == "1 / 0"
    with pytest.raises(ZeroDivisionError if is_bug else SystemExit) as ended:
        cli.main(words)
    if is_bug:
        assert place_of(ended.value).startswith(f"{file}, line 3")
    else:
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(file) in line and "line 3" in line


def test_a_model_at_the_top_of_a_file_is_loaded_once_by_a_run(whole: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(30)]
    data = tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    model = tiny.tiny_chat_model(tmp_path / "model", context=320)
    words = f"train --rewards {whole} --environment {whole}:Walk --loss {whole}:loss --data {data}"
    words += f" --model {model} --out-dir {tmp_path}/run {RUN}"
    cli.main(words.split())
    assert (whole.parent / "runs.txt").read_text() == "run\n"
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]["rewards/length/mean"] <= 5
    cli.main(["evaluate", f"{tmp_path}/run", "--n", "2"])
