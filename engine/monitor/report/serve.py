"""Server of a report page on this machine alone, for a run that goes on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ....base.errors import ConfigError
from ..files import HISTOGRAMS, METRICS, RUN, TIMELINE
from .write import report_page

_ADDRESS = "127.0.0.1"


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error of a request, unless the browser has left."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def report_server(folders: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """Return a server of the report page of runs; ``serve_forever()`` answers requests.

    It listens on the loopback address, so that no other machine reaches it, and answers no request for another host's
    name. The page is made anew for each request, and asks every 2 s if the runs' files have changed.

    Args:
        folders: folders of the runs.
        port: port; 0: a free one.

    Raises:
        ConfigError: a folder holds no run, the runs cannot be compared, or the port is in use.
    """
    report_page(folders)

    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0  # of a connection that asks for nothing, which has a thread

        def do_GET(self) -> None:
            names = {f"{name}:{self.server.server_port}" for name in (_ADDRESS, "localhost")}  # type: ignore[attr-defined]
            if self.headers.get("Host") not in names:  # a page of another site that has this address for its name
                self.send_error(403, "this server is for this machine")
            elif self.path == "/version":
                self._send(_version(folders), "text/plain")
            elif self.path == "/":
                try:
                    self._send(report_page(folders, live=True), "text/html")
                except ConfigError as error:
                    self.send_error(404, explain=str(error))
            else:
                self.send_error(404)

        def _send(self, text: str, kind: str) -> None:
            content = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Print no line for each request."""

    try:
        return _Server((_ADDRESS, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"Port {port} of {_ADDRESS} cannot be used: {error.strerror}. Give another --port."
        ) from error


def _version(folders: Sequence[Path]) -> str:
    """Return a text that changes when a file of the runs does."""
    files = (folder / name for folder in folders for name in (METRICS, RUN, TIMELINE, HISTOGRAMS))
    return " ".join(
        f"{status.st_mtime_ns}:{status.st_size}" for file in files if file.exists() for status in [file.stat()]
    )
