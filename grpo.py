"""GRPO in one file: a small language model learns from rewards, in plain PyTorch.

Group Relative Policy Optimization comes from DeepSeekMath (arXiv 2402.03300). One training step:

    1. Draw a few prompts.
    2. Sample a group of completions per prompt from the model as it is now, the policy.
    3. Score every completion: its reward.
    4. Advantage = (reward - mean of its group) / standard deviation of its group.
    5. Compute the log-probability of every sampled token under the policy.
    6. Compute the loss. It raises the probability of tokens with a positive advantage, and lowers
       that of the others. It clips the ratio to the policy before the update, and may penalise the
       KL to the initial policy.
    7. Take an optimizer step. Now and then, evaluate on prompts that are never trained on.

The task is to write a chess position after a move, given the position before it and the move. The
model that comes with the library gets it exactly right in about 21 % of its samples, and
`python grpo.py` raises that within a few minutes on a CPU.

This file leaves out what the library does elsewhere:

    running shared prefixes only once        minigrpo/model/packing.py
    speculative decoding                     minigrpo/sampling/
    DAPO, Dr. GRPO, GSPO, CISPO, RLOO        minigrpo/losses.py
    micro-batches, non-finite gradients      minigrpo/learner.py
    reward functions in a thread pool        minigrpo/rewards/
    AMP, DDP                                 minigrpo/runtime/
    checkpoints, run folders                 minigrpo/checkpoint.py, minigrpo/run/
    other tasks, prompts from files          minigrpo/tasks/

Shapes: P prompts, G completions per prompt, B = P * G rows, T columns, V tokens in the vocabulary.
"""

import time
from importlib.resources import files

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minigrpo.model.context import Context
from minigrpo.model.transformer import Transformer
from minigrpo.task import Task
from minigrpo.tasks.chess_env import ChessEnv
from minigrpo.text.tokenizer import Tokenizer, load_tokenizer
from minigrpo.types import Example

PROMPTS_PER_STEP = 8  # P
GROUP_SIZE = 8  # G
MAX_NEW_TOKENS = 80  # limit per completion; true answers have about 50 tokens
STEPS = 160
UPDATES_PER_ROLLOUT = 1  # optimizer steps per batch; with 1, the ratio is 1 and never clipped
LEARNING_RATE = 2e-4
WARMUP_STEPS = 10
CLIP = 0.2  # the ratio is clipped to [1 - CLIP, 1 + CLIP]
KL_COEF = 0.0  # weight of the KL to the initial model; with 0, there is no reference model
EVAL_EVERY = 40
EVAL_SIZE = 256  # held-out prompts
SEED = 0


