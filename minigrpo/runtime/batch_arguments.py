"""Check a batch that the learner is given: a shape that only broadcasts would be learnt wrongly."""

from ..types import RolloutBatch
from . import loss_arguments


def check_batch(batch: RolloutBatch) -> None:
    """Raise ValueError unless all parts of a batch are of the same prompts and completions."""
    shape = batch.completions.completion_mask.shape
    for name, rows in (("examples", batch.examples), ("texts", batch.texts)):
        if len(rows) != shape[0]:
            raise ValueError(f"{name} must be those of {shape[0]} prompts, got {len(rows)}")
    loss_arguments.tensor("advantages", batch.advantages, shape[:2], kind="real")
    loss_arguments.tensor("loss_mask", batch.loss_mask, shape[:2], kind="bool")
    loss_arguments.tensor("old_logp", batch.old_logp, shape)
    loss_arguments.tensor("ref_logp", batch.ref_logp, shape)
