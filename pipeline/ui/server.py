"""The server of a store's pages: on the loopback interface, for reading only.

A page of another site could resolve its own name to this machine (DNS rebinding); so only requests for a loopback name
are answered.
"""

import re
import socket
from collections.abc import Callable
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from nxpipe.pipeline.ui.site import StoreSite

_LOOPBACK: Final = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",  # each page has a stricter policy with digests
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def application(site: StoreSite) -> Starlette:
    def page(request: Request) -> Response:
        if not _LOOPBACK.fullmatch(request.headers.get("host", "")):
            return PlainTextResponse("this server answers for localhost only", 421, _HEADERS)
        path = request.path_params["path"]
        if path == "" or path.endswith("/"):
            return (
                RedirectResponse(f"/{path}index.html", 307, _HEADERS) if site.page(f"{path}index.html") else _absent()
            )
        found = site.page(path)
        return Response(found, media_type="text/html", headers=_HEADERS) if found is not None else _absent()

    return Starlette(routes=[Route("/{path:path}", page, methods=["GET"])])


def _absent() -> Response:
    return PlainTextResponse("there is no such page", 404, _HEADERS)


class PageServer(uvicorn.Server):
    """A server on the loopback interface that ends at a signal."""

    def __init__(self, site: StoreSite, port: int, announce: Callable[[str], None]) -> None:
        super().__init__(
            uvicorn.Config(application(site), "127.0.0.1", port, log_level="warning", access_log=False,
                           server_header=False, timeout_graceful_shutdown=1)
        )  # fmt: skip
        self._announce_url = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for listening in server.sockets:
                self._announce_url(f"http://127.0.0.1:{listening.getsockname()[1]}/")
