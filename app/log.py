"""Log lines of the API process, as text for people or JSON for machines.

A line written while a request is served carries that request's id. Prompts and completions are never logged.
"""

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Literal

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The X-Request-Id of the request that the current task serves."""

LogFormat = Literal["text", "json"]


class _WithRequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00 INFO app.api.server message [request id]`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        identifier = getattr(record, "request_id", None)
        return f"{line} [{identifier}]" if identifier else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, message, and request_id and exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if identifier := getattr(record, "request_id", None):
            line["request_id"] = identifier
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up(level: str, style: LogFormat) -> None:
    """Send every logger's lines of `level` ("info", "WARNING", ...) and above to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_WithRequestId())
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # uvicorn's and asyncio's own INFO lines tell an operator nothing that ours do not.
    for name in ("uvicorn.error", "asyncio", "httpx"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
