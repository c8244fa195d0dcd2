"""Flags that the parts of the bench share, and what may stand behind them."""

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

from app.bench.client import LIMITED


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("servers")
    group.add_argument(
        "--base-url",
        type=named_url,
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="a server that runs, of whatever make; several are compared",
    )
    group.add_argument("--api-key", metavar="KEY")
    group.add_argument("--model", metavar="NAME", help="[default: the first of /v1/models]")
    group.add_argument(
        "--serve-args", type=shlex.split, default=[], metavar="'...'", help="flags of `serve` for servers of our own"
    )
    group.add_argument(
        "--timeout", type=amount, default=600.0, metavar="S", help="seconds of silence that are a failure"
    )
    add_out_flag(parser, "results.json and a PNG of each table")


def add_out_flag(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"write {what} there")


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("answers")
    group.add_argument("--temperature", type=amount, default=0.0, metavar="T", help="[default: 0]")
    group.add_argument("--max-tokens", type=count, default=max_tokens, metavar="N", help=f"[default: {max_tokens}]")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="[default: 0]")
    group.add_argument(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="""more fields of every request: '{"chat_template_kwargs": {"enable_thinking": false}}'""",
    )


def count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def listed(text: str) -> list[str]:
    return text.split(",")


def amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def spreads(text: str) -> tuple[float, float]:
    """ "1.2,1" -> (1.2, 1.0), "0.5" -> (0.5, 0.5)"""
    found = [amount(part) for part in text.split(",")]
    if len(found) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number for prompts and one for answers")
    return found[0], found[-1]


def rates(text: str) -> list[float]:
    rates = [amount(part) for part in text.split(",")]
    if 0.0 in rates:
        raise argparse.ArgumentTypeError("a rate is more than 0 requests a second")
    return rates


def limit(text: str) -> tuple[str, float]:
    """ "ttft:500" -> ("ttft", 0.5)"""
    kind, _, limit = text.partition(":")
    if kind not in LIMITED:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(f'{k}:MS' for k in LIMITED)}")
    return kind, amount(limit) / 1000


def named_url(text: str) -> tuple[str, str]:
    """ "peer=http://host:1/v1" -> ("peer", "http://host:1"); without a name it is host:port."""
    found = re.fullmatch(r"(?:([^=/:]+)=)?(https?://([^/]+).*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not URL or NAME=URL, with http:// or https://")
    name, url, host = found.groups()
    return name or host, url.rstrip("/").removesuffix("/v1")


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
