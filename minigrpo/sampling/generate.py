"""From prompts to completions: the loop of decoding, its running state, and the Sampler.

A token is a pure function of its logits and of one uniform number that was drawn beforehand. So a
completion does not depend on what else is in the batch. And speculative decoding is exact: a
proposed token is kept only if it would have been picked anyway.

Completions of a prompt that are equal so far share a *slot*, a place in the decoder's batch: their
logits are the same. In a dialogue, a sequence whose turn has ended keeps its slot while it waits
for an answer. The next rounds then run the tokens of the answer, and decoding goes on.

Shapes: P prompts with G completions each, P * G sequences in all, of which N are running in B
slots; W tokens per slot and round.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import Config, SamplingConfig
from ..environments import Dialogues
from ..model.encoding import decode, encode_answer, encode_prompts, pad
from ..model.logprobs import log_softmax
from ..model.tokenizer import Tokenizer
from ..model.transformer import Transformer
from ..runtime.device import low_precision_copy
from ..runtime.guard import OOMBackoff
from ..task import Task
from ..types import Completions, Example, Warn
from .decoder import Decoder
from .pick import pick_token, propose, truncate

# Waiting prompts enter when there is room for this share of those that are decoded together: an
# entry costs a forward pass of its own.
SHARE_THAT_ENTERS = 0.125
MOST_READ = 16  # tokens of an answer per round; every slot then runs that many
WAITS = -1  # in Generation.unread
PLAIN = SamplingConfig()  # the model's own distribution


class Generation:
    """Completions in work: their tokens so far, which of them are running, and in which slots."""

    def __init__(
        self,
        model: Transformer,
        prompt_ids: Tensor,
        prompt_len: Tensor,
        *,
        stops: Collection[int],
        max_new_tokens: int,
        num_samples: int,
        prompts_at_once: int,
        u: Tensor | np.ndarray | None,
        sampling: SamplingConfig,
        drafts: Tensor | None,
        num_speculative_tokens: int,
        work: Counter[str],
        dialogues: Any,
    ) -> None:
        """
        Args:
            prompt_ids: `[P, Lp]` int64, right-padded.
            prompt_len: `[P]` int64.
            stops: the tokens that end a completion; others end after `max_new_tokens`.
            prompts_at_once: the most prompts whose completions are side by side.
            u: `[P, G, S]` uniform numbers in [0, 1), S >= max_new_tokens; None picks the most
                likely token each time.
            sampling: its temperature, top-k, top-p and min-p.
            drafts: `[P, L]` int64, a text that completions of each prompt probably resemble.
            work: a counter to add to: `rounds`, prompts excluded, and `tokens` that the model ran.
            dialogues: answers turns (environments.Dialogues); None: a completion is one turn.
        """
        device, self.sampling = model.device, sampling
        self.prompt_ids, self.prompt_len = prompt_ids.to(device), prompt_len.to(device)
        self.max_new_tokens, self.num_samples = max_new_tokens, num_samples  # num_samples is G
        self.prompts_at_once = prompts_at_once
        self.stops = torch.tensor(sorted(stops), dtype=torch.int64, device=device)
        self.drafts = None if drafts is None else drafts.to(device)
        self.window = 1 if drafts is None else 1 + num_speculative_tokens  # W
        self.work = work
        # W spare columns, because proposals may go past the last column
        size = len(prompt_ids) * num_samples, max_new_tokens + self.window
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.sampled = torch.zeros(size, dtype=torch.bool, device=device)
        self.logp = torch.zeros(size, dtype=torch.float32, device=device)
        truncates = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self.log_kept_mass = torch.zeros_like(self.logp) if truncates else None
        self.u = None
        if u is not None:
            given = torch.as_tensor(u).flatten(0, 1)[:, :max_new_tokens].to(device)
            self.u = torch.nn.functional.pad(given, (0, self.window))
        self.lengths = self.ids.new_zeros(len(self.ids))  # [P * G] tokens of each completion
        # [P * G] tokens of an answer that are in `ids` and have not been run; or WAITS
        self.dialogues, self.unread, self.most_unread = dialogues, self.lengths.clone(), 0
        self.decoder = Decoder(model)
        self.running = self.lengths[:0]  # [N] unfinished sequences, in ascending order
        self.slot = self.lengths[:0]  # [N] the slot of each
        self.representatives = self.lengths[:0]  # [B] one running sequence of each slot
        self.longest = 0  # length of the longest running sequence
        self.num_entered = 0  # prompts that have been run

    @torch.no_grad()
    def run(self) -> Completions:
        """Complete all prompts, on the model's device.

        Waiting prompts enter as completions end and make room (continuous batching, as in Orca, Yu
        et al., OSDI 2022). A prompt enters with all of its completions.
        """
        total, size = len(self.prompt_ids), self.prompts_at_once
        while (waiting := total - self.num_entered) or len(self.running):
            room = min(waiting, size - -(-len(self.running) // self.num_samples))
            if waiting and room >= min(waiting, max(1, int(size * SHARE_THAT_ENTERS))):
                self._enter(self.num_entered, self.num_entered + room)
            elif self.most_unread != WAITS:
                self._run_round()
            self._update_slots()
        tables = [self.ids, self.sampled, self.logp]
        if self.log_kept_mass is not None:
            tables.append(self.log_kept_mass)
        longest = int(self.lengths.max())
        grouped = [x[:, :longest].unflatten(0, (total, -1)) for x in tables]
        return Completions(self.prompt_ids, self.prompt_len, *grouped)

    def _enter(self, first: int, last: int) -> None:
        """Run waiting prompts, and pick the first token of each of their completions."""
        lengths, samples = self.prompt_len[first:last], self.num_samples
        logits = self.decoder.prefill(self.prompt_ids[first:last], lengths, samples)
        sequences = torch.arange(first * samples, last * samples, device=logits.device)
        slot = sequences // samples - first
        self._accept(logits[:, None], sequences, slot, self.ids[: len(logits), :0])
        self.slot = torch.cat([self.slot, slot + len(self.representatives)])
        self.running = torch.cat([self.running, sequences])
        self.num_entered = last
        self.work["tokens"] += int(lengths.sum())

    def _run_round(self) -> None:
        """Run the last token of each slot, and the tokens that are proposed after it."""
        ids, lengths = self.ids[self.representatives], self.lengths[self.representatives]
        tokens = ids.gather(1, lengths[:, None] - 1)
        if self.drafts is not None:
            drafts = self.drafts[self.representatives // self.num_samples]
            tokens = torch.cat([tokens, propose(drafts, ids, lengths, self.window - 1)], dim=1)
        last = None
        if self.most_unread > 0:
            columns = torch.arange(min(self.most_unread, MOST_READ) + 1, device=ids.device)
            columns = (lengths[:, None] - 1 + columns).clamp(max=ids.shape[1] - 1)
            tokens, read = ids.gather(1, columns), self.unread.clamp(0, columns.shape[1] - 1)
            last = read[self.representatives]
        num_columns = self.longest - 1 + tokens.shape[1]
        logits = self.decoder.step(tokens, lengths - 1, num_columns, last)
        if last is not None:
            self.lengths[self.running] += read[self.running]
            self.unread -= read
        self._accept(logits, self.running, self.slot, tokens[:, 1 : logits.shape[1]])
        self.work.update(rounds=1, tokens=tokens.numel())

    def _accept(self, logits: Tensor, sequences: Tensor, slot: Tensor, proposals: Tensor) -> None:
        """Pick tokens from `[B, W, V]`, up to and including the first that was not proposed.

        A pick counts only if the model was run on the picks before it. The first pick always
        counts; each further one counts if all picks before it equal the proposals, `[B, W - 1]`.
        """
        logp = log_softmax(logits, self.sampling.temperature)
        allowed = truncate(logp, self.sampling)
        rows, offsets = sequences[:, None], torch.arange(logp.shape[1], device=logp.device)
        columns = self.lengths[rows] + offsets  # [N, W]
        picks = pick_token(allowed, None if self.u is None else self.u[rows, columns], slot)
        goes_on = (picks[:, :-1] == proposals[slot]) & ~torch.isin(picks[:, :-1], self.stops)
        goes_on = torch.cat([torch.ones_like(rows, dtype=torch.bool), goes_on], dim=1)
        kept = goes_on.cumprod(1).bool() & (columns < self.max_new_tokens)
        kept &= self.unread[rows] == 0

        def store(table: Tensor, values: Tensor) -> None:
            table[rows, columns] = torch.where(kept, values, table[rows, columns]).to(table.dtype)

        store(self.ids, picks)
        store(self.sampled, kept)
        store(self.logp, logp[slot[:, None], offsets, picks])
        if self.log_kept_mass is not None:
            store(self.log_kept_mass, allowed.logsumexp(-1)[slot])
        self.lengths[sequences] += kept.sum(1)

    def _update_slots(self) -> None:
        """Drop finished sequences, and separate those of a slot that now differ."""
        lengths, unread = self.lengths[self.running], self.unread[self.running]
        last = self.ids[self.running, lengths - 1]
        ended = torch.isin(last, self.stops)
        # a single copy to the host and back, because each makes the host wait for the device
        numbers = torch.stack([ended.long(), unread, self.running, self.slot, lengths, last])
        state = numbers.cpu().numpy()
        ended, unread, _, _, lengths, _ = state
        unfinished = (unread != 0) | ((ended == 0) & (lengths < self.max_new_tokens))
        if self.dialogues is not None:
            self._talk(unfinished, state)
        running, slot, running_lengths, running_last = state[2:, unfinished]
        # Sequences of a slot were equal before this round and got the same proposals. So they are
        # equal now if they have the same length, last token and, if there is one, new answer.
        sources, slot, chosen = assign_slots(slot, running_lengths, running_last)
        joined = torch.from_numpy(np.concatenate([running, slot, running[chosen]]))
        sizes = [len(running), len(running), len(chosen)]
        self.running, self.slot, self.representatives = joined.to(last.device).split(sizes)
        self.longest = int(running_lengths.max(initial=0))
        self.decoder.reorder(sources, len(running))

    def _talk(self, unfinished: np.ndarray, state: np.ndarray) -> None:
        """Have ended turns answered, and append the answers that have come.

        `unfinished` `[N]` and `state` `[6, N]`, see `_update_slots`, are changed. An answer gets a
        number in place of the last token, which tells it from others.
        """
        ended, unread, running, _, lengths, last = state
        new = np.flatnonzero((ended > 0) & (unread == 0))
        rows = self.ids[torch.from_numpy(running[new]).to(self.ids.device)].tolist()
        for i, ids in zip(new, rows, strict=True):
            self.dialogues.submit(int(running[i]), ids[: lengths[i]])
        unread[new], unfinished[new] = WAITS, True
        answers, beyond = dict[Any, int](), last.max(initial=0) + 1
        others = (unfinished & (unread != WAITS)).any()
        written: list[Any] = []  # row, column and token; all go to the device at once
        for sequence, answer in self.dialogues.replies(wait=not others).items():
            i = np.searchsorted(running, sequence)
            written += [(sequence, lengths[i] + k, x) for k, x in enumerate(answer)]
            unread[i] = unfinished[i] = len(answer)
            # with the stop before it: the same answer may follow another one
            last[i] = beyond + answers.setdefault((last[i], *answer), len(answers))
        if written:
            row, column, token = self.ids.new_tensor(written).T
            self.ids[row, column] = token
        self.unread[self.running] = torch.from_numpy(unread).to(self.unread.device)
        self.most_unread = int(unread[unfinished].max(initial=WAITS))


def assign_slots(
    slot: np.ndarray, lengths: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Assign one slot to the sequences that agree in their slot, length and last token, `[N]` each.

    Slots keep their place where possible, so that little of the cache is copied. Returns the old
    slot that each new slot continues, `[B]`, the new slot of each sequence, `[N]`, and one of the N
    sequences for each new slot, `[B]`.
    """
    # one number per (slot, length, last token), ordered by slot first
    key = (slot * (lengths.max(initial=0) + 1) + lengths) * (last.max(initial=0) + 1) + last
    _, chosen, group = np.unique(key, return_index=True, return_inverse=True)
    old, places = slot[chosen], np.arange(len(chosen))  # `old` is sorted
    # of the groups from one old slot, the first stays there if that place still exists
    stays = (np.diff(old, prepend=-1) > 0) & (old < len(old))
    new = np.empty_like(places)
    new[stays], new[~stays] = old[stays], np.setdiff1d(places, old[stays])
    order = np.argsort(new)
    return old[order], new[group], chosen[order]


