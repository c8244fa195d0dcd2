r"""Judges of answers: by the final number, by what is in \boxed{}, by a letter, or by running code."""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cache

from tools.bench.sandbox import passes

Judge = Callable[[str], bool]
"""Returns True if the text of an answer is right."""

_NUMBER = re.compile(r"((?<![\w).])[-\u2212])?\\?[$€£]?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
# The text after each mark: a line with a number alone, within the braces, to the end of the sentence.
_MARKED = re.compile(r"^####[ \t]*([-\u2212]?\\?[$€£]?[\d.,]+)[ \t]*$", re.MULTILINE)
_BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_SENTENCE = re.compile(r"answer\s*(?:is|:|=|would be|will be)(?=(.*?)(?:[.!?](?:\s|$)|\n|$))", re.IGNORECASE)

_BOX_OPENING = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_REWRITTEN = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|displaystyle)(?![A-Za-z])|(?<!\\)\\[,!;: ]|\\?[$%]|\^\{?\\circ\}?|\.\s*$", ""),
        (r"(?<=\d)\s+[A-Za-z][A-Za-z ]+$", ""),  # units: 5 cm, but not 5x
        (r"(?<=[^\s,])\s*\\(?:text|mbox|mathrm|textrm)\{[^{}]*\}(?:\^\{?\d\}?)?\s*$", ""),  # units: 5\text{ cm}^2
        (r"\\(?:text|mbox|mathrm|textrm|textbf)\{([^{}]*)\}", r"\1"),
        (r"\s+", ""),
        (r"\{,\}", ","),
        (r"\\[dt]frac", r"\\frac"),
        (r"\\(frac|sqrt)(\d)", r"\\\1{\2}"),
        (r"(\\frac\{[^{}]*\})(\d)", r"\1{\2}"),
        (r"^[A-Za-z](?:=|\\in(?![a-z]))", ""),  # x = 5
        (r"^\(([A-Z])\)$", r"\1"),
        (r"([_^])\{(\w)\}", r"\1\2"),
    )
]
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_FRACTION = re.compile(r"(-?)(\d*)\\frac\{(-?\d+)\}\{(\d+)\}")
_PLAIN = re.compile(r"[-+]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:/\d{1,40})?")

_FONT = r"(?:\\?(?:text|textbf|mathbf|mathrm|mbox)\s*\{\W*)?"
# The last match counts. A letter without a word before it must begin the answer.
_LETTERS = (
    re.compile(rf"\\boxed\s*\{{\W*{_FONT}\W*([A-J])\b"),
    re.compile(
        # "A" and "I" before a word may be words too
        rf"(?i:answer)(?i:\s+is)?(?i:\s+option)?[\s:*(\[\"'$]*{_FONT}([A-J])\b(?!(?<=[AI]) +(?!because|since|as )[a-z])"
    ),
    re.compile(r"\A\W*([A-J])(?=[).:]|\W*\Z)"),
)
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_DEFINITION = re.compile(r"^[ \t]*(?:async +)?(?:def|class) ", re.MULTILINE)


def number_is(number: Decimal) -> Judge:
    return lambda text: final_number(text) == number


def box_is(answer: str) -> Judge:
    """Return a judge of mathematical answers, which compares what is in the last box with `answer`."""

    def is_right(text: str) -> bool:
        box = last_box(_said(text))
        return box is not None and _comparable(box) == wanted

    wanted = _comparable(answer)
    return is_right


def letter_is(letter: str) -> Judge:
    return lambda text: final_letter(text) == letter


def code_passes(program: Callable[[str], Sequence[str]]) -> Judge:
    """Return a judge that runs `program` of an answer's code, whose parts are executed in turn. A text is run once."""
    return cache(lambda text: passes(program(final_code(text))))


def final_number(text: str) -> Decimal | None:
    """Return the number of an answer, like GSM8K's harnesses, or None.

    It stands in `\\boxed{}`, alone after `####`, after "the answer is", or last. The last of each kind counts, and
    thinking does not. 1,234, $5, -5 and 18.00 are numbers.
    """
    said = _said(text).replace("{,}", ",").replace("\\!", "")
    for form in (_BOX, _MARKED, _SENTENCE):
        for rest in reversed(form.findall(said)):
            # "the answer is 10 - 5 = 5" means the number after the last sign of equality
            numbers = _NUMBER.findall(rest.rpartition("=")[2]) or _NUMBER.findall(rest)
            if numbers:
                return _decimal(numbers[0])
    numbers = _NUMBER.findall(said)
    return _decimal(numbers[-1]) if numbers else None


def final_letter(text: str) -> str | None:
    """Return the letter of a choice: in a box, after "the answer is", or at the beginning."""
    for form in _LETTERS:
        if letters := form.findall(_said(text)):
            return str(letters[-1])
    return None


def final_code(text: str) -> str:
    """Return the last fenced block that defines something, or the last one, or all of an answer."""
    blocks = _FENCED.findall(_said(text))
    found = [block for block in blocks if _DEFINITION.search(block)] or blocks
    return str(found[-1]) if found else _said(text)


def last_box(text: str) -> str | None:
    """Return what is in the last \\boxed{}, up to the brace that closes it, or None."""
    openings = list(_BOX_OPENING.finditer(text))
    depth = 1
    for brace in _BRACE.finditer(text, openings[-1].end()) if openings else ():
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[openings[-1].end() : brace.start()]
    return None


def _comparable(answer: str) -> Fraction | str:
    """Return a number, or TeX without what does not change its meaning."""
    said = answer
    for pattern, replacement in _REWRITTEN:
        said = pattern.sub(replacement, said)
    if _THOUSANDS.fullmatch(said):
        said = said.replace(",", "")
    try:
        if mixed := _FRACTION.fullmatch(said):
            sign, whole, above, below = mixed.groups()
            return (-1 if sign else 1) * (int(whole or 0) + Fraction(int(above), int(below)))
        return Fraction(said) if _PLAIN.fullmatch(said) else said
    except (ValueError, ZeroDivisionError):
        return said


def _said(text: str) -> str:
    """Return an answer without its thinking."""
    return text.rpartition("</think>")[2]


def _decimal(found: tuple[str, str]) -> Decimal:
    minus, digits = found
    return Decimal(("-" if minus else "") + digits.replace(",", ""))
