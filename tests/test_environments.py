"""Dialogues: tokens, masks, tools, games, and what a run makes of them."""

import asyncio
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from itertools import chain, repeat
from pathlib import Path
from threading import Event
from typing import Any, ClassVar
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch

import minigrpo
from minigrpo.evaluate import grade
from minigrpo.metrics import dialogue_metrics
from minigrpo.model.chat import Chat
from minigrpo.model.encoding import encode_prompt
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.model.transformer import Transformer
from minigrpo.rewards import RewardScorer
from minigrpo.run.logging import read_jsonl
from minigrpo.runtime.guard import RunFailed
from minigrpo.runtime.rng import uniforms
from minigrpo.sampling import generate as generate_module
from minigrpo.sampling.sampler import Sampler
from minigrpo.tasks.base import load_task
from minigrpo.turns.dialogues import Dialogues, Episode
from minigrpo.turns.environments import EnvironmentSet, TurnTask, as_text
from minigrpo.turns.tools import FORMS, Tool, calls_of, result_of
from minigrpo.types import Completions, ConfigError, Dialogue, Example

from . import tiny
from .steps import EOS, make_completions
from .test_sampling import generate
from .test_tokenizer import SWALLOWS
from .tiny import TINY, ask, read_json, refused, tiny_chat_model

LENGTH, SAMPLES, PROMPTS = 24, 4, 5
STOPS = (EOS, 4, 7)  # so that turns end often
QWEN, MISTRAL, LLAMA = FORMS

# --- tokens ---------------------------------------------------------------------------------------


def answer_to(ids: Sequence[int]) -> list[int]:
    """What the environment of these tests says: two to four tokens, or the end of the dialogue.

    As in text, the token that ended the turn says nothing.
    """
    said = 1 + sum(ids[:-1])
    if said % 7 == 0:
        return []
    return [1 + said % 3, *[2] * (len(ids) % 3), 5]


class Stub:
    """Answers turns after a while that differs from turn to turn."""

    def __init__(self, patience: int = 0) -> None:
        self.patience, self.open = patience, {}
        self.submitted = 0

    def submit(self, sequence: int, ids: Sequence[int]) -> None:
        self.submitted += 1
        answer = answer_to(ids)
        wait = (sequence * 7 + len(ids)) % (self.patience + 1)
        self.open[sequence] = wait, answer if len(ids) + len(answer) < LENGTH else []

    def replies(self, *, wait: bool) -> dict[int, list[int]]:
        least = min((n for n, _ in self.open.values()), default=0) if wait else 0
        ready = {s: answer for s, (n, answer) in self.open.items() if n <= least}
        self.open = {s: (n - 1, x) for s, (n, x) in self.open.items() if s not in ready}
        return ready


def prompts() -> Completions:
    return make_completions(0, prompts=PROMPTS)


def u(vocab_size: int) -> torch.Tensor:
    """In each group, the first two completions begin with the tokens 4 and 7 and end their turn."""
    found = uniforms(0, "turns", 0, np.arange(PROMPTS), SAMPLES, LENGTH)
    found[:, :2, 0] = np.array([4.5, 7.5]) / vocab_size
    return torch.from_numpy(found)


@torch.no_grad()
def naive(model: Transformer, c: Completions) -> Iterator[tuple[list[int], list[bool], list]]:
    """The tokens of each dialogue, which of them were sampled, and their log-probs."""
    numbers = u(model.shape.vocab_size).double()
    for p, g in np.ndindex(PROMPTS, SAMPLES):
        prompt, ids, sampled, logps = c.prompt_ids[p, : c.prompt_len[p]].tolist(), [], [], []
        while len(ids) < LENGTH:
            logp = model.logits(torch.tensor([prompt + ids]))[0, -1].log_softmax(-1)
            cdf = logp.exp().cumsum(-1)
            token = int(torch.searchsorted(cdf, numbers[p, g, len(ids)] * cdf[-1], right=True))
            ids, sampled, logps = [*ids, token], [*sampled, True], [*logps, float(logp[token])]
            if token in STOPS:
                answer = answer_to(ids) if len(ids) < LENGTH else []
                if not answer or len(ids) + len(answer) >= LENGTH:
                    break
                ids, sampled = ids + answer, sampled + [False] * len(answer)
                logps += [0.0] * len(answer)
        yield ids, sampled, logps


