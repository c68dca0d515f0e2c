"""Questions from files: how lines are read, and what is held out."""

import json
import math
from collections.abc import Iterable
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minigrpo.parts import Given
from minigrpo.task import Task
from minigrpo.tasks.base import fingerprint, is_held_out, load_task, tagged_answer
from minigrpo.tasks.data import (
    Row,
    Rows,
    parse_any,
    parse_episode,
    parse_pair,
    plain,
    question_key,
    rows_of,
    tell_apart,
)
from minigrpo.tasks.prompts import Prompts, normalized, parse_qa
from minigrpo.types import Example

from .tiny import ask, refused
from .tiny import write_jsonl as write

SUMS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(400)]


def rows_in(*data: Path, eval_data: tuple[Path, ...] = (), seed: int = 0) -> Rows:
    return Rows(seed, data, eval_data, parse_pair)


def splits(task: Task, epoch: int) -> tuple[list[Example], list[Example]]:
    """The training examples of one epoch, of that many rows, and all held-out ones."""
    held_out = [task.held_out(i) for i in range(task.num_held_out)]
    return [task.train(i) for i in range(epoch)], held_out


def prompts(examples: Iterable[Example]) -> set[str]:
    return {example.prompt for example in examples}


# --- splits ---------------------------------------------------------------------------------------


def test_a_tenth_of_questions_is_held_out_by_a_hash_of_the_question_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", SUMS)
    expected = {row["prompt"] for row in SUMS if is_held_out(row["prompt"])}
    assert 20 < len(expected) < 60
    for seed in (0, 1):
        rows = rows_in(path, seed=seed)
        train, held_out = splits(rows, 400 - len(expected))
        assert prompts(held_out) == expected
        assert prompts(train) == {row["prompt"] for row in SUMS} - expected
    part = rows_in(write(tmp_path / "part.jsonl", SUMS[100:300]))  # whatever else is in the file
    assert prompts(splits(part, 0)[1]) == expected & {row["prompt"] for row in SUMS[100:300]}


def test_eval_data_is_held_out_whole_and_its_questions_are_not_trained_on(tmp_path: Path) -> None:
    train = write(tmp_path / "my-test.jsonl", SUMS[:100])  # a name decides nothing
    held_out = write(tmp_path / "train.jsonl", SUMS[80:120])
    rows = rows_in(train, eval_data=(held_out,))
    trained, evaluated = splits(rows, 80)
    assert [example.prompt for example in evaluated] == [row["prompt"] for row in SUMS[80:120]]
    assert prompts(trained) == {row["prompt"] for row in SUMS[:80]}
    assert "80 of 100" in rows.about  # the rows that are left out are reported
    # what is evaluated on alone needs no training rows
    alone = Rows(0, (), (held_out,), parse_pair)
    assert alone.num_held_out == 40 and prompts(splits(alone, 0)[1]) == prompts(evaluated)


def test_a_question_counts_once_whatever_else_its_lines_say(tmp_path: Path) -> None:
    """Copies that differ in white space, Unicode's form, an id or the answer are one question."""
    forms = ("caf\u00e9 {}  ?", "cafe\u0301 {} ?\n", " caf\u00e9\t{} ?")
    lines = [
        {"prompt": form.format(i), "answer": f"{i}", "id": n}
        for i in range(100)
        for n, form in enumerate(forms)
    ]
    path = write(tmp_path / "a.jsonl", lines)
    rows = rows_in(path)
    num_trained = 300 - 3 * rows.num_held_out
    trained, evaluated = splits(rows, num_trained)
    keys = [{question_key(x.prompt) for x in examples} for examples in (trained, evaluated)]
    assert not keys[0] & keys[1] and len(keys[0]) + len(keys[1]) == 100
    assert len(evaluated) == len(keys[1]) == rows.num_held_out
    for hashes, questions in zip(rows.questions, keys, strict=True):
        assert hashes.dtype == np.uint64
        assert hashes.tolist() == sorted(map(fingerprint, questions))
    # each line is trained on, also one with another answer
    assert len({(x.prompt, x.fields["id"]) for x in trained}) == num_trained
    both = rows_in(path, eval_data=(write(tmp_path / "b.jsonl", lines[::30]),))
    kept = {question_key(line["prompt"]) for line in lines[::30]}
    assert both.num_held_out == len(kept) == 10
    assert "30 more" in both.about  # copies that are left out are reported
    assert not kept & {question_key(x.prompt) for x in splits(both, 270)[0]}


