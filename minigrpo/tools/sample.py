"""Prompt a model with a text or a position of your own, or with held-out examples.

minigrpo sample MODEL --prompt "Why is the sky blue?" --temperature 0.7
minigrpo sample RUN --fen "8/P7/8/8/8/4k3/8/4K3 w - - 0 60" --move a7a8q

The answer to --prompt appears while it is sampled. Other completions stand beside the true answers;
for chess positions it draws the true board beside the model's, and marks the wrong squares.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import compress

import chess
import numpy as np
from rich.console import Console
from rich.text import Text

from ..model.encoding import decode
from ..rewards import RewardScorer
from ..runtime.build import make_token_scoring
from ..runtime.flags import ConfigError, flag, parse, shown
from ..runtime.logging import Screen
from ..runtime.measures import EXACT, answer_in_words
from ..runtime.rng import uniforms
from ..runtime.text import has_lone_surrogate
from ..sampling.generate import SamplingParams
from ..sampling.sampler import GREEDY
from ..tasks.chess_env import ChessEnv
from ..tasks.own import load_rewards
from ..tasks.transitions import prompt_of, render, transition
from ..types import Completions, Example
from .ask import ask, how
from .boards import differences, side_by_side
from .loading import Loaded, ModelSelection, load, warn_of_other_files
from .messages import one_line_errors

PROMPTS_AT_ONCE, MOST_SAMPLES = 32, 10_000
CHAT = ("system", "chat_template")  # settings of a chat


@dataclass(frozen=True)
class Arguments(ModelSelection):
    prompt: str | None = None
    """A text for the model: a user message if the model has a chat template, else sent as it is."""
    raw: bool = False
    """Send --prompt as it is, without a chat template."""
    fen: str = ""
    """A position, together with --move; empty: held-out examples."""
    move: str = ""
    """A move in that position, such as e2e4 or e7e8q; it need not be legal."""
    before: str = ""
    """The moves before it, separated by commas; the prompt has the last --history of them."""
    examples: int = 3
    """Number of held-out examples."""
    n: int = 0
    """Completions to sample per example; 0: a single greedy one."""
    temperature: float | None = None
    """Sampling temperature, with --n or --prompt."""
    top_k: int | None = None
    """As for minigrpo train, with --n or --prompt; so are --top-p and --min-p."""
    top_p: float | None = None
    min_p: float | None = None

    def check(self) -> None:
        """Raises ConfigError, in one line, for what can be told before the model is loaded."""
        if self.n < 0 or self.examples < 1:
            raise ConfigError(
                f"--n must be at least 0 and --examples at least 1, got {self.n} and "
                f"{self.examples}"
            )
        if self.n > MOST_SAMPLES:
            raise ConfigError(f"--n must be at most {MOST_SAMPLES}, got {self.n}")
        if bool(self.fen) != bool(self.move) or (self.before and not self.fen):
            raise ConfigError("--fen and --move go together, and --before with them")
        self._check_prompt()
        for name in self._distribution():
            if not (self.n or self.prompt):
                raise ConfigError(f"{flag(name)} goes with --n; without it, completions are greedy")

    def _check_prompt(self) -> None:
        if self.prompt == "":
            raise ConfigError("--prompt must be a text, got ''")
        if self.raw and not self.prompt:
            raise ConfigError("--raw goes with --prompt, which it leaves without a chat template")
        if has_lone_surrogate(self.prompt or ""):
            raise ConfigError(f"--prompt must be UTF-8 text, got {shown(self.prompt)}")
        asked = ("fen", "move", "before", "examples", "task", "data", "history", "confidence")
        for name in (*(asked if self.prompt else ()), *(CHAT if self.raw else ())):
            if getattr(self, name) != getattr(Arguments, name):
                other = "--raw" if name in CHAT else "--prompt"
                raise ConfigError(f"{flag(name)} does not go with {other}")

    def _distribution(self) -> list[str]:
        """The settings of sampling that are given."""
        names = ("temperature", "top_k", "top_p", "min_p")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def num_samples(self) -> int:
        """Completions to sample; 0: a single greedy one. --prompt --temperature 1 is one sample."""
        return self.n or int(bool(self.prompt and self._distribution()))


def question(arguments: Arguments, history: int) -> Example:
    """The example for --fen and --move. Raises ConfigError for an invalid position or move."""
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
            "--before goes with --history N, the number of earlier moves in the prompt; it is 0"
        )
    fen, before = render(board), ",".join(moves[-history:]) if history else None
    return Example(prompt_of(fen, arguments.move, before), transition(fen, arguments.move))


def questions(arguments: Arguments, loaded: Loaded) -> list[Example]:
    """The examples to complete. Raises ConfigError for flags that do not go together."""
    if arguments.fen:
        if not isinstance(loaded.task, ChessEnv):
            raise ConfigError(
                f"--fen and --move are for --task chess-env, without --data; here it is "
                f"{loaded.config.task.name}"
            )
        return [question(arguments, loaded.config.task.history)]
    size = min(arguments.examples, getattr(loaded.task, "num_held_out", None) or arguments.examples)
    return [loaded.task.held_out(i) for i in range(size)]


def complete(loaded: Loaded, examples: Sequence[Example], num_samples: int) -> list[Completions]:
    """Complete each example, in parts: `num_samples` samples, or one greedy completion for 0."""
    u, params = None, GREEDY
    if num_samples:
        seed, sampling = loaded.config.run.seed, loaded.config.sampling
        rows = np.array([example.index for example in examples])
        u = uniforms(seed, "tools/sample", 0, rows, num_samples, sampling.max_new_tokens)
        params = SamplingParams.of(sampling)
    parts = loaded.sampler.complete(
        examples, num_samples=max(1, num_samples), u=u, params=params, batch_size=PROMPTS_AT_ONCE
    )
    return list(parts)


def right_texts(
    loaded: Loaded,
    examples: Sequence[Example],
    completions: Completions,
    texts: Sequence[Sequence[str]],
    *,
    temperature: float,
    screen: Screen,
) -> tuple[str, list[set[str]]]:
    """The success of the run, and by it the right completions of each example.

    Of --rewards only the function that is the success is asked.
    """
    config, warn, sampler = loaded.config, screen.warn, loaded.sampler
    functions = load_rewards(config.task.rewards, warn) if not config.task.confidence else []
    scorer = RewardScorer(
        loaded.task,
        functions=[function for function in functions if function.success],
        warn=warn,
        timeout_s=config.task.reward_timeout,
        token_scoring=make_token_scoring(
            config, sampler.tokenizer, sampler.model.device, warn, loaded.asked
        ),
    )
    if scorer.success == EXACT:
        return EXACT, [{example.answer} for example in examples]
    with closing(scorer):
        table = scorer.submit(examples, texts).result()
        table = scorer.with_token_parts(table, examples, texts, completions, temperature)
    right = table.parts[scorer.success] == 1
    return scorer.success, [set(compress(*row)) for row in zip(texts, right, strict=True)]


def show(
    console: Console,
    example: Example,
    texts: Sequence[str],
    right: set[str],
    *,
    answer: str,
    boards: bool,
) -> None:
    """Print a prompt, its answer, called `answer`, and each distinct completion with its count."""
    kind = f"   ({example.kind})" if example.kind else ""
    console.print(Text(f"prompt      {plain(example.prompt)}{kind}"))
    console.print(Text(f"{answer:<11} {plain(example.answer)}"))
    for text, count in Counter(texts).most_common():
        is_right, is_exact = text in right, text == example.answer
        verdict = "wrong" if not is_right else "exact" if is_exact else "right"
        colour = "green" if is_right else "red"
        line = Text(f"completion  {plain(text)}").append(f"   {verdict}", style=f"bold {colour}")
        console.print(line.append(f"   {count} of {len(texts)}" if len(texts) > 1 else ""))
        if boards and not is_right:
            wrong = "; ".join(differences(example.answer, text))
            console.print(Text(f"            {plain(wrong)}"))
        if boards and (not is_right or len(texts) == 1):
            console.print(side_by_side(example.answer, text))
    console.print()


def plain(text: str) -> str:
    """The text with control characters escaped: a model's output must not control the terminal."""
    return text if text.isprintable() else repr(text)[1:-1]


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    with one_line_errors():
        run(parse(Arguments, argv, description=__doc__, prog=prog or "minigrpo sample"))


