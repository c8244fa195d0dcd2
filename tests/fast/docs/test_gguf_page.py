"""docs/gguf.md names the types that are read, and those that are not."""

import re

from app.engine.checkpoint.gguf import BLOCKS, UNREAD
from tests import ROOT

PAGE = (ROOT / "docs" / "gguf.md").read_text(encoding="utf-8")


def test_the_table_has_every_type_with_its_bits() -> None:
    rows = [row.split("|")[1:-1] for row in PAGE.partition("|---|---|")[2].partition("\n\n")[0].splitlines()[1:]]
    *read, unread = [(re.findall(r"`(\w+)`", names), re.findall(r"[\d.]+", bits)) for names, bits, *_ in rows]
    sizes = {name: 8 * size / block for name, block, size in BLOCKS.values()}
    assert sorted(name for names, _ in read for name in names) == sorted(sizes)
    for names, bits in read:
        assert {float(number) for number in bits} == {
            round(edge([sizes[name] for name in names]), 1) for edge in (min, max)
        }
    assert sorted(unread[0]) == sorted(UNREAD.values())
