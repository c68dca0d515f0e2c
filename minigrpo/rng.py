"""Random numbers that are pure functions of (seed, stream name, counters), by NumPy's Philox."""

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
    seed: int,
    name: str,
    step: int,
    rows: np.ndarray,
    num_samples: int,
    length: int,
) -> np.ndarray:
    """`[P, G, S]` float32 in [0, 1), one number for every token that may be sampled.

    The numbers are keyed by (seed, name, step, row, sample), where `rows` [P] has the index of each
    prompt in the task, not in the batch. A larger `length` appends numbers.
    """
    draws = np.empty((len(rows), num_samples, length), np.float32)
    for place, sample in np.ndindex(draws.shape[:2]):
        generator = stream(seed, name, step, int(rows[place]), sample)
        generator.random(dtype=np.float32, out=draws[place, sample])
    return draws