class KVCache(Context):
    """Keys and values of all earlier columns, so that only new columns run through the model."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, [B, heads, columns, head size]

    def attend(self, layer: int, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The model calls this in each layer, with `[B * columns, heads, head size]` each."""
        q, k, v = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in (q, k, v))
        if layer in self.kv:
            old_k, old_v = self.kv[layer]
            k = torch.cat([old_k, k], dim=2)
            v = torch.cat([old_v, v], dim=2)
        self.kv[layer] = (k, v)
        # Only the first call has several columns. They begin the sequence, so a causal mask fits.
        has_several = q.shape[2] > 1
        out = F.scaled_dot_product_attention(q, k, v, is_causal=has_several, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


def next_token_logits(model: Transformer, ids: Tensor, start: int, cache: KVCache) -> Tensor:
    """Next-token logits `[B, V]` after `ids [B, t]`, which are the columns from `start` on."""
    columns = torch.arange(start, start + ids.shape[1], device=ids.device)
    positions = columns.expand_as(ids)
    hidden = model.forward_hidden(ids.flatten(), positions.flatten(), cache)
    last_hidden = hidden.unflatten(0, ids.shape)[:, -1]
    return model.lm_head(last_hidden)


def pick_token(logits: Tensor, u: Tensor | None) -> Tensor:
    """Sample a token per row, `[B, V]` -> `[B]`, by a uniform number `u [B]`.

    It is the first token whose cumulative probability exceeds the number. Without `u`, it is the
    most likely token.
    """
    if u is None:
        return logits.argmax(-1)
    cdf = logits.softmax(-1).cumsum(-1)  # [B, V]
    threshold = u[:, None] * cdf[:, -1:]  # [B, 1]; by rounding, the last entry is not exactly 1
    token = torch.searchsorted(cdf, threshold, right=True)[:, 0]  # [B]
    return token.clamp(max=logits.shape[-1] - 1)


@torch.no_grad()
def sample(
    model: Transformer, prompts: list[list[int]], eos: int, u: Tensor | None, max_new_tokens: int
) -> tuple[Tensor, Tensor]:
    """Sample one completion per prompt, up to and including `eos`. Column t uses `u[:, t]`.

    All rows advance one column at a time. A row that is inside its prompt keeps its own token, and
    the others take the sampled one. So prompts of different lengths need no left padding.
    Returns `ids [B, T]` (prompt, completion, zeros) and `mask [B, T]`, True on the completion.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)  # [B]
    ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    ids = F.pad(ids, (0, max_new_tokens)).to(model.device)  # [B, T]
    mask = torch.zeros_like(ids, dtype=torch.bool)  # [B, T]
    running = torch.ones_like(lengths, dtype=torch.bool)  # [B]
    cache = KVCache(len(prompts))
    start = 0  # the first column that the cache does not have
    for t in range(int(lengths.min()), ids.shape[1]):
        logits = next_token_logits(model, ids[:, start:t], start, cache)  # [B, V]
        token = pick_token(logits, None if u is None else u[:, t])  # [B]
        is_sampled = running & (t >= lengths)  # [B]
        mask[:, t] = is_sampled
        ids[:, t] = torch.where(is_sampled, token, ids[:, t])
        has_ended = is_sampled & (token == eos)  # [B]
        has_room = t + 1 < lengths + max_new_tokens  # [B]
        running &= ~has_ended & has_room
        start = t
        if not running.any():
            break
    return ids[:, : t + 1], mask[:, : t + 1]


def decode(tokenizer: Tokenizer, ids: Tensor, mask: Tensor) -> list[str]:
    """The B completions as text, without end of text."""
    texts = []
    for row, completion in zip(ids, mask, strict=True):
        tokens = [token for token in row[completion].tolist() if token != tokenizer.eot]
        texts.append(tokenizer.decode(tokens))
    return texts


def reward(task: Task, example: Example, text: str) -> float:
    """The weighted sum of the task's scores, by the weights in minigrpo/tasks/chess_env.py."""
    scores = task.score(example, text)  # None where a reward does not concern the example
    return sum(weight * (scores[name] or 0.0) for name, weight in task.reward_weights.items())


def advantages(rewards: Tensor) -> Tensor:
    """A = (r - mean(r)) / (std(r) + 1e-4) within each group, `[P, G]` -> `[P, G]`."""
    mean = rewards.mean(dim=1, keepdim=True)  # [P, 1]
    std = rewards.std(dim=1, keepdim=True)  # [P, 1]
    return (rewards - mean) / (std + 1e-4)


def token_logprobs(model: Transformer, ids: Tensor, mask: Tensor) -> Tensor:
    """log pi(ids[b, t] | ids[b, :t]) where `mask` is True, 0 elsewhere, `[B, T]` -> `[B, T]`."""
    # The model is causal, so no text sees the padding after it.
    every_logp = model.logits(ids[:, :-1]).log_softmax(-1)  # [B, T - 1, V]
    next_tokens = ids[:, 1:, None]  # [B, T - 1, 1]
    logp = every_logp.gather(2, next_tokens)[..., 0]  # [B, T - 1]
    # Nothing predicts column 0, which is in the prompt.
    return F.pad(logp, (1, 0)) * mask  # [B, T]


def grpo_loss(
    logp: Tensor, old_logp: Tensor, A: Tensor, mask: Tensor, ref_logp: Tensor | None, kl_coef: float
) -> Tensor:
    """The mean over completions of the mean over their tokens of

        -min(r * A, clip(r, 1 - CLIP, 1 + CLIP) * A) + kl_coef * KL
        r  = pi / pi_old                            how far the policy has moved since sampling
        KL = pi_ref / pi - log(pi_ref / pi) - 1     an estimate that is never negative ("k3")

    Log-probabilities and `mask` are `[B, T]`, the advantages `A` are `[B]`.
    """
    r = (logp - old_logp).exp()  # [B, T]
    clipped = r.clamp(1 - CLIP, 1 + CLIP)  # [B, T]
    A = A[:, None]  # [B, 1], the same for all tokens of a completion
    loss = -torch.min(r * A, clipped * A)  # [B, T]
    if ref_logp is not None:
        log_ratio = ref_logp - logp  # [B, T]
        kl = log_ratio.exp() - log_ratio - 1  # [B, T]
        loss = loss + kl_coef * kl
    per_completion = (loss * mask).sum(1) / mask.sum(1)  # [B]
    return per_completion.mean()


def evaluate(model: Transformer, task: Task, tokenizer: Tokenizer) -> str:
    """The fraction of held-out prompts answered exactly right, sampled and greedy."""
    examples = [task.held_out(i) for i in range(EVAL_SIZE)]
    prompts = [tokenizer.encode(example.prompt) for example in examples]
    always_the_same = torch.Generator().manual_seed(SEED)
    u = torch.rand(EVAL_SIZE, model.shape.context, generator=always_the_same)  # [B, T]
    results = []
    for name, numbers in (("sampled", u), ("greedy", None)):
        ids, mask = sample(model, prompts, tokenizer.eot, numbers, MAX_NEW_TOKENS)
        texts = decode(tokenizer, ids, mask)
        num_exact = sum(
            text == example.answer for text, example in zip(texts, examples, strict=True)
        )
        results.append(f"{name} {num_exact / EVAL_SIZE:.1%}")
    return f"exact match on {EVAL_SIZE} held-out prompts: " + ", ".join(results)


def main() -> None:
    tokenizer = load_tokenizer("chess")
    task = ChessEnv(SEED)
    weights = str(files("minigrpo.assets") / "chess.safetensors")
    model = Transformer.from_pretrained(weights)  # the policy
    reference = Transformer.from_pretrained(weights).requires_grad_(False) if KL_COEF else None
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    torch.manual_seed(SEED)
    began = time.time()
    print(evaluate(model, task, tokenizer))
    for step in range(STEPS):
        # 1. Prompts, each repeated for its group.
        first_number = step * PROMPTS_PER_STEP
        examples = [task.train(first_number + i) for i in range(PROMPTS_PER_STEP)]
        rows = [example for example in examples for _ in range(GROUP_SIZE)]  # B of them
        prompts = [tokenizer.encode(example.prompt) for example in rows]
        # 2. Completions.
        u = torch.rand(len(rows), model.shape.context)  # [B, T]
        ids, mask = sample(model, prompts, tokenizer.eot, u, MAX_NEW_TOKENS)  # [B, T]
        texts = decode(tokenizer, ids, mask)
        # 3. Rewards, and 4. advantages.
        scores = [reward(task, example, text) for example, text in zip(rows, texts, strict=True)]
        rewards = torch.tensor(scores).view(PROMPTS_PER_STEP, GROUP_SIZE)  # [P, G]
        A = advantages(rewards).flatten()  # [B]
        ref_logp = token_logprobs(reference, ids, mask) if reference else None  # [B, T]
        for update in range(UPDATES_PER_ROLLOUT):
            # 5. Log-probabilities. Before the first update, the policy is the one that sampled.
            logp = token_logprobs(model, ids, mask)  # [B, T]
            if update == 0:
                old_logp = logp.detach()
            # 6. Loss and gradient.
            loss = grpo_loss(logp, old_logp, A, mask, ref_logp, KL_COEF)
            loss.backward()
            # 7. Optimizer step, with a linear warm-up and then a linear decay.
            warmup = (step + 1) / WARMUP_STEPS
            decay = 1 - step / STEPS
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(warmup, decay)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.time() - began
        print(f"step {step + 1:3}  {seconds:3.0f} s  reward {rewards.mean():.3f}", flush=True)
        if (step + 1) % EVAL_EVERY == 0:
            print(evaluate(model, task, tokenizer))


if __name__ == "__main__":
    main()
