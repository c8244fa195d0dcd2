"""The page at `/`: chat with the model and see DFlash work."""

from functools import cache
from pathlib import Path

from fastapi import APIRouter, Response

router = APIRouter()

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'"
)


@router.head("/", include_in_schema=False)
@router.get("/", include_in_schema=False)
async def page() -> Response:
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    return Response(_html(), media_type="text/html; charset=utf-8", headers=headers)


@cache
def _html() -> bytes:
    return (Path(__file__).parent / "static" / "index.html").read_bytes()
