"""Ask a model: a position and a move of one's own, or held-out examples; in chess with the boards,
wrong squares marked.

python -m minigrpo.tools.sample RUN --fen "8/P7/8/8/8/4k3/8/4K3 w - - 0 60" --move a7a8q
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import chess
import numpy as np
from rich.console import Console
from rich.text import Text

from ..model.encoding import decode
from ..runtime.flags import ConfigError, exit_with, parse
from ..runtime.logging import Screen
from ..runtime.rng import uniforms
from ..sampling.generate import SamplingParams
from ..sampling.sampler import GREEDY
from ..tasks.chess_env import ChessEnv
from ..tasks.transitions import prompt_of, render, transition
from ..types import Example
from .boards import differences, side_by_side
from .loading import Loaded, ModelSelection, load

PROMPTS_AT_ONCE = 32


@dataclass(frozen=True)
class Arguments(ModelSelection):
    fen: str = ""
    """A position, with --move; without it held-out examples are asked."""
    move: str = ""
    """A move in it, as e2e4 or e7e8q; it need not be legal."""
    before: str = ""
    """The moves before it by commas, as far as --history tells them."""
    examples: int = 3
    """Held-out examples to ask."""
    n: int = 0
    """Completions of each, sampled; 0: the most likely one, token by token."""
    temperature: float | None = None
    """Sampling temperature, with --n."""


def question(arguments: Arguments, history: int) -> Example:
    """The example of --fen and --move, the position as this task writes it. Raises ConfigError."""
    try:
        board = chess.Board(arguments.fen)
    except ValueError as error:
        raise ConfigError(f"--fen {arguments.fen!r}: {error}") from None
    if not board.is_valid():
        raise ConfigError(f"--fen {arguments.fen!r}: not a legal position ({board.status().name})")
    moves = [move for move in arguments.before.split(",") if move]
    try:
        for move in [arguments.move, *moves]:
            chess.Move.from_uci(move)
    except ValueError as error:
        raise ConfigError(f"--move and --before take moves as e2e4 or e7e8q: {error}") from None
    if moves and not history:
        raise ConfigError(
            "--before goes with --history N, the number of earlier moves that the prompt tells; "
            "here it is 0"
        )
    fen, before = render(board), ",".join(moves[-history:]) if history else None
    return Example(prompt_of(fen, arguments.move, before), transition(fen, arguments.move))


def questions(arguments: Arguments, loaded: Loaded) -> list[Example]:
    """What is asked. Raises ConfigError."""
    if arguments.n < 0 or arguments.examples < 1:
        raise ConfigError(
            f"--n must be at least 0 and --examples at least 1, got {arguments.n} and "
            f"{arguments.examples}"
        )
    if bool(arguments.fen) != bool(arguments.move) or (arguments.before and not arguments.fen):
        raise ConfigError("--fen and --move go together, and --before with them")
    if arguments.fen:
        if not isinstance(loaded.task, ChessEnv):
            raise ConfigError(
                f"--fen and --move are for --task chess-env, without --data; here it is "
                f"{loaded.config.task.name}"
            )
        return [question(arguments, loaded.config.task.history)]
    size = min(arguments.examples, getattr(loaded.task, "num_held_out", None) or arguments.examples)
    return [loaded.task.held_out(i) for i in range(size)]


def complete(loaded: Loaded, examples: Sequence[Example], num_samples: int) -> list[list[str]]:
    """Completions of each example: `num_samples` that are sampled, or a greedy one for 0."""
    config, u = loaded.config, None
    if num_samples:
        rows = np.array([example.index for example in examples])
        u = uniforms(
            config.run.seed, "tools/sample", 0, rows, num_samples, config.sampling.max_new_tokens
        )
    params = (
        SamplingParams(config.sampling.temperature, config.sampling.top_k, config.sampling.top_p)
        if num_samples
        else GREEDY
    )
    parts = loaded.sampler.complete(
        examples, num_samples=max(1, num_samples), u=u, params=params, batch_size=PROMPTS_AT_ONCE
    )
    return [group for part in parts for group in decode(loaded.sampler.tokenizer, part)]


def show(console: Console, example: Example, texts: Sequence[str], *, boards: bool) -> None:
    """A question, its truth, and each distinct completion with how often it was written."""
    console.print(
        Text(
            f"prompt      {plain(example.prompt)}"
            + (f"   ({example.kind})" if example.kind else "")
        )
    )
    console.print(Text(f"truth       {plain(example.answer)}"))
    for text, count in Counter(texts).most_common():
        right = text == example.answer
        line = Text(f"completion  {plain(text)}")
        line.append(
            "   exact" if right else "   wrong", style="bold green" if right else "bold red"
        )
        line.append(f"   {count} of {len(texts)}" if len(texts) > 1 else "")
        console.print(line)
        if boards and not right:
            console.print(
                Text(f"            {plain('; '.join(differences(example.answer, text)))}")
            )
        if boards and (not right or len(texts) == 1):
            console.print(side_by_side(example.answer, text))
    console.print()


def plain(text: str) -> str:
    """What a model writes may be anything; control characters stay on paper."""
    return text if text.isprintable() else repr(text)[1:-1]


def main() -> None:
    screen = Screen()
    try:
        arguments = parse(Arguments, description=__doc__, prog="python -m minigrpo.tools.sample")
        if arguments.fen and arguments.data is None:
            arguments = replace(
                arguments, data=""
            )  # a question of one's own needs no file that the run had
        loaded = load(arguments, screen)
        examples = questions(arguments, loaded)
        with screen.errors.status("sampling"):
            texts = complete(loaded, examples, arguments.n)
    except ValueError as error:
        exit_with(error)
    how = (
        f"{arguments.n} at temperature {loaded.config.sampling.temperature:g}"
        if arguments.n
        else "greedy"
    )
    screen.say(f"{loaded.name}, {how}\n")
    for example, group in zip(examples, texts, strict=True):
        show(screen.console, example, group, boards=isinstance(loaded.task, ChessEnv))


if __name__ == "__main__":
    main()
