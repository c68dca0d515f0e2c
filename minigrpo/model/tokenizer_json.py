"""Read Hugging Face's tokenizer.json of the families here: byte-level BPE, as Llama, Qwen, SmolLM.

The file describes a pipeline: normalizer, added tokens, pre-tokenizer, merges, post-processor. What
tiktoken would compute differently is refused, in one line that says what is not supported.

Whether merging by number, as tiktoken does, gives what the file's list of merges gives, is proved
at load by merges.py.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime.text import parse_json
from .merges import check_merges
from .vocabulary import GPT2_PATTERN, Vocabulary, bytes_of

# A piece is a contraction; letters with at most one other character before them; a digit, or up to
# three; other characters with an optional space before and line ends after them; white space.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_PATTERN = QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
# Every digit is a piece, and the text between digits is split as by GPT-2. White space before a
# digit ends such a text, so it is one piece, all of it.
SMOLLM_PATTERN = GPT2_PATTERN.replace(r"| ?\p{N}+|", r"|\p{N}|").replace(
    r"|\s+(?!\S)|", r"|\s+(?=\p{N})|\s+(?!\S)|"
)
PATTERNS = {  # the steps of a pre-tokenizer, as `_step` writes them -> the pattern that does it
    ("ByteLevel with its pattern",): GPT2_PATTERN,
    (f"Split by {QWEN_PATTERN}", "ByteLevel"): QWEN_PATTERN,
    (f"Split by {LLAMA_PATTERN}", "ByteLevel"): LLAMA_PATTERN,
    ("Digits one by one", "ByteLevel with its pattern"): SMOLLM_PATTERN,
}
FAMILIES = "those of GPT-2, Qwen2 and Qwen3, Llama 3 and SmolLM3, SmolLM2"
MODEL: Mapping[str, tuple[Any, ...]] = {  # the settings of a BPE that are supported
    "type": ("BPE",),
    "dropout": (None, 0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (False,),
}
# flags of an added token that change which part of the text it takes
FLAGS = ("single_word", "lstrip", "rstrip")

Json = Mapping[str, Any]


def read_tokenizer_json(
    file: Path, more_tokens: Iterable[Json] = (), control: Container[str | int] = ()
) -> Vocabulary:
    """Read a tokenizer.json.

    Args:
        more_tokens: added tokens that other files list, in the same form; those that the file
            already has do not count.
        control: added tokens, by text or number, that are special although the file does not say
            so, such as the end of text.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is malformed, or has something that is not supported.
    """
    try:
        try:
            found = parse_json(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"is not whole JSON ({error})") from None
        return _vocabulary(found, more_tokens, control)
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        # `found` is not laid out as a tokenizer.json: a list in place of an object and so on
        problem = f"is not a whole tokenizer.json ({type(error).__name__}: {error})"
        raise ValueError(f"{file.name}: {problem}") from None
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from None


def _vocabulary(
    found: Json, more_tokens: Iterable[Json], control: Container[str | int]
) -> Vocabulary:
    model: Json = found["model"]
    for name, allowed in MODEL.items():
        if (value := model.get(name, allowed[0])) not in allowed:
            raise _unsupported(f"{name} {value!r} of the model", [repr(x) for x in allowed])
    steps = tuple(_step(step) for step in _flat(found.get("pre_tokenizer"), "pretokenizers"))
    if steps not in PATTERNS:
        raise _unsupported(f"the pre-tokenizer [{', '.join(steps)}]", [FAMILIES])
    normalizers = [step.get("type") for step in _flat(found.get("normalizer"), "normalizers")]
    if set(normalizers) - {"NFC"}:
        raise _unsupported(f"the normalizer {', '.join(map(str, normalizers))}", ["none", "NFC"])
    decoders = [step.get("type") for step in _flat(found.get("decoder"), "decoders")]
    if decoders != ["ByteLevel"]:
        raise _unsupported(f"the decoder {', '.join(map(str, decoders)) or None}", ["ByteLevel"])

    numbers: dict[str, int] = dict(model["vocab"])
    if any(type(number) is not int or number < 0 for number in numbers.values()):
        raise ValueError("a token of the vocabulary has a number that is not 0, 1, 2, ...")
    if "" in numbers:
        raise ValueError("a token of the vocabulary is empty: a model can sample it, unseen")
    entries = [*found.get("added_tokens", ()), *more_tokens]
    special, added = _added_tokens(entries, numbers, control)
    if normalizers and (late := [token for token in added if added[token].normalized]):
        raise _unsupported(f"the added token {late[0]!r}, which is looked for after NFC")
    ordinary = {text: number for text, number in numbers.items() if text not in special}
    unreachable = check_merges(ordinary, model["merges"])
    whole = bool(model.get("ignore_merges", False))  # a piece that is a token needs no merges
    ranks = {
        bytes_of(text): number
        for text, number in ordinary.items()
        if whole or text not in unreachable
    }
    others = {bytes_of(text): numbers[text] for text in unreachable if not whole}
    vocabulary = Vocabulary(
        pattern=PATTERNS[steps],
        ranks=ranks,
        special=special,
        added={token: entry.number for token, entry in added.items()},
        unreachable=others,
        nfc=bool(normalizers),
        prefix=_prefix(found.get("post_processor")),
    )
    if vocabulary.missing and model.get("unk_token") is not None:
        raise _unsupported(f"a token for unknown bytes, such as {vocabulary.missing[0]},")
    return vocabulary


def _unsupported(what: str, allowed: Iterable[str] = ()) -> ValueError:
    listed = "; ".join(allowed)
    return ValueError(f"{what} is not supported" + (f"; supported: {listed}" if listed else ""))


# --- the pipeline ---------------------------------------------------------------------------------


def _flat(step: Json | None, inside: str) -> list[Json]:
    """The steps of a part of the pipeline: none, one, or a sequence of them."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [one for part in step[inside] for one in _flat(part, inside)]