@pytest.mark.parametrize(("patience", "at_once", "read"), [(0, 0, 16), (5, 0, 1), (3, 2, 2)])
def test_a_dialogue_is_what_a_plain_forward_makes_of_it(
    model: Transformer, patience: int, at_once: int, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long answers take, in however many rounds they are read, whatever else runs."""
    monkeypatch.setattr(generate_module, "MOST_READ", read)
    c, stub = prompts(), Stub(patience)
    found = generate(
        model,
        c.prompt_ids,
        c.prompt_len,
        stops=STOPS,
        max_new_tokens=LENGTH,
        num_samples=SAMPLES,
        u=u(model.shape.vocab_size),
        prompts_at_once=at_once,
        answers=stub,
    )
    turns = ended = 0
    for (p, g), (ids, sampled, logps) in zip(
        np.ndindex(PROMPTS, SAMPLES), naive(model, c), strict=True
    ):
        n = len(ids)
        assert found.completion_len[p, g] == n
        assert found.completion_ids[p, g, :n].tolist() == ids
        assert found.completion_mask[p, g, :n].tolist() == sampled
        assert found.sampler_logp[p, g, :n].tolist() == pytest.approx(logps, abs=1e-6)
        turns += sampled.count(False)
        ended += sum(own and x in STOPS for x, own in zip(ids, sampled, strict=True))
    assert stub.submitted == ended  # also a turn that ends at the last column
    assert turns > PROMPTS * SAMPLES  # there are dialogues to compare


# --- tools ----------------------------------------------------------------------------------------


class Shop:
    def reset(self, price: int, **row: Any) -> str:
        self.price, self.paid = price, 0
        return f" It costs {price}."

    def pay(self, amount: int, note: str = "") -> str:
        """Pay something.

        Args:
            amount: How much to pay: all of it,
                or a part
            note: What to say
        """
        self.paid += amount
        return f"paid {self.paid}"

    def fail(self) -> None:
        """Fail."""
        raise ValueError("it fails")

    def get_reward(self) -> float:
        return float(self.paid == self.price)

    def _secret(self) -> None: ...


class Game:
    def reset(self) -> None: ...

    def step(self, text: str) -> tuple[str, float, bool]:
        return "Go on.", 0.0, False


class Quiz:
    def reset(self) -> None: ...

    def get_reward(self) -> float:
        return 1.0


async def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: A city
    """
    return f"sun in {city}"


def test_a_call_is_read_as_qwen_llama_and_mistral_write_it() -> None:
    one, two = ({"name": "pay", "arguments": {"amount": n, "note": "[x]"}} for n in (3, 4))
    expected = [("pay", call["arguments"]) for call in (one, two)]
    qwen = f"Well.\n<tool_call>\n{json.dumps(one)}\n</tool_call>"
    assert calls_of(qwen) == expected[:1] and calls_of(qwen + qwen) == expected[:1] * 2
    llama = json.dumps(one).replace("arguments", "parameters")
    assert calls_of(llama) == calls_of(f"<|python_tag|>{llama}\n") == expected[:1]
    for space in ("", " "):
        mistral = f"[TOOL_CALLS]{space}{json.dumps([one, {**two, 'id': 'abcdefghi'}])}"
        assert calls_of(mistral) == calls_of(f"Well.\n{mistral}\n") == expected
    thought = f"<think>{qwen}"
    for text in ("the answer is {3}", "", '{"answer": 5}', "{3}", f"{thought}</think> 4", thought):
        assert calls_of(text) == []
    # those between thoughts count
    first, second = call("pay", amount=1), call("pay", amount=2)
    found = calls_of(f"<think>a</think>{first}<think>{first} </think>{second}<think>{first}")
    assert [arguments["amount"] for _, arguments in found] == [1, 2]
    for broken in ("{", "[1]", "[{", "pay", '{"name": 1', "3"):
        for text in (f"<tool_call>{broken}</tool_call>", f"[TOOL_CALLS]{broken}"):
            assert [arguments for _, arguments in calls_of(text)] == [{}]


HIDDEN = ("</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", '"}')


@pytest.mark.parametrize("note", HIDDEN)
@pytest.mark.parametrize("thought", ["", "<think>{call}</think>", "{call} or not</think>\n"])
def test_nothing_in_a_call_ends_it_or_is_a_thought(note: str, thought: str) -> None:
    """The second thought was begun by the prompt, and both have a draft of a call."""
    qwen = call("pay", note=note)
    llama = json.dumps({"name": "pay", "parameters": {"note": note}})
    mistral = f"[TOOL_CALLS] {json.dumps([{'name': 'pay', 'arguments': {'note': note}}])}"
    expected = ("pay", {"note": note})
    draft = thought.format(call=qwen)
    assert calls_of(f"{draft}{qwen}{qwen}", QWEN) == [expected] * 2
    assert calls_of(f"{draft}{qwen}") == [expected]
    assert calls_of(f"{draft}{llama}", LLAMA) == [expected]
    if "{call} or" not in thought:  # Mistral's last call is whatever follows
        assert calls_of(f"{draft}{mistral}", MISTRAL) == [expected]


def test_an_answer_in_json_is_a_call_only_in_the_form_of_the_template() -> None:
    for answer in ({"name": "Bob", "age": 3}, {"all": [{"name": "Bob"}], "parameters": 3}):
        for form in (None, QWEN, MISTRAL, LLAMA):
            assert calls_of(json.dumps(answer), form) == []
    as_llama = json.dumps({"name": "pay", "parameters": {"amount": 3}})
    assert calls_of(as_llama, LLAMA) and not calls_of(as_llama, QWEN)
    assert calls_of(call("pay"), QWEN) and not calls_of(call("pay"), MISTRAL)
    broken = as_llama[:-1] + ",}"
    assert calls_of(broken, LLAMA) == [(broken, {})]  # the model reads that there is no such tool


MISTRAL_CALLS = (tiny.TEMPLATES / "mistral-tools.jinja").read_text()
XML_CALLS = tiny.QWEN_TEMPLATE.replace("call.function | tojson", "'<f=' + call.function.name + '>'")
# family of the tokenizer, template or the name of a published one, whether its calls are read
CALL_TEMPLATES = [
    ("qwen", tiny.QWEN_TEMPLATE, True),
    ("mistral", MISTRAL_CALLS, True),
    ("qwen", XML_CALLS, False),
    ("qwen", tiny.QWEN_TEMPLATE.replace("message.tool_calls or []", "[]"), False),  # left out
    *(pytest.param("qwen", name, True, marks=pytest.mark.peer) for name in ("qwen2_5", "qwen3")),
    pytest.param("qwen", "qwen3_instruct_2507", True, marks=pytest.mark.peer),
    *(pytest.param("llama", f"llama3_{n}", True, marks=pytest.mark.peer) for n in (1, 2)),
    *(
        pytest.param("qwen", name, False, marks=pytest.mark.peer)
        for name in ("glm4moe", "deepseekv3")
    ),
    pytest.param("qwen", "qwen3_5_think", False, marks=pytest.mark.peer),
]


@pytest.mark.parametrize(("family", "template", "is_read"), CALL_TEMPLATES)
def test_a_template_whose_own_call_is_not_read_is_refused(
    tmp_path: Path, family: str, template: str, is_read: bool
) -> None:
    if "{" not in template:
        template = tiny.published_template(template)
    tokenizer = load_tokenizer(str(tiny.tiny_tokenizer_folder(tmp_path, family, template=template)))
    for kind in (Game, Quiz) if family == "qwen" else (Game,):  # without tools
        dialogues_of(EnvironmentSet.of(kind), tokenizer)
    with nullcontext() if is_read else pytest.raises(ConfigError):
        dialogues_of(EnvironmentSet.of(Shop), tokenizer)


def dialogues_of(world: EnvironmentSet, tokenizer: Any, **settings: Any) -> Dialogues:
    return Dialogues(minigrpo.Config.of(**settings), world, tokenizer, print)


def replies(dialogues: Dialogues, *turns: list[int]) -> list[list[int]]:
    """The tokens of the answers to the first turns of a batch."""
    for sequence, ids in enumerate(turns):
        dialogues.submit(sequence, ids)
    found = {}
    while len(found) < len(turns):
        found |= dialogues.replies(wait=True)
    dialogues.pool.close()
    return [list(found[sequence]) for sequence in range(len(turns))]


def test_a_dialogue_goes_on_after_a_call_in_the_form_of_its_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny.tiny_tokenizer_folder(tmp_path)))
    world = EnvironmentSet.of(None, [weather])
    dialogues = dialogues_of(world, tokenizer, max_new_tokens=400)
    as_llama = json.dumps({"name": "weather", "parameters": {"city": "Bonn"}})
    turns = [call("weather", city="</think>"), as_llama, '{"name": "Bob"}', call("none")]
    dialogues.begin([Example("a")], len(turns))
    said = [[*tokenizer.encode(turn), tokenizer.turn_end] for turn in turns]
    assert [bool(ids) for ids in replies(dialogues, *said)] == [True, False, False, True]
    assert dialogues.episodes[0].messages[-1]["content"] == "sun in </think>"


