"""Random numbers that are derived, never stored.

Every draw is a pure function of (seed, stream name, counters), by NumPy's counter-based Philox
generator. So resuming needs no generator state, and no draw depends on the batch, on the number of
processes or on earlier draws. Only the initial weights come from a torch.Generator. Global
generators are not used.
"""

import hashlib

import numpy as np


def stream(seed: int, name: str, *counters: int) -> np.random.Generator:
    """An independent generator for (seed, name, up to three counters), good for 2**64 draws."""
    hashed = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16)
    key = np.frombuffer(hashed.digest(), dtype=np.uint64)
    counter = np.zeros(4, dtype=np.uint64)
    counter[1 : 1 + len(counters)] = counters
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def uniforms(
    seed: int, name: str, step: int, rows: np.ndarray, num_samples: int, length: int
) -> np.ndarray:
    """`[P, G, S]` float32 in [0, 1), a number for every token that may be sampled.

    They are keyed by (seed, name, step, row, sample), where `rows` [P] has the index of each prompt
    in the task, not in the batch. A larger `length` appends.
    """
    draws = [
        stream(seed, name, step, int(row), sample).random(length, dtype=np.float32)
        for row in rows
        for sample in range(num_samples)
    ]
    return np.array(draws).reshape(len(rows), num_samples, length)
