"""Dialogues: tokens, masks, tools, games, and what a run makes of them."""

import asyncio
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import chain, count, repeat
from pathlib import Path
from threading import Event
from typing import Any, ClassVar
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch

import minigrpo
from minigrpo.errors import RunFailed
from minigrpo.metrics import dialogue_metrics
from minigrpo.model.transformer import Transformer
from minigrpo.rewards.scorer import RewardScorer
from minigrpo.rng import uniforms
from minigrpo.run.logging import read_jsonl
from minigrpo.sampling import generate as generate_module
from minigrpo.tasks import base
from minigrpo.tasks.loading import load_task
from minigrpo.text.chat import Chat
from minigrpo.text.encoding import encode_prompt
from minigrpo.text.tokenizer import load_tokenizer
from minigrpo.turns.dialogues import Dialogues
from minigrpo.turns.environments import EnvironmentSet, Episode, TurnTask, as_text
from minigrpo.turns.tools import FORMS, CallForm, Tool, calls_of, result_of
from minigrpo.types import Completion, Completions, ConfigError, Example

from . import tiny
from .steps import EOS, make_completions
from .test_sampling import generate
from .test_tokenizer import SWALLOWS
from .tiny import TINY, ask, read_json, refused, tiny_chat_model

LENGTH, SAMPLES, PROMPTS = 24, 4, 5
STOPS = (EOS, 4, 7)  # so that turns end often
TAGGED, QWEN, MISTRAL, LLAMA = FORMS

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

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.submitted = 0
        self.answers = {}
        self.waits = {}  # how often `replies` is asked before an answer is there

    def submit(self, sequence: int, ids: Sequence[int]) -> None:
        self.submitted += 1
        answer = answer_to(ids)
        leaves_room = len(ids) + len(answer) < LENGTH
        self.answers[sequence] = answer if leaves_room else []
        self.waits[sequence] = (sequence * 7 + len(ids)) % (self.patience + 1)

    def replies(self, *, wait: bool) -> dict[int, list[int]]:
        soonest = min(self.waits.values(), default=0) if wait else 0
        ready = [sequence for sequence, n in self.waits.items() if n <= soonest]
        self.waits = {x: n - 1 for x, n in self.waits.items() if x not in ready}
        return {sequence: self.answers[sequence] for sequence in ready}


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
        prompt = c.prompt_ids[p, : c.prompt_len[p]].tolist()
        ids, sampled, logps = [], [], []
        while len(ids) < LENGTH:
            logp = model.logits(torch.tensor([prompt + ids]))[0, -1].log_softmax(-1)
            cdf = logp.exp().cumsum(-1)
            token = int(torch.searchsorted(cdf, numbers[p, g, len(ids)] * cdf[-1], right=True))
            ids.append(token)
            sampled.append(True)
            logps.append(float(logp[token]))
            if token in STOPS:
                answer = answer_to(ids)
                if not answer or len(ids) + len(answer) >= LENGTH:
                    break
                ids += answer
                sampled += [False] * len(answer)
                logps += [0.0] * len(answer)
        yield ids, sampled, logps