@pytest.mark.parametrize("peer", [False, pytest.param(True, marks=pytest.mark.peer)])
@pytest.mark.parametrize("flags", SWALLOWS)
def test_the_tokens_of_a_dialogue_are_those_of_its_whole_text(
    tmp_path: Path, flags: dict[str, bool], peer: bool
) -> None:
    """The first turn ends by its own token, by another one that ends texts, and by a stop text."""
    folder = tiny.change_flags(tiny.tiny_tokenizer_folder(tmp_path), **flags)
    tokenizer = load_tokenizer(str(folder))
    dialogues = dialogues_of(EnvironmentSet.of(Game), tokenizer, max_new_tokens=99)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]
    example = Example("", messages=messages[:1])
    dialogues.begin([example], 3)
    ended, other, stopped = (
        [*tokenizer.encode("x"), *end] for end in ([tokenizer.turn_end], [tokenizer.eot], [])
    )
    to_ended, to_other, to_stopped = replies(dialogues, ended, other, stopped)
    whole = [*messages, {"role": "user", "content": "Go on."}]
    if peer:
        from transformers import PreTrainedTokenizerFast

        theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        written = theirs.apply_chat_template(whole, add_generation_prompt=True)
        expected = written["input_ids"]
    else:
        assert tokenizer.chat
        expected = tokenizer.encode(tokenizer.chat.render(whole), special=True)
    prompt = encode_prompt(tokenizer, example)
    assert prompt + ended + to_ended == expected
    assert prompt + stopped + to_stopped == expected
    assert to_other == to_ended  # what was sampled has closed the turn


def test_variables_of_a_row_reach_the_turns_that_follow(tmp_path: Path) -> None:
    tiny.tiny_tokenizer_folder(tmp_path, template=tiny.QWEN_TEMPLATE + "{{ mood }}")
    tokenizer = load_tokenizer(str(tmp_path), chat_args={"mood": "glad"})
    dialogues = dialogues_of(EnvironmentSet.of(Game), tokenizer)
    own = {"chat_template_kwargs": {"mood": "sad"}}
    dialogues.begin([Example("a"), Example("b", fields=own)], 1)
    said = tokenizer.encode("x")
    texts = map(tokenizer.text_of, replies(dialogues, said, said))
    assert [text.rpartition("\n")[2] for text in texts] == ["glad", "sad"]


def test_what_an_environment_says_stands_before_the_beginning_of_an_answer() -> None:
    asked = [{"role": "user", "content": "Buy."}, {"role": "assistant", "content": "So"}]
    rows = [{"prompt": asked, "price": price} for price in (5, 7)]
    world = EnvironmentSet.of(Shop)
    example = begun(world, *rows).held_out(0)
    price = example.fields["price"]
    assert [x["content"] for x in example.messages] == [f"Buy. It costs {price}.", "So"]
    assert len(played(world, example, call("pay", amount=price)).messages) == 2


@pytest.mark.peer
def test_schemas_are_those_of_transformers() -> None:
    from transformers.utils import get_json_schema

    for tool in (Shop().pay, Shop().fail, weather):
        found, expected = Tool(tool.__name__, tool).schema, get_json_schema(tool)
        for argument in found["function"]["parameters"]["properties"].values():
            argument.pop("default", None)
        required = found["function"]["parameters"].setdefault("required", [])
        expected["function"]["parameters"].setdefault("required", [])
        expected["function"].pop("return", None)
        assert found == expected and isinstance(required, list)


