"""Chat templates with the features of the published ones, on tokenizers of their families."""

import json
from pathlib import Path
from typing import Any

import pytest

from minigrpo.model.chat import Chat
from minigrpo.model.encoding import encode_prompt
from minigrpo.model.tokenizer import Tokenizer, load_tokenizer
from minigrpo.types import ConfigError, Example

from . import tiny

# drops earlier thinking, looks into contents
QWEN3 = """
{%- set last = namespace(user=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if last.user < 0 and message.role == 'user' and not (
        message.content.startswith('<tool_response>')) %}
        {%- set last.user = index %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\nTools: ' ~ tools | map('tojson') | join(' ') ~ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < last.user %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content.strip('\\n') ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# begins with BOS, writes a date, trims contents, refuses wrong roles
LLAMA = """
{{- bos_token }}
{%- set date = strftime_now('%d %b %Y') if strftime_now is defined else 'never' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date + '\\n\\n' + system_message }}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate') }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- generation %}{{ message['content'] | trim }}{% endgeneration %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# blocks on lines of their own, whose line ends are trimmed
SMOLLM = """
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
<|im_start|>system
You write {{ {'as': 'json', 'ü': '<&>'} | tojson }}<|im_end|>
    {% endif %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
    {% if loop.last %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
""".lstrip()
# the system message is part of the first question; the end of a turn is that of the text
MISTRAL = """
{{- bos_token }}
{%- set system = messages[0].content ~ '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for message in messages if message.role != 'system' %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message.content + '[/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
# kind -> tokenizer, template, end of a turn
KINDS = {
    "qwen2.5": ("qwen", tiny.QWEN_TEMPLATE, "<|im_end|>"),
    "qwen3": ("qwen", QWEN3, "<|im_end|>"),
    "llama3.2": ("llama", LLAMA, "<|eot_id|>"),
    "smollm2": ("smollm", SMOLLM, "<|im_end|>"),
    "mistral": ("mistral", MISTRAL, "</s>"),
}


def ask(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


DIALOGUES = [
    ask(" 1+1? "),
    ask("Who's naïve?\n\n  象棋", "<think>me</think>\n\nYou.", "And 12?", system="Be short. "),
    ask("a", "b", "c", "d"),
]
KNOWN = tiny.golden("tokens")


def load(folder: Path, kind: str, **config: Any) -> tuple[Tokenizer, Chat]:
    family, template, _ = KINDS[kind]
    if family == "mistral":
        config = {"bos_token": "<s>", **config}
    tiny.tiny_tokenizer_folder(folder, family, **{"template": template, **config})
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.chat
    return tokenizer, tokenizer.chat


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_the_golden_ones_and_the_end_of_a_turn_stops(tmp_path: Path, kind: str) -> None:
    tokenizer, chat = load(tmp_path, kind)
    end = tokenizer.special[KINDS[kind][2]]
    assert tokenizer.turn_end == end and tokenizer.stops == {end, tokenizer.eot}
    assert len(KNOWN[f"chat {kind}"]) == len(DIALOGUES)
    for messages, (text, ids, whole) in zip(DIALOGUES, KNOWN[f"chat {kind}"], strict=True):
        assert chat.render(messages) == text
        assert tokenizer.encode(chat.prompt(messages), special=True) == ids
        assert encode_prompt(tokenizer, Example("?", messages=messages)) == ids
        assert chat.render(messages, add_generation_prompt=False) == whole


@pytest.mark.peer
@pytest.mark.parametrize("kind", KINDS)
def test_the_golden_prompts_are_those_of_transformers(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import datetime

    import transformers
    from transformers.utils import chat_template_utils

    class Then(datetime):
        @classmethod
        def now(cls, tz: object = None) -> "Then":
            return cls(2024, 7, 26)

    monkeypatch.setattr(chat_template_utils, "datetime", Then)
    load(tmp_path, kind)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    made = []
    for messages in DIALOGUES:
        text, whole = (
            theirs.apply_chat_template(messages, add_generation_prompt=on, tokenize=False)
            for on in (True, False)
        )
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        made.append([text, ids, whole])
    tiny.check_golden("tokens", f"chat {kind}", made)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_come_from_the_template_alone(tmp_path: Path, kind: str) -> None:
    tokenizer, chat = load(tmp_path, kind)
    for token in tokenizer.special:
        for messages in (ask(f"a {token}"), ask("a", token, "b"), ask("a", system=token)):
            with pytest.raises(ConfigError):
                chat.prompt(messages)
    near = ask("<|im_end |>", "< |eot_id|>", "[INST")
    special = {*tokenizer.special.values()}
    counts = [
        sum(i in special for i in encode_prompt(tokenizer, Example("", messages=messages)))
        for messages in (near, ask("a", "b", "c"))
    ]
    assert counts[0] == counts[1] > 0


def test_a_system_message_begins_all_chats_without_one(tmp_path: Path) -> None:
    folder = tiny.tiny_tokenizer_folder(tmp_path)
    plain, told = load_tokenizer(str(folder)), load_tokenizer(str(folder), system="Be\nshort.")
    expected = encode_prompt(plain, Example("", messages=ask("a", system="Be\nshort.")))
    # a plain prompt becomes a user's message
    for example in (Example("a"), Example("", messages=ask("a"))):
        assert encode_prompt(told, example) == expected
    own = Example("", messages=ask("a", system="Mine."))
    assert encode_prompt(told, own) == encode_prompt(plain, own)
    assert encode_prompt(plain, Example("a")) == plain.encode("a")
    with pytest.raises(ConfigError):  # it would do nothing
        load_tokenizer("chess", system="Be short.")


USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "What is asked?",
        "{{ messages[0].content }}",
        "{{ messages[1].content | wordcount }}",
        USERS,  # without the system message
        "{{ messages | map(attribute='content') }}",  # a generator's address
    ],
)
def test_a_template_without_the_question_or_the_instructions_is_refused(template: str) -> None:
    with pytest.raises(ConfigError):
        Chat(template).prompt(ask("1+1?", system="Short."))
    if template == USERS:
        assert Chat(template).prompt(ask("1+1?")) == "1+1?"
        with pytest.raises(ConfigError):
            Chat(template, system="Short.").prompt(ask("1+1?"))


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content.x }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_what_a_template_must_not_do_is_refused(template: str) -> None:
    with pytest.raises(ConfigError):
        Chat(template).render(ask("a"))


def test_a_template_of_the_users_counts_before_those_of_the_folder(tmp_path: Path) -> None:
    def rendered(own: Path | None = None, name: Path | str = tmp_path) -> str | None:
        chat = load_tokenizer(str(name), own and str(own)).chat
        return chat.render(ask("a")) if chat else None

    tiny.tiny_tokenizer_folder(tmp_path, template=None)
    assert rendered() is None
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    tiny.tiny_tokenizer_folder(tmp_path, chat_template=named)
    assert rendered() == "plain"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}{{ bos_token }}")
    settings = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert rendered() == "<|im_end|><|im_start|>"
    own = tmp_path / "own.jinja"
    own.write_text("own{{ eos_token }}", encoding="utf-8-sig")
    assert rendered(own) == "own<|im_end|>" and rendered(own, "chess") == "own<|endoftext|>"
