"""Which settings have no effect on a run, and why: a table with a row per setting.

`without_effect` reads the table for settings that somebody typed, or that differ from the default.
A setting whose combination with others is wrong, not idle, is an error: see combinations.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from ..config import Config
from ..losses import LOSSES, cispo, clipped, geometric_mean, per_local_token
from ..model.architectures import groups_queries
from ..model.linear import onednn_is_faster
from ..model.logprobs import chunk_size
from ..model.shape import ModelShape
from ..tasks.chess_files import WANTED as CHESS_TASKS
from ..types import Task
from .fast import BFLOAT16_AND_TF32, LAYERS, cuda_capability, device_kind
from .flags import flag

FIRST_EXAMPLES = 16  # that show whether a user's task has messages
MOVES_IN_PROMPTS = (".pgn", ".pgn.gz")  # data from which chess prompts are made, with their history


@dataclass(frozen=True)
class Situation:
    """What is known of a run once its device, its task and its model are."""

    config: Config
    device: torch.device
    processes: int
    shape: ModelShape
    task: Task

    @property
    def share(self) -> int:
        """Prompts per step and process."""
        return self.config.sampling.prompts_per_step // self.processes

    @property
    def last_step(self) -> int:
        run = self.config.run
        return min(run.stop_after or run.max_steps, run.max_steps)

    @property
    def supervised(self) -> bool:
        return self.config.supervised

    @property
    def kl(self) -> bool:
        return self.config.loss.kl_coef > 0

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def single_update(self) -> bool:
        """Whether the policy never moves away from the one that sampled: the ratio is 1."""
        return self.config.optimizer.num_iterations == 1

    @property
    def surrogate(self) -> Callable[..., object]:
        return LOSSES[self.config.loss.name].surrogate

    @property
    def one_rollout_batch(self) -> bool:
        return self.config.memory.rollout_batch_size in (0, self.share)

    @property
    def trusted_rewards(self) -> bool:
        """Whether all scores are the task's own, which run without a time limit."""
        own = hasattr(self.task, "score_batch") or hasattr(self.task, "score_tokens")
        return not self.config.task.rewards and own

    @property
    def may_ask_models(self) -> bool:
        """Whether rewards have models of their own, or may have: a user's code is not read."""
        return hasattr(self.task, "score_tokens") or bool(self.config.task.rewards)

    @property
    def scores_in_threads(self) -> bool:
        """Whether some scores run in a thread; those that might hang do in any case."""
        return self.config.speed.parallel_rewards or not self.trusted_rewards

    @cached_property
    def has_chats(self) -> bool:
        """Whether a chat template writes some prompts, as far as the first examples tell."""
        of_file: bool | None = getattr(self.task, "has_messages", None)
        if self.config.task.system or of_file is not None:
            return bool(self.config.task.system or of_file)
        return any(self.task.train(number).messages for number in range(FIRST_EXAMPLES))

    @cached_property
    def has_tf32(self) -> bool:
        return not self.on_cpu and cuda_capability(str(self.device)) >= BFLOAT16_AND_TF32


Row = tuple[tuple[Callable[[Situation], object], str], ...]  # (condition, reason), ...

