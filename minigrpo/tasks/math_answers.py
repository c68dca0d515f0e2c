r"""Find the final answer in a text, and compare answers as exact numbers.

Nothing here evaluates an expression. A number is read by one regular expression and becomes an
exact rational: 0.1 is one tenth, not the nearest float. Every function takes any text, in time that
grows with its length only, and returns None where it finds nothing.

These are equal:

- 1/2, 0.5, .50, \frac{1}{2} and 5e-1; 1 1/2 and 1.5
- 1,234 and 1234; but 1,23 is no number, because separators stand before groups of three digits
- $5, 5 dollars, 5\text{ cm} and 5: currencies and units are ignored. "5 million", "5 pi" and "5x"
  are no numbers
- 50% and 50, and also 50% and 0.5, because published answers leave out the sign. 50 and 0.5 differ
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

MAX_TEXT_CHARS = 20_000  # at the end of a text, where its answer is
MAX_ANSWER_CHARS = 1_000
MAX_DIGITS = 300  # of a number; the time of arithmetic with more grows with their square

# --- where a text gives its answer ----------------------------------------------------------------

BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\boxed ([^\s{}$\\]+)|\\.|[{}]", re.DOTALL)
HASHES = "####"
ANSWER_IS = re.compile(r"answer\s*(?:is|:|=)", re.IGNORECASE)
END_OF_SENTENCE = re.compile(r"\.(?:\s|$)|\n")
END_OF_CLAUSE = re.compile(r"[,;]\s|\s\(")
# what follows it in a clause is not the answer
NEGATION = re.compile(r"\b(?:not|never|cannot)\b|n['\u2019]t\b|\\neq?\b|\u2260|!=", re.IGNORECASE)
INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
DECIMAL = rf"(?:{INTEGER}(?:\.[0-9]+)?|\.[0-9]+)"
# a minus after a letter, a digit or a bracket subtracts: the last number of "7-3" is 3
NUMBER_IN_TEXT = re.compile(rf"(?:(?<![\w)\]])-)?[$€£¥]?{DECIMAL}(?:/{INTEGER})?%?")

# what makes a number a part of something else: an operator or a digit before it, a function or a
# word that changes its value; a letter after it that multiplies it
GOES_ON_FROM = re.compile(
    r"""(?:[\d)\]!]\s*[-+*/^\u00d7\u00b7\u00f7\u2212\u2013]+|\b[a-z]\s*[*^/+]+
      |[\^<>\u00b1\u00d7\u00f7\u221a\u2264\u2265]
      |\\pm
      |\d\s+(?:and\s+)?|[\w\u221a]\(
      |\b(?:plus|minus|times|negative|half|twice|double|triple|sqrt|root|or|by|than
        |unlike)\b(?:\s+(?:of|the))*)
    [\s(]*$
    |\d:$""",
    re.IGNORECASE | re.VERBOSE,
)
GOES_ON = re.compile(
    r"(?:[kKMBbxnei\u03c0]|bn|mn)\b|\s*[\^\u00d7]|[\u00b9\u00b2\u00b3\u2070-\u207f]|\*\w"
    r"|\s+(?:pi|factorial|squared|cubed|halves|and\s+(?:an?|one)\s+(?:half|third|quarter))\b"
)
NEXT_WORD = re.compile(r"[\s-]+([A-Za-z-]+)")
MAX_CONTEXT_CHARS = 40  # before a number
# dashes that are read as a minus: hyphens, the figure and en dash, the minus, small and wide ones
MINUS = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\u207b\ufe63\uff0d", "-"))


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` that is closed; of nested ones the inner one."""
    opened: list[int] = []  # where the content of each open brace begins; -1: the brace of no box
    last, content = -1, None
    for found in BOX_OR_BRACE.finditer(text):
        token, start, end = found[0], -1, found.start()
        if token == "{":
            opened.append(-1)
        elif token.endswith("{") and len(token) > 2:
            opened.append(found.end())
        elif token == "}" and opened:
            start = opened.pop()
        elif found[1]:
            start, end = found.span(1)
        if start > last and (inside := text[start:end].strip()):
            last, content = start, inside
    return content


def after_hashes(text: str) -> str | None:
    """The rest of the line after the last `####`."""
    _, mark, rest = text.rpartition(HASHES)
    return (rest.strip().split("\n", 1)[0].strip() if mark else "") or None


def in_tags(text: str) -> str | None:
    """The content of the last `<answer>...</answer>`."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start < 0:
        return None
    inside = text[start + len("<answer>") : end].strip()
    return after_words(inside) or inside or None


def after_words(text: str) -> str | None:
    """What is `stated` after the last "the answer is", up to the end of the sentence.

    All of the sentence if its numbers are parts of a formula; "" if it only says what the answer is
    not.
    """
    last = max(ANSWER_IS.finditer(text), key=re.Match.start, default=None)
    rest = text[last.end() :][:MAX_ANSWER_CHARS].strip() if last else ""
    sentence = END_OF_SENTENCE.split(rest, maxsplit=1)[0].strip(" :*.")
    if NEGATION.search(sentence):
        return stated(sentence) or ""
    return stated(sentence) or (sentence if last_number(sentence) else None)


def stated(sentence: str) -> str | None:
    """All of a sentence if it is a number or a formula, else `plain_number` of its first clause.

    What follows the first clause explains the answer: "72 clips (48 and 24)". If there is no number
    in that clause, it is the last one in the sentence. What follows a "not" is not the answer: in
    "72, not 70", "72 not 70" and "not 70, 72" it is 72, and "not 72" has none. "72 million" is left
    as it is.
    """
    is_formula = "\\" in sentence or sentence.count("$") > 1  # one may be a currency
    if is_formula or number(sentence) or MULTIPLES & set(sentence.lower().split()):
        return sentence
    clauses = (NEGATION.split(clause)[0] for clause in END_OF_CLAUSE.split(sentence))
    first, *others = map(plain_number, clauses)
    return first or next(filter(None, reversed(others)), None)


def plain_number(clause: str) -> str | None:
    """The last number in a clause, of its last side of an equation that has one.

    None if that number is a part of something else: "6*12", "10^6", "minus 3", "8:30", "5k".
    """
    for side in reversed(clause.translate(MINUS).split("=")):
        *_, found = None, *NUMBER_IN_TEXT.finditer(side)
        if found:
            before = side[max(0, found.start() - MAX_CONTEXT_CHARS) : found.start()]
            after = NEXT_WORD.match(side, found.end())
            changes = after and (PARTS | MULTIPLES) & {*after[1].lower().split("-")} - COINS
            if not (changes or GOES_ON_FROM.search(before) or GOES_ON.match(side, found.end())):
                return found[0]
    return None


def last_number(text: str) -> str | None:
    """The last number in a text."""
    found = NUMBER_IN_TEXT.findall(text.translate(MINUS))
    return found[-1] if found else None


FORMS: dict[str, Callable[[str], str | None]] = {  # in the order in which they are looked for
    r"\boxed{}": boxed,
    HASHES: after_hashes,
    "<answer>": in_tags,
    "the answer is": after_words,
    "the last number": last_number,
}


def final_answer(text: str, form: str = "") -> str | None:
    """The answer that a text gives, in the first of `FORMS` that it has; `form` is tried first."""
    text = text[-MAX_TEXT_CHARS:]
    for name in (form, *FORMS) if form else FORMS:
        if (found := FORMS[name](text)) is not None:
            return found
    return None


# --- numbers --------------------------------------------------------------------------------------

SPELLINGS = {  # TeX and typography -> plain text
    "\\$": "$",
    "\\%": "%",
    "\\!": "",
    "\\,": "",
    "\\;": " ",
    "\\:": " ",
    "\\quad": " ",
    "{,}": ",",
    "\\ ": " ",
    "\\(": "",
    "\\)": "",
    "\\[": "",
    "\\]": "",
    "\\displaystyle": "",
    "\u00b0": "",
    "~": " ",
    "^{\\circ}": "",
    "^\\circ": "",
    "\\dfrac": "\\frac",
    "\\cfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\left": "",
    "\\right": "",
}
FRACTION = re.compile(
    r"\\frac\s*(?:\{([+-]?[0-9,]+)\}|([0-9]))\s*(?:\{([0-9,]+)\}|([0-9]))(?![0-9])"
)
TEXT_MACRO = re.compile(r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
UNIT_LETTER = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{[~\s]*[mgshLNJWV]\s*\}")
NUMBER = re.compile(
    rf"""(?:[A-Za-z]\s?=\s?)?                         # x = 5
    (?P<sign>[+-]?)\s*[$€£¥]?\s*(?P<inner>[+-]?)      # -$5 and $-5
    (?:(?:(?P<whole>{INTEGER})\s+)?(?P<top>{INTEGER})\s?/\s?(?P<bottom>{INTEGER})
      |(?P<decimal>{DECIMAL})\.?(?:[eE](?P<exponent>[+-]?[0-9]{{1,2}}))?)
    (?P<percent>\s?%|\s(?i:per\s?cent))?(?P<unit>.*)""",
    re.DOTALL | re.VERBOSE,
)
IN_BRACKETS = re.compile(r"\(\s*([^(){},]+)\)|\{\s*([^(){}]+)\}")  # (1,234) is a point
# layout; white space between digits is none unless a group of three follows: "1 2" is not 12
BETWEEN = re.compile(r"(?<![0-9])[\s$]+|[\s$]+(?![0-9\s$])|[\s$]+(?=[0-9]{3}(?![0-9]))")
# words of at least two letters, apart from the number: "5x" and "5 m" are formulas
UNIT = re.compile(r"(?:\s+[A-Za-z][A-Za-z'/-]+(?:\^\{?[23]\}?|[²³])?){1,4}\s*")
MULTIPLES = {"dozen", "hundred", "thousand", "million", "billion", "trillion"}
MULTIPLES |= {f"{word}s" for word in MULTIPLES}
PARTS = {"third", "quarter", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"}
PARTS |= {"twelfth", "sixteenth", "twentieth", "hundredth", "thousandth", "millionth", "billionth"}
PARTS |= {f"{word}s" for word in PARTS}
COINS = {"quarter", "quarters"}
NOT_UNITS = {  # words that change the value
    *("and", "or", "to", "plus", "minus", "times", "over", "by", "mod", "pi", "sqrt", "sin", "cos"),
    *("tan", "log", "ln", "exp", "half", "halves", "squared", "cubed", "factorial", "negative"),
    *PARTS,
    *MULTIPLES,
}


class Number(NamedTuple):
    """A number as it was written."""

    value: Fraction
    percent: bool  # a percent sign follows


def number(text: str) -> Number | None:
    """The number that a text is, with or without currency and unit; None for anything else."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    text = UNIT_LETTER.sub(" units", text.translate(MINUS))
    for written, plain in SPELLINGS.items():
        text = text.replace(written, plain)
    text = FRACTION.sub(r" \1\2/\3\4", TEXT_MACRO.sub(r" \1", text))
    text = text.strip("$* \t\r\n").removesuffix(".")  # the marks of TeX, bold type, a currency
    if inside := IN_BRACKETS.fullmatch(text):
        text = inside[1] or inside[2]
    found = NUMBER.fullmatch(text)
    if not found or not _is_unit(found["unit"]):
        return None
    if sum(map(str.isdigit, text)) > MAX_DIGITS:
        return None
    value = _value(found)
    if value is None:
        return None
    negative = (found["sign"] == "-") != (found["inner"] == "-")
    return Number(-value if negative else value, bool(found["percent"]))


def _is_unit(text: str) -> bool:
    """Whether what follows a number leaves its value as it is."""
    if not text.strip():
        return True
    return bool(UNIT.fullmatch(text)) and not NOT_UNITS & set(re.split(r"[\s-]+", text.lower()))


def _value(found: re.Match[str]) -> Fraction | None:
    """The value of a match of `NUMBER` without its sign; None for a division by zero."""
    whole, top, bottom, decimal = (
        (found[name] or "0").replace(",", "") for name in ("whole", "top", "bottom", "decimal")
    )
    if found["top"]:
        return int(whole) + Fraction(int(top), int(bottom)) if int(bottom) else None
    return Fraction(decimal) * Fraction(10) ** int(found["exponent"] or 0)


def same_number(a: Number, b: Number) -> bool:
    """Whether two numbers are equal; a percent sign on one of them may count or not."""
    if a.percent == b.percent:
        return a.value == b.value
    percent, plain = (a, b) if a.percent else (b, a)
    return plain.value in (percent.value, percent.value / 100)


def same_answer(truth: str, answer: str) -> bool | None:
    """Whether two answers are equal: as numbers if both are, else as texts without their layout.

    None if that does not decide it: the texts differ, and at least one is no number.
    """
    a, b = number(truth), number(answer)
    if a and b:
        return same_number(a, b)
    if a and NEGATION.search(answer):  # math-verify would find the number in "not 72"
        return False
    return True if _without_layout(truth) == _without_layout(answer) else None


def _without_layout(text: str) -> str:
    text = text.translate(MINUS)
    for written, plain in SPELLINGS.items():
        text = text.replace(written, plain)
    return BETWEEN.sub("", TEXT_MACRO.sub(r"\1", text)).removesuffix(".")
