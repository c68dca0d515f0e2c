"""Questions from files: how lines are read, and what is held out."""

import copy
import json
import math
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.qa import QA, normalized, parse_qa
from minigrpo.given import Given
from minigrpo.task import Task
from minigrpo.tasks.base import Rows, is_held_out
from minigrpo.tasks.loading import load_task
from minigrpo.tasks.prompts import Prompts
from minigrpo.tasks.rows import as_json, canonical, parse_any, parse_episode, parse_pair, read_rows
from minigrpo.types import Example

from .tiny import ask, refused
from .tiny import write_jsonl as write

SUMS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(400)]


def rows_in(*data: Path, eval_data: tuple[Path, ...] = (), seed: int = 0) -> Rows:
    return Rows(seed, data, eval_data, parse_pair)


def splits(task: Task, epoch: int) -> tuple[list[Example], list[Example]]:
    """The training examples of one epoch, of that many rows, and all held-out ones."""
    trained = [task.train(i) for i in range(epoch)]
    held_out = [task.held_out(i) for i in range(task.num_held_out)]
    return trained, held_out


def prompts(examples: Iterable[Example]) -> set[str]:
    return {example.prompt for example in examples}


@pytest.mark.parametrize("seed", [0, 1])
def test_a_tenth_of_questions_is_held_out_by_a_hash_of_the_question_alone(
    tmp_path: Path, seed: int
) -> None:
    """Whatever else is in the file."""
    every = {row["prompt"] for row in SUMS}
    expected = {question for question in every if is_held_out(question)}
    assert 20 < len(expected) < 60
    rows = rows_in(write(tmp_path / "a.jsonl", SUMS), seed=seed)
    train, held_out = splits(rows, 400 - len(expected))
    assert prompts(held_out) == expected
    assert prompts(train) == every - expected
    some = SUMS[100:300]
    part = rows_in(write(tmp_path / "part.jsonl", some), seed=seed)
    assert prompts(splits(part, 0)[1]) == expected & {row["prompt"] for row in some}


def test_eval_data_is_held_out_whole_and_its_questions_are_not_trained_on(tmp_path: Path) -> None:
    train = write(tmp_path / "my-test.jsonl", SUMS[:100])  # a name decides nothing
    spaced = [{**row, "prompt": f" {row['prompt']}"} for row in SUMS[80:120]]
    held_out = write(tmp_path / "train.jsonl", spaced)
    trained, evaluated = splits(rows_in(train, eval_data=(held_out,)), 80)
    assert [example.prompt for example in evaluated] == [row["prompt"] for row in spaced]
    assert prompts(trained) == {row["prompt"] for row in SUMS[:80]}
    alone = rows_in(eval_data=(held_out,))  # what is evaluated on needs no training rows
    assert prompts(splits(alone, 0)[1]) == prompts(evaluated)


FORMS = ("caf\u00e9 {}  ?", "cafe\u0301 {} ?\n", " caf\u00e9\t{} ?")  # of one question
COPIES = [
    {"prompt": form.format(i), "answer": f"{i}", "id": n}
    for i in range(100)
    for n, form in enumerate(FORMS)
]


def test_a_question_counts_once_whatever_else_its_lines_say(tmp_path: Path) -> None:
    """Copies that differ in white space, Unicode's form, an id or the answer are one question."""
    rows = rows_in(write(tmp_path / "a.jsonl", COPIES))
    num_trained = 300 - 3 * rows.num_held_out
    trained, evaluated = splits(rows, num_trained)
    keys = [{canonical(x.prompt) for x in examples} for examples in (trained, evaluated)]
    assert not keys[0] & keys[1]
    assert len(keys[0] | keys[1]) == 100
    assert len(evaluated) == len(keys[1])
    # each line is trained on, also one with another answer
    assert len({(x.prompt, x.fields["id"]) for x in trained}) == num_trained


