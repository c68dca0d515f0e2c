"""Chat templates with the features of the published ones, on tokenizers of their families."""

from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from minigrpo.model.frozen_model import with_context
from minigrpo.text.chat import Chat
from minigrpo.text.encoding import encode_pairs, encode_prompt
from minigrpo.text.tokenizer import Tokenizer, load_tokenizer
from minigrpo.types import Example

from . import tiny
from .tiny import ask, refused

# template -> tokenizer, end of a turn
KINDS = {
    "qwen2.5": ("qwen", "<|im_end|>"),
    # drops earlier thinking, looks into contents
    "qwen3": ("qwen", "<|im_end|>"),
    # begins with BOS, writes a date, trims contents, refuses wrong roles
    "llama3.2": ("llama", "<|eot_id|>"),
    # has blocks on lines of their own, whose line ends are trimmed
    "smollm2": ("smollm", "<|im_end|>"),
    # has the system message in the first question; the end of a turn is that of the text
    "mistral": ("mistral", "</s>"),
}
PUBLISHED = {"qwen2_5": "qwen", "qwen3": "qwen", "llama3_1": "llama", "phi3": "qwen"}
PUBLISHED |= dict.fromkeys(("qwen3_5_think", "qwen3_5_nothink", "lfm2", "lfm2_2_5_v2"), "qwen")
DIALOGUES = [
    ask(" 1+1? "),
    ask("Who's naïve?\n\n  象棋", "<think>me</think>\n\nYou.", "And 12?", system="Be short. "),
    ask("a", "b", "c", "d"),
]
KNOWN = tiny.golden("tokens")


def load(folder: Path, kind: str, **config: Any) -> tuple[Tokenizer, Chat]:
    family, _ = KINDS[kind]
    template = (tiny.TEMPLATES / f"{kind}.jinja").read_text("utf-8")
    if family == "mistral":
        config = {"bos_token": "<s>", **config}
    tiny.tiny_tokenizer_folder(folder, family, **{"template": template, **config})
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.chat
    return tokenizer, tokenizer.chat


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_the_golden_ones_and_the_end_of_a_turn_stops(tmp_path: Path, kind: str) -> None:
    tokenizer, chat = load(tmp_path, kind)
    end = tokenizer.special[KINDS[kind][1]]
    assert tokenizer.turn_end == end
    assert tokenizer.stops == {end, tokenizer.eot}
    for messages, (text, ids, whole) in zip(DIALOGUES, KNOWN[f"chat {kind}"], strict=True):
        assert chat.render(messages) == text
        assert tokenizer.encode(text, special=True) == ids
        assert chat.render(messages, add_generation_prompt=False) == whole
        if messages[-1]["role"] == "user":
            assert encode_prompt(tokenizer, Example("?", messages=messages)) == ids


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_come_from_the_template_alone(tmp_path: Path, kind: str) -> None:
    tokenizer, chat = load(tmp_path, kind)
    for token in tokenizer.special:
        for messages in (ask(f"a {token}"), ask("a", token, "b"), ask("a", system=token)):
            refused(chat.prompt, messages)
        refused(chat.prompt, ask("a"), tools=[{"name": token}])
        refused(chat.prompt, ask("a"), args={"documents": [token]})
    assert "[INST" in chat.prompt(ask("<|im_end |>", "< |eot_id|>", "[INST"))  # nearly


BEGINNINGS = (" Let me think.\n<think>\n\n", "a  \n", "<think>me</think>\n\nI", "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begun", BEGINNINGS)
def test_the_beginning_of_an_answer_is_continued(tmp_path: Path, kind: str, begun: str) -> None:
    tokenizer, chat = load(tmp_path, kind)
    messages = ask("1+1?", begun)
    text = chat.prompt(messages)
    whole = chat.render(messages, add_generation_prompt=False)
    # nothing but the end of the turn is missing; some templates trim white space before it
    assert "".join(whole.split()) == "".join(text.split()) + KINDS[kind][1]
    pair = encode_pairs(tokenizer, [Example("1+1?", "2", messages=messages)], 999)
    assert pair.prompt_ids[0].tolist() == tokenizer.encode(text, special=True)
    assert pair.completion_ids[0, 0].tolist() == [*tokenizer.encode("2"), tokenizer.turn_end]


def test_what_stands_at_a_beginning(tmp_path: Path) -> None:
    tokenizer, chat = load(tmp_path, "qwen3")
    asked = Example("", messages=ask("1+1?", "So"), fields={"x": "y"})
    assert [*with_context(tokenizer, asked, "x").messages] == ask("1+1?\n\ny", "So")
    call = {"role": "assistant", "content": "b", "tool_calls": [{"function": {}}]}
    refused(chat.prompt, [*ask("a"), call])  # what follows is the tool's result
    changes = Chat("{% for m in messages %}{{ m.content.replace('o', '') }}{% endfor %}")
    refused(changes.prompt, ask("1+1?", "So"))


