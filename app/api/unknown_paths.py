"""Advice for paths that are not served, because a wrong base_url is a common mistake."""

import re

_SERVED = ("/chat/completions", "/completions", "/responses", "/models")
_STORED = re.compile(r"/v1/responses/.+")
_NOT_SERVED = re.compile(r"/v1/responses/(input_tokens|compact)/?")


def advice(path: str, root_path: str) -> str:
    """Return a sentence on what to use instead of `path`, or ""."""
    path = path.removeprefix(root_path)
    if _NOT_SERVED.fullmatch(path):
        return "This server has no such endpoint."
    if _STORED.fullmatch(path):
        return "Nothing is stored here: send the whole conversation as `input` to POST /v1/responses."
    path = path.rstrip("/")
    if path.endswith("/messages"):
        return f"Anthropic's Messages API is not served. Use POST {root_path}/v1/chat/completions."
    served = next((end for end in _SERVED if path.endswith(end)), None)
    return f"Use {root_path}/v1{served}: the base_url of a client ends with {root_path}/v1." if served else ""
