"""Texts in pieces, and what a parser makes of them."""

import itertools
from collections.abc import Iterable

from app.text.parsers import OutputParser
from app.text.parsers.base import Parsed


def cut(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(at % (len(text) + 1) for at in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


def parse(parser: OutputParser, pieces: Iterable[str], *, is_cut: bool = False) -> Parsed:
    parts = [part for piece in pieces for part in parser.push(piece)]
    return Parsed.of([*parts, *parser.finish(is_cut)])
