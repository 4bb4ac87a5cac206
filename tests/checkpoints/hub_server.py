"""A stand-in for the Hugging Face hub and for a server of plain files, on this machine."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Server(ThreadingHTTPServer):
    """`files` by path: /owner/name/FILE is a file of a repository at every revision but "nowhere"; others are plain files."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}  # instead of the SHA-256
        self.redirects: dict[str, str] = {}
        self.headers: dict[str, dict[str, str]] = {}  # additional ones, by path
        self.requests: list[tuple[str, str, str | None, str | None]] = []  # method, path, Range, Authorization
        self.token: str | None = None  # which uploads need
        self.refusal: int | None = None  # the status of all uploads
        self.objects: dict[str, bytes] = {}  # uploaded large files by SHA-256
        self.private: dict[str, bool] = {}  # created repositories
        self.stop_after: int | None = None  # bytes of the next large answer, after which the connection is closed
        self.address = f"http://127.0.0.1:{self.server_port}"

    def paths(self, method="GET"):
        return [path for kind, path, *_ in self.requests if kind == method]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        self.server.requests.append((self.command, self.path, self.headers["Range"], self.headers["Authorization"]))
        repository = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/tree/main\?.*)?", self.path)
        if repository and repository[1] in self.server.private:
            self.describe(repository[1], listed=bool(repository[2]))
            return
        if self.path in self.server.redirects:
            self.reply(302, {"Location": self.server.redirects[self.path]})
            return
        hub = re.fullmatch(r"(/[^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path)
        path = f"{hub[1]}/{hub[3]}" if hub else self.path
        if path not in self.server.files:
            known = hub and any(file.startswith(f"{hub[1]}/") for file in self.server.files)
            code = {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"} if hub else {}
            self.reply(404, code | {"X-Repo-Commit": COMMIT})
            return
        if hub and hub[2] == "nowhere":
            self.reply(404, {"X-Error-Code": "RevisionNotFound"})
            return
        data = self.server.files[path]
        tag = f'"{self.server.etags.get(path, hashlib.sha256(data).hexdigest())}"'
        headers = {"ETag": tag, **({"X-Repo-Commit": COMMIT} if hub else {})} | self.server.headers.get(path, {})
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        start = int(wanted[1]) if wanted and self.headers["If-Range"] in (None, tag) else 0
        if start >= len(data) > 0:
            self.reply(416, {})
            return
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.send_response(206 if start else 200)
        for name, value in ({"Content-Length": str(len(data) - start)} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            stop, self.server.stop_after = (self.server.stop_after, None) if len(data) > 1000 else (None, self.server.stop_after)
            self.wfile.write(data[start:] if stop is None else data[start : start + stop])
            if stop is not None:
                self.close_connection = True

    def describe(self, name, listed):
        """A created repository: its files, or whether it is private."""
        start = f"/{name}/"
        files = [
            {"type": "file", "path": path.removeprefix(start), "oid": COMMIT, "size": len(content)}
            for path, content in self.server.files.items()
            if path.startswith(start)
        ]
        self.reply_json(files if listed else {"id": name, "private": self.server.private[name]})

    def do_POST(self):
        """Uploads: create a repository, say how files are sent, tell where large ones go, commit."""
        self.server.requests.append((self.command, self.path, None, self.headers["Authorization"]))
        content = self.rfile.read(int(self.headers["Content-Length"] or 0))
        allowed = self.headers["Authorization"] == f"Bearer {self.server.token}"
        if self.server.refusal or not allowed:
            self.reply_json({"error": "refused"}, self.server.refusal or 401)
        elif self.path == "/api/repos/create":
            requested = json.loads(content)
            name = f"{requested['organization']}/{requested['name']}"
            exists = name in self.server.private  # then it keeps its visibility
            self.server.private.setdefault(name, requested.get("visibility") == "private")
            self.reply_json({"url": f"{self.server.address}/{name}"}, 409 if exists else 200)
        elif self.path == "/api/validate-yaml":
            header = yaml.safe_load(json.loads(content)["content"].split("---")[1])
            self.reply_json({"errors": [] if header["library_name"] == "vitrail" else [{"message": "wrong"}], "warnings": []})
        elif "/preupload/" in self.path:
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(content)["files"]
            ]
            self.reply_json({"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                each | {"actions": {"upload": {"href": f"{self.server.address}/upload/{each['oid']}"}}}
                for each in json.loads(content)["objects"]
            ]
            self.reply_json({"transfer": "basic", "objects": objects})
        else:
            repository = re.fullmatch(r"/api/models/(.+/.+)/commit/main", self.path)[1]
            for line in map(json.loads, content.splitlines()):
                file = line["value"]
                if line["key"] == "file":
                    self.server.files[f"/{repository}/{file['path']}"] = base64.b64decode(file["content"])
                elif line["key"] == "lfsFile":
                    self.server.files[f"/{repository}/{file['path']}"] = self.server.objects[file["oid"]]
                elif line["key"] == "deletedFile":
                    del self.server.files[f"/{repository}/{file['path']}"]
            self.reply_json({"commitUrl": f"{self.server.address}/{repository}/commit/{COMMIT}", "commitOid": COMMIT})

    def do_PUT(self):
        self.server.requests.append((self.command, self.path, None, self.headers["Authorization"]))
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == f"/upload/{hashlib.sha256(content).hexdigest()}"
        self.server.objects[self.path.rpartition("/")[2]] = content
        self.reply(200, {})

    def reply_json(self, content, code=200):
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def reply(self, code, headers):
        self.send_response(code)
        for name, value in ({"Content-Length": "0"} | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_):
        pass


@contextmanager
def running():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
