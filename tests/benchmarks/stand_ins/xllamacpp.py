"""A stand-in for xllamacpp: a server that answers with zeros and records its requests in a file beside its model.

It answers only once all of its slots have a request. It cannot load a model file that contains "broken".
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__version__ = "stand-in"


class CommonParams(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace())


class Server:
    def __init__(self, params: CommonParams) -> None:
        model = Path(params.model.path)
        if "broken" in model.read_text():
            raise RuntimeError("Failed to init server")
        print("a library may print")
        slots, all_busy = params.n_parallel, threading.Barrier(params.n_parallel)
        with model.with_suffix(".seen").open("a") as seen:
            settings = {"cpuparams": vars(params.cpuparams), "cpuparams_batch": vars(params.cpuparams_batch)}
            print(json.dumps({**vars(params), **settings, "model": str(model)}), file=seen)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                all_busy.wait(10)
                with model.with_suffix(".seen").open("a") as seen:
                    print(json.dumps(request), file=seen)
                answer = self.answer(request)
                body = json.dumps(answer)
                if request.get("stream"):
                    body = "".join(f"data: {json.dumps({'tokens': [token]})}\n\n" for token in answer["tokens"])
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def answer(self, request: dict[str, Any]) -> dict[str, Any]:
                if len(request["prompt"]) + request["n_predict"] > params.n_ctx // slots:
                    return {"error": {"message": "exceeds the available context size"}}
                return {"tokens": [0] * request["n_predict"]}

            def log_message(self, *_: object) -> None:
                pass

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{http.server_port}"
