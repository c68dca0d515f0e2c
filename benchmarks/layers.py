"""The rows of the steps benchmark: grpo.py, the library without its speed layers, and one layer
more per row.
"""

from dataclasses import dataclass, field
from typing import Any

from minigrpo.config import Config, SpeedConfig
from minigrpo.runtime import accel
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.no_effect import Situation, reason

from .workload import Workload

GRPO_PY = "grpo.py"
NO_LAYERS = "the library, no speed layers"
DEFAULTS = "the defaults of train.py"
AS_CONFIGURED = "as configured"
IN_BATCHES = "a few prompts sampled at a time"
LARGEST_BATCH = 4  # prompts that the rows with rollout batches sample together, at most
NOTHING_TO_DO = "nothing to do: "  # begins the status of a row whose layer changes nothing here
EVERYWHERE = ("cpu", "cuda")
# every speed layer off, regardless of defaults and config
PLAIN: dict[str, Any] = {
    "packing": "repeated",
    "kv_cache": True,
    "share_prompt_kv": False,
    "cuda_graphs": False,
    "low_precision_weights": False,
    "speculative_decoding": False,
    "fused_optimizer": False,
    "parallel_rewards": False,
    "overlap_rewards": False,
    "skip_zero_variance_groups": False,
    "use_amp": False,
    "amp_dtype": "bfloat16",
    "use_tf32": False,
    "onednn": False,
    "compile_model": False,
    "gradient_checkpointing": False,
    "chunked_logprobs": False,
    "offload_reference": False,
    "rollout_batch_size": 0,
}
DEFAULT_FLAGS = {name: Config().flat()[name] for name in PLAIN}
LEAN: dict[str, Any] = {
    "gradient_checkpointing": True,
    "chunked_logprobs": True,
    "offload_reference": True,
    "share_prompt_kv": True,
}


@dataclass(frozen=True)
class Layer:
    """What one row adds to the rows above it."""

    name: str
    flags: dict[str, Any] = field(default_factory=dict)
    needs_cuda: bool = False
    not_kept_on: tuple[str, ...] = ()  # kinds of devices on which the rows below leave it off
    over: str = ""  # the layer whose row it is compared with; default: the last one that was kept


LAYERS = (
    Layer(GRPO_PY),
    Layer(NO_LAYERS),
    Layer("rewards in a pool", {"parallel_rewards": True}),
    Layer("fused AdamW", {"fused_optimizer": True}),
    Layer("oneDNN products", {"onednn": True}),
    Layer("zero-variance groups skipped", {"skip_zero_variance_groups": True}),
    Layer("shared-prompt packing", {"packing": "shared-prompt"}),
    Layer("shared prompt KV", {"share_prompt_kv": True}, not_kept_on=EVERYWHERE),
    Layer("speculative decoding", {"speculative_decoding": True}),
    Layer("prefix-tree packing", {"packing": "prefix-tree"}),
    Layer("TF32", {"use_tf32": True}, needs_cuda=True),
    # not kept on CPU, so that the rows below sample the same completions as grpo.py
    Layer("bfloat16 autocast", {"use_amp": True}, not_kept_on=("cpu",)),
    Layer(
        "bfloat16 autocast and weights",
        {"use_amp": True, "low_precision_weights": True},
        not_kept_on=("cpu",),
    ),
    Layer("torch.compile", {"compile_model": True}, not_kept_on=("cpu",)),
    Layer("CUDA graphs", {"cuda_graphs": True}, needs_cuda=True, not_kept_on=EVERYWHERE),
    # two rows, because smaller rollout batches cost time that overlapping must first win back
    Layer(IN_BATCHES, {"rollout_batch_size": LARGEST_BATCH}, not_kept_on=EVERYWHERE),
    Layer(
        "the same with overlapped rewards",
        {"rollout_batch_size": LARGEST_BATCH, "overlap_rewards": True},
        not_kept_on=EVERYWHERE,
        over=IN_BATCHES,
    ),
    Layer("chunked log-probs", {"chunked_logprobs": True}, not_kept_on=EVERYWHERE),
    Layer("gradient checkpointing", {"gradient_checkpointing": True}, not_kept_on=EVERYWHERE),
    Layer("offloaded reference", {"offload_reference": True}, not_kept_on=EVERYWHERE),
    Layer(
        "lean: all memory layers, one prompt at a time",
        {**LEAN, "micro_batch_size": 1},
        not_kept_on=EVERYWHERE,
    ),
)


