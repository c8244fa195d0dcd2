"""Flags that the parts of the bench share, and the types of their values."""

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

from tools.bench.client import LIMITED


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("servers").add_argument
    about = "a running server of any make; several are compared"
    add("--base-url", type=named_url, action="append", default=[], metavar="[NAME=]URL", help=about)
    add("--api-key", metavar="KEY")
    add("--model", metavar="NAME", help="[default: the first of /v1/models]")
    about = "vLLM's; nothing to set, because prompts decide whether they are chats"
    add("--backend", choices=["openai", "openai-chat", "vllm"], help=about)
    add_serve_flags(parser)
    add_out_flag(parser, "results.json")


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    about = "flags of `serve` for servers that the bench starts"
    parser.add_argument("--serve-args", type=shlex.split, default=[], metavar="'...'", help=about)
    about = "seconds of silence that are a failure"
    parser.add_argument("--timeout", type=amount, default=600.0, metavar="S", help=about)


def add_out_flag(parser: argparse.ArgumentParser, content: str) -> None:
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"write {content} there")


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    add = parser.add_argument_group("answers").add_argument
    add("--temperature", type=amounts, default=[0.0], metavar="T,T", help="each with every load [default: 0]")
    add("--max-tokens", type=count, default=max_tokens, metavar="N", help=f"[default: {max_tokens}]")
    add("--seed", type=int, default=0, metavar="N", help="[default: 0]")
    about = """more fields of every request: '{"chat_template_kwargs": {"enable_thinking": false}}'"""
    add("--extra-body", type=json_object, default={}, metavar="JSON", help=about)


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


def amounts(text: str) -> list[float]:
    return [amount(part) for part in text.split(",")]


def spreads(text: str) -> tuple[float, float]:
    """Return (1.2, 1.0) for "1.2,1" and (0.5, 0.5) for "0.5"."""
    found = amounts(text)
    if len(found) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number for prompts and one for answers")
    return found[0], found[-1]


def rates(text: str) -> list[float]:
    rates = amounts(text)
    if 0.0 in rates:
        raise argparse.ArgumentTypeError("a rate is more than 0 requests a second")
    return rates


def limit(text: str) -> tuple[str, float]:
    """Return ("ttft", 0.5) for "ttft:500"."""
    kind, _, limit = text.partition(":")
    if kind not in LIMITED:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(f'{k}:MS' for k in LIMITED)}")
    return kind, amount(limit) / 1000


def named_url(text: str) -> tuple[str, str]:
    """Return ("peer", "http://host:1") for "peer=http://host:1/v1". Without a name it is host:port."""
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
