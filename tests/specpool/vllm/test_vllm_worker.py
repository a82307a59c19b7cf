"""`RemoteDraft` with a real draft worker, TLS and a token, and a stand-in for vLLM."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from certificates import OTHER_TOKEN, TOKEN, Authority
from other_tokenizers import permute_vocabulary
from pair_service import serving_draft
from tiny_models import load_engine
from vllm_stand_in import StandIn, always_draft, vllm_config

from coordinator.workers import link
from specpool.drafting.ledger import Ledger
from specpool.engine.cache.spans import Span
from specpool.testing import FakeTarget
from specpool.vllm import RemoteDraft
from specpool.worker.host import WorkerHost

PATIENCE_SECONDS = 60


class ModelTarget(FakeTarget):
    """A target that decodes greedily with a model."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._engine = load_engine(folder, exact=False)

    def choose(self, context: Sequence[int]) -> int:
        return int(self._engine.forward([Span(0, 0, list(context), 1)]).argmax())

    def continuation(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):  # like the stand-in, ignore the end of sequence
            tokens.append(self.choose(tokens))
        return tokens[len(prompt) :]


@dataclass
class Secured:
    """A draft worker, and the environment variables of an authorized client."""

    address: str
    host: WorkerHost
    variables: dict[str, Path]


@asynccontextmanager
async def secured_draft(draft: Path, folder: Path) -> AsyncIterator[Secured]:
    """A draft worker that requires client certificates and a token."""
    ca = Authority(folder)
    server, client = ca.issue("server"), ca.issue("client")
    tokens, token = folder / "tokens", folder / "token"
    tokens.write_text(f"alice {TOKEN}\n")
    token.write_text(TOKEN)
    settings = {**server.options, "tls_ca": ca.path, "api_tokens": tokens, "threads": 1, "port": 0}
    async with serving_draft(draft, **settings) as (address, host):
        variables = {"TLS_CA": ca.path, "TOKEN_FILE": token, "TLS_CERT": client.cert, "TLS_KEY": client.key}
        yield Secured(address, host, {f"SPECPOOL_{name}": path for name, path in variables.items()})


@pytest.mark.slow
async def test_drafts_of_a_real_draft_worker_over_tls(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "PROBE_SECONDS", 0.05)
    monkeypatch.setattr("vllm_stand_in.STEP_SECONDS", 0.05)  # drafts must pay on a busy machine
    monkeypatch.setattr(Ledger, "is_plain_due", lambda *_: False)
    monkeypatch.setattr(Ledger, "has_free_trial", lambda *_: False)
    target, draft = tiny_pair
    async with secured_draft(draft, tmp_path) as worker:
        monkeypatch.setenv("SPECPOOL_DRAFT_ADDRESS", worker.address)
        await _check_refusals(target, worker, tmp_path, monkeypatch)
        remote = await asyncio.to_thread(RemoteDraft, vllm_config(str(target)))
        await _check_drafts(StandIn(remote, ModelTarget(target)), worker.host)
        await asyncio.to_thread(remote.close)
        assert await worker.host.run(lambda backend: backend.info().slots_in_use) == 0


@pytest.mark.slow
async def test_drafts_of_a_model_with_another_tokenizer(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch)
    target = tiny_pair[0]
    async with serving_draft(permute_vocabulary(target, tmp_path / "draft"), threads=1, port=0) as (address, host):
        monkeypatch.setenv("SPECPOOL_DRAFT_ADDRESS", address)
        remote = await asyncio.to_thread(RemoteDraft, vllm_config(str(target)))
        await _check_drafts(StandIn(remote, ModelTarget(target)), host)
        await asyncio.to_thread(remote.close)


async def _check_drafts(vllm: StandIn, host: WorkerHost) -> None:
    """Assert that tokens are exact and drafts are accepted, even after the worker loses its caches."""
    rows = [vllm.add([i, 30, 40 + i, 7]) for i in range(3)]
    await _until(vllm, lambda: all(row.accepted > 3 for row in rows))
    await host.run(lambda backend: backend.expire(math.inf, 0.0))  # like a restart
    accepted = [row.accepted for row in rows]
    await _until(vllm, lambda: all(row.accepted > one + 3 for row, one in zip(rows, accepted, strict=True)))
    for row in rows:
        assert row.output == vllm.target.continuation(row.tokens[: row.prompt_length], len(row.output))


async def _check_refusals(target: Path, worker: Secured, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert failures without TLS and with a wrong token; then set valid variables."""
    monkeypatch.setenv("SPECPOOL_DRAFT_START_SECONDS", "0.3")

    async def refused() -> str:
        with pytest.raises(ValueError, match=f"cannot use the draft worker at {worker.address}: ") as caught:
            await asyncio.to_thread(RemoteDraft, vllm_config(str(target)))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "UNAVAILABLE" in await refused()
    for name, path in worker.variables.items():
        monkeypatch.setenv(name, str(path))
    (folder / "other").write_text(OTHER_TOKEN)
    monkeypatch.setenv("SPECPOOL_TOKEN_FILE", str(folder / "other"))
    monkeypatch.setenv("SPECPOOL_DRAFT_START_SECONDS", "1")
    assert "UNAUTHENTICATED" in await refused()
    monkeypatch.setenv("SPECPOOL_TOKEN_FILE", str(worker.variables["SPECPOOL_TOKEN_FILE"]))
    monkeypatch.delenv("SPECPOOL_DRAFT_START_SECONDS")


async def _until(vllm: StandIn, condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.to_thread(vllm.step)