@pytest.mark.parametrize("num_instructions", [1, 12])
def test_rows_of_one_instruction_differ_by_their_documents(num_instructions: int) -> None:
    documents = [f"Report {n}." for n in range(200)]
    records = [
        {"prompt": ask(f"Task {n % num_instructions}.", system=document), "answer": ""}
        for n, document in enumerate(documents)
    ]
    alone = Rows(0, (records,), ())
    assert 10 < alone.num_held_out < 40 and alone.num_train == 200 - alone.num_held_out
    apart = Rows(0, (records[:150],), (records[150:],))
    assert (apart.num_train, apart.num_held_out) == (150, 50)
    for rows in (alone, apart):
        trained, evaluated = splits(rows, rows.num_train)
        assert {x.messages[0]["content"] for x in trained + evaluated} == {*documents}


def test_a_question_is_the_whole_prompt_without_what_no_template_writes() -> None:
    (user,) = ask("And 2+2?")
    call = {"function": {"name": "add", "arguments": {"a": 2}}, "id": "x1"}
    asked = [
        [user],
        [{**user, "name": "Ann"}],
        ask("And 2+2?", system="Be brief."),
        ask("And 2+2?", system="Be rude."),
        ask("1+1?", "2", "And 2+2?"),
        ask("1+1?", "3", "And 2+2?"),
        *(
            [user, {"role": "assistant", "content": "Wait.", "tool_calls": calls}, user]
            for calls in ([], [call], [{"function": {**call["function"], "name": "sub"}}])
        ),
    ]
    rows = [{"prompt": messages} for messages in asked]
    rows += [{**rows[0], "tools": [tool(name)]} for name in ("add", "sub")]
    rows += [{**rows[0], "chat_template_kwargs": {"think": value}} for value in (True, False)]
    questions = [question_key(parse_any(plain(row)).question) for row in rows]
    assert len({*questions}) == len(rows) and questions[0] == "And 2+2?"

    for row, question in zip(rows, questions, strict=True):
        copied = [
            {**one, "content": one["content"].replace(" ", "\n "), "id": "x2"}
            for one in row["prompt"]
        ]
        for one in copied:
            one["tool_calls"] = [{**x, "id": "x2"} for x in one.get("tool_calls", ())]
        same = parse_any({**row, "prompt": copied, "level": 3})
        assert question_key(same.question) == question
    # a plain prompt with tools becomes a user's message
    assert parse_any({"prompt": "And 2+2?", "tools": [tool("add")]}).question == questions[-4]


def test_beginnings_of_answers_tell_rows_apart_where_questions_are_few() -> None:
    for num_questions, num_held_out in ((1, 200), (20, 20)):
        records = [{"prompt": ask(f"{n % num_questions}?", f"It is {n}")} for n in range(200)]
        assert Rows(0, (), (records,), parse_any).num_held_out == num_held_out


def test_an_epoch_visits_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", SUMS)
    rows = rows_in(path, seed=3)
    n = 400 - rows.num_held_out
    examples = [rows.train(i) for i in range(2 * n)]
    first, second = ([x.prompt for x in epoch] for epoch in (examples[:n], examples[n:]))
    assert sorted(first) == sorted(second) and first != second and len(set(first)) == n
    again, other = rows_in(path, seed=3), rows_in(path, seed=4)
    assert examples[n:] == [again.train(n + i) for i in range(n)]  # in any order of the calls
    assert first != [other.train(i).prompt for i in range(n)]
    # a number for each place, so that a prompt is sampled anew in the next epoch
    assert [x.index for x in examples] == list(range(2 * n))


def test_rows_may_come_from_python_and_a_few_are_enough(tmp_path: Path) -> None:
    few = [row for row in SUMS if not is_held_out(row["prompt"])][:3]  # none by its hash
    given = Rows(0, (few,), (), parse_pair)
    assert given.num_held_out == 1
    assert splits(given, 2) == splits(rows_in(write(tmp_path / "a.jsonl", few)), 2)
    refused(Rows, 0, ([*few, {"answer": "1"}],), (), parse_pair)


