"""The page at work, as an animated GIF: `make picture`.

A real server answers one of the page's examples with DFlash and plainly, in a real browser. Frames have the times at
which they were taken, so the picture is as fast as the server was while it was watched.
"""

import argparse
import base64
import io
import itertools
import sys
import time
from pathlib import Path

from PIL import Image

from tests import ROOT
from tests.browser.chromium import BINARY, Tab, browser, new_tab
from tests.server.demo import ready

PAGE = ROOT / "docs" / "page.gif"
MOST_BYTES = 2_000_000
COLOURS = 64
SECONDS_BETWEEN = 0.2  # a screenshot takes time that the server needs
HOLD_SECONDS = 4.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.browser.picture", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="the model that is served (smollm2)")
    parser.add_argument("--example", type=int, default=3, help="the example that is asked, from 1 (3)")
    parser.add_argument("--max-tokens", type=int, default=120, help="tokens of an answer (120)")
    parser.add_argument("--seed", type=int, default=1, help="its seed (1)")
    parser.add_argument("--out", type=Path, default=PAGE, help="the picture to write (docs/page.gif)")
    args = parser.parse_args()
    if BINARY is None:
        parser.error("there is no chromium on this machine")
    with ready(args.model) as url, browser() as devtools, new_tab(devtools) as tab:
        tab.resize(1200, 700)
        tab.prefer("light")
        tab.open(f"{url}/")
        tab.until("!document.querySelector('#send').disabled")
        for field, value in (("max-tokens", args.max_tokens), ("seed", args.seed)):
            tab.run(f"document.querySelector('#{field}').value = {value}")
        frames = [*filmed(tab, args.example)]
        print(tab.run("document.querySelector('.verdict').innerText.replaceAll('\\n', ' ')"))
    size = write(frames, args.out)
    print(f"wrote {args.out}: {len(frames)} frames, {size:,} bytes")
    return 0 if size <= MOST_BYTES else 1


def filmed(tab: Tab, example: int) -> list[tuple[float, Image.Image]]:
    """Return screenshots with the seconds for which each is seen: the welcome, then the answers to their comparison."""
    shots = [(time.monotonic(), shot(tab))]
    time.sleep(1.0)
    tab.run(f"document.querySelectorAll('#examples button')[{example - 1}].click()")
    while not tab.run("document.querySelector('#status').textContent.startsWith('Done')"):
        shots.append((time.monotonic(), shot(tab)))
        time.sleep(SECONDS_BETWEEN)
    shots.append((time.monotonic(), shot(tab)))
    ends = [at for at, _ in shots[1:]] + [shots[-1][0] + HOLD_SECONDS]
    return [(end - at, image) for (at, image), end in zip(shots, ends, strict=True)]


def shot(tab: Tab) -> Image.Image:
    stored = base64.b64decode(tab.command("Page.captureScreenshot", format="png")["data"])
    return Image.open(io.BytesIO(stored)).convert("RGB")


def write(frames: list[tuple[float, Image.Image]], out: Path) -> int:
    """Write the frames with one palette, that of the last one, which has all colours. Returns the bytes written."""
    palette = frames[-1][1].quantize(COLOURS)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for _, image in frames]
    ends = [round(100 * end) for end in itertools.accumulate(seconds for seconds, _ in frames)]  # GIF counts in 10 ms
    durations = [10 * (end - begin) for begin, end in itertools.pairwise([0, *ends])]
    images[0].save(out, save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=True)
    return out.stat().st_size


if __name__ == "__main__":
    sys.exit(main())
