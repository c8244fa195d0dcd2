"""Two pages: a chat that shows DFlash at work at `/`, and the text of openapi.json at `/docs`."""

from functools import cache
from pathlib import Path

from fastapi import APIRouter, Response

router = APIRouter()

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'"
)


@router.get("/", include_in_schema=False)
async def chat() -> Response:
    return _page("index.html")


@router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    return _page("docs.html")


def _page(name: str) -> Response:
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    return Response(_html(name), media_type="text/html; charset=utf-8", headers=headers)


@cache
def _html(name: str) -> bytes:
    return (Path(__file__).parent / "static" / name).read_bytes()