def test_what_an_environment_reads_tells_rows_apart_where_questions_are_few() -> None:
    def asked(num_questions: int, is_read: bool = True) -> list[Row]:
        records = [{"prompt": f"{i % num_questions}", "seed": i} for i in range(20)]
        return [parse_episode(record, is_read=is_read) for record in records]

    for num_questions, num_keys in ((1, 20), (9, 20), (10, 10), (20, 20)):
        rows = asked(num_questions)
        told_apart, nothing = tell_apart(rows, [])
        assert len({row.question for row in told_apart}) == num_keys and not nothing
        assert [row.example for row in told_apart] == [row.example for row in rows]
    # the questions of both files count together, so that a question has one key in both
    for num_questions, are_few in ((9, True), (10, False)):
        rows = asked(num_questions)
        told_apart, evaluated = tell_apart(rows, rows[:3])
        assert evaluated == told_apart[:3] and (evaluated != rows[:3]) == are_few
    # tools alone read nothing of a row
    assert tell_apart(asked(3, is_read=False), [])[0] == asked(3, is_read=False)
    assert parse_episode({"seed": 1}, is_read=False).question != ""


class Picture:
    """An object whose text has its address."""

    def __init__(self, name: str) -> None:
        self.name = name


def test_rows_with_objects_are_told_apart_by_their_contents() -> None:
    """Or another process, such as that of a resume, would hold out other questions."""

    def questions(name: str) -> set[str]:
        shown = {"picture": Picture(name)}
        asks = {"prompt": "What is this?", "answer": "a", "chat_template_kwargs": shown}
        return {parse_episode(shown, is_read=True).extra_key, parse_pair(asks).question}

    assert questions("a") == questions("a") and not questions("a") & questions("b")


def test_a_split_without_questions_is_an_error(tmp_path: Path) -> None:
    for num_rows in (0, 1):
        path = write(tmp_path / "a.jsonl", SUMS[:num_rows])
        for held_out in ((), (path,)):  # or all of it is held out
            refused(rows_in, path, eval_data=held_out)
    refused(load_task, "prompts", seed=0)


# --- lines ----------------------------------------------------------------------------------------


BAD_LINES = [
    "[" * 100_000,
    '{"prompt": "a", "answer": "b"',
    '{"prompt": "a", "answer": null}',
    '{"prompt": "a", "answer": [3]}',
    '{"prompt": "a", "answer": NaN}',
    '{"prompt": ["a"], "answer": "b"}',
    '{"answer": "b"}',
    '{"messages": [], "answer": "b"}',
    '{"messages": ["a"], "answer": "b"}',
    '{"messages": [{"role": "user", "content": 1}], "answer": "b"}',
    '{"messages": [{"role": "system", "content": "a"}], "answer": "b"}',
    '{"messages": [{"role": "assistant", "content": "b"}]}',
    b"\xff\xfe",
]