def asked_rows() -> list[dict[str, Any]]:
    """Rows that ask something else each."""
    (user,) = ask("And 2+2?")
    prompts = [
        [user],
        [{**user, "name": "Ann"}],
        ask("And 2+2?", system="Be brief."),
        ask("1+1?", "2", "And 2+2?"),
        ask("1+1?", "3", "And 2+2?"),
    ]
    for name, number in (("add", 2), ("sub", 2), ("add", 3)):
        function = {"name": name, "arguments": {"a": number}}
        calls = [{"function": function, "id": "x1"}]
        called = {"role": "assistant", "content": "", "tool_calls": calls}
        prompts.append([user, called, user])
    rows = [{"prompt": messages} for messages in prompts]
    for more in ({"tools": [tool("add")]}, {"chat_template_kwargs": {"think": True}}):
        rows.append({**rows[0], **more})
    return rows


def question_of(row: dict[str, Any]) -> str:
    return parse_any(as_json(row)).question


def test_a_question_is_the_whole_prompt() -> None:
    questions = [*map(question_of, asked_rows())]
    assert len({*questions}) == len(questions)
    assert questions[0] == "And 2+2?"
    # a plain prompt with tools becomes a user's message
    assert question_of({"prompt": "And 2+2?", "tools": [tool("add")]}) == questions[-2]


def test_what_is_no_part_of_the_prompt_belongs_to_no_question() -> None:
    for row in asked_rows():
        copied = {**row, "prompt": copy.deepcopy(row["prompt"]), "kind": "sum"}
        for message in copied["prompt"]:
            message["content"] = message["content"].replace(" ", "\n ")
        assert canonical(question_of(copied)) == question_of(row)
        assert parse_any(copied).example.kind == "sum"


def test_an_epoch_visits_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", SUMS)
    rows, again, other = (rows_in(path, seed=seed) for seed in (3, 3, 4))
    n = rows.num_train
    examples = [rows.train(i) for i in range(2 * n)]
    first = [example.prompt for example in examples[:n]]
    second = [example.prompt for example in examples[n:]]
    assert len({*first}) == n
    assert sorted(first) == sorted(second)
    assert first != second
    assert first != [other.train(i).prompt for i in range(n)]
    assert examples[n:] == [again.train(n + i) for i in range(n)]  # in any order of the calls
    # a number for each place, so that a prompt is sampled anew in the next epoch
    assert [example.index for example in examples] == [*range(2 * n)]


def test_rows_may_come_from_python_and_a_few_are_enough(tmp_path: Path) -> None:
    few = [row for row in SUMS if not is_held_out(row["prompt"])][:3]  # none by its hash
    given = Rows(0, (few,), (), parse_pair)
    assert given.num_held_out == 1
    assert splits(given, 2) == splits(rows_in(write(tmp_path / "a.jsonl", few)), 2)
    for bad in ({"answer": "1"}, {"prompt": "so \ud83d", "answer": ""}):
        assert "row 4" in refused(Rows, 0, ([*few, bad],), (), parse_pair)


class Picture:
    """An object whose text has its address."""

    def __init__(self, name: str) -> None:
        self.name = name


def test_rows_with_objects_are_told_apart_by_their_contents() -> None:
    """Or another process, such as that of a resume, would hold out other questions."""

    def keys(name: str) -> set[str]:
        shown = {"picture": Picture(name)}
        asks = {"prompt": "What is this?", "answer": "a", "chat_template_kwargs": shown}
        return {parse_episode(shown).question, parse_pair(asks).question}

    assert keys("a") == keys("a")
    assert not keys("a") & keys("b")


def test_a_row_whose_environment_asks_keeps_its_answer_and_its_kind() -> None:
    example = parse_episode({"answer": 7, "kind": "odd"}).example
    assert (example.prompt, example.answer, example.kind) == ("", "7", "odd")


@pytest.mark.parametrize("num_rows", [0, 1])
def test_a_split_without_questions_is_an_error(tmp_path: Path, num_rows: int) -> None:
    path = write(tmp_path / "a.jsonl", SUMS[:num_rows])
    refused(rows_in, path)
    refused(rows_in, path, eval_data=(path,))  # all of it is held out
    refused(load_task, "prompts", seed=0)


