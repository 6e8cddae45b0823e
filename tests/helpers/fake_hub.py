"""A small Hugging Face Hub on 127.0.0.1: repositories with commits behind the Hub's HTTP interface."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

TOKEN = "hf_" + "t" * 30
# Status, content, headers.
Answer = tuple[int, bytes, dict[str, str]]


class Hub:
    """Repositories by `models/owner/name` or `datasets/owner/name`; `asked` lists every request."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.asked.append(f"{self.command} {self.path}")
                path, _, query = self.path.partition("?")
                self.answer(*hub.read(unquote(path), "recursive=true" in query.lower()))

            do_HEAD = do_GET

            def do_POST(self) -> None:
                hub.asked.append(f"{self.command} {self.path}")
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                path = unquote(self.path.partition("?")[0])
                self.answer(*hub.write(path, body, self.headers.get("Authorization")))

            def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def commit(self, repository: str, files: dict[str, bytes]) -> str:
        """Add files to a repository's last commit; return the hash of the new commit."""
        commits = self.repositories.setdefault(repository, {})
        tree = {**(list(commits.values())[-1] if commits else {}), **files}
        content = [[path, hashlib.sha1(content).hexdigest()] for path, content in sorted(tree.items())]
        name = hashlib.sha1(json.dumps([content, len(commits)]).encode()).hexdigest()
        commits[name] = tree
        return name

    def add_folder(self, repository: str, folder: Path) -> str:
        return self.commit(repository, {f.name: f.read_bytes() for f in folder.iterdir() if f.is_file()})

    def read(self, path: str, recursive: bool = False) -> Answer:
        page = r"/api/((?:models|datasets)/[^/]+/[^/]+)(?:/(revision|tree)/([^/]+)/?(.*))?"
        if match := re.fullmatch(page, path):
            repository, view, revision, folder = match.groups()
            commit = self.find(repository, revision)
            if commit is None and (revision or repository not in self.repositories):
                return self.missing(repository)
            files = self.repositories[repository][commit] if commit else {}
            if view == "tree":
                return self.listing(files, f"{folder}/" if folder else "", recursive)
            siblings = [{"rfilename": file} for file in files]
            name = repository.partition("/")[2]
            return json_answer({"id": name, "sha": commit, "siblings": siblings, "tags": []})
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repository = (match[1] or "models/") + match[2]
            if (commit := self.find(repository, match[3])) is None:
                return self.missing(repository)
            if (content := self.repositories[repository][commit].get(match[4])) is None:
                return 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            return 200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
        return 404, b"", {}

    def listing(self, files: dict[str, bytes], folder: str, recursive: bool) -> Answer:
        inside = [p for p in files if p.startswith(folder)]
        if not inside:
            return 404, b'{"error": "not found"}', {"X-Error-Code": "EntryNotFound"}
        here = [p for p in inside if recursive or "/" not in p[len(folder) :]]
        deeper = {folder + p[len(folder) :].partition("/")[0] for p in inside if p not in here}
        folders = [{"type": "directory", "path": p, "size": 0, "oid": "0" * 40} for p in sorted(deeper)]
        return json_answer(folders + [entry(p, files[p]) for p in here])

    def write(self, path: str, body: bytes, authorization: str | None) -> Answer:
        if authorization != f"Bearer {TOKEN}":
            return 401, b'{"error": "Invalid credentials"}', {}
        if path == "/api/repos/create":
            settings = json.loads(body)
            repository = f"models/{settings['organization']}/{settings['name']}"
            place = {"url": f"{self.url}/{settings['organization']}/{settings['name']}"}
            self.repositories[repository] = {}
            return json_answer(place)
        if path == "/api/validate-yaml":
            return json_answer({"errors": [], "warnings": []})
        if path.endswith("/preupload/main"):
            taken = {"uploadMode": "regular", "shouldIgnore": False}
            return json_answer({"files": [taken | {"path": f["path"]} for f in json.loads(body)["files"]]})
        if match := re.fullmatch(r"/api/(models/[^/]+/[^/]+)/commit/main", path):
            lines = [json.loads(line) for line in body.decode().splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            commit = self.commit(match[1], {f["path"]: base64.b64decode(f["content"]) for f in files})
            place = f"{self.url}/{match[1]}/commit/{commit}"
            return json_answer({"success": True, "commitOid": commit, "commitUrl": place})
        return 404, b"", {}

    def find(self, repository: str, revision: str | None) -> str | None:
        commits = self.repositories.get(repository) or {}
        if revision in (None, "main"):
            return next(reversed(commits), None)
        return revision if revision in commits else None

    def missing(self, repository: str) -> Answer:
        code = "RevisionNotFound" if self.repositories.get(repository) else "RepoNotFound"
        return 404, b'{"error": "not found"}', {"X-Error-Code": code}


def entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def json_answer(value: object) -> Answer:
    return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}
