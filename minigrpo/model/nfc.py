"""Unicode's normal form C, as Hugging Face's tokenizers compute it.

Their tables are those of Unicode 9. Python's are newer, and differ between versions of Python:
marks that were assigned later are reordered and composed. The text between such characters is the
same in both, so they are kept as they are, and what lies between them is normalized.
"""

import re
import unicodedata

# Ranges that hold all characters with a combining class or a part in a composition that Unicode 10
# to 17 added, and none that Unicode 9 had.
_RANGES = """
    05C8-05C9 07FD 0897-089F 08CA-08D3 09FE 0C3C 0D3B-0D3C 0EBA 1715 1ABF-1AF0 1DF6-1DFA A82C
    105C0-105FF 10D24-10D6D 10EAB-10F85 11070 1133B 11380-113FF 1145E 11839-1183A 11930-11A99
    11D42-11F42 16100-1613F 16D40-16D7F 16FF0-16FF1 1D127-1D128 1D250-1D281 1E08F-1E6F5
"""
LATER = re.compile(
    "(["
    + "".join("-".join(chr(int(end, 16)) for end in codes.split("-")) for codes in _RANGES.split())
    + "]+)"
)


def nfc(text: str) -> str:
    """The text in normal form C."""
    if text.isascii():
        return text
    parts = LATER.split(text)  # what matched stands between what did not
    parts[::2] = [unicodedata.normalize("NFC", part) for part in parts[::2]]
    return "".join(parts)