BAD_LINES = [
    "[" * 100_000,
    '{"prompt": "a", "answer": "b"',
    '{"prompt": "a", "answer": NaN}',
    '{"prompt": ["a"], "answer": "b"}',
    '{"answer": "b"}',
    '{"messages": [], "answer": "b"}',
    '{"messages": ["a"], "answer": "b"}',
    '{"messages": [{"role": "user", "content": 1}], "answer": "b"}',
    '{"messages": [{"role": "system", "content": "a"}], "answer": "b"}',
    '{"messages": [{"role": "assistant", "content": "b"}]}',
    # half of an emoji, as JSON spells it
    '{"prompt": "so \\ud83d", "answer": ""}',
    '{"prompt": "a", "answer": "", "notes": [{"by": "\\ud83d"}]}',
    b"\xff\xfe",
]


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_the_first_bad_line_is_named_in_one_line(tmp_path: Path, line: bytes | str) -> None:
    good = write(tmp_path / "a.jsonl", SUMS[:40])
    bad = line if isinstance(line, bytes) else line.encode()
    path = tmp_path / "b.jsonl"
    path.write_bytes(b"\n".join([good.read_bytes(), bad, bad]))
    for said in (refused(rows_in, path), refused(rows_in, good, eval_data=(path,))):
        assert f"{path}, line 42:" in said
        assert "\n" not in said
        assert said.encode()  # it can be printed


@pytest.mark.parametrize(("head", "end"), [("", "\n"), ("\ufeff", "\r\n")])
def test_texts_are_read_as_they_are(tmp_path: Path, head: str, end: str) -> None:
    """With or without a byte order mark, and with what `str.splitlines` takes for a line's end."""
    rows = [{"prompt": f"{i}\u2028\x85 ", "answer": "é "} for i in range(60)]
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes((head + end.join(lines)).encode())
    found = rows_in(path)
    trained, evaluated = splits(found, found.num_train)
    assert prompts(trained + evaluated) == {row["prompt"] for row in rows}
    assert {example.answer for example in trained} == {"é "}


USER, FOUR = ask("2+2?", "4")
PARTS = {**USER, "content": [{"type": "text", "text": text} for text in ("2+", "2?")]}
BEGUN = {"role": "assistant", "content": "Let me think.\n<think>"}


def test_a_row_without_an_answer_is_read_where_none_is_needed() -> None:
    begun = {"prompt": [USER, BEGUN], "messages": [USER, FOUR]}
    calls = {"messages": [USER, {**FOUR, "tool_calls": [{"function": {"name": "f"}}]}]}
    no_text = {"prompt": "2+2?", "answer": [4]}
    for record in (begun, calls, {"prompt": [USER]}, {"prompt": "2+2?"}, no_text):
        assert parse_any(record).question == "2+2?"
        assert parse_any(record).example.answer == ""
        with pytest.raises(ValueError):
            parse_pair(record)
    # nothing reads a list without a judge
    assert parse_any({"prompt": "2+2?", "answer": [4], "solution": 5}).example.answer == "5"


@pytest.mark.parametrize(
    ("record", "messages", "answer"),
    [
        # as TRL and OpenAI write them
        ({"prompt": [USER], "solution": 4}, [USER], "4"),
        ({"prompt": [USER], "completion": [FOUR], "solution": 2}, [USER], "4"),
        ({"messages": [USER, FOUR]}, [USER], "4"),
        ({"messages": np.array([USER, FOUR]), "answer": np.float64(4)}, [USER], "4.0"),  # Arrow
        ({"messages": [PARTS], "answer": "four"}, [USER], "four"),
        # a prompt counts above messages, and may begin the answer
        ({"prompt": "2+2?", "messages": [USER, FOUR], "answer": "5"}, [], "5"),
        ({"prompt": [USER, BEGUN], "answer": 4}, [USER, BEGUN], "4"),
        ({"prompt": [USER, BEGUN], "completion": [FOUR]}, [USER, BEGUN], "4"),
        ({"prompt": None, "messages": [USER, FOUR]}, [USER], "4"),
        ({"question": "x", "messages": [USER, FOUR]}, [USER], "4"),
        # without messages
        ({"prompt": "2+2?", "completion": "b"}, [], "b"),
        ({"question": "2+2?", "answer": "b", "solution": "c"}, [], "b"),
        ({"problem": "2+2?", "answer": "", "solution": "c"}, [], "c"),
        ({"prompt": None, "question": "2+2?", "answer": None, "solution": "c"}, [], "c"),
        ({"prompt": "2+2?", "answer": math.nan, "solution": 0.5}, [], "0.5"),  # none in pandas
    ],
    ids=range(15),
)
def test_rows_are_read_in_the_forms_of_trl_openai_and_published_files(
    record: dict[str, Any], messages: list[Any], answer: str
) -> None:
    row = parse_pair(as_json(record))
    assert parse_any(as_json(record)) == row
    assert [*row.example.messages] == messages
    assert row.example.answer == answer
    assert row.question == row.example.prompt == "2+2?"  # the beginning asks nothing
    assert row.example.fields == as_json(record)


