"""A model hub over HTTP with one model."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = 40 * "a"


@contextmanager
def model_hub(repository: str, folder: Path) -> Iterator[str]:
    """Serve this folder as a repository; yield the endpoint."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            prefix, api = f"/{repository}/resolve/", f"/api/models/{repository}"
            if self.path.startswith(f"{api}/tree/"):
                files = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": COMMIT}
                    for file in folder.iterdir()
                ]
                is_root = self.path.count("/") == api.count("/") + 2
                return self._reply(json.dumps(files).encode()) if is_root else self._reply(b"", 404)
            if self.path.startswith(api):
                names = [{"rfilename": file.name} for file in folder.iterdir()]
                return self._reply(json.dumps({"id": repository, "sha": COMMIT, "siblings": names}).encode())
            file = folder / self.path.rpartition("/")[2]
            if not self.path.startswith(prefix) or not file.is_file():
                return self._reply(b"", 404)
            return self._reply(file.read_bytes())

        do_HEAD = do_GET

        def _reply(self, content: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hash(content) & 0xFFFFFFFF:x}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if status == 404:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
