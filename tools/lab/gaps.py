"""How long streams stand still while this server reads a long prompt: `python -m tools.lab gaps`.

Streams run, a prompt of random tokens comes beside them, and it comes once more when the server is idle. Exits with 1
if a request fails.
"""

import argparse
import asyncio
import random
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from rich.console import Console

from tools.bench.client import Answer, Server, ask, first_model
from tools.bench.flags import count
from tools.bench.formats import Prompt
from tools.bench.markdown import Row, Table
from tools.bench.own_server import VARIANTS, OwnServer
from tools.lab.publish import part_parser, publish

MEANING = (
    "Seconds. A gap is the time between two chunks of a stream; those count that overlap with the reading of the "
    "prompt. `before` is the median gap until then. The prompt's times end with its first token."
)
_VOCABULARY = 256
"""Token ids that every model has."""
_STORY = Prompt({"prompt": "Once upon a time, there was a"}, exact=True)
"""Beginning of a stream of words: a token that is a part of a character would be no chunk."""
_SETTLE_SECONDS = 1.0
"""Time for the streams to run by themselves."""


def gaps(streams: Sequence[Answer], beside: Answer) -> tuple[list[float], list[float]]:
    """Return the gaps of streams that ended before the prompt of `beside` was sent, and those that overlap with its
    reading, in seconds."""
    times = [gap for stream in streams for gap in pairwise(stream.chunks)]
    before = [end - start for start, end in times if end < beside.sent]
    return before, [end - start for start, end in times if start < beside.last and end >= beside.sent]


async def measure(server: Server, options: argparse.Namespace) -> tuple[Row, list[Answer]]:
    """Return a row of the table, and all answers."""
    async with server.connect(options.seconds) as http:
        wishes = {"temperature": 0.0}
        long = Prompt({"prompt": random.Random(0).choices(range(_VOCABULARY), k=options.prompt_tokens)})
        streamed = [
            asyncio.create_task(ask(http, server, _STORY, wishes | {"max_tokens": options.stream_tokens}))
            for _ in range(options.streams)
        ]
        await asyncio.sleep(_SETTLE_SECONDS)
        beside = await ask(http, server, long, wishes | {"max_tokens": 1})
        streams = await asyncio.gather(*streamed)
        alone = await ask(http, server, long, wishes | {"max_tokens": 1})
    before, during = gaps(streams, beside)
    row = {
        "streams": options.streams,
        "prompt tokens": options.prompt_tokens,
        "before": f"{median(before):.3f}" if before else "-",
        "gaps": len(during),
        "median gap": f"{median(during):.2f}" if during else "-",
        "longest gap": f"{max(during):.2f}" if during else "-",
        "prompt beside": f"{beside.e2el:.1f}",
        "prompt alone": f"{alone.e2el:.1f}",
    }
    return row, [*streams, beside, alone]


def bench(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    console = Console(stderr=True)
    with (
        OwnServer(options.variant, [options.model, *options.serve_args]) as process,
        console.status("starting") as status,
        asyncio.Runner() as runner,
    ):
        process.wait_until_ready(status.update)
        server = Server("ours", process.url)
        server = replace(server, model=runner.run(first_model(server)))
        status.update("measuring")
        row, answers = runner.run(measure(server, options))
    errors = [answer.error for answer in answers if answer.error]
    publish("gaps", arguments, [Table("gaps", "Gaps", MEANING, [row])], options.out, about=[str(process), *errors])
    return int(bool(errors))


def parser() -> argparse.ArgumentParser:
    made = part_parser("gaps", __doc__)
    add = made.add_argument
    add("model", nargs="?", default="demo", metavar="MODEL", help="as for `dflash-server serve` [default: demo]")
    add("--variant", choices=VARIANTS, default="plain", help="[default: plain]")
    add("--streams", type=count, default=1, metavar="N", help="[default: 1]")
    add("--stream-tokens", type=count, default=300, metavar="N", help="of each stream [default: 300]")
    add("--prompt-tokens", type=count, default=1500, metavar="N", help="of the long prompt [default: 1500]")
    add("--seconds", type=float, default=600.0, metavar="S", help="of silence that are a failure [default: 600]")
    add("--serve-args", type=shlex.split, default=[], metavar="'...'", help="more flags of `serve`")
    return made
