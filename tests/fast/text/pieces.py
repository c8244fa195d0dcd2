"""Texts in pieces, and what a parser makes of them."""

import itertools
from collections.abc import Iterable

from app.text.parsers import OutputParser, Parsed


def cut(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(at % (len(text) + 1) for at in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


def parse(parser: OutputParser, pieces: Iterable[str]) -> Parsed:
    return Parsed.joined([*map(parser.push, pieces), parser.finish()])