def played(world: EnvironmentSet, example: Example, *texts: str) -> Episode:
    episode = Episode(world, example)
    for text in texts:
        episode.messages += [{"role": "assistant", "content": text}, *episode.answer(text)]
    return episode


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def begun(world: EnvironmentSet, *rows: dict[str, Any]) -> TurnTask:
    rows = rows or ({"price": 5, "answer": [1]}, {"price": 7})  # no question is read
    task = load_task("prompts", seed=0, data=rows, environment=world, args=NONE)
    return TurnTask(task, world, 0)


NONE = {"judge": "none"}


def test_tools_answer_and_the_environment_gives_the_reward() -> None:
    world = EnvironmentSet.of(Shop, [weather])
    example = begun(world).held_out(0)
    price = example.fields["price"]
    assert example.prompt == f" It costs {price}." and isinstance(example.fields["seed"], int)
    assert [x["function"]["name"] for x in example.tools or ()] == ["fail", "pay", "weather"]
    calls = call("pay", amount="2") + call("pay", amount=price - 2), call("weather", city="Bonn")
    episode = played(world, example, *calls, "Done.")
    contents = [x["content"] for x in episode.messages if x["role"] == "tool"]
    assert contents == ["paid 2", f"paid {price}", "sun in Bonn"]
    assert episode.score() == 1 and not episode.answer("no call")
    odd = call("pay", amount="x"), call("fail"), call("_secret"), call("a b")
    bad = played(world, example, *odd)
    assert len(bad.messages) == 8 and bad.score() == 0  # each error is an answer


def test_episodes_without_rows_have_random_numbers_of_their_own() -> None:
    class Same(Shop):
        def reset(self, seed: int) -> str:  # type: ignore[override]
            return "Go."

    world = EnvironmentSet.of(Same)
    task = TurnTask(load_task("prompts", seed=0, environment=world, args=NONE), world, 0)
    examples = [task.train(i) for i in range(8)]
    assert [x.index for x in examples] == [*range(8)]
    seeds, prompts = {x.fields["seed"] for x in examples}, {x.prompt for x in examples}
    assert len(seeds) == 8 and prompts == {"Go."}
    refused(load_task, "prompts", seed=0, environment=world)  # nothing gives a reward


def test_members_of_a_group_must_start_alike() -> None:
    class Moody(Game):
        count = 0

        def reset(self, price: int) -> str:
            Moody.count += 1
            return f"{Moody.count}"

    world = EnvironmentSet.of(Moody)
    with pytest.raises(ValueError):
        Episode(world, begun(world).held_out(0)).answer("x")


@pytest.mark.parametrize("more", [(), (False, {}), (True, {})])
def test_a_game_has_steps_of_three_or_gymnasiums_five_values(more: tuple[Any, ...]) -> None:
    class Game:
        def reset(self, price: int) -> tuple[str, dict[str, int]]:
            self.steps = 0
            return "Go.", {}

        def step(self, text: str) -> tuple[Any, ...]:
            self.steps += 1
            return f"step {self.steps}", 0.5, self.steps == 3, *more

    world = EnvironmentSet.of(Game, [weather])
    example = begun(world).held_out(0)
    assert example.tools == []  # a game would not answer the call
    assert example.prompt == "Go."  # of Gymnasium's two values
    episode = played(world, example, "a", "b")
    assert episode.over == bool(more and more[0]) and episode.score() == 1.0
    assert episode.messages[-1] == {"role": "user", "content": "step 2"}
    episode.turns, episode.error = ["a", "b"], "gone"
    assert math.isnan(episode.dialogue().rewards["Game"])
    answers = dialogues_of(world, load_tokenizer("chess"))
    assert answers.encode(json.dumps(ask("")))  # else the game would end


def test_the_row_chooses_among_environments() -> None:
    class Other(Shop): ...

    world = EnvironmentSet.of({"shop": Shop, "other": Other})
    assert list(world.parts) == ["Shop", "Other"]
    rows = [{"price": n, "environment": name} for n, name in enumerate(["shop", "other"])]
    task = begun(world, *rows)
    made = task.train(0), task.held_out(0)
    kinds = {example.fields["price"]: world.kind_of(example).make for example in made}
    assert kinds == {0: Shop, 1: Other}
    refused(world.kind_of, Example("", fields={"environment": "none"}))


# --- what users give -----------------------------------------------------------------------------


def search(word: str) -> str:
    """Search songs."""
    return "a song"


class Library(Quiz):
    def search(self, word: str) -> str:
        return "a shelf"

    def _sort(self) -> None: ...

    def close(self) -> None: ...


def test_one_thing_may_have_two_names_or_be_given_twice(tmp_path: Path) -> None:
    assert list(EnvironmentSet.of({"a": Game, "b": Game}).parts) == ["Game"]
    assert list(EnvironmentSet.of(None, [search, search]).tools) == ["search"]
    assert list(EnvironmentSet.of(None, search).tools) == ["search"]
    assert list(EnvironmentSet.of({"a": Library, "b": Game}).kinds) == ["a", "b"]
    assert list(EnvironmentSet.of(Library).tools_of(Library())) == ["search"]
    # a schema that a row has is not shown again
    own, other = Tool("search", search).schema, Tool("weather", weather).schema
    for row in (own, own["function"]):
        example = Example("a", tools=[other, row])
        task = Mock(spec=minigrpo.Task, train=lambda number, example=example: example)
        asked = TurnTask(task, EnvironmentSet.of(None, [search]), 0).train(0)
        assert asked.tools == [other, own]
    # classes of one name in two files are two
    files = [tmp_path / "one.py", tmp_path / "two.py"]
    for file in files:
        file.write_text("class Walk:\n    def reset(self): ...\n")
    one, two = (f"{file}:Walk" for file in files)
    assert list(EnvironmentSet.load(f"{one},{one}").kinds) == ["Walk"]
    refused(EnvironmentSet.load, f"{one},{two}")


