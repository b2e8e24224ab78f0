"""A server on this machine that answers `huggingface_hub` as the hub does."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_account_with_access"
OTHER_TOKEN = "hf_of_another_account"
LARGE = (".safetensors", ".bin", ".pt")
"""Kept in large-file storage: answered with a redirect and the hash of the content."""


@dataclass
class Repo:
    """A model; `revisions` names commits, whose files are `commits`."""

    commits: dict[str, dict[str, bytes]]
    revisions: dict[str, str] = field(default_factory=dict)
    is_gated: bool = False
    is_private: bool = False

    def commit_of(self, revision: str) -> str | None:
        commit = self.revisions.get(revision, revision)
        return commit if commit in self.commits else None


@dataclass
class FakeHub:
    """What the server has, and what it was asked."""

    url: str
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path, in the order of their arrival."""
    broken_status: int | None = None
    """Answers everything with it."""

    def add(self, name: str, files: dict[str, bytes], revision: str = "main") -> Repo:
        ids = sorted(name + _blob_id(content) for name, content in files.items())
        commit = hashlib.sha1("".join(ids).encode()).hexdigest()
        repo = self.repos.setdefault(name, Repo({}))
        repo.commits[commit] = files
        repo.revisions[revision] = commit
        return repo

    def wanted(self) -> set[str]:
        """Files of repositories that were asked for."""
        paths = [path for _, path in self.requests if "/resolve/" in path]
        return {path.split("/resolve/")[1].split("/", 1)[1] for path in paths}


@contextlib.contextmanager
def running_hub() -> Iterator[FakeHub]:
    """The server, for the time of the `with`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}")
    _Handler.hubs[server.server_address[1]] = hub
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hubs: ClassVar[dict[int, FakeHub]] = {}

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        hub = self.hubs[self.server.server_address[1]]
        path = unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path))
        if hub.broken_status is not None:
            self._send(hub.broken_status, b"")
        elif match := re.fullmatch(r"/cdn/([0-9a-f]{64})", path):
            self._send_content(hub, match[1])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._describe(hub, match[1], match[2] or "revision", match[3] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path):
            self._resolve(hub, *match.groups())
        else:
            self._send(404, b"")

    def _repo(self, hub: FakeHub, name: str, revision: str) -> tuple[Repo, str] | None:
        repo = hub.repos.get(name)
        sent = self.headers.get("authorization")
        if sent not in (None, f"Bearer {TOKEN}", f"Bearer {OTHER_TOKEN}"):
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif repo is None or (repo.is_private and sent is None):
            self._refuse(404 if sent else 401, "RepoNotFound", "Repository not found")
        elif (commit := repo.commit_of(revision)) is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repo, commit
        return None

    def _describe(self, hub: FakeHub, name: str, what: str, revision: str) -> None:
        found = self._repo(hub, name, revision)
        if found is None:
            return
        repo, commit = found
        files = repo.commits[commit]
        if what == "tree":
            self._send(200, json.dumps([_entry(*item) for item in files.items()]).encode())
            return
        siblings = [{"rfilename": file} for file in files]
        about = {"_id": "1", "id": name, "modelId": name, "sha": commit, "siblings": siblings}
        more = {"private": False, "gated": "manual" if repo.is_gated else False, "tags": []}
        self._send(200, json.dumps({**about, **more}).encode())

    def _resolve(self, hub: FakeHub, name: str, revision: str, file: str) -> None:
        found = self._repo(hub, name, revision)
        if found is None:
            return
        repo, commit = found
        sent = self.headers.get("authorization")
        if repo.is_gated and sent != f"Bearer {TOKEN}":
            status = 403 if sent else 401
            self._refuse(status, "GatedRepo", f"Access to model {name} is restricted")
        elif (content := repo.commits[commit].get(file)) is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            head = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            if file.endswith(LARGE):
                digest = hashlib.sha256(content).hexdigest()
                head |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
                other_host = hub.url.replace("127.0.0.1", "localhost")
                self._send(302, b"", {**head, "Location": f"{other_host}/cdn/{digest}"})
            else:
                self._send(200, content, {**head, "ETag": f'"{_blob_id(content)}"'})

    def _send_content(self, hub: FakeHub, digest: str) -> None:
        for repo in hub.repos.values():
            for files in repo.commits.values():
                for content in files.values():
                    if hashlib.sha256(content).hexdigest() == digest:
                        self._send(200, content, {"ETag": f'"{digest}"'})
                        return
        self._send(404, b"")

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, body: bytes, head: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(head or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _blob_id(content: bytes) -> str:
    """As git names it."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, object]:
    entry = {"type": "file", "path": path, "size": len(content), "oid": _blob_id(content)}
    if path.endswith(LARGE):
        digest = hashlib.sha256(content).hexdigest()
        return {**entry, "lfs": {"oid": digest, "size": len(content), "pointerSize": 134}}
    return entry
