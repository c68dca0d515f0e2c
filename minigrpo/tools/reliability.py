"""The reliability diagram of `minigrpo evaluate RUN --plot FILE`.

A well calibrated model's points lie on the diagonal: of the answers that it gives with a confidence
of 0.7, it gets 70 % right. The panel below shows how many answers each bin has.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..runtime.calibration import NUM_BINS, calibration, reliability
from ..runtime.flags import ConfigError
from ..runtime.measures import wilson
from ..runtime.outputs import write_output

FORMATS: Sequence[str] = (".png", ".svg", ".pdf")
NEEDED = ("format", "confidence", "correct")  # the reward parts that it shows
Answers = Mapping[str, np.ndarray]  # part -> its values of n completions


def check_parts(parts: Mapping[str, object]) -> None:
    """Raise ConfigError for a task without confidences."""
    if not set(NEEDED) <= parts.keys():
        raise ConfigError("--plot draws stated confidences, so it needs --confidence")


def draw(of: Mapping[str, Answers], out: Path) -> None:
    """Draw one series per name, such as greedy and sampled, with 95 % intervals.

    Answers whose form does not match have no confidence and are left out.

    Raises:
        ConfigError: matplotlib is missing, no answer has a confidence, or the file cannot be
            written.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'minigrpo[plots]'") from None
    matplotlib.use("Agg")  # draws into files, and needs no display
    from matplotlib import pyplot as plt

    series = {name: _stated(parts) for name, parts in of.items()}
    if not any(len(confidence) for confidence, _ in series.values()):
        raise ConfigError("--plot: no completion states a confidence in the right form")
    figure, (upper, lower) = plt.subplots(
        2, figsize=(5, 6), height_ratios=[3, 1], layout="constrained", sharex=True
    )
    upper.plot([0, 1], [0, 1], "--", color="gray", linewidth=1, label="perfectly calibrated")
    edges = np.arange(NUM_BINS) / NUM_BINS
    width = 1 / NUM_BINS / (len(series) + 1)
    for place, (name, (confidence, correct)) in enumerate(series.items()):
        if not len(confidence):
            continue
        bins, found = reliability(confidence, correct), calibration(confidence, correct)
        used = bins.count > 0
        shares = zip(bins.accuracy[used], bins.count[used], strict=True)
        ends = np.array([(x.value - x.low, x.high - x.value) for x in (wilson(*s) for s in shares)])
        label = f"{name}: ECE {found['ece']:.3f}, Brier score {found['brier']:.3f}"
        x, y = bins.confidence[used], bins.accuracy[used]
        upper.errorbar(x, y, yerr=ends.T, fmt="o-", linewidth=1, capsize=2, label=label)
        at = edges + (place + 1) * width
        lower.bar(at, bins.count / bins.count.sum() * 100, width)
    room = (-0.02, 1.02)  # for the points at 0 and 1
    upper.set(ylabel="share of answers that are right", xlim=room, ylim=room)
    lower.set(xlabel="stated confidence", ylabel="answers, %")
    for panel in (upper, lower):
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    upper.legend(frameon=False, loc="upper left")
    write_output("--plot", out, lambda path: figure.savefig(path, dpi=140))
    plt.close(figure)


def _stated(parts: Answers) -> tuple[np.ndarray, np.ndarray]:
    """The confidence and correctness of the completions that have both, `[n]` each."""
    form, confidence, correct = (np.asarray(parts[name]).reshape(-1) for name in NEEDED)
    valid = (form == 1) & ~np.isnan(correct)
    return confidence[valid].astype(float), correct[valid].astype(float)