SAMPLES_NOTHING = (lambda s: s.supervised, "--loss nll samples nothing")
NOT_FROM_SCRATCH = (
    (
        lambda s: s.config.model.init_from != "scratch",
        "the model of --init-from has its own; they are for scratch",
    ),
)
NO_ADAPTERS: Row = ((lambda s: not s.config.model.lora_rank, "no --lora-rank"),)
CLIPS = (clipped, geometric_mean)
NO_CLIP: Row = (
    (lambda s: s.surrogate not in CLIPS, "this loss does not clip the ratio"),
    (lambda s: s.single_update, "with --num-iterations 1 the ratio is 1"),
)
NO_ADVANTAGE: Row = ((lambda s: s.supervised, "--loss nll has no advantages"),)
# setting -> when it has no effect, and the words that say so; the first that is true is given
TABLE: dict[str, Row] = {
    "difficulty": (
        (lambda s: s.config.task.name[:9] != "countdown", "--task countdown makes problems by it"),
        (lambda s: s.config.task.data, "the problems are those of --data"),
    ),
    "history": (
        (lambda s: s.config.task.name.endswith(".py"), "a task of your own makes its own prompts"),
        (lambda s: s.config.task.name not in CHESS_TASKS, "only chess prompts have earlier moves"),
        (
            lambda s: s.config.task.data and not reads_games(s.config),
            "the prompts of --data are used as they are",
        ),
    ),
    "student": ((lambda s: s.config.task.name != "teach", "it is for --task teach"),),
    "reward_timeout": (
        (
            lambda s: s.trusted_rewards and s.config.task.name != "code",
            "the task's own scores are not timed, and there are no --rewards",
        ),
    ),
    "chat_template": (
        (lambda s: not s.has_chats, "the prompts are plain text: no messages, and no --system"),
    ),
    **dict.fromkeys(("arch", "layers", "width", "heads", "context"), NOT_FROM_SCRATCH),
    "kv_heads": (
        *NOT_FROM_SCRATCH,
        (lambda s: not groups_queries(s.config.model.arch), "this --arch has as many as --heads"),
    ),
    "lora_alpha": NO_ADAPTERS,
    "lora_targets": NO_ADAPTERS,
    "group_size": (
        (
            lambda s: s.supervised and s.config.sampling.group_size != 1,
            "--loss nll has one true answer per prompt",
        ),
    ),
    "top_k": (
        SAMPLES_NOTHING,
        (
            lambda s: not 0 < s.config.sampling.top_k < s.shape.vocab_size,
            "the model has no more tokens",
        ),
    ),
    "top_p": (SAMPLES_NOTHING,),
    "min_p": (SAMPLES_NOTHING,),
    "dynamic_sampling": (SAMPLES_NOTHING,),
    "clip_low": NO_CLIP,
    "clip_high": NO_CLIP,
    "ratio_cap": (
        (lambda s: s.surrogate not in (clipped, cispo), "this loss does not cap the ratio"),
        (
            lambda s: s.single_update and (s.config.loss.ratio_cap or 1.0) >= 1,
            "with --num-iterations 1 the ratio is 1",
        ),
    ),
    "advantage": NO_ADVANTAGE,
    "scale": NO_ADVANTAGE,
    "kl": ((lambda s: not s.kl, "no --kl-coef"),),
    "overlong": (SAMPLES_NOTHING,),
    "overlong_buffer": (
        (lambda s: s.config.loss.overlong != "punish", "no --overlong punish"),
        SAMPLES_NOTHING,
    ),
    "sampler_correction": (SAMPLES_NOTHING,),
    "sampler_correction_cap": (
        (lambda s: not s.config.loss.sampler_correction, "no --sampler-correction"),
        SAMPLES_NOTHING,
    ),
    "shuffle_rewards": (SAMPLES_NOTHING,),
    "fast": (
        (
            lambda s: LAYERS[device_kind(s.config.speed.device)] is LAYERS["cpu"],
            "the defaults are what helps on this device",
        ),
    ),
    "amp_dtype": ((lambda s: not s.config.speed.use_amp, "no --use-amp"),),
    "use_tf32": (
        (lambda s: s.on_cpu, "CPU"),
        (lambda s: not s.has_tf32, "TF32 needs a card of compute capability 8.0"),
    ),
    "onednn": (
        (lambda s: not s.on_cpu, "it is for CPUs"),
        (lambda s: not onednn_is_faster(), "this CPU has no AVX-512, or is Intel's"),
    ),
    "keep_freed_memory": ((lambda s: not s.on_cpu, "it is for CPUs"),),
    "num_speculative_tokens": (
        (lambda s: not s.config.speed.speculative_decoding, "--no-speculative-decoding"),
    ),
    "skip_zero_variance_groups": (
        (lambda s: s.supervised, "--loss nll has no groups"),
        (lambda s: s.kl, "with a KL every group has a gradient"),
        (
            lambda s: LOSSES[s.config.loss.name].reduce is per_local_token,
            "this loss needs all groups of a micro-batch",
        ),
    ),
    "num_reward_workers": (
        (lambda s: not s.config.speed.parallel_rewards, "--no-parallel-rewards"),
    ),
    "overlap_rewards": (
        SAMPLES_NOTHING,
        (lambda s: not s.scores_in_threads, "--no-parallel-rewards"),
        (
            lambda s: s.one_rollout_batch and (not s.kl or s.config.sampling.dynamic_sampling),
            "one rollout batch, and nothing else to do meanwhile",
        ),
    ),
    "micro_batch_size": (
        (lambda s: s.config.memory.micro_batch_size == s.share, "that is all prompts"),
    ),
    "rollout_batch_size": (SAMPLES_NOTHING, (lambda s: s.one_rollout_batch, "that is all prompts")),
    "chunked_logprobs": (
        (
            lambda s: chunk_size(s.shape.vocab_size, s.device.type) >= most_tokens(s),
            "all tokens of a micro-batch fit into one chunk",
        ),
    ),
    "base_dtype": (
        (
            lambda s: not (s.config.model.lora_rank or s.may_ask_models),
            "no --lora-rank, and no reward that asks a model",
        ),
    ),
    "offload_reference": (
        (lambda s: not (s.kl or s.may_ask_models), "no --kl-coef"),
        (lambda s: s.on_cpu, "CPU"),
        (
            lambda s: s.config.model.lora_rank and not s.may_ask_models,
            "with --lora-rank the reference is the model itself, without its adapters",
        ),
    ),
    "offload_optimizer": ((lambda s: s.on_cpu, "CPU"),),
    "share_prompt_kv": ((lambda s: not s.config.speed.kv_cache, "--no-kv-cache"),),
    "stop_after": (
        (lambda s: not 0 < s.config.run.stop_after < s.config.run.max_steps, "the run ends before"),
    ),
    "eval_size_during": (
        (
            lambda s: (
                not 0 < s.config.run.eval_every < s.config.run.max_steps
                or s.config.run.eval_every > s.last_step
            ),
            "no evaluation between the first and the last",
        ),
    ),
    "pg_timeout": ((lambda s: s.processes == 1, "one process"),),
}