def _step(step: Json) -> str:
    """A step of the pre-tokenizer in words; what PATTERNS does not have is not supported."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return "ByteLevel" + (" with its pattern" if step.get("use_regex", True) else "")
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"} if not (
            step.get("invert", False)
        ):
            return f"Split by {pattern}"
        case {"type": "Digits", "individual_digits": True}:
            return "Digits one by one"
    return " ".join(f"{name} {value}" if name != "type" else value for name, value in step.items())


def _prefix(post_processor: Json | None) -> tuple[int, ...]:
    """The tokens that are put before every text."""
    prefix: list[int] = []
    for step in _flat(post_processor, "processors"):
        if step["type"] == "ByteLevel":  # changes offsets only
            continue
        if step["type"] != "TemplateProcessing":
            raise _unsupported(f"the post-processor {step['type']}", ["TemplateProcessing"])
        *before, text = step["single"]
        if "Sequence" not in text or any("SpecialToken" not in piece for piece in before):
            raise _unsupported("a post-processor that adds tokens after a text")
        names = [piece["SpecialToken"]["id"] for piece in before]
        prefix += [number for name in names for number in step["special_tokens"][name]["ids"]]
    return tuple(prefix)


@dataclass(frozen=True)
class _Added:
    number: int
    normalized: bool


def _added_tokens(
    entries: Iterable[Json], numbers: Mapping[str, int], control: Container[str | int]
) -> tuple[dict[str, int], dict[str, _Added]]:
    """The special tokens, and the others that are looked for in every text."""
    special: dict[str, int] = {}
    added: dict[str, _Added] = {}
    taken = {number: text for text, number in numbers.items()}
    if len(taken) != len(numbers):
        raise ValueError("two tokens of the vocabulary have the same number")
    for entry in entries:
        text, number = str(entry["content"]), int(entry["id"])
        if text in special or text in added:
            continue
        if numbers.get(text, number) != number:
            raise ValueError(f"added token {text!r} has two numbers, {number} and {numbers[text]}")
        if not text or number < 0 or taken.setdefault(number, text) != text:
            raise ValueError(f"added token {text!r} cannot have the number {number}")
        if flags := [name for name in FLAGS if entry.get(name, False)]:
            raise _unsupported(f"{flags[0]} of the added token {text!r}")
        if entry.get("special", False) or text in control or number in control:
            special[text] = number
        else:
            added[text] = _Added(number, bool(entry.get("normalized", True)))
    return special, added
