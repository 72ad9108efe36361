"""The files of the page at `/`, as they lie in the folder `page`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from starlette.responses import Response

from infer.serve.errors import ApiError

PAGE_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("state", "wire", "chat", "race", "figures", "tree", "page")
PAGE_FILES = {
    "/": "index.html",
    **{f"/{name}": name for name in ("page.css", "icon.svg", *(f"{script}.js" for script in _SCRIPTS))},
}
"""What is served at which path."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)


def page_file(name: str) -> Callable[[], Response]:
    def read() -> Response:
        path = PAGE_FOLDER / name
        kind = _TYPES[path.suffix]
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise ApiError(f"there is no {name} in this installation", status=404) from None
        headers = {"content-type": kind, "content-security-policy": _POLICY, "cache-control": "no-cache"}
        return Response(content, headers=headers)

    return read
