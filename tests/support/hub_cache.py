"""The Hugging Face Hub without a network: its cache on disk as huggingface_hub lays it out, and a small server."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def fill(cache: Path, name: str, files: Path, *, kind: str = "model", revision: str = "main", commit: str = "") -> Path:
    """Put the files of a folder into a cache, as a repository's only commit; return the snapshot's folder."""
    commit = commit or hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()
    repository = cache / f"{kind}s--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for file in sorted(path for path in files.rglob("*") if path.is_file()):
        content = file.read_bytes()
        blob = repository / "blobs" / hashlib.sha1(content).hexdigest()
        link = snapshot / file.relative_to(files)
        for each in (blob, link):
            each.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.symlink_to(blob)
    ref = repository / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit)
    return snapshot


@contextmanager
def cache_of(cache: Path, offline: bool = True) -> Iterator[None]:
    """Let huggingface_hub in this process use a cache, and no network."""
    from huggingface_hub import constants

    before = constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE
    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = str(cache), offline
    try:
        yield
    finally:
        constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = before


class HubServer:
    """Server with the calls of the Hub that a download makes, for one repository at one commit.

    Attributes:
        address: HF_ENDPOINT.
        commit: the commit of the branch ``main``.
        sent: file -> number of times that its content was sent.
    """

    def __init__(self, name: str, files: Path, kind: str = "model") -> None:
        self.commit = "a" * 40
        self.sent: Counter[str] = Counter()
        contents = {str(f.relative_to(files)): f.read_bytes() for f in files.rglob("*") if f.is_file()}
        prefix, api = f"{'datasets/' * (kind == 'dataset')}{name}", f"/api/{kind}s/{name}"
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(False)

            def do_GET(self) -> None:
                self.answer(True)

            def answer(self, body: bool) -> None:
                path = self.path.partition("?")[0]
                file = path.removeprefix(f"/{prefix}/resolve/{server.commit}/")
                if path in (f"{api}/revision/main", f"{api}/revision/{server.commit}", api):
                    self.reply(json.dumps({"id": name, "sha": server.commit, "siblings": []}).encode())
                elif path.startswith(f"{api}/revision/"):
                    self.fail(404, "RevisionNotFound")
                elif path == f"{api}/tree/{server.commit}":
                    tree = [
                        {"type": "file", "path": each, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                        for each, content in contents.items()
                    ]
                    self.reply(json.dumps(tree).encode())
                elif file in contents:
                    etag = hashlib.sha1(contents[file]).hexdigest()
                    if body:
                        server.sent[file] += 1
                    self.reply(contents[file], body, ETag=f'"{etag}"', **{"X-Repo-Commit": server.commit})
                elif path.endswith("/given/few") or "/given/few/" in path:
                    self.fail(403, "GatedRepo")
                else:
                    self.fail(404, "RepoNotFound")

            def reply(self, content: bytes, body: bool = True, **headers: str) -> None:
                self.send_response(200)
                for key, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                if body:
                    self.wfile.write(content)

            def fail(self, status: int, code: str) -> None:
                self.send_response(status)
                self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()
