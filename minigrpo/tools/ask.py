"""Send a text to a model, and show the answer while it is sampled: `minigrpo sample --prompt`."""

import codecs
import unicodedata
from collections.abc import Callable

import numpy as np
from torch import Tensor

from ..config import Config
from ..model.tokenizer import Tokenizer
from ..runtime.logging import Screen
from ..runtime.rng import uniforms
from ..runtime.text import check_file_name
from ..sampling.params import SamplingParams
from ..sampling.sampler import GREEDY, Sampler
from ..tasks.own import OwnExample
from .loading import ModelSelection, check_model_paths, config_of, load_sampler, tokenizer_of

# Joiners of emoji and of Persian letters are no characters of their own, and control no terminal.
HARMLESS = ("\n", "\t", "\u200c", "\u200d")


def on_screen(text: str) -> str:
    """A text of several lines with control characters escaped, so that it controls no terminal."""
    return "".join(
        c if c.isprintable() or c in HARMLESS or unicodedata.category(c) == "Zs" else ascii(c)[1:-1]
        for c in text
    )


class StreamedText:
    """The text of a completion while it grows: never half of a character."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], object]) -> None:
        """`write` gets each new piece of text."""
        self.tokenizer, self.write = tokenizer, write
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.length = 0  # tokens written

    def watch(self, ids: Tensor, lengths: Tensor) -> None:
        """Write what is new in the first of the completions `ids` [R, S], `lengths` [R]."""
        length = int(lengths[0])
        self._write(ids[0, self.length : length].tolist())
        self.length = max(self.length, length)

    def finish(self) -> None:
        """Write what the last tokens left open: bytes that are no whole character."""
        self._write([], final=True)

    def _write(self, ids: list[int], *, final: bool = False) -> None:
        text = self.decoder.decode(self.tokenizer.decode_bytes(ids), final)
        if text:
            self.write(on_screen(text))


def ask(
    selection: ModelSelection, screen: Screen, prompt: str, *, raw: bool, num_samples: int
) -> None:
    """Load a model and print its answers to a prompt. The task and data of a run are not read.

    Args:
        raw: the prompt is sent as it is; otherwise a chat template, if there is one, makes a user's
            message of it.
        num_samples: answers, one after the other; 0: a single greedy one.

    Raises ValueError, in one line, for a model that cannot be loaded, a prompt that leaves no room
    for --max-new-tokens, or one that the template refuses.
    """
    check_file_name(selection.run)
    config = config_of(selection)
    check_model_paths(selection, config)
    # without a true answer there is nothing to propose
    config = config.replace(speculate="none", **({"system": ""} if raw else {}))
    tokenizer = tokenizer_of(selection, config)
    name, sampler = load_sampler(selection, config, tokenizer, screen)
    is_chat = tokenizer.chat is not None and not raw
    sent = "written by its chat template" if is_chat else "as it is"
    screen.say(f"{name}, {how(num_samples, config)}, the prompt {sent}\n")
    messages = ({"role": "user", "content": prompt},) if is_chat else ()
    for number in range(max(1, num_samples)):
        if num_samples > 1:
            screen.say(f"--- {number + 1} of {num_samples}")
        example = OwnExample(prompt, "", number, messages=messages, where="--prompt")
        _answer(config, sampler, screen, example, is_sampled=num_samples > 0)


def how(num_samples: int, config: Config) -> str:
    """How answers are picked."""
    temperature = config.sampling.temperature
    return f"{num_samples} at temperature {temperature:g}" if num_samples else "greedy"


def _answer(
    config: Config, sampler: Sampler, screen: Screen, example: OwnExample, *, is_sampled: bool
) -> None:
    """Print one answer while it is sampled."""

    def write(text: str) -> None:
        screen.console.file.write(text)
        screen.console.file.flush()

    most, u, params = config.sampling.max_new_tokens, None, GREEDY
    if is_sampled:
        row = np.array([example.index])
        u = uniforms(config.run.seed, "tools/sample", 0, row, 1, most)
        params = SamplingParams.of(config.sampling)
    text = StreamedText(sampler.tokenizer, write)
    for part in sampler.complete([example], u=u, params=params, watch=text.watch):
        text.finish()
        write("\n")
        if int(part.completion_ids[0, 0, -1]) not in sampler.tokenizer.stops:
            screen.say(f"(cut off: the answer has --max-new-tokens {most})")