class Sampler:
    """Completes examples: encodes prompts, and halves the batch when memory runs out."""

    def __init__(
        self,
        config: Config,
        model: Transformer,
        tokenizer: Tokenizer,
        autocast: Callable[[], Any],
        warn: Warn,
        task: Task,
    ) -> None:
        """`model` must not be compiled: shapes differ in every round of decoding.

        `task` says whether completions resemble the true answers, and names their environments.
        """
        self.config, self.model, self.tokenizer, self.autocast = config, model, tokenizer, autocast
        self.stops: Collection[int] = tokenizer.stops
        self.num_speculative_tokens = config.speed.num_speculative_tokens * task.speculate
        self.dialogues = task.world and Dialogues(config, task.world, tokenizer, warn)
        self.low_precision = low_precision_copy(config.speed, model)
        # by number of samples per prompt: training and evaluation fit different numbers of prompts
        self.backoffs: defaultdict[int, OOMBackoff] = defaultdict(
            lambda: OOMBackoff("sampling", "--rollout-batch-size", 0, warn)
        )
        self.work = Counter[str]()  # see Generation; the rollout clears it

    def complete(
        self,
        examples: Sequence[Example],
        *,
        num_samples: int,
        u: np.ndarray | None,
        sampling: SamplingConfig,
        batch_size: int,
    ) -> tuple[Completions, list[list[str]]]:
        """Complete each example `num_samples` times; the completions, on the host, and their texts.

        `u` and `sampling`: see `Generation`. `batch_size`: prompts decoded together, 0: all.
        """
        longest = self.config.sampling.max_new_tokens
        room = self.model.shape.context - longest
        prompt_ids, prompt_len = encode_prompts(self.tokenizer, examples, room)
        # a prompt of the user's own has no environment
        drafts, in_turns = None, self.dialogues and examples[0].tools is not None
        if self.num_speculative_tokens:
            # what lies far beyond the longest completion is never proposed, and costs memory
            answers = [encode_answer(self.tokenizer, example) for example in examples]
            drafts = pad(answers)[0][:, : 2 * longest]

        def completed(size: int) -> Completions:
            """With so many prompts at once; after an error, all begin again with fewer."""
            if in_turns:
                self.dialogues.begin(examples, num_samples)
            with self.autocast():
                low = torch.is_autocast_enabled(self.model.device.type)  # off after the fallback
                return Generation(
                    self.low_precision if low else self.model,
                    prompt_ids,
                    prompt_len,
                    stops=self.stops,
                    max_new_tokens=longest,
                    num_samples=num_samples,
                    prompts_at_once=size,
                    u=u,
                    sampling=sampling,
                    drafts=drafts,
                    num_speculative_tokens=self.num_speculative_tokens,
                    work=self.work,
                    dialogues=self.dialogues if in_turns else None,
                ).run()

        most = min(batch_size or len(examples), len(examples))
        done = self.backoffs[num_samples].run(completed, most).to("cpu")
        return done, self.dialogues.finish(done) if in_turns else decode(self.tokenizer, done)