def test_a_bad_line_is_refused_with_its_file_and_number(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", SUMS[:40])
    good = path.read_bytes() + b"\n"
    for line in BAD_LINES:
        path.write_bytes(good + (line if isinstance(line, bytes) else line.encode()))
        said = refused(rows_in, path)
        assert str(path) in said and "42" in said and "\n" not in said, line
    # all are counted
    bad = write(tmp_path / "a.jsonl", [*SUMS[:40], *[{"answer": "1"}] * 17, *SUMS[40:]])
    good = write(tmp_path / "b.jsonl", SUMS)
    for data, eval_data in (((bad,), ()), ((good,), (bad,))):
        said = refused(rows_in, *data, eval_data=eval_data)
        assert "17 of 417" in said and f"{bad}, line 41:" in said and "\n" not in said


def test_half_a_character_is_refused_with_its_row(tmp_path: Path) -> None:
    half = "so \ud83d"  # of an emoji's two halves in JSON
    for row in (
        {"prompt": half, "answer": ""},
        {"prompt": "a", "answer": half},
        {"prompt": ask(half), "answer": ""},
        {"prompt": "a", "answer": "", "notes": [{"by": half}]},
    ):
        rows = [*SUMS[:40], row]
        for given in (rows, write(tmp_path / "a.jsonl", rows)):
            said = refused(Rows, 0, (given,), ())
            assert "41" in said and said.encode()  # it can be printed


def test_texts_are_read_as_they_are(tmp_path: Path) -> None:
    """With or without a byte order mark, and with what `str.splitlines` takes for a line's end."""
    path = tmp_path / "a.jsonl"
    lines = [
        json.dumps({"prompt": f"{i}\u2028\x85 ", "answer": "é "}, ensure_ascii=False)
        for i in range(60)
    ]
    for head, end in (("", "\n"), ("\ufeff", "\r\n")):
        path.write_bytes((head + end.join(lines)).encode())
        rows = rows_in(path)
        trained, evaluated = splits(rows, 60 - rows.num_held_out)
        assert prompts(trained) | prompts(evaluated) == {f"{i}\u2028\x85 " for i in range(60)}
        assert {example.answer for example in trained} == {"é "}


def test_the_keys_of_published_files_are_known() -> None:
    expected = [
        ({"prompt": "a", "completion": "b"}, "b"),
        ({"question": "a", "answer": "b", "solution": "c"}, "b"),
        ({"problem": "a", "solution": ""}, ""),
        ({"prompt": None, "question": "a", "answer": None, "solution": "c"}, "c"),
        ({"prompt": "a", "answer": 3}, "3"),
        ({"prompt": "a", "answer": math.nan, "solution": 0.5}, "0.5"),  # pandas' missing value
    ]
    for record, answer in expected:
        row = parse_pair(plain(record))
        assert (row.question, row.example.prompt, row.example.answer) == ("a", "a", answer)
        assert row.example.fields == plain(record) and not row.example.messages


USER, FOUR = ask("2+2?", "4")
PARTS = {**USER, "content": [{"type": "text", "text": text} for text in ("2+", "2?")]}


def test_chats_are_read_in_the_forms_of_trl_and_openai() -> None:
    for record, answer in [
        ({"prompt": [USER], "solution": 4}, "4"),
        ({"prompt": [USER], "completion": [FOUR], "level": 2}, "4"),
        ({"messages": [USER, FOUR]}, "4"),
        ({"messages": np.array([USER, FOUR]), "answer": np.float64(4)}, "4.0"),  # from Arrow
        ({"messages": [PARTS], "answer": "four"}, "four"),
    ]:
        row = parse_pair(plain(record))
        assert (row.question, row.example.answer) == ("2+2?", answer)
        assert row.example.messages == (USER,)
        assert row.example.fields == plain(record)
    for record in ({"prompt": [USER]}, {"prompt": "2+2?"}):
        assert parse_any(record).question == "2+2?" and parse_any(record).example.answer == ""
        with pytest.raises(ValueError):
            parse_pair(record)
    with pytest.raises(ValueError):
        parse_pair({"prompt": "2+2?", "answer": [4]})
    # nothing reads it without a judge
    assert parse_any({"prompt": "2+2?", "answer": [4], "solution": 5}).example.answer == "5"


(BEGUN,) = ask("2+2?", "Let me think.\n<think>")[1:]


@pytest.mark.parametrize(
    ("record", "messages", "answer"),
    [
        ({"prompt": "2+2?", "messages": [USER, FOUR], "answer": "5"}, [], "5"),
        ({"prompt": [USER], "messages": [{**USER, "content": "x"}, FOUR]}, [USER], ""),
        ({"prompt": [USER, BEGUN], "messages": [USER, FOUR]}, [USER, BEGUN], ""),
        ({"prompt": [USER, BEGUN], "answer": 4}, [USER, BEGUN], "4"),
        ({"prompt": [USER, BEGUN], "completion": [FOUR]}, [USER, BEGUN], "4"),
        ({"prompt": None, "messages": [USER, FOUR]}, [USER], "4"),
        ({"question": "x", "messages": [USER, FOUR]}, [USER], "4"),
    ],
)
def test_a_prompt_counts_above_messages_and_may_begin_the_answer(
    record: dict[str, Any], messages: list[Any], answer: str
) -> None:
    row = parse_any(plain(record))
    assert [*row.example.messages] == messages and row.example.answer == answer
    assert row.question == row.example.prompt == "2+2?"  # the beginning asks nothing


def tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": value} for key, value in types.items()}
    parameters = {"type": "object", "properties": properties, "required": [*types]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": x} for x in calls]}


ADD = {"name": "add", "arguments": {"a": 2, "b": 3}}
LOOK = {"name": "look", "arguments": {"word": "tea", "deep": {"n": 1}}}
CALLERS = [  # the calls have different arguments
    {
        "prompt": [{**USER, "content": f"{i}?"}, calling(*calls), {"role": "tool", "content": "4"}],
        "answer": str(i),
        "tools": [tool("add", a="integer", b="integer"), tool("look", word="string")][: i % 3],
    }
    for i, calls in enumerate([(ADD, LOOK), (LOOK,), (ADD,)] * 3)
]


def read(data: Any) -> list[Example]:
    rows = rows_of("data", data)
    return [row.example for row in Rows(0, (rows,), (), parse_pair).read((rows,))]


@pytest.mark.peer
def test_tables_give_the_prompts_of_the_list_of_dicts(tmp_path: Path) -> None:
    import datasets
    import pandas

    plain_rows = [(x.messages, x.tools, x.answer) for x in read(CALLERS)]
    dataset = datasets.Dataset.from_list(CALLERS)
    dataset.to_parquet(tmp_path / "rows.parquet")
    frame = pandas.read_parquet(tmp_path / "rows.parquet")
    arrow = dataset.with_format("arrow")[:]
    for table in (dataset, frame, pandas.DataFrame(CALLERS), dataset.to_pandas(), arrow):
        assert [(x.messages, x.tools, x.answer) for x in read(table)] == plain_rows
    refused(rows_of, "data", datasets.DatasetDict(train=dataset))
    missing = {"prompt": ["a", "b"], "n": pandas.array([1, None], dtype="Int64")}
    missing |= {"day": [pandas.Timestamp(2024, 5, 6), pandas.NaT]}
    first, second = rows_of("data", pandas.DataFrame(missing))
    assert plain(first) == {"prompt": "a", "n": 1, "day": "2024-05-06T00:00:00"}
    assert plain(second) == {"prompt": "b"}


def test_values_of_a_row_are_plain() -> None:
    image = object()
    pairs = [
        # a number that other calls lack became a float
        (np.array([{"arguments": {"a": 2.0, "b": None}}]), [{"arguments": {"a": 2}}]),
        (
            {"none": None, "nan": math.nan, "list": [{"none": None}, None, 2.0]},
            {"list": [{}, None, 2.0]},
        ),
        (np.array([1, 2]), [1, 2]),
        (np.float32(0.5), 0.5),
        (date(2024, 5, 6), "2024-05-06"),
        (np.datetime64("2024-05-06T07:08:09", "ns"), "2024-05-06T07:08:09"),
        (image, image),
    ]
    for value, expected in pairs:
        assert repr(plain({"key": value})) == repr({"key": expected})  # 2 is not 2.0


def test_tools_that_are_words_are_no_schemas() -> None:
    assert parse_any({"prompt": "a", "tools": "a hammer"}).example.tools is None
    schemas = json.dumps([tool("add", a="integer")])
    assert parse_any({"prompt": "a", "tools": schemas}).example.tools == json.loads(schemas)
    said = refused(read, [*CALLERS, {"prompt": "a", "answer": "", "tools": "[a saw]"}])
    assert f"row {len(CALLERS) + 1}" in said


def test_calls_of_tools_reach_the_template_as_objects() -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "4"}
    record = {"messages": [USER, said, result]}
    messages = parse_any(plain(record)).example.messages
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 2}
    assert messages[1]["content"] == "" and messages[2] == result
    assert isinstance(call["function"]["arguments"], str)  # the caller's row is as it was
    other = {"function": {"name": "add", "arguments": {"a": 1, "b": 3}}}
    changed = {"messages": [USER, {**said, "tool_calls": [other]}, result]}
    assert parse_any(plain(changed)).question != parse_any(plain(record)).question