@pytest.mark.peer
@pytest.mark.parametrize("kind", [*KINDS, *PUBLISHED])
def test_prompts_are_those_of_transformers(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that begin an answer. The golden ones are made here."""
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    now = Mock(now=lambda: datetime(2024, 7, 26))
    monkeypatch.setattr(chat_template_utils, "datetime", now)
    if kind in KINDS:
        load(tmp_path, kind)
    else:
        template = tiny.published_template(kind)
        tiny.tiny_tokenizer_folder(tmp_path, PUBLISHED[kind], template=template)
    chat = load_tokenizer(str(tmp_path)).chat
    render = PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template
    for begun in BEGINNINGS[:2]:
        messages = ask("a", "b", "c", begun, system="Short.")
        expected = render(messages, continue_final_message=True, tokenize=False)
        assert chat.prompt(messages) == expected
    asked = ask("a", "b", "c", system="Short.")
    assert chat.prompt(asked) == render(asked, add_generation_prompt=True, tokenize=False)
    if kind in KINDS:
        made = []
        for messages in DIALOGUES:
            text = render(messages, add_generation_prompt=True, tokenize=False)
            ids = render(messages, add_generation_prompt=True, return_dict=False)
            whole = render(messages, add_generation_prompt=False, tokenize=False)
            made.append([text, ids, whole])
        tiny.check_golden("tokens", f"chat {kind}", made)


NO_THOUGHT = "<think>\n\n</think>\n\n"
THINKS = (
    tiny.QWEN_TEMPLATE
    + """{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}"""
)
ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}


@pytest.mark.parametrize(
    ("args", "own", "is_off"),
    [
        ({}, {}, False),
        (OFF, {}, True),
        (OFF, ON, False),
        ({}, OFF, True),
        ({"messages": []}, {"add_generation_prompt": False}, False),  # what it always gets
    ],
)
def test_variables_reach_the_template_and_those_of_a_row_count_above(
    tmp_path: Path, args: dict[str, Any], own: dict[str, Any], is_off: bool
) -> None:
    folder = str(tiny.tiny_tokenizer_folder(tmp_path, template=THINKS))
    tokenizer = load_tokenizer(folder, chat_args=args)
    example = Example("", messages=ask("a"), fields={"chat_template_kwargs": own})
    text = tokenizer.text_of(encode_prompt(tokenizer, example))
    assert text.endswith("a<|im_end|>\n<|im_start|>assistant\n" + NO_THOUGHT * is_off)
    assert tokenizer.chat
    assert tokenizer.chat.between(ask("b"), own).endswith(NO_THOUGHT) == is_off
    assert tokenizer.chat.variables == {"enable_thinking"}


def test_a_system_message_begins_all_chats_without_one(tmp_path: Path) -> None:
    folder = str(tiny.tiny_tokenizer_folder(tmp_path))
    plain = load_tokenizer(folder)
    told = load_tokenizer(folder, system="Be\nshort.")
    expected = encode_prompt(plain, Example("", messages=ask("a", system="Be\nshort.")))
    assert encode_prompt(told, Example("", messages=ask("a"))) == expected
    assert encode_prompt(told, Example("a")) == expected  # a plain prompt becomes a user's message
    own = Example("", messages=ask("a", system="Mine."))
    assert encode_prompt(told, own) == encode_prompt(plain, own)
    assert encode_prompt(plain, Example("a")) == plain.encode("a")
    refused(load_tokenizer, "chess", system="Be short.")  # it would do nothing


WHOLE = "{% for m in messages %}{{ m.content }}{% endfor %}"
USERS = WHOLE.replace("messages", "messages if m.role == 'user'")  # without the instructions


@pytest.mark.parametrize(
    "template",
    [
        "What is asked?",
        "{{ messages[0].content }}",
        "{{ messages[1].content | wordcount }}",
        USERS,
        "{{ messages | map(attribute='content') }}",  # a generator's address
        *("{% for %}", "{{ messages.append(1) }}" + WHOLE, "{{ ''.__class__.__mro__ }}" + WHOLE),
        *("{{ 1 / 0 }}" + WHOLE, "{{ raise_exception('no') }}" + WHOLE),
    ],
)
def test_a_template_that_leaves_out_messages_or_fails_is_refused(template: str) -> None:
    messages = ask("1+1?", system="Short.")
    assert Chat(WHOLE).prompt(messages) == "Short.1+1?"
    refused(lambda: Chat(template).prompt(messages))


def test_instructions_that_nobody_gives_may_be_left_out() -> None:
    assert Chat(USERS).prompt(ask("1+1?")) == "1+1?"
    refused(Chat(USERS, system="Short.").prompt, ask("1+1?"))


def test_a_template_of_the_users_counts_before_those_of_the_folder(tmp_path: Path) -> None:
    def rendered(name: Path | str = tmp_path, own: Path | str = "") -> str | None:
        chat = load_tokenizer(str(name), str(own)).chat
        return chat and chat.render(ask("a"))

    tiny.tiny_tokenizer_folder(tmp_path, template=None)
    assert rendered() is None
    named = {"content": "<|im_end|>"}
    tiny.tiny_tokenizer_folder(tmp_path, chat_template="plain", eos_token=named)
    assert rendered() == "plain"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}{{ bos_token }}")
    assert rendered() == "<|im_end|><|endoftext|>"
    own = tmp_path / "own.jinja"
    own.write_text("own{{ eos_token }}", encoding="utf-8-sig")
    assert rendered(own=own) == "own<|im_end|>"
    assert rendered("chess", own) == "own<|endoftext|>"
