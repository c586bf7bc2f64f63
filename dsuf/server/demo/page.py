"""GET /demo: one page that streams an answer with its speed and, when the answer is a page, runs it.

Answers are text in the page and run only in a sandboxed frame of an origin of its own. A frame made from text inherits
this page's policy, so inline scripts must be allowed here; nothing from another server is.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'unsafe-inline'",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "font-src data:",
        "media-src data:",
        "connect-src 'self'",
        "frame-src 'none'",  # text frames are no sources; a frame cannot leave for another address either
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
_PAGE = files(__package__).joinpath("index.html").read_bytes()


async def demo(request: Request) -> Response:
    """The page; it needs no API key, the calls it makes do."""
    return Response(_PAGE, headers=_HEADERS, media_type="text/html")
