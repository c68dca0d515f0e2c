"""Prove that merging by number gives what a list of merges gives, for any text.

tiktoken has no list of merges: it joins any two neighbours that together are a token, the lowest
number first, from the left. Hugging Face's files list which pairs may be joined, and in which
order.

Let r be the number of a token t. While only tokens below r are merged, the bytes of t become the
same parts wherever they stand, as long as no merge crosses their ends. If these are two parts, no
other pair ever becomes t. So both ways agree if this pair is listed for every t, and the list is in
the order of the tokens' numbers.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

Pair = tuple[str, str]


def check_merges(
    numbers: Mapping[str, int], merges: Iterable[str | Sequence[str]]
) -> frozenset[str]:
    """Return the tokens that no sequence of merges gives.

    Args:
        numbers: token -> number; a character stands for a byte.
        merges: pairs in order, as "a b" or as [a, b]. A token may have several.

    Raises:
        ValueError: names the first merge or token for which merging by number is not the same.
    """
    pairs: dict[str, list[Pair]] = {}
    last = -1
    for merge in merges:
        left, right = _pair(merge, numbers)
        number = numbers[left + right]
        if number < last:
            raise ValueError(
                f"merge {merge!r} is not supported: it is listed after a token with a higher number"
            )
        last = number
        pairs.setdefault(left + right, []).append((left, right))
    made_of: dict[str, Pair] = {}
    for token, listed in pairs.items():
        for one in listed:
            if _meet(one, numbers, made_of):
                made_of[token] = one
                break
    unreachable = [token for token in numbers if len(token) > 1 and token not in made_of]
    for token in unreachable:
        if len(parts := _parts(token, numbers)) == 2:
            raise ValueError(f"token {token!r} is not supported: the merge {parts} is not listed")
    return frozenset(unreachable)


def _pair(merge: str | Sequence[str], numbers: Mapping[str, int]) -> Pair:
    left, right, *more = (*(merge.split(" ") if isinstance(merge, str) else merge), "", "")
    if more != ["", ""] or not (left in numbers and right in numbers and left + right in numbers):
        raise ValueError(f"merge {merge!r} is not of two tokens of the vocabulary into another")
    return left, right


def _meet(pair: Pair, numbers: Mapping[str, int], made_of: Mapping[str, Pair]) -> bool:
    """Whether two tokens arise side by side, because no earlier merge joins parts of both.

    Goes back in time: undoes whichever of the two was merged last. Until then, its part at the
    border stood beside the other token. If these two were to be merged earlier, or at the same time
    but further left, the pair never arises.
    """
    left, right = pair
    while len(left) > 1 or len(right) > 1:
        # a byte is there from the beginning
        left_since = numbers[left] if len(left) > 1 else -1
        right_since = numbers[right] if len(right) > 1 else -1
        if (left if left_since > right_since else right) not in made_of:
            return False
        if left_since > right_since:
            left, until = made_of[left][1], left_since
        else:
            right, until = made_of[right][0], right_since + 1
        if numbers.get(left + right, until) < until:
            return False
    return True


def _parts(token: str, numbers: Mapping[str, int]) -> list[str]:
    """What the bytes of a token become while only tokens with lower numbers are merged."""
    parts, end = list(token), numbers[token]
    while len(parts) > 1:
        joined = [numbers.get(left + right, end) for left, right in itertools.pairwise(parts)]
        first = joined.index(min(joined))
        if joined[first] >= end:
            break
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts
