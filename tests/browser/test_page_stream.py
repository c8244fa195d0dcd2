"""The page reads its stream rightly wherever the network cuts it: its own function, in a real browser."""

import base64
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app import api
from tests.browser.chromium import BINARY, Tab, browser, new_tab

pytestmark = pytest.mark.skipif(BINARY is None, reason="there is no chromium on this machine")

PAGE = (Path(api.__file__).parent / "static" / "index.html").read_text(encoding="utf-8")
READ = """
(async () => {
  const pieces = PIECES.map((piece) => Uint8Array.from(atob(piece), (c) => c.charCodeAt(0)));
  const body = new ReadableStream({
    pull(controller) {
      if (pieces.length) controller.enqueue(pieces.shift());
      else controller.close();
    },
  });
  const found = [];
  try {
    for await (const { chunk } of chunksOf({ body })) found.push(chunk);
    found.push("done");
  } catch (error) {
    found.push(`error: ${error.message}`);
  }
  return found;
})()"""

texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=4)


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    """A tab that knows the page's chunksOf and ApiError, and nothing else of it."""
    with browser() as address, new_tab(address) as tab:
        for start in ("class ApiError ", "async function* chunksOf("):
            found = re.search(rf"^{re.escape(start)}.*?^}}$", PAGE, re.MULTILINE | re.DOTALL)
            assert found is not None, start
            tab.run(found.group())
        yield tab


def read(tab: Tab, raw: bytes, cuts: set[int]) -> list[object]:
    """Return the events that the page reads from the stream in these pieces."""
    pieces = [base64.b64encode(raw[start:stop]).decode() for start, stop in pairwise([0, *sorted(cuts), len(raw)])]
    return list(tab.run(READ.replace("PIECES", json.dumps(pieces))))


def event(data: object) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(texts, st.sampled_from(["data: [DONE]\n\n", event({"error": {"message": "died"}}), ""]), st.data())
def test_every_chunk_comes_whole_and_once_wherever_the_stream_is_cut(
    tab: Tab, sent: list[str], end: str, data: st.DataObject
) -> None:
    raw = "".join([": keep-alive\n\n" + event({"text": text}) for text in sent] + [end]).encode()
    cuts = data.draw(st.sets(st.integers(0, len(raw)), max_size=12))
    ends = {"": "error: The answer broke off before its end."}
    last = ends.get(end, "done" if "DONE" in end else "error: died")
    assert read(tab, raw, cuts) == [*({"text": text} for text in sent), last]


def test_an_emoji_in_two_pieces_is_one(tab: Tab) -> None:
    raw = (event({"text": "\U0001f600"}) + "data: [DONE]\n\n").encode()
    for cut in range(len(raw)):
        assert read(tab, raw, {cut}) == [{"text": "\U0001f600"}, "done"]