@pytest.mark.parametrize(("patience", "at_once", "read"), [(0, 0, 16), (5, 0, 1), (3, 2, 2)])
def test_a_dialogue_is_what_a_plain_forward_makes_of_it(
    model: Transformer, patience: int, at_once: int, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long answers take, in however many rounds they are read, whatever else runs."""
    monkeypatch.setattr(generate_module, "MOST_READ", read)
    c = prompts()
    stub = Stub(patience)
    found = generate(
        model,
        c,
        stops=STOPS,
        max_new_tokens=LENGTH,
        num_samples=SAMPLES,
        uniforms=u(model.shape.vocab_size),
        prompts_at_once=at_once,
        dialogues=stub,
    )
    answered = ended = 0
    for (p, g), expected in zip(np.ndindex(PROMPTS, SAMPLES), naive(model, c), strict=True):
        ids, sampled, logps = expected
        n = len(ids)
        assert found.completion_len[p, g] == n
        assert found.completion_ids[p, g, :n].tolist() == ids
        assert found.completion_mask[p, g, :n].tolist() == sampled
        assert found.sampler_logp[p, g, :n].tolist() == pytest.approx(logps, abs=1e-6)
        answered += sampled.count(False)
        ended += sum(own and x in STOPS for x, own in zip(ids, sampled, strict=True))
    assert stub.submitted == ended  # also a turn that ends at the last column
    assert answered > PROMPTS * SAMPLES  # there are dialogues to compare


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


def tagged(entry: dict[str, Any]) -> str:
    """A call as Qwen3.5's template writes it."""
    arguments = [
        f"<parameter={name}>\n{x if isinstance(x, str) else json.dumps(x)}\n</parameter>\n"
        for name, x in entry["arguments"].items()
    ]
    function = f"<function={entry['name']}>\n{''.join(arguments)}</function>"
    return f"<tool_call>\n{function}\n</tool_call>"


def written(form: CallForm, *calls: dict[str, Any]) -> str:
    """Calls as a form has them."""
    if form is MISTRAL:
        return f"[TOOL_CALLS] {json.dumps(calls)}"
    if form is TAGGED:
        return "\n".join(map(tagged, calls))
    if form is LLAMA:
        return json.dumps(calls[0]).replace("arguments", "parameters")
    return "".join(f"<tool_call>\n{json.dumps(each)}\n</tool_call>" for each in calls)


def paying(**arguments: Any) -> dict[str, Any]:
    return {"name": "pay", "arguments": arguments}


NOTES = ("[x]", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", '"}')


@pytest.mark.parametrize("note", NOTES)
@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_read_as_its_template_writes_it(form: CallForm, note: str) -> None:
    """Nothing in it ends it or is a thought."""
    text = written(form, paying(note=note))
    draft = call("pay")
    before = "<|python_tag|>" if form is LLAMA else "Well.\n"
    wholes = [text, f"{before}{text}\n", f"<think>{draft}</think>{text}"]
    if form is not MISTRAL:  # its last call is whatever follows
        wholes.append(f"{draft} or not</think>\n{text}")  # the prompt began the thought
    assert [form.find(whole) for whole in wholes] == [[("pay", {"note": note})]] * len(wholes)
    if form is not LLAMA:
        two = written(form, paying(amount=1), paying(amount=2))
        assert [arguments["amount"] for _, arguments in form.find(two)] in ([1, 2], ["1", "2"])


@pytest.mark.parametrize("form", FORMS)
def test_the_first_form_that_finds_calls_counts(form: CallForm) -> None:
    assert calls_of(written(form, paying(note="[x]"))) == [("pay", {"note": "[x]"})]


@pytest.mark.parametrize("text", ["the answer is {3}", "", '{"answer": 5}', "{3}"])
def test_a_text_without_calls_has_none(text: str) -> None:
    thought = f"<think>{call('pay')}"
    for whole in (text, f"{thought}</think>{text}", f"{text}{thought}"):
        assert [form.find(whole) for form in FORMS] == [[]] * len(FORMS)


def test_calls_between_thoughts_count() -> None:
    first, second = call("pay", amount=1), call("pay", amount=2)
    found = QWEN.find(f"<think>a</think>{first}<think>{first} </think>{second}<think>{first}")
    assert [arguments["amount"] for _, arguments in found] == [1, 2]


@pytest.mark.parametrize("broken", ["{", "[1]", "[{", "pay", '{"name": 1', "3"])
def test_a_broken_call_is_one_without_arguments(broken: str) -> None:
    for form, text in (
        (QWEN, f"<tool_call>{broken}</tool_call>"),
        (MISTRAL, f"[TOOL_CALLS]{broken}"),
    ):
        assert [arguments for _, arguments in form.find(text)] == [{}]


def test_a_call_counts_only_in_the_form_of_the_template() -> None:
    as_llama = written(LLAMA, paying(amount=3))
    assert LLAMA.find(as_llama)
    assert not QWEN.find(as_llama)
    assert not MISTRAL.find(call("pay"))
    broken = as_llama[:-1] + ",}"
    assert LLAMA.find(broken) == [(broken, {})]  # the model reads that there is no such tool
    for form in FORMS:
        assert not form.find('{"name": "Bob", "age": 3}')  # an answer


def test_arguments_that_are_texts_are_read_as_what_the_tool_takes() -> None:
    def order(note: str, by: Any = "", most: float | None = None, *, amounts: list[int]) -> str:
        """Order."""
        return repr((note, by, most, amounts))

    asked = {"note": "[5]", "by": "1e5", "most": 2.5, "amounts": [1, 2]}
    ((name, arguments),) = TAGGED.find(written(TAGGED, {"name": "order", "arguments": asked}))
    assert set(map(type, arguments.values())) == {str}
    assert result_of({name: Tool.of(order)}, name, arguments).content == repr((*asked.values(),))


MISTRAL_CALLS = (tiny.TEMPLATES / "mistral-tools.jinja").read_text()
XML_CALLS = tiny.QWEN_TEMPLATE.replace("call.function | tojson", "'<f=' + call.function.name + '>'")


def has_readable_calls(folder: Path, family: str, template: str) -> bool:
    tokenizer = load_tokenizer(str(tiny.tiny_tokenizer_folder(folder, family, template=template)))
    dialogues_of(EnvironmentSet.of(Game), tokenizer)  # without tools there is nothing to read
    try:
        dialogues_of(EnvironmentSet.of(Shop), tokenizer)
    except ConfigError:
        return False
    return True


def test_a_template_whose_own_call_is_not_read_is_refused(tmp_path: Path) -> None:
    without_calls = tiny.QWEN_TEMPLATE.replace("message.tool_calls or []", "[]")
    assert has_readable_calls(tmp_path, "qwen", tiny.QWEN_TEMPLATE)
    assert has_readable_calls(tmp_path, "mistral", MISTRAL_CALLS)
    assert not has_readable_calls(tmp_path, "qwen", XML_CALLS)
    assert not has_readable_calls(tmp_path, "qwen", without_calls)


READ = ("qwen2_5", "qwen3_instruct_2507", "llama3_1", "qwen3_5_think", "qwen3_5_nothink")
UNREAD = ("glm4moe", "deepseekv3")


@pytest.mark.peer
@pytest.mark.parametrize("name", READ + UNREAD)
def test_the_calls_of_published_templates_are_read_or_refused(tmp_path: Path, name: str) -> None:
    family = "llama" if "llama" in name else "qwen"
    template = tiny.published_template(name)
    assert has_readable_calls(tmp_path, family, template) == (name in READ)


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
    turns = [
        call("weather", city="</think>"),
        call("none"),
        json.dumps({"name": "weather", "parameters": {"city": "Bonn"}}),  # as Llama writes it
        '{"name": "Bob"}',
    ]
    dialogues.begin([Example("a")], len(turns))
    ids = [[*tokenizer.encode(turn), tokenizer.turn_end] for turn in turns]
    answers = replies(dialogues, *ids)
    assert [bool(answer) for answer in answers] == [True, True, False, False]
    assert dialogues.episodes[0].messages[-1]["content"] == "sun in </think>"


@pytest.mark.parametrize("flags", SWALLOWS)
def test_the_tokens_of_a_dialogue_are_those_of_its_whole_text(
    tmp_path: Path, flags: dict[str, bool]
) -> None:
    """The first turn ends by its own token, by another one that ends texts, and by a stop text."""
    folder = tiny.change_flags(tiny.tiny_tokenizer_folder(tmp_path), **flags)
    tokenizer = load_tokenizer(str(folder))
    dialogues = dialogues_of(EnvironmentSet.of(Game), tokenizer, max_new_tokens=99)
    example = Example("", messages=ask("a"))
    dialogues.begin([example], 3)
    stopped = tokenizer.encode("x")
    ended = [*stopped, tokenizer.turn_end]
    ended_otherwise = [*stopped, tokenizer.eot]
    answers = replies(dialogues, ended, ended_otherwise, stopped)
    assert tokenizer.chat
    whole = tokenizer.chat.render(ask("a", "x", "Go on."))
    expected = tokenizer.encode(whole, special=True)
    prompt = encode_prompt(tokenizer, example)
    assert prompt + ended + answers[0] == expected
    assert prompt + stopped + answers[2] == expected
    assert answers[1] == answers[0]  # what was sampled has closed the turn


def test_variables_of_a_row_reach_the_turns_that_follow(tmp_path: Path) -> None:
    tiny.tiny_tokenizer_folder(tmp_path, template=tiny.QWEN_TEMPLATE + "{{ mood }}")
    tokenizer = load_tokenizer(str(tmp_path), chat_args={"mood": "glad"})
    dialogues = dialogues_of(EnvironmentSet.of(Game), tokenizer)
    sad = Example("b", fields={"chat_template_kwargs": {"mood": "sad"}})
    dialogues.begin([Example("a"), sad], 1)
    turn = tokenizer.encode("x")
    answers = replies(dialogues, turn, turn)
    moods = [tokenizer.text_of(ids).rpartition("\n")[2] for ids in answers]
    assert moods == ["glad", "sad"]


def test_what_an_environment_says_stands_before_the_beginning_of_an_answer() -> None:
    rows = [{"prompt": ask("Buy.", "So"), "price": price} for price in (5, 7)]
    example = begun(EnvironmentSet.of(Shop), *rows).held_out(0)
    price = example.fields["price"]
    assert [x["content"] for x in example.messages] == [f"Buy. It costs {price}.", "So"]


@pytest.mark.peer
@pytest.mark.parametrize("tool", [Shop().pay, Shop().fail, weather])
def test_a_schema_is_that_of_transformers(tool: Callable[..., Any]) -> None:
    from transformers.utils import get_json_schema

    found = Tool(tool.__name__, tool).schema["function"]
    expected = get_json_schema(tool)["function"]
    for argument in found["parameters"]["properties"].values():
        argument.pop("default", None)  # theirs has no defaults
    for function in (found, expected):
        function["parameters"].setdefault("required", [])
    expected.pop("return", None)
    assert found == expected


def played(world: EnvironmentSet, example: Example, *texts: str) -> Episode:
    episode = Episode(world.spec_of(example), example)
    for text in texts:
        episode.messages += [{"role": "assistant", "content": text}, *episode.answer(text, QWEN)]
    return episode


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def begun(world: EnvironmentSet, *rows: dict[str, Any]) -> TurnTask:
    rows = rows or ({"price": 5, "answer": [1]}, {"price": 7})  # no question is read
    task = load_task("prompts", seed=0, data=rows, environment=world, args=NONE)
    return TurnTask(task, world, 0)


def tools_shown(example: Example) -> list[str]:
    return [tool["function"]["name"] for tool in example.tools or ()]


NONE = {"judge": "none"}


def test_tools_answer_and_the_environment_gives_the_reward() -> None:
    world = EnvironmentSet.of(Shop, [weather])
    example = begun(world).held_out(0)
    price = example.fields["price"]
    assert example.prompt == f" It costs {price}."
    assert tools_shown(example) == ["fail", "pay", "weather"]
    two_calls = call("pay", amount="2") + call("pay", amount=price - 2)
    episode = played(world, example, two_calls, call("weather", city="Bonn"), "Done.")
    contents = [x["content"] for x in episode.messages if x["role"] == "tool"]
    assert contents == ["paid 2", f"paid {price}", "sun in Bonn"]
    assert episode.score() == 1
    assert not episode.answer("no call", QWEN)
    assert played(world, example, call("fail")).score() == 0


def test_episodes_without_rows_have_random_numbers_of_their_own() -> None:
    world = EnvironmentSet.of(Game)
    task, again = (
        TurnTask(load_task("prompts", seed=0, environment=world, args=NONE), world, 0)
        for _ in range(2)
    )
    examples = [task.train(i) for i in range(8)]
    assert examples == [again.train(i) for i in range(8)]
    assert [example.index for example in examples] == [*range(8)]
    assert len({example.fields["seed"] for example in examples}) == 8
    refused(load_task, "prompts", seed=0, environment=world)  # nothing gives a reward


def test_members_of_a_group_must_start_alike() -> None:
    starts = count()

    class Moody(Game):
        def reset(self, moods: list[str]) -> str:
            return f"start {next(starts)}"

    world = EnvironmentSet.of(Moody)
    rows = [{"moods": []}, {"moods": ["glad"]}]
    with pytest.raises(ValueError):
        played(world, begun(world, *rows).held_out(0), "x")


@pytest.mark.parametrize(("more", "over"), [([], False), ([False, {}], False), ([True, {}], True)])
def test_a_game_has_steps_of_three_or_gymnasiums_five_values(more: list[Any], over: bool) -> None:
    class Game:
        def reset(self, price: int) -> tuple[str, dict[str, int]]:
            return "Go.", {}

        def step(self, text: str) -> tuple[Any, ...]:
            return f"after {text}", 0.5, False, *more

    world = EnvironmentSet.of(Game, [weather])
    example = begun(world).held_out(0)
    assert example.tools == []  # a game would not answer the call
    assert example.prompt == "Go."  # of Gymnasium's two values
    episode = played(world, example, "a", "b")
    assert episode.over == over
    assert episode.score() == 1.0
    assert episode.messages[-1] == {"role": "user", "content": "after b"}
    episode.final, episode.turns = 1.0, ["a", "b"]
    assert episode.completion().rewards == {"Game": 1.0}
    without_template = dialogues_of(world, load_tokenizer("chess"))
    assert without_template.encode(json.dumps(ask("")))  # else the game would end


def test_the_row_chooses_among_environments() -> None:
    world = EnvironmentSet.of({"shop": Shop, "game": Game})
    assert [*world.reward_weights] == ["Shop", "Game"]
    for name, made in (("shop", Shop), ("game", Game)):
        assert world.spec_of(Example("", fields={"environment": name})).make is made


# --- what users give -----------------------------------------------------------------------------


def search(word: str) -> str:
    return "a song"


class Library(Quiz):
    def search(self, word: str) -> str:
        return "a shelf"


def test_one_thing_may_have_two_names_or_be_given_twice() -> None:
    world = EnvironmentSet.of({"a": Game, "b": Game}, [search, search])
    assert [*world.specs] == ["a", "b"]
    assert [*world.reward_weights] == ["Game"]
    assert [*world.tools] == [*EnvironmentSet.of(None, search).tools] == ["search"]


def test_a_schema_that_a_row_has_is_not_shown_again() -> None:
    own, other = Tool("search", search).schema, Tool("weather", weather).schema
    for row in (own, own["function"]):
        example = Example("a", tools=[other, row])
        task = Mock(spec=minigrpo.Task, train=lambda number, example=example: example)
        asked = TurnTask(task, EnvironmentSet.of(None, search), 0).train(0)
        assert asked.tools == [other, own]


class Sized:
    """A game of a given length, with a deadline of its own."""

    timeout_s = 3
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


@pytest.mark.parametrize("make", [partial(Sized, size=2), later])
def test_a_callable_makes_environments(make: Callable[[], Any]) -> None:
    """One is made at the start, to see what it has, and is closed at once."""
    before = Sized.closed
    world = EnvironmentSet.of(make)
    assert Sized.closed == before + 1
    assert [*world.specs] == [*world.reward_weights] == ["Sized"]
    assert world.specs["Sized"].timeout_s == 3
    episode = played(world, Example(""), "a")
    assert not episode.over
    episode.answer("b")
    assert episode.over
    assert episode.score() == 7


class Called:
    def __call__(self, word: str) -> str:
        return word


def of_places(word: str, /) -> str:
    return word


def of_unknown(word: Called) -> str:
    return ""


class Odd(Quiz):
    def look(self, *places: str) -> str:
        return ""


REFUSED = {
    "class": (None, [Called]),
    "object": (None, [Called()]),
    "without a name": (None, [lambda word: word]),
    "arguments by place": (None, [of_places]),
    "any number of arguments": (Odd, []),
    "type that JSON lacks": (None, [of_unknown]),
    "schema": (None, [Tool("search", search).schema]),
    "a tool of another's name": (None, [search, Library().search]),
    "a tool of a method's name": (Library, [search]),
    "a tool of one of several methods' name": ({"a": Game, "b": Library}, [search]),
    "two classes of one name": ({"a": Game, "b": type("Game", (Game,), {})}, []),
    "leaves": (sys.exit, []),
    "one object cannot serve many completions": (Sized(), []),
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_makes_no_environments_or_tools_is_refused(given: str) -> None:
    refused(EnvironmentSet.of, *REFUSED[given])


def test_methods_of_the_class_are_tools() -> None:
    class Atlas(Quiz):
        @classmethod
        def tell(cls, city: str) -> str:
            return f"{cls.__name__}: {city}"

    tools = EnvironmentSet.of(Atlas).specs["Atlas"].tools_of(Atlas())
    assert result_of(tools, "tell", {"city": "Rome"}).content == "Atlas: Rome"


def test_completions_cannot_share_an_environment() -> None:
    refused(begun(EnvironmentSet.of(cache(lambda: Sized(2)))).train, 0)


class Client:
    """It works in the loop of its first call only, as clients of HTTP do."""

    loop: Any = None
    said = ""

    async def get(self, word: str) -> str:
        """Get a word."""
        self.loop = self.loop or asyncio.get_running_loop()
        assert asyncio.get_running_loop() is self.loop
        await asyncio.sleep(0)
        self.said = word
        return word


def test_all_calls_await_in_one_loop() -> None:
    client = Client()

    class Waits:
        async def reset(self) -> str:
            return await client.get("Go.")

        async def step(self, text: str) -> tuple[str, float, bool]:
            return await client.get(text), 0.0, False

        async def get_reward(self) -> float:
            return float(await client.get("3"))

        async def close(self) -> None:
            await client.get("close")

    assert result_of({"get": Tool("get", client.get)}, "get", {"word": "a"}).content == "a"
    episode = played(EnvironmentSet.of(Waits), Example("Go."), "b")
    assert episode.messages[-1]["content"] == "b"
    assert episode.score() == 3
    episode.close()
    assert client.said == "close"


TEXT_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (None, ""),
        (0, "0"),
        ([], ""),
        (np.arange(3), "[0 1 2]"),
        (np.zeros(2000, dtype=int), str([0] * 2000).replace(",", "")),
        (torch.tensor(4), "tensor(4)"),
        ((1, 2), "(1, 2)"),
        ({"x": [1]}, "{'x': [1]}"),
        (("a", {}), "a"),  # of Gymnasium
        (TEXT_PARTS, "ab"),
    ],
)
def test_what_an_environment_says_becomes_a_text(said: Any, text: str) -> None:
    assert as_text(said).replace("\n", "") == text