def reads_games(config: Config) -> bool:
    """Whether some prompts of --data are made from games, with --history moves."""
    paths = config.task.data.split(",")
    from_positions = config.task.name == "chess-env+best-move"  # self-play joins where it must
    return from_positions or any(path.endswith(MOVES_IN_PROMPTS) for path in paths)


def most_tokens(s: Situation) -> int:
    """The most completion tokens that a micro-batch can have; true answers may be long."""
    prompts = s.config.memory.micro_batch_size or s.share
    if s.supervised:
        return prompts * s.shape.context
    return prompts * s.config.sampling.group_size * s.config.sampling.max_new_tokens


def reason(name: str, situation: Situation) -> str:
    """Why a setting has no effect, or "" if it has one."""
    return next((words for idle, words in TABLE.get(name, ()) if idle(situation)), "")


def without_effect(situation: Situation) -> str:
    """One line that lists the settings without effect and why; "" if there are none.

    Settings at their default are left out, unless somebody typed them and they are not off.
    """
    config, groups = situation.config, dict[str, list[str]]()
    default = type(config).of(task=config.task.name).flat()  # with the settings of the task
    for name, value in config.flat().items():
        typed = name in config.typed and value not in (False, 0, "", None)
        if (typed or value != default[name]) and (why := reason(name, situation)):
            groups.setdefault(why, []).append(flag(f"no_{name}" if value is False else name))
    listed = [f"{' '.join(names)} ({why})" for why, names in groups.items()]
    return f"no effect here: {', '.join(listed)}" if listed else ""
