"""A Hugging Face hub on this machine: the few addresses that `huggingface_hub.snapshot_download` asks, from folders."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"  # of every repository, and its main


@contextmanager
def serving(
    folders: Mapping[str, Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[tuple[str, str]]]:
    """The hub, for as long as the block runs, with an empty cache in `home`; yields (method, path) of each request.

    folders: repository -> its files.
    """
    from huggingface_hub import constants

    asked: list[tuple[str, str]] = []

    class Answers(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            asked.append((self.command, path))
            parts = path.removeprefix("api/models/").split("/")
            folder = folders.get("/".join(parts[:2]))
            if folder is None:
                self.say(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif parts[3] not in (COMMIT, "main"):
                self.say(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif parts[2] == "revision":
                self.say_json({"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": []})
            elif parts[2] == "tree":
                files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
                self.say_json(
                    [
                        {"type": "file", "path": str(file.relative_to(folder)), "size": file.stat().st_size,
                         "oid": hashlib.sha1(file.read_bytes()).hexdigest()}
                        for file in files
                    ]
                )  # fmt: skip
            else:
                raw = folder.joinpath(*parts[4:]).read_bytes()
                self.say(200, raw, {"ETag": f'"{hashlib.sha1(raw).hexdigest()}"', "X-Repo-Commit": COMMIT})

        def say_json(self, value: Any) -> None:
            self.say(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def say(self, code: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with monkeypatch.context() as patched:
        address = f"http://127.0.0.1:{server.server_port}"
        patched.setattr(constants, "HF_HUB_OFFLINE", False)
        patched.setattr(constants, "ENDPOINT", address)
        patched.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
        patched.setattr(constants, "HF_HUB_CACHE", str(home))
        try:
            yield asked
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