def tool(name: str, **types: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": value} for key, value in types.items()},
        "required": [*types],
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ADD = {"name": "add", "arguments": {"a": 2, "b": 3}}
LOOK = {"name": "look", "arguments": {"word": "tea", "deep": {"n": 1}}}
CALLERS = [  # the calls have different arguments
    {
        "prompt": [
            {**USER, "content": f"{i}?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": x} for x in calls]},
            {"role": "tool", "content": "4"},
        ],
        "answer": str(i),
        "tools": [tool("add", a="integer", b="integer"), tool("look", word="string")][: i % 3],
    }
    for i, calls in enumerate([(ADD, LOOK), (LOOK,), (ADD,)] * 3)
]


def read(data: Any) -> list[Example]:
    rows = read_rows("data", data)
    return [row.example for row in Rows(0, (rows,), (), parse_pair).read((rows,))]


@pytest.mark.peer
def test_tables_give_the_prompts_of_the_list_of_dicts(tmp_path: Path) -> None:
    import datasets
    import pandas

    def asked(data: Any) -> list[Any]:
        return [(x.messages, x.tools, x.answer) for x in read(data)]

    dataset = datasets.Dataset.from_list(CALLERS)
    dataset.to_parquet(tmp_path / "rows.parquet")
    frame = pandas.read_parquet(tmp_path / "rows.parquet")
    arrow = dataset.with_format("arrow")[:]
    for table in (dataset, frame, pandas.DataFrame(CALLERS), arrow):
        assert asked(table) == asked(CALLERS)
    refused(read_rows, "data", datasets.DatasetDict(train=dataset))
    missing = {"prompt": ["a", "b"], "n": pandas.array([1, None], dtype="Int64")}
    missing["day"] = [pandas.Timestamp(2024, 5, 6), pandas.NaT]
    first, second = read_rows("data", pandas.DataFrame(missing))
    assert as_json(first) == {"prompt": "a", "n": 1, "day": "2024-05-06T00:00:00"}
    assert as_json(second) == {"prompt": "b"}


IMAGE = object()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        # a number that other calls lack became a float
        (np.array([{"arguments": {"a": 2.0, "b": None}}]), [{"arguments": {"a": 2}}]),
        ({"none": None, "nan": math.nan, "list": [{"none": None}, 2.0]}, {"list": [{}, 2.0]}),
        (np.array([1, 2]), [1, 2]),
        (np.float32(0.5), 0.5),
        (date(2024, 5, 6), "2024-05-06"),
        (np.datetime64("2024-05-06T07:08:09", "ns"), "2024-05-06T07:08:09"),
        (IMAGE, IMAGE),
    ],
)
def test_values_of_a_row_are_plain(value: Any, expected: Any) -> None:
    assert repr(as_json({"key": value})) == repr({"key": expected})  # 2 is not 2.0


def test_tools_that_are_words_are_no_schemas() -> None:
    schemas = [tool("add", a="integer")]
    assert parse_any({"prompt": "a", "tools": "a hammer"}).example.tools is None
    assert parse_any({"prompt": "a", "tools": json.dumps(schemas)}).example.tools == schemas
    with pytest.raises(ValueError):
        parse_any({"prompt": "a", "tools": "[a saw]"})