class Sized:
    """A game of a given length."""

    closed = 0

    def __init__(self, size: int = 3) -> None:
        self.left = size

    def reset(self) -> None: ...

    def step(self, text: str) -> tuple[str, float, bool]:
        self.left -= 1
        return "more", 0.0, self.left == 0

    def get_reward(self) -> float:
        return 7.0 - self.left

    def close(self) -> None:
        Sized.closed += 1


async def later() -> Sized:
    return Sized(2)


@pytest.mark.parametrize("make", [lambda: Sized(2), partial(Sized, size=2), later])
def test_a_callable_makes_environments(make: Callable[[], Any]) -> None:
    """One is made at the start, to see what it has, and is closed at once."""
    before = Sized.closed
    world = EnvironmentSet.of(make)
    assert Sized.closed == before + 1
    assert list(world.kinds) == list(world.parts) == ["Sized"]
    episode = Episode(world, Example(""))
    assert episode.answer("a") and not episode.over
    assert episode.answer("b") and episode.over and episode.score() == 7


def with_timeout(timeout_s: Any) -> type[Quiz]:
    return type("Timed", (Quiz,), {"timeout_s": timeout_s})


def hangs() -> None:
    time.sleep(60)


hangs.timeout_s = 0.1  # type: ignore[attr-defined]


class Called:
    def __call__(self, word: str) -> str:
        """Repeat a word.

        Args:
            word: what is repeated
        """
        return word


def repeated(word: str, times: int) -> str:
    """Repeat a word often."""
    return word * times


def test_a_tool_may_be_a_partial_or_an_object_that_is_called() -> None:
    """As a reward may: its name, hints and docstring are those of the code that is called."""
    tools = EnvironmentSet.of(None, [partial(repeated, times=2), Called()]).tools
    assert list(tools) == ["repeated", "Called"]
    for tool, about in zip(tools.values(), ("Repeat a word often.", "Repeat a word."), strict=True):
        function = tool.schema["function"]
        assert function["description"] == about
        assert list(function["parameters"]["properties"]) == ["word"]
    assert result_of(tools, "repeated", {"word": "ab"}).content == "abab"
    assert result_of(tools, "repeated", {"word": "ab", "times": 3}).has_failed
    assert result_of(tools, "Called", {"word": "ab"}).content == "ab"


def of_places(word: str, /) -> str:
    return word


def of_many(*words: str) -> str:
    return ""


def of_unknown(word: Called) -> str:
    return ""


def of_lines(word: str) -> Iterator[str]:
    yield word


NO_TIMES = [0, -1.0, "10", math.nan, math.inf, None]
UNCALLABLE = [Called, partial(search, "a", "b"), lambda word: word, len]
UNCALLABLE += [of_places, of_many, of_unknown, of_lines, Tool("search", search).schema]
REFUSED = [
    # two things of one name
    (None, [search, Library().search]),
    (Library, [search]),
    ({"a": Game, "b": Library}, [search]),
    ({"a": Game, "b": type("Game", (Game,), {})}, []),
    # what makes no environment; one object cannot serve many completions
    *((make, []) for make in (hangs, sys.exit, lambda x: x, Mock(spec=[]), Sized())),
    # a deadline is a positive number
    *((with_timeout(timeout_s), []) for timeout_s in NO_TIMES),
    *((partial(with_timeout(timeout_s)), []) for timeout_s in NO_TIMES),
    # what a model cannot call
    *((None, [tool]) for tool in UNCALLABLE),
]


@pytest.mark.parametrize(("environment", "tools"), REFUSED)
def test_what_is_no_environment_or_tool_is_refused(environment: Any, tools: list[Any]) -> None:
    refused(EnvironmentSet.of, environment, tools)
    assert EnvironmentSet.of(with_timeout(3)).kinds["Timed"].timeout_s == 3


def test_a_method_that_a_model_cannot_call_is_refused() -> None:
    class Odd(Quiz):
        def look(self, *places: str) -> str:
            return ""

    with pytest.raises(ConfigError):
        begun(EnvironmentSet.of(Odd)).train(0)
    with pytest.raises(ConfigError):
        begun(EnvironmentSet.of(Odd)).known(0)


def test_methods_with_a_cache_and_of_the_class_are_tools() -> None:
    class Atlas(Quiz):
        @classmethod
        def tell(cls, city: str) -> str:
            return f"{cls.__name__}: {city}"

        @cache  # noqa: B019
        def find(self, city: str) -> str:
            return city

    tools = EnvironmentSet.of(Atlas).tools_of(Atlas())
    assert result_of(tools, "tell", {"city": "Rome"}).content == "Atlas: Rome"
    assert result_of(tools, "find", {"city": "Rome"}).content == "Rome"


def test_completions_cannot_share_an_environment() -> None:
    refused(begun(EnvironmentSet.of(cache(lambda: Sized(2)))).train, 0)


class Client:
    """It works in the loop of its first call only, as clients of HTTP do."""

    loop: Any = None

    async def get(self, word: str) -> str:
        """Get a word."""
        self.loop = self.loop or asyncio.get_running_loop()
        assert asyncio.get_running_loop() is self.loop
        await asyncio.sleep(0)
        return word


def test_all_calls_await_in_one_loop() -> None:
    client = Client()
    closed = []

    class Waits:
        async def reset(self) -> str:
            return await client.get("Go.")

        async def step(self, text: str) -> tuple[str, float, bool]:
            return await client.get(text), 0.0, False

        async def get_reward(self) -> float:
            return float(await client.get("3"))

        async def close(self) -> None:
            closed.append(await client.get("x"))

    tools = {"get": Tool("get", client.get)}
    for word in ("a", "b"):
        assert result_of(tools, "get", {"word": word}).content == word
    world = EnvironmentSet.of(Waits)
    example = begun(world, {"prompt": "a"}, {"prompt": "b"}).held_out(0)
    assert example.prompt.endswith("Go.") and closed == ["x"]
    episode = played(world, example, "b")
    assert episode.messages[-1]["content"] == "b" and episode.score() == 3
    episode.session.close()
    assert closed == ["x", "x"]


