"""Log lines of the API process and of the engine's, as text for people or JSON for machines.

A line written while a request is served carries that request's id. Prompts and completions are never logged. Keys are
redacted if they are longer than common words, and so is every text after "Bearer".
"""

import json
import logging
import re
import sys
import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Literal
from urllib.parse import quote

request: ContextVar[dict[str, Any]] = ContextVar("request")
"""What is known of the request that the current task serves: its `request_id`, and what else its access line says."""

MIN_KEY_LENGTH = 8
"""Shorter keys are found in ordinary words: with the key `a` no line could be read."""


class _Text(logging.Formatter):
    """Lines like `2026-01-31 12:00:00+0100 INFO app.api.server message [request id]`; the last is `error: message`."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = f"error: {record.message}" if hasattr(record, "is_last") else super().formatMessage(record)
        return f"{line} [{identifier}]" if (identifier := request.get({}).get("request_id")) else line


class _Json(logging.Formatter):
    """JSON objects, one a line: time (UTC), level, logger, message, request_id and exception if any, and `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        written = time.strftime(f"%Y-%m-%dT%H:%M:%S.{int(record.msecs):03d}Z", time.gmtime(record.created))
        line = {"time": written, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if identifier := request.get({}).get("request_id"):
            line["request_id"] = identifier
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, "fields", {}), ensure_ascii=False)


def set_up(level: str, style: Literal["text", "json"], secrets: Iterable[str] = ()) -> None:
    """Send every logger's lines of `level` ("info", "WARNING", ...) and above to stderr, without `secrets`, and warn of
    those that are too short to be redacted."""
    keys = set(secrets)
    long = {key for key in keys if len(key) >= MIN_KEY_LENGTH}
    ways = str, lambda key: quote(key, safe="/:,"), lambda key: json.dumps(key, ensure_ascii=False)[1:-1]
    spelt = {spell(key) for key in long for spell in ways}
    longest_first = sorted(map(re.escape, spelt), key=len, reverse=True)
    secret = re.compile("|".join([*longest_first, r"(?i:(?:(?<=bearer )|(?<=bearer%20))[^\s\"']+)"]))
    is_over_bar = style == "text" and sys.stderr.isatty()
    over_bar = "\r\x1b[2K" if is_over_bar else ""  # a line takes the place of a progress bar, which moves down
    text = _Text("%(asctime)s %(levelname)s %(name)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S%z")
    formatter = _Json() if style == "json" else text
    handler = logging.StreamHandler()
    handler.format = lambda record: over_bar + _printable(secret.sub("[redacted]", formatter.format(record)))  # type: ignore[method-assign]
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # INFO lines of uvicorn, asyncio and httpx repeat ours.
    for name in ("uvicorn.error", "asyncio", "httpx"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    if num_short := len(keys - long):
        logging.getLogger(__name__).warning(
            "keys with fewer than %d characters (%d of %d) can be guessed, and are not redacted in this log: "
            "`openssl rand -hex 16` makes a better one",
            *(MIN_KEY_LENGTH, num_short, len(keys)),
        )


def _printable(text: str) -> str:
    """Return text with JSON's escapes for characters that a terminal obeys or a reader cannot see.

    Python's `isprintable` knows them: C0 and C1 controls, line separators, marks that turn the writing's direction.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