@pytest.mark.parametrize("said", [ask("a")[0], ask("a"), [{"type": "image"}], [object()], b"a"])
def test_what_is_no_text_is_refused(said: Any) -> None:
    refused(as_text, said)


def leaves() -> None:
    sys.exit(0)


async def leaves_the_loop() -> None:
    sys.exit(0)


WRONG_CALLS = [
    *(("nothing", {}), ({}, {}), ("pay", [1]), ("pay", {}), ("pay", {"amount": "x", "z": 1})),
    *(("fail", {}), ("leaves", {}), ("leaves_the_loop", {})),
]


@pytest.mark.parametrize(("name", "arguments"), WRONG_CALLS)
def test_a_model_reads_what_is_wrong_with_a_call(name: Any, arguments: Any) -> None:
    """In words that know neither this library nor how it was started."""
    shop = Shop()
    tools = {
        tool.__name__: Tool.of(tool) for tool in (shop.pay, shop.fail, leaves, leaves_the_loop)
    }
    result = result_of(tools, name, arguments)
    assert result.has_failed
    assert str(name) in result.content
    assert not any(x in result.content for x in ("\n", "minigrpo", "pydantic", "https", "input"))


def test_failed_calls_are_counted() -> None:
    world = EnvironmentSet.of(None, [weather, leaves])
    calls = call("weather", city="Bonn"), call("weather"), call("leaves"), call("nothing")
    episode = played(world, Example(""), *calls)
    episode.turns += calls
    dialogue = episode.completion()
    assert list(dialogue.failed_calls) == [False, True, True, True]
    values = dialogue_metrics([[dialogue]])
    assert np.mean(values["tools/failure_frequency"]) == 0.75
    assert values["tools/call_frequency"] == [4]


