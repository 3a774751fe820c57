"""Serves the static files: a page at `/`, one at `/docs`, and what they load from `/web/`.

Every address in the files is relative, so that they work behind a proxy that adds a prefix; nothing is
loaded from another host, and the policy below enforces this in browsers whatever a model writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(__file__).parent / "static"
# Images are only those that a user chooses, and drawings, from memory; styles and scripts are files only.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",  # of formulas
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "frame-src 'self'",  # of the one below
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
# The frame that draws diagrams writes styles, as its library does, but is an origin of its own: without a
# network, storage or access to the page around it.
_FRAME = "diagram.html"
_FRAME_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'unsafe-inline'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'self'",
        "sandbox allow-scripts",
    )
)
HEADERS = {
    # Browsers revalidate each time, and so never mix old and new files after an update.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    # No referrer to other hosts. With no-referrer some browsers hide the origin from this one as well.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class Assets(StaticFiles):
    """Starlette's files, with our headers also on 304."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Returns one file. Raises starlette's HTTPException 404 or 405."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        if path == _FRAME:
            response.headers["Content-Security-Policy"] = _FRAME_POLICY
        return response


def page_router(with_chat: bool) -> APIRouter:
    """Returns routes for `/docs`, and for `/` if the settings enable a page there."""
    router = APIRouter(include_in_schema=False)
    assets = Assets(directory=STATIC)

    def add(path: str, name: str) -> None:
        async def page(request: Any) -> Response:
            return await assets.get_response(name, request.scope)

        router.add_route(path, page, methods=["GET", "HEAD"])

    add("/docs", "docs.html")
    if with_chat:
        add("/", "index.html")
    router.mount("/web", assets)
    return router