def test_calls_of_tools_reach_the_template_as_objects() -> None:
    function = {"name": "add", "arguments": '{"a": 2, "b": 2}'}
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    result = {"role": "tool", "content": "4"}
    _, said, answer = parse_any(as_json({"messages": [USER, called, result]})).example.messages
    assert said["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 2}
    assert said["content"] == ""
    assert answer == result
    assert isinstance(function["arguments"], str)  # the caller's row is as it was


class Sized:
    """A data set as torch has it, which makes a row for any number."""

    def __getitem__(self, number: int) -> dict[str, str]:
        return {"prompt": f"{number}"}

    def __len__(self) -> int:
        return 300


@pytest.mark.parametrize("data", [{"prompt": ["a"]}, ["a", "b"], [None], [["prompt"]]], ids=str)
def test_what_is_no_rows_is_refused(data: Any) -> None:
    refused(Given.of, data=data)


def test_a_data_set_is_read_to_its_length() -> None:
    assert len(read_rows("data", Sized())) == 300


def test_prompts_are_scored_by_equality_and_similarity(tmp_path: Path) -> None:
    task = Prompts(0, [write(tmp_path / "a.jsonl", SUMS)])
    example = Example("39+83=", "122")
    assert task.score(example, "122") == {"exact": 1, "similarity": 1}
    assert task.score(example, "12") == {"exact": 0, "similarity": pytest.approx(2 / 3)}
    refused(Prompts, 0, [tmp_path / "a.jsonl"], judge="nobody")


def test_answers_of_chats_are_not_proposed(tmp_path: Path) -> None:
    plain_rows = [write(tmp_path / "a.jsonl", SUMS)]
    chats = [{"messages": ask(row["prompt"]), "answer": "4"} for row in SUMS]
    assert Prompts(0, plain_rows).speculate
    assert not Prompts(0, plain_rows, chat=True).speculate
    assert not Prompts(0, [write(tmp_path / "b.jsonl", chats)]).speculate


NORMALIZED = {
    "The  Beatles!": "beatles",
    "an apple a day": "apple day",
    "Theodore": "theodore",
    "U.S.A.": "usa",
    " yes\n": "yes",
    "A": "a",  # what would be empty
    "+": "+",
    "": "",
}
ALIKE = [("-$5.", "$-5"), ("1,234", "1234"), ("It is 3.5.", "it is 3.5"), ("50%", "50")]
APART = [("3.5", "35"), (".5", "5"), ("-5", "5"), ("9/11", "911"), ("10:30", "1030")]


def test_case_punctuation_and_articles_do_not_matter_to_qa() -> None:
    assert {text: normalized(text) for text in NORMALIZED} == NORMALIZED
    assert all(normalized(one) == normalized(other) for one, other in ALIKE)
    assert not any(normalized(one) == normalized(other) for one, other in APART)


HUB = {"title": ["Paris", "Seine"], "sentences": [["A city.", " Big."], ["A river."]]}


@pytest.mark.parametrize("context", [HUB, "Paris: A city. Big.\n\nSeine: A river."])
def test_hotpotqa_lines_become_a_users_message(context: Any) -> None:
    line = {"question": "Where?", "answer": "Paris", "context": context, "level": "hard"}
    row = parse_qa(line)
    (message,) = row.example.messages
    assert message["role"] == "user"
    assert message["content"].startswith("Paris: A city. Big.\n\nSeine: A river.\n\nWhere?\n\n")
    assert row.example.prompt == "Where?"
    assert row.example.answer == "Paris"
    assert row.example.fields["level"] == "hard"
    # the context is part of what is asked
    assert row.question != parse_qa({**line, "context": ""}).question
    # neither the text of a Python object, nor a message without its context
    for change in ({"answer": {"value": "Paris"}}, {"prompt": ask("Where?")}):
        with pytest.raises(ValueError):
            parse_qa({**line, **change})


def test_qa_answers_stand_in_the_last_tags_or_are_the_whole_text(tmp_path: Path) -> None:
    lines = [{"problem": f"Question {i}?", "answer": [f"The {i}", "x"]} for i in range(60)]
    task = QA(0, [write(tmp_path / "qa.jsonl", lines)])
    example = task.held_out(0)
    number = example.answer.removeprefix("The ")
    in_tags = "So <answer>y</answer> <answer> the X! </answer>"
    for text, correct in ((number, 1), (in_tags, 1), (f"So {number}", 0), ("", 0)):
        assert task.score(example, text)["correct"] == correct
