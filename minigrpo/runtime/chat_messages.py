"""Chat messages: what they must look like, and the text that stands for them in logs and splits."""

from collections.abc import Mapping, Sequence

from .text import has_lone_surrogate

Message = Mapping[str, str]  # role and content
ROLES = ("system", "developer", "user", "assistant", "tool")
INSTRUCTIONS = ("system", "developer")  # roles that say how to answer, not what


def check_messages(messages: Sequence[Message]) -> None:
    """Raise ValueError unless these are messages: objects with a role and a text."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError("messages must be a list of objects with role and content, and not empty")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ValueError(f"message {number} must be an object with role and content only")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise ValueError(f"message {number}: role must be {', '.join(ROLES)}, got {role!r:.60}")
        if not isinstance(content, str):
            raise ValueError(f"message {number}: content must be text, got {content!r:.60}")


def check_prompt_messages(messages: Sequence[Message]) -> None:
    """Raise ValueError unless these are messages that an assistant can answer."""
    check_messages(messages)
    for number, message in enumerate(messages, 1):
        if has_lone_surrogate(message["content"]):
            raise ValueError(
                f"message {number} has half of a surrogate pair, which is no character"
            )
    if messages[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's: its text belongs into the answer")
    if not question_of(messages):
        raise ValueError("messages must have a text besides that of the system")


def question_of(messages: Sequence[Message]) -> str:
    """The text that stands for messages in logs, and whose hash decides the split.

    The content of a single user message, so that a question is in the same split whether it is
    given as a prompt or as a message; else every message after its role. System messages are left
    out: the same question with other instructions must not be trained on and evaluated too.
    """
    asked = [message for message in messages if message["role"] not in INSTRUCTIONS]
    if len(asked) == 1 and asked[0]["role"] == "user":
        return asked[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in asked)


def with_system(messages: Sequence[Message], text: str) -> Sequence[Message]:
    """The messages after a system message with this text, unless it is empty or they have one."""
    if not text or any(message["role"] in INSTRUCTIONS for message in messages):
        return messages
    return ({"role": "system", "content": text}, *messages)
