"""Which slot of the decoder a completion gets, and how many tokens wide a round is.

NumPy on the host only. running.py says what a slot is.
"""

import numpy as np


def assign_slots(slot: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Assign one slot to each set of running sequences that are equal so far.

    Slots keep their place where possible, so that little of the cache is copied.

    Args:
        slot: `[N]`, the current slot of each running sequence.
        states: `[K, N]`, K numbers in which sequences of a slot may differ; those that agree in
            all of them keep sharing a slot.

    Returns:
        `[B]`, the old slot that each new slot continues; `[N]`, the new slot of each sequence;
        `[B]`, the representative of each new slot, as an index into the N sequences.
    """
    # one number per (slot, state 1, .., state K), ordered by slot first
    key = slot
    for state in states:
        key = key * (state.max() + 1) + state
    _, representative, group = np.unique(key, return_index=True, return_inverse=True)
    old, places = slot[representative], np.arange(len(representative))  # `old` is sorted
    # of the groups from one old slot, the first stays there if that place still exists
    stays = np.append(True, old[1:] != old[:-1]) & (old < len(old))
    new = np.empty_like(places)
    new[stays], new[~stays] = old[stays], np.setdiff1d(places, old[stays])
    order = np.argsort(new)
    return old[order], new[group], representative[order]


def round_up_window(tokens: int) -> int:
    """The next power of 2: rounds of few widths, where each is captured (cuda_graphs.py)."""
    return 1 << (tokens - 1).bit_length()
