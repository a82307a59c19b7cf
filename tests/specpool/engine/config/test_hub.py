"""Hub models are looked up with one request, which is not repeated if the hub cannot be reached."""

import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub.constants
import pytest

from specpool.engine.config import hub
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.preflight import InvalidOptionError, check_options, check_same_tokenizer

COMMIT = "0123456789" * 4
CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}


class Hub(BaseHTTPRequestHandler):
    """A hub with one model; errors are answered as huggingface.co does."""

    requests: list[str]

    def do_HEAD(self) -> None:
        self.requests.append(self.path)
        content = self.content()
        code = {"/gated/": "GatedRepo", "/absent/": "RepoNotFound", "/resolve/none/": "RevisionNotFound"}
        error = next((name for part, name in code.items() if part in self.path), "")
        if "/broken/" in self.path:
            self.send_response(500)
        elif error:
            self.send_response(403 if error == "GatedRepo" else 404)
            self.send_header("X-Error-Code", error)
        elif not self.path.endswith("/config.json"):
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
        else:
            self.send_response(200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", '"abc"')
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.content())

    def content(self) -> bytes:
        return json.dumps(CONFIG).encode()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.file_download.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub.hub_config.cache_clear()
    yield
    hub.hub_config.cache_clear()


def connect(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    for name, value in (("ENDPOINT", f"http://{address}"), ("HUGGINGFACE_CO_URL_TEMPLATE", URL.format(address))):
        monkeypatch.setattr(huggingface_hub.constants, name, value)


URL = "http://{}/{{repo_id}}/resolve/{{revision}}/{{filename}}"


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Paths that the hub has been asked for."""
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OneHub", (Hub,), {"requests": asked}))
    connect(monkeypatch, f"127.0.0.1:{server.server_port}")
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a hub that does not listen."""
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"slept {seconds} s before another attempt"))
    connect(monkeypatch, "127.0.0.1:9")
    return "127.0.0.1:9"


def cached_model(folder: Path, name: str, **files: Any) -> None:
    """Put a model into the cache."""
    repository = folder / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot.mkdir(parents=True)
    for stem, content in files.items():
        (snapshot / f"{stem}.json").write_text(json.dumps(content))


def refusal(model: str, revision: str | None = None) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        hub.hub_config(model, revision)
    return str(caught.value)


def test_a_model_on_the_hub_is_checked_by_its_configuration(requests: list[str]) -> None:
    check_options(EngineOptions(model="some/model", max_model_len=64))
    with pytest.raises(InvalidOptionError, match=r"^max-model-len: 65 exceeds the 64 positions of some/model$"):
        check_options(EngineOptions(model="some/model", max_model_len=65))
    assert {path for path in requests if not path.startswith("/api/")} == {"/some/model/resolve/main/config.json"}


def test_models_that_the_hub_does_not_serve_are_refused_by_their_reason(requests: list[str]) -> None:
    assert "nor a public model at 127.0.0.1:" in refusal("absent/model")
    assert "is gated: accept its terms at 127.0.0.1:" in refusal("gated/model")
    assert refusal("some/model", "none").startswith("some/model has no revision none at 127.0.0.1:")
    assert len(requests) == 3
    assert refusal("a/b/c") == "a/b/c is neither a local file or folder nor a valid hub id"


def test_an_unreachable_hub_is_named_at_once(unreachable: str) -> None:
    message = refusal("some/model")
    assert message.startswith(f"some/model is neither a local file or folder nor cached, and {unreachable} cannot be")
    assert "refused" in message


def test_the_cached_copy_replaces_an_unreachable_hub(
    unreachable: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cached_model(tmp_path, "some/model", config=CONFIG)
    assert json.loads(hub.hub_config("some/model", None).read_text()) == CONFIG
    assert f"{unreachable} cannot be reached" in caplog.text
    assert "using the cached copy of some/model" in caplog.text
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert huggingface_hub.constants.is_offline_mode()
    assert "HF_HUB_OFFLINE forbids a download" in refusal("another/model")


def test_an_error_of_the_hub_is_quoted(requests: list[str]) -> None:
    assert "returned an error (" in refusal("broken/model")


def test_cached_tokenizers_are_compared(tmp_path: Path) -> None:
    for name, vocabulary in (("a/target", {"a": 0}), ("a/draft", {"a": 0}), ("a/other", {"b": 0})):
        cached_model(tmp_path, name, tokenizer={"model": {"vocab": vocabulary}, "name": name})
    target, draft, other, unknown = (EngineOptions(model=f"a/{name}") for name in ("target", "draft", "other", "none"))
    check_same_tokenizer(target, draft, "try it")
    check_same_tokenizer(target, unknown, "try it")
    with pytest.raises(InvalidOptionError, match=r"^draft: a/other uses a different tokenizer than a/target; try it$"):
        check_same_tokenizer(target, other, "try it")