def test_examples_that_are_used_are_known_in_the_order_of_the_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*SUMS, *SUMS])
    rows = rows_in(path, eval_data=(write(tmp_path / "b.jsonl", SUMS[:50]),))
    known = [rows.known(i) for i in range(rows.num_known)]
    asked = [row["prompt"] for row in (*SUMS[50:], *SUMS[50:], *SUMS[:50])]
    assert [example.prompt for example in known] == asked


class Endless:
    """A data set as torch has it, which makes a row for any number."""

    def __init__(self) -> None:
        self.read = []

    def __getitem__(self, number: int) -> dict[str, str]:
        self.read.append(number)
        return {"prompt": f"{number}"}


class Sized(Endless):
    def __len__(self) -> int:
        return 300


def test_what_is_no_rows_or_has_no_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for data in ({"prompt": ["a"]}, ["a", "b"], 3, [None], [["prompt"]]):
        assert "\n" not in refused(Given.of, data=data)
    monkeypatch.setattr("minigrpo.tasks.data.MOST_ROWS", 200)
    made = ({"prompt": f"{number}"} for number in range(10**9))
    endless = Endless()
    for given in ({"data": made}, {"data": SUMS, "eval_data": endless}):
        refused(Given.of, **given)
    assert int(next(made)["prompt"]) == 201 and endless.read == [*range(201)]
    # what says how many rows it has, has no bound, and is read to there
    assert len(rows_of("data", Sized())) == 300 and len(rows_of("data", SUMS)) == 400
    assert len(rows_of("data", islice(made, 200))) == 200
    monkeypatch.setattr("minigrpo.tasks.data.MOST_CHARACTERS", 100)
    refused(rows_of, "data", islice(made, 10))  # few rows may be long


