"""The boundary between prompt and completion: training and sampling use encode(prompt) +
encode(completion).
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from minigrpo import Config, Trainer
from minigrpo.model.encoding import decode
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.rollout import RolloutBatches, SupervisedBatches
from minigrpo.tasks.chess_env import ChessEnv

from . import bpe
from .gradients import TINY


def make_trainer(folder: Path, **changes: object) -> Trainer:
    """A run on pairs `ab` -> `cd`, with a tokenizer that has the token `bc`."""
    ranks = bpe.write_ranks(folder / "bc.tiktoken", [(b"b", b"c")])
    data = folder / "pairs.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"{i}ab", "answer": "cd"}) + "\n" for i in range(40))
    )
    options = {
        **TINY,
        "reward_weights": "",
        "tokenizer": str(ranks),
        "data": str(data),
        "out_dir": str(folder / "run"),
    }
    return Trainer(Config.of(**{**options, **changes}), quiet=True)  # type: ignore[arg-type]


def rows(ids: Tensor, lengths: Tensor) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]


def test_the_warm_start_encodes_prompt_and_answer_separately(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, loss="nll", group_size=1)
    tokenizer, (a, b, c, d), bc = trainer.tokenizer, b"abcd", 256
    assert tokenizer.encode("ab" + "cd") == [a, bc, d]  # so the boundary matters
    assert isinstance(trainer.source, SupervisedBatches)
    batch = trainer.source.batch(0)
    done = batch.completions
    prompts = rows(done.prompt_ids, done.prompt_len)
    assert [row[-2:] for row in prompts] == [[a, b]] * 4
    answers = rows(done.completion_ids[:, 0], done.completion_mask[:, 0].sum(-1))
    assert answers == [[c, d, tokenizer.eot]] * 4


def test_sampling_continues_the_prompts_tokens_and_training_uses_the_sampled_ones(
    tmp_path: Path,
) -> None:
    trainer = make_trainer(tmp_path)
    assert isinstance(trainer.source, RolloutBatches)
    with torch.no_grad():
        trainer.model.wte.weight[ord("b")] *= 30  # `b` becomes likely, and `c` or `bc` may follow
    batch = trainer.source.batch(0)
    done = batch.completions
    for example, prompt in zip(batch.examples, rows(done.prompt_ids, done.prompt_len), strict=True):
        assert prompt == trainer.tokenizer.encode(example.prompt)
    texts = decode(trainer.tokenizer, done)
    assert [list(group) for group in batch.texts] == texts
    for p, group in enumerate(texts):
        for g, text in enumerate(group):
            tokens = done.completion_ids[p, g][done.completion_mask[p, g]].tolist()
            assert text == trainer.tokenizer.decode(
                [t for t in tokens if t != trainer.tokenizer.eot]
            )


def test_in_chess_env_nothing_is_merged_across_the_boundary_by_gpt2s_pattern(
    tmp_path: Path,
) -> None:
    """A prompt ends in `+`, an answer starts with a letter or digit: GPT-2's pattern cuts there."""
    tokenizer = load_tokenizer(
        str(bpe.write_ranks(tmp_path / "chess.tiktoken", bpe.chess_merges()))
    )
    for history in (0, 4):
        env = ChessEnv(0, history)
        for example in map(env.train, range(64)):
            apart = tokenizer.encode(example.prompt) + tokenizer.encode(example.answer)
            assert tokenizer.encode(example.prompt + example.answer) == apart