@pytest.mark.parametrize(
    ("said", "text"),
    [
        *((None, ""), ("a", "a"), (0, "0"), (2.5, "2.5"), (False, "False"), ([], "")),
        *((np.arange(3), "[0 1 2]"), (np.int64(4), "4"), (torch.tensor(4), "tensor(4)")),
        *(([1, 2], "[1, 2]"), ((1, 2, 3), "(1, 2, 3)"), ({"x": 1}, "{'x': 1}")),
        *((("a", {}), "a"), ((0, {"x": 1}), "0")),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
    ],
)
def test_what_an_environment_says_becomes_a_text(said: Any, text: str) -> None:
    class Says:
        def reset(self) -> Any:
            return said

        def step(self, text: str) -> Any:
            return said, 0.0, True

    world = EnvironmentSet.of(Says)
    example = begun(world, {"prompt": "Now: "}, {"prompt": "So: "}).held_out(0)
    assert example.prompt.partition(": ")[2] == text
    assert Episode(world, example).answer("x")[0]["content"] == text
    assert as_text(np.zeros(2000, dtype=int)).count("0") == 2000


MESSAGE = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    "said", [MESSAGE, [MESSAGE], [{"type": "image", "url": "a"}], [object()], b"a", object()]
)
def test_what_is_no_text_is_refused(said: Any) -> None:
    with pytest.raises(TypeError):
        as_text(said)


def leaves() -> None:
    """End the process."""
    sys.exit(0)


async def leaves_the_loop() -> None:
    """End the loop."""
    sys.exit(0)


def test_a_model_reads_what_is_wrong_with_a_call() -> None:
    """In words that know neither this library nor how it was started."""
    functions = (Shop().pay, Shop().fail, weather, leaves, leaves_the_loop)
    tools = {function.__name__: Tool.of(function) for function in functions}
    wrong = [
        *(("nothing", {}), ({}, {}), ("pay", [1]), ("pay", None), ("pay", {})),
        *(("pay", {"amount": "x", "z": 1}), ("fail", {}), ("leaves", {}), ("leaves_the_loop", {})),
    ]
    for name, arguments in wrong:
        content = result_of(tools, name, arguments).content
        assert str(name) in content and "\n" not in content
        assert not any(word in content for word in ("minigrpo", "pydantic", "https", "input"))
        assert result_of(tools, name, arguments).has_failed
    assert result_of(tools, "weather", {"city": "Bonn"}).content == "sun in Bonn"


def test_failed_calls_are_counted() -> None:
    world = EnvironmentSet.of(None, [weather, leaves])
    calls = call("weather", city="Bonn"), call("weather"), call("leaves"), call("nothing")
    episode = played(world, Example("", tools=()), *calls)
    episode.turns += calls
    dialogue = episode.dialogue()
    assert list(dialogue.failed_calls) == [False, True, True, True]
    values = dialogue_metrics([[dialogue]])
    assert np.mean(values["tools/failure_frequency"]) == 0.75
    assert values["tools/call_frequency"] == [4]


def test_rows_are_known_with_their_tools_and_without_a_reset() -> None:
    class Slow(Shop):
        def reset(self, price: int, seed: int) -> str:  # type: ignore[override]
            raise AssertionError

    world = EnvironmentSet.of({"slow": Slow, "shop": Shop}, [weather])
    rows = [{"prompt": f"{n}?", "price": n} for n in range(20)]
    task = begun(world, *rows, {"prompt": "a", "cost": 5}, {"prompt": "b", "environment": "x"})
    assert task.num_known == 22
    for number in range(20):
        example = task.known(number)
        assert example.prompt == f"{number}?"
        assert [x["function"]["name"] for x in example.tools or ()] == ["fail", "pay", "weather"]
    for number in (20, 21):  # no price for `reset`, and no environment of the name
        assert f"row {number + 1}" in refused(task.known, number)


def test_rows_that_ask_the_same_differ_by_what_their_environment_is_told() -> None:
    rows = [{"prompt": f"Buy {n % 12}.", "price": n} for n in range(120)]
    told = begun(EnvironmentSet.of(Shop), *rows, *rows[:5]).questions
    assert told and sum(map(len, told)) == 120
    rows = [{"prompt": "Buy.", "price": price} for price in (5, 5, 6, 7)]
    for world, number in ((EnvironmentSet.of(Shop), 3), (EnvironmentSet.of(None, [weather]), 1)):
        questions = begun(world, *rows, {"prompt": "Sell.", "price": 5}).questions
        assert questions and sum(map(len, questions)) == number + 1


# --- chat templates -------------------------------------------------------------------------------

ANSWER = {"role": "tool", "name": "f", "content": '4 "apples"'}