def run(arguments: Arguments) -> None:
    """Load, complete and print. Raises ValueError in one line."""
    arguments.check()
    if arguments.fen and arguments.data is None:
        # --fen does not need the run's data files, which may be gone
        arguments = replace(arguments, data="")
    screen = Screen(has_result=True)
    if arguments.prompt:
        ask(
            *(arguments, screen, arguments.prompt),
            raw=arguments.raw,
            num_samples=arguments.num_samples,
        )
        return
    loaded = load(arguments, screen)
    examples = questions(arguments, loaded)
    with screen.errors.status("sampling"):
        parts = complete(loaded, examples, arguments.n)
        texts = [group for part in parts for group in decode(loaded.sampler.tokenizer, part)]
        params = loaded.config.sampling if arguments.n else GREEDY
        asked = loaded, examples, Completions.join(parts), texts
        success, right = right_texts(*asked, temperature=params.temperature, screen=screen)
        warn_of_other_files(arguments, loaded.asked, screen)
    screen.say(f"{loaded.name}, {how(arguments.n, loaded.config)}\n")
    answer, boards = answer_in_words(success), isinstance(loaded.task, ChessEnv)
    for example, group, found in zip(examples, texts, right, strict=True):
        show(screen.console, example, group, found, answer=answer, boards=boards)


if __name__ == "__main__":
    main()