@dataclass(frozen=True)
class RowSpec:
    """What a row runs: grpo.py, or the library with these flags."""

    name: str  # in brackets if the rows below do not keep its layer
    flags: dict[str, Any]
    status: str = "ok"  # or why it is not timed here
    over: str = ""  # the name of the row that its gain is over

    @property
    def is_grpo_py(self) -> bool:
        return self.name == GRPO_PY

    @property
    def is_default(self) -> bool:
        """Whether it runs what train.py runs without flags."""
        return not self.is_grpo_py and self.name != AS_CONFIGURED and self.flags == DEFAULT_FLAGS


def stacked(work: Workload, *, as_configured: bool = False) -> list[RowSpec]:
    """Every layer on top of the layers above it that this device keeps.

    One of the rows has the defaults of train.py. With `as_configured`, the last row has the flags
    of the job's own config.
    """
    rows, flags, kept = dict[str, RowSpec](), PLAIN, ""  # rows by layer
    for layer in LAYERS:
        keeps, over = work.device.type not in layer.not_kept_on, rows.get(layer.over)
        name = layer.name if keeps else f"({layer.name})"
        added = {**flags, **_fitting(layer.flags, work)}
        status = _status(layer, added, over.flags if over else flags, work)
        rows[layer.name] = RowSpec(name, added, status, over.name if over else kept)
        if keeps and not (layer.needs_cuda and work.device.type != "cuda"):
            flags = added if status == "ok" or status.startswith(NOTHING_TO_DO) else flags
            kept = layer.name if status == "ok" else kept
    found = [row for row in rows.values() if row.is_default and row.status == "ok"]
    default = found[0] if found else RowSpec(DEFAULTS, DEFAULT_FLAGS, over=kept)
    own = {name: x for name, x in work.config.flat().items() if name in PLAIN}
    last = [RowSpec(AS_CONFIGURED, own, over=default.name)] if as_configured else []
    return [*rows.values(), *([] if found else [default]), *last]


def alone(work: Workload) -> list[RowSpec]:
    """Every layer by itself, on top of the library without speed layers."""
    rows = {GRPO_PY: RowSpec(GRPO_PY, PLAIN), NO_LAYERS: RowSpec(NO_LAYERS, PLAIN, over=GRPO_PY)}
    for layer in LAYERS[len(rows) :]:
        flags, over = {**PLAIN, **_fitting(layer.flags, work)}, rows[layer.over or NO_LAYERS]
        status = _status(layer, flags, over.flags, work)
        rows[layer.name] = RowSpec(layer.name, flags, status, over.name)
    return list(rows.values())


def _fitting(flags: dict[str, Any], work: Workload) -> dict[str, Any]:
    """A layer's flags, with a rollout batch that divides the job's prompts."""
    if "rollout_batch_size" not in flags:
        return flags
    prompts = work.config.sampling.prompts_per_step
    sizes = [n for n in range(1, min(LARGEST_BATCH, prompts - 1) + 1) if prompts % n == 0]
    return {**flags, "rollout_batch_size": max(sizes, default=0)}


def _status(layer: Layer, flags: dict[str, Any], before: dict[str, Any], work: Workload) -> str:
    """ok, or why a row that changes flags from `before` is not timed here."""
    if layer.needs_cuda and work.device.type != "cuda":
        return f"{NOTHING_TO_DO}needs CUDA"
    try:
        config = work.config.replace(**flags)
        if layer.flags.get("compile_model"):
            accel.check_compiler(SpeedConfig(compile_model=True), work.device)
    except ConfigError as error:
        return str(error)
    situation = Situation(config, work.device, 1, work.shape, work.task)
    changed = [name for name in layer.flags if flags[name] != before.get(name)]
    reasons = [reason(name, situation) for name in changed or layer.flags]
    return NOTHING_TO_DO + reasons[-1] if reasons and all(reasons) else "ok"