# --- prompts --------------------------------------------------------------------------------------


def test_prompts_are_scored_by_equality_and_similarity(tmp_path: Path) -> None:
    task = Prompts(0, [write(tmp_path / "a.jsonl", SUMS)])
    example = Example("39+83=", "122")
    assert task.score(example, "122") == {"exact": 1, "similarity": 1}
    assert task.score(example, "12") == {"exact": 0, "similarity": pytest.approx(2 / 3)}
    assert task.speculate and not Prompts(0, [tmp_path / "a.jsonl"], chat=True).speculate
    chat = [{"messages": [{"role": "user", "content": x["prompt"]}], "answer": ""} for x in SUMS]
    assert not Prompts(0, [write(tmp_path / "b.jsonl", chat)]).speculate
    refused(Prompts, 0, [tmp_path / "a.jsonl"], judge="nobody")


def test_case_punctuation_and_articles_do_not_matter_to_the_qa_judge() -> None:
    texts = ["The  Beatles!", "an apple a day", "Theodore", "U.S.A.", " yes\n"]
    assert [*map(normalized, texts)] == ["beatles", "apple day", "theodore", "usa", "yes"]
    alike = [("-$5.", "$-5"), ("1,234", "1234"), ("It is 3.5.", "it is 3.5"), ("50%", "50")]
    assert all(normalized(one) == normalized(other) for one, other in alike)
    apart = [("3.5", "35"), (".5", "5"), ("-5", "5"), ("9/11", "911"), ("10:30", "1030")]
    assert not any(normalized(one) == normalized(other) for one, other in apart)
    few = ["A", "The.", "+", ""]  # what would be empty
    assert [*map(normalized, few)] == ["a", "the", "+", ""]


HUB = {"title": ["Paris", "Seine"], "sentences": [["A city.", " Big."], ["A river."]]}


def test_hotpotqa_lines_become_a_users_message() -> None:
    for context in (HUB, "Paris: A city. Big.\n\nSeine: A river."):
        line = {"question": "Where?", "answer": "Paris", "context": context, "level": "hard"}
        row = parse_qa(line)
        example = row.example
        (message,) = example.messages
        assert message["role"] == "user"
        assert message["content"].startswith("Paris: A city. Big.\n\nSeine: A river.\n\nWhere?\n\n")
        assert (example.prompt, example.answer) == ("Where?", "Paris")
        assert example.fields["level"] == "hard"
        # the context is part of what is asked
        other = parse_qa({**line, "context": "Rome: A city."})
        assert len({row.question, other.question, parse_qa({**line, "context": ""}).question}) == 3


def test_qa_answers_stand_in_the_last_tags_or_are_the_whole_text(tmp_path: Path) -> None:
    lines = [{"problem": f"Question {i}?", "answer": [f"The {i}", "x"]} for i in range(60)]
    task = Prompts(0, [write(tmp_path / "qa.jsonl", lines)], judge="qa")
    example = task.held_out(0)
    number = example.answer.removeprefix("The ")
    texts = [number, "So <answer>y</answer> <answer> the X! </answer>", f"So {number}", ""]
    assert [task.score(example, text)["correct"] for text in texts] == [1, 1, 0, 0]
    tagged = {
        "<answer>1</answer> no, <answer>\n2\n</answer> and so on": "\n2\n",
        "<answer>1</answer> <answer>2": "1",
        "</answer>1<answer>": "?",
        "<answer>" * 20_000: "?",
    }
    assert {text: tagged_answer(text, "?") for text in tagged} == tagged