def test_rows_are_known_with_their_tools_and_without_a_reset() -> None:
    class Slow(Shop):
        def reset(self, price: int) -> str:  # type: ignore[override]
            raise AssertionError

    rows = [{"prompt": f"{n}?", "price": n} for n in range(3)]
    environments = EnvironmentSet.of({"slow": Slow}, [weather])
    known = begun(environments, *rows).known()
    assert [example.prompt for example in known] == ["0?", "1?", "2?"]
    assert tools_shown(known[1]) == ["fail", "pay", "weather"]
    no_environment = {"prompt": "b", "environment": "x"}
    assert "row 4" in refused(begun(environments, *rows, no_environment).known)


@pytest.mark.parametrize(
    ("world", "number"), [(EnvironmentSet.of(Shop), 4), (EnvironmentSet.of(None, weather), 2)]
)
def test_rows_that_ask_the_same_differ_by_what_their_environment_reads(
    world: EnvironmentSet, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tools alone read nothing."""
    rows = [{"prompt": "Buy.", "price": price} for price in (5, 5, 6, 7)]
    questions = set[str]()
    monkeypatch.setattr(base, "is_held_out", questions.add)
    begun(world, *rows, {"prompt": "Sell.", "price": 5})
    assert len(questions) == number


# --- chat templates -------------------------------------------------------------------------------

ANSWER = {"role": "tool", "name": "f", "content": '4 "apples"'}
BETWEEN = {
    # writes an assistant's last turn differently from earlier ones
    "qwen3": '\n<|im_start|>user\n<tool_response>\n4 "apples"\n</tool_response><|im_end|>\n'
    "<|im_start|>assistant\n",
    "llama": '<|start_header_id|>ipython<|end_header_id|>\n\n"4 \\"apples\\""<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
}


@pytest.mark.parametrize("name", BETWEEN)
def test_text_between_turns_follows_their_end(name: str) -> None:
    template = (tiny.TEMPLATES / f"{name}-tools.jinja").read_text()
    chat = Chat(template, special=[tiny.CHATML[2], "<|eot_id|>"])
    assert chat.between([ANSWER]) == chat.turn_end + BETWEEN[name]
    refused(chat.between, [{**ANSWER, "content": f"4{chat.turn_end}"}])
    refused(chat.prompt, ask("f"), [Tool("f", weather).schema])  # it does not write tools
    deaf = "{% for m in messages if m.role != 'tool' %}" + template.partition("%}")[2]
    refused(Chat(deaf).between, [ANSWER])


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
    settings = {
        **TINY,
        "reward_weights": {},
        "max_new_tokens": 60,
        "model": str(folder),
        "environment": Echo,
        "out_dir": str(out),
        "quiet": True,
    }
    return minigrpo.train(**{**settings, **changes})


def test_an_environment_and_a_reward_get_no_original_to_change() -> None:
    class Cards:
        def reset(self, deck: list[int], **row: Any) -> None:
            deck.pop()

    example = Example("", fields={"deck": [1, 2]})
    Episode(EnvironmentSet.of(Cards).spec_of(example), example).begin()
    assert example.fields["deck"] == [1, 2]
    text = Completion("a", messages=[{"role": "assistant", "content": "a"}])
    function = minigrpo.reward(lambda example, text: len(text.messages.pop()))
    RewardScorer(minigrpo.Task(), functions=[function]).score([example], [[text]])
    assert len(text.messages) == 1


def test_a_run_in_an_environment_is_logged(folder: Path, tmp_path: Path) -> None:
    run = trained(folder, tmp_path)
    assert max(run.metrics["dialogues/turns"]) > 1
    assert sum(run.metrics["rewards/Echo/failures"]) > 0
    assert "tools/call_frequency" not in run.metrics  # a game has none
    whole_rewards = 0
    for sample in read_jsonl(tmp_path / "samples.jsonl"):
        dialogue = sample["dialogue"]
        said = [message["content"] for message in dialogue[::2]]
        assert {message["role"] for message in dialogue[::2]} == {"assistant"}
        assert sample["completion"] == said[-1]
        if all(len(text) % 3 for text in said):  # Echo fails at others
            answered = said[: len(dialogue) // 2]
            assert sample["reward"] == pytest.approx(sum(map(len, answered)) / 100)
            whole_rewards += len(dialogue) > 2
    assert whole_rewards


def test_tools_join_the_environment_that_a_file_names(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "walk.py").write_text(
        "class Walk:\n    def reset(self): return 'Go.'\n    def get_reward(self): return 1.0\n"
    )
    config = tmp_path / "walk.toml"
    config.write_text(f'environment = "{tmp_path}/walk.py:Walk"\n')
    given = {"environment": None, "tools": [weather], "max_new_tokens": 9, "max_steps": 1}
    run = trained(folder, tmp_path / "run", config=config, **given)
    environments = run.trainer.job.environments
    assert [*environments.specs] == ["Walk"] and [*environments.tools] == ["weather"]
    assert run.sample("1+1?")[0].is_dialogue


def test_a_stop_text_ends_a_turn(folder: Path, tmp_path: Path) -> None:
    def turns(name: str, **settings: Any) -> list[str]:
        trained(folder, tmp_path / name, max_steps=1, **settings)
        samples = read_jsonl(tmp_path / name / "samples.jsonl")
        said = [message for sample in samples for message in sample["dialogue"][::2]]
        return [message["content"] for message in said]

    longest = 12  # characters of a token, at most
    free = turns("free")
    stopped = turns("stopped", stop=["e"])
    assert any("e" in text[:-longest] for text in free)
    assert not any("e" in text[:-longest] for text in stopped)
    assert len(stopped) > len(free)


class Held(Echo):
    """Remembers what was asked of it at the end."""

    made: ClassVar[list["Held"]] = []

    def __init__(self) -> None:
        self.asked = []
        Held.made.append(self)

    def step(self, text: str) -> tuple[str, float, bool]:
        if len(text) % 4 == 0:
            sys.exit(0)
        return super().step(text)

    def get_reward(self) -> float:
        self.asked.append("reward")
        return float(self.seed % 10)

    def close(self) -> None:
        self.asked.append("close")
        if len(Held.made) % 3 == 0:
            raise OSError("gone")


def test_every_environment_is_closed_once_after_its_reward(folder: Path, tmp_path: Path) -> None:
    """Whether it is scored, fails, or only asks; and whatever `close` does."""
    Held.made.clear()
    run = trained(folder, tmp_path, environment=Held, max_steps=2)
    assert run.summary["status"] == "finished"
    assert max(run.metrics["rewards/Held/failures"]) > 0
    endings = {tuple(environment.asked) for environment in Held.made}
    assert endings == {("close",), ("reward", "close")}


def test_what_ends_a_batch_closes_its_environments(folder: Path, tmp_path: Path) -> None:
    """A batch that is halved for want of memory has the tokens and rewards of a whole one."""
    run = trained(folder, tmp_path, environment=Held, max_steps=1).trainer
    examples = [run.job.task.train(i) for i in range(4)]
    whole = run.batches.roll_out(examples, 5)
    dialogues = run.sampler.dialogues
    replies = dialogues.replies

    Held.made.clear()
    effects = chain(repeat(DEFAULT, 20), [torch.OutOfMemoryError], repeat(DEFAULT))
    dialogues.replies = Mock(wraps=replies, side_effect=effects)
    halved = run.batches.roll_out(examples, 5)
    assert dialogues.replies.call_count > 21
    assert {environment.asked.count("close") for environment in Held.made} == {1}
    assert whole.texts == halved.texts
    assert np.array_equal(whole.rewards.total, halved.rewards.total)
    assert torch.equal(whole.completions.completion_mask, halved.completions.completion_mask)

    Held.made.clear()

    def interrupted(wait: bool) -> Any:
        if dialogues.replies.call_count > 20 and Held.made:  # they are made by other threads
            raise KeyboardInterrupt
        return DEFAULT

    dialogues.replies = Mock(wraps=replies, side_effect=interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.batches.roll_out(examples, 5)
    assert {environment.asked.count("close") for environment in Held.made} == {1}


class Stuck:
    """Hangs in its turns until it is closed."""

    timeout_s = 0.2
    made: ClassVar[list["Stuck"]] = []

    def __init__(self) -> None:
        self.free = Event()
        self.closed = 0
        Stuck.made.append(self)

    def reset(self) -> None: ...

    def step(self, text: str) -> tuple[str, float, bool]:
        self.free.wait(60)
        return "", 0.0, True

    def close(self) -> None:
        self.closed += 1
        self.free.set()


def test_closing_ends_what_hangs() -> None:
    dialogues = dialogues_of(EnvironmentSet.of(Stuck), load_tokenizer("chess"))
    Stuck.made.clear()
    dialogues.begin([Example("")], 2)
    episodes = dialogues.episodes
    for sequence in (0, 1):
        dialogues.submit(sequence, [1])
    while not all(episode.error for episode in episodes):
        dialogues.replies(wait=True)
    assert all(math.isnan(episode.final) for episode in episodes)
    dialogues.close()
    assert [environment.closed for environment in Stuck.made] == [1, 1]


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
        if step == 2:
            monkeypatch.setattr(Unsure, "broken", how)

    given = {"environment": Unsure, "max_steps": 6, "eval_every": 0}
    with pytest.raises(RunFailed):
        trained(folder, tmp_path, callbacks=[breaks], **given)
    summary = read_json(tmp_path / "summary.json")
    assert summary["status"] == "failed"
    assert 2 <= summary["step"] < 6
    monkeypatch.setattr(Unsure, "broken", "")
    assert trained(folder, tmp_path, resume="auto", **given).summary["step"] == 6


def test_turns_and_tokens_are_limited(folder: Path, tmp_path: Path) -> None:
    run = trained(folder, tmp_path, max_steps=1, max_turns=1, overlong="mask")
    assert run.metrics["dialogues/turns"] == [1.0]
    batch = run.trainer.batches.batch(1)
    cut = torch.tensor([[text.cut for text in group] for group in batch.texts])
    has_ended = batch.completions.ended  # its last turn
    assert (has_ended & cut).any()
    assert torch.equal(batch.loss_mask, has_ended & ~cut)