@pytest.mark.parametrize(
    ("name", "special", "expected"),
    [
        (
            "qwen3",  # writes an assistant's last turn differently from earlier ones
            ["<|im_start|>", "<|im_end|>"],
            '\n<|im_start|>user\n<tool_response>\n4 "apples"\n</tool_response><|im_end|>\n'
            "<|im_start|>assistant\n",
        ),
        (
            "llama",
            ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
            '<|start_header_id|>ipython<|end_header_id|>\n\n"4 \\"apples\\""<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ],
)
def test_text_between_turns_follows_their_end(name: str, special: list[str], expected: str) -> None:
    template = (tiny.TEMPLATES / f"{name}-tools.jinja").read_text()
    chat = Chat(template, special=special)
    assert chat.between([ANSWER]) == chat.turn_end + expected
    refused(chat.between, [{**ANSWER, "content": f"4{special[0]}"}])
    with pytest.raises(ConfigError):  # it does not write tools
        chat.prompt(ask("f"), [Tool("f", weather).schema])
    deaf = "{% for m in messages if m.role != 'tool' %}" + template.partition("%}")[2]
    with pytest.raises(ConfigError):
        Chat(deaf, special=special).between([ANSWER])


# --- runs -----------------------------------------------------------------------------------------


class Echo:
    """A game that a model with random weights plays: each turn gives a reward for its length."""

    timeout_s = 5.0

    def reset(self, seed: int, **row: Any) -> str:
        self.left, self.seed = 1 + seed % 3, seed
        return f"Say {self.left}."

    def step(self, text: str) -> tuple[str, float, bool]:
        self.left -= 1
        if len(text) % 3 == 0:
            raise RuntimeError("not this one")
        return f"{len(text)} {self.seed % 10}", len(text) / 100, self.left == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model(tmp_path_factory.mktemp("chat") / "model", context=320)


def trained(folder: Path, out: Path, **changes: Any) -> Any:
    settings = {**TINY, "reward_weights": {}, "max_new_tokens": 60, "model": str(folder)}
    settings |= {"environment": Echo, "out_dir": str(out), "quiet": True}
    return minigrpo.train(**{**settings, **changes})


def test_an_environment_and_a_reward_get_no_original_to_change() -> None:
    class Cards:
        def reset(self, deck: list[int], **row: Any) -> None:
            self.card = deck.pop()

    example = Example("", fields={"deck": [1, 2]})
    assert Episode(EnvironmentSet.of(Cards), example).begin().card == 2
    text = Dialogue("a", messages=[{"role": "assistant", "content": "a"}])
    function = minigrpo.reward(lambda example, text: len(text.messages.pop()))
    scorer = RewardScorer(minigrpo.Task(), functions=[function])
    assert scorer.score([example], [[text]]).total == [[2]]
    assert example.fields["deck"] == [1, 2] and len(text.messages) == 1


def test_a_run_in_an_environment_is_logged_and_resumed(folder: Path, tmp_path: Path) -> None:
    whole = trained(folder, tmp_path / "a")
    trained(folder, tmp_path / "b", stop_after=2)
    again = trained(folder, tmp_path / "b", resume="auto")
    for x, y in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(x, y)
    assert whole.metrics["reward"] == again.metrics["reward"]
    turns, failures = whole.metrics["dialogues/turns"], whole.metrics["rewards/Echo/failures"]
    assert max(turns) > 1 and sum(failures) > 0
    samples = read_jsonl(tmp_path / "a" / "samples.jsonl")
    dialogues = [x["dialogue"] for x in samples]
    roles = [[message["role"] for message in dialogue] for dialogue in dialogues]
    assert all(found[::2] == ["assistant"] * len(found[::2]) for found in roles)
    assert any(len(found) > 2 for found in roles)
    for sample, dialogue in zip(samples, dialogues, strict=True):
        said = [x["content"] for x in dialogue if x["role"] == "assistant"]
        assert sample["completion"] == said[-1]
        lengths = [len(text) for text, _ in zip(said, dialogue[1::2], strict=False)]
        whole_turns = said[: len(dialogue) // 2 + 1] if len(dialogue) % 2 else said
        failed = any(len(text) % 3 == 0 for text in whole_turns)
        assert failed or sample["reward"] == pytest.approx(sum(lengths) / 100)


def test_a_stop_text_ends_a_turn(folder: Path, tmp_path: Path) -> None:
    def turns(name: str, **settings: Any) -> list[str]:
        trained(folder, tmp_path / name, max_steps=1, **settings)
        dialogues = [row["dialogue"] for row in read_jsonl(tmp_path / name / "samples.jsonl")]
        said = [message for dialogue in dialogues for message in dialogue]
        return [one["content"] for one in said if one["role"] == "assistant"]

    longest = 12  # characters of a token, at most
    free, stopped = turns("free"), turns("stopped", stop=["e"])
    assert any("e" in text[:-longest] for text in free)
    assert not any("e" in text[:-longest] for text in stopped)
    assert len(stopped) > len(free)


class Slow:
    """Hangs after some turns."""

    timeout_s = 0.2

    def reset(self, seed: int) -> None: ...

    def step(self, text: str) -> tuple[str, float, bool]:
        if len(text) % 2:
            time.sleep(60)
        return "", 1.0, True


def test_an_environment_that_hangs_fails_its_dialogue_alone(folder: Path, tmp_path: Path) -> None:
    run = trained(folder, tmp_path, max_steps=1, eval_size=2)
    world = EnvironmentSet.of(Slow)
    task = begun(world, {"prompt": "Go."}, {"prompt": "Stop."})
    config, tokenizer = run.trainer.config, run.trainer.tokenizer
    dialogues = Dialogues(config, world, tokenizer, print)
    others = {"autocast": nullcontext, "warn": print, "dialogues": dialogues}
    sampler = Sampler(config, run.model, tokenizer, **others)
    scorer = RewardScorer(task, environments=world.parts)
    start = time.monotonic()
    graded = grade(sampler, scorer, [task.held_out(0)], 24)
    assert time.monotonic() - start < 30
    failed = [bool(text.error) for text in graded.texts[0]]
    answered = [len(x.messages) > 1 for x in graded.texts[0]]
    assert any(failed) and any(answered)
    assert not any(a and b for a, b in zip(failed, answered, strict=True))
    assert graded.rewards.failed["Slow"][0].tolist() == failed
    # those that failed have the least of the others
    least = [n for n, has_failed in zip(answered, failed, strict=True) if not has_failed]
    assert graded.rewards.total[0][failed].tolist() == [min(least)] * sum(failed)


class Held(Echo):
    """Remembers which environments were closed, and how often."""

    made: ClassVar[list["Held"]] = []

    def __init__(self) -> None:
        self.done = []
        Held.made.append(self)

    def step(self, text: str) -> tuple[str, float, bool]:
        if len(text) % 4 == 0:
            sys.exit(0)
        return super().step(text)

    def get_reward(self) -> float:
        self.done.append("reward")
        return float(self.seed % 10)

    def close(self) -> None:
        self.done.append("close")
        if len(Held.made) % 3 == 0:
            raise OSError("gone")


def test_every_environment_is_closed_once_after_its_reward(folder: Path, tmp_path: Path) -> None:
    """Whether it is scored, fails, or only asks; and whatever `close` does."""
    Held.made.clear()
    run = trained(folder, tmp_path, environment=Held, max_steps=2)
    assert run.summary["status"] == "finished" and max(run.metrics["rewards/Held/failures"]) > 0
    endings = {tuple(environment.done) for environment in Held.made}
    assert endings == {("close",), ("reward", "close")}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_what_ends_a_batch_closes_its_environments(
    error: type[BaseException], folder: Path, tmp_path: Path
) -> None:
    """A batch that is halved for want of memory has the tokens and rewards of a whole one."""
    run = trained(folder, tmp_path, environment=Held, max_steps=1).trainer
    examples = [run.task.train(i) for i in range(4)]
    whole = run.source.roll_out(examples, 5)
    Held.made.clear()
    effects = chain(repeat(DEFAULT, 20), [error], repeat(DEFAULT))
    replies = Mock(wraps=run.sampler.dialogues.replies, side_effect=effects)
    run.sampler.dialogues.replies = replies
    is_halved = error is torch.OutOfMemoryError
    with nullcontext() if is_halved else pytest.raises(error):
        cut = run.source.roll_out(examples, 5)
    assert Held.made and all(environment.done.count("close") == 1 for environment in Held.made)
    if is_halved:
        assert replies.call_count > 21 and whole.texts == cut.texts
        assert np.array_equal(whole.rewards.total, cut.rewards.total)
        masks = (batch.completions.completion_mask for batch in (whole, cut))
        assert torch.equal(*masks)


class Stuck:
    """Hangs in its turns until it is closed, or while it is made."""

    timeout_s = 0.2
    made: ClassVar[list["Stuck"]] = []
    slow_to_make = False

    def __init__(self) -> None:
        self.free, self.closed = Event(), 0
        if Stuck.slow_to_make:
            time.sleep(0.6)
        Stuck.made.append(self)

    def reset(self) -> None: ...

    def step(self, text: str) -> tuple[str, float, bool]:
        self.free.wait(60)
        return "", 0.0, True

    def close(self) -> None:
        self.closed += 1
        self.free.set()


@pytest.mark.parametrize("slow_to_make", [False, True])
def test_closing_ends_what_hangs(slow_to_make: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that is made too late is closed by the thread that made it."""
    monkeypatch.setattr(Stuck, "slow_to_make", slow_to_make)
    Stuck.made.clear()
    dialogues = dialogues_of(EnvironmentSet.of(Stuck), load_tokenizer("chess"))
    dialogues.begin([Example("")], 2)
    episodes = dialogues.episodes
    for sequence in (0, 1):
        dialogues.submit(sequence, [1])
    while not all(episode.error for episode in episodes):
        dialogues.replies(wait=True)
    dialogues.close()
    tiny.wait_until(lambda: [environment.closed for environment in Stuck.made] == [1, 1])
    with suppress(RuntimeError):
        episodes[0].begin()  # a call that comes too late makes no other
    assert len(Stuck.made) == 2


class Unsure:
    """Its `reset` works until something breaks."""

    timeout_s = 0.3
    broken = ""

    def reset(self, **row: Any) -> str:
        if Unsure.broken == "hangs":
            time.sleep(60)
        if Unsure.broken == "leaves":
            sys.exit(0)
        return "Go."

    def step(self, text: str) -> tuple[str, float, bool]:
        return "", 1.0, True


@pytest.mark.parametrize("how", ["hangs", "leaves"])
def test_a_prompt_that_cannot_be_made_ends_the_run_which_can_go_on(
    how: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(step: int, metrics: Any) -> None:
        monkeypatch.setattr(Unsure, "broken", how if step >= 2 else "")

    given = {"environment": Unsure, "max_steps": 6, "eval_every": 0}
    with pytest.raises(RunFailed):
        trained(folder, tmp_path, callbacks=[breaks], **given)
    summary = read_json(tmp_path / "summary.json")
    assert summary["status"] == "failed" and 2 <= summary["step"] < 6
    with pytest.raises(RunFailed):
        trained(folder, tmp_path, resume="auto", **given)
    monkeypatch.setattr(Unsure, "broken", "")
    assert trained(folder, tmp_path, resume="auto", **given).summary["step"] == 6


def test_turns_and_tokens_are_limited(folder: Path, tmp_path: Path) -> None:
    run = trained(folder, tmp_path, max_steps=1, max_turns=1, overlong="mask")
    assert run.metrics["dialogues/turns"] == [1.0]
    assert 0 < run.metrics["dialogues/cut_ratio"][0] <= run.metrics["completions/clipped_ratio"][0]
    batch = run.trainer.source.batch(1)
    cut = torch.tensor([[text.cut for text in group] for group in batch.texts])
    whole = batch.completions.ended(run.trainer.tokenizer.stops)  # the last turn
    assert (whole & cut).any()
    assert torch.equal(batch.loss_mask, whole & ~cut)
