"""Starts of vLLM for which `RemoteDraft` cannot draft end in one line that says why."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import RecordingDraft
from vllm_stand_in import save_tokenizer, vllm_config

from specpool.testing import FakeTarget
from specpool.vllm import RemoteDraft


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


async def refused(make: Callable[[], Any]) -> str:
    """The one line in which a start ends."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - callers check the text
        await asyncio.to_thread(make)
    assert "\n" not in str(caught.value)
    return str(caught.value)


async def test_another_tokenizer_is_refused(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = RecordingDraft(FakeTarget(), fingerprint="another")
    monkeypatch.setenv("SPECPOOL_DRAFT_ADDRESS", await draft.start())
    text = await refused(lambda: RemoteDraft(vllm_config(tokenizer)))
    assert "the draft fake has another tokenizer than the target served" in text
    await draft.stop()


async def test_an_unreachable_draft_worker_is_refused(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPOOL_DRAFT_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("SPECPOOL_DRAFT_START_SECONDS", "0.3")
    text = await refused(lambda: RemoteDraft(vllm_config(tokenizer)))
    assert text.startswith("the draft worker at 127.0.0.1:1 cannot be used: no answer in 0.3 s: UNAVAILABLE")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"async_scheduling": True}, "async_scheduling must be off"),
        ({"distributed_executor_backend": "external_launcher"}, "external_launcher is not supported"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1, not 0"),
    ],
)
async def test_a_vllm_that_cannot_use_drafts_is_refused(
    changes: dict[str, Any], text: str, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECPOOL_DRAFT_ADDRESS", "127.0.0.1:1")
    assert text in await refused(lambda: RemoteDraft(vllm_config(tokenizer, **changes)))


async def test_a_vllm_of_another_shape_is_refused(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPOOL_DRAFT_ADDRESS", "127.0.0.1:1")
    config = vllm_config(tokenizer)
    del config.parallel_config.rank
    assert "has no attribute 'rank' (tried: 0.32)" in await refused(lambda: RemoteDraft(config))


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({}, "SPECPOOL_* variables: draft-address: Field required"),
        ({"SPECPOOL_DRAFT_ADDRESS": "a:1", "SPECPOOL_DRAFT_TIMEOUT_SECONDS": "0"}, "draft-timeout-seconds: "),
        ({"SPECPOOL_PREFILL_TOKENS": "0"}, "draft-address: Field required; SPECPOOL_* variables: prefill-tokens: "),
        ({"SPECPOOL_DRAFT_ADDRESS": "a:1", "SPECPOOL_TLS_CERT": "x"}, "tls_"),
        ({"SPECPOOL_DRAFT_ADDRES": "a:1"}, "unknown environment variable SPECPOOL_DRAFT_ADDRES"),
    ],
)
async def test_wrong_settings_are_refused(
    variables: dict[str, str],
    line: str,
    tokenizer: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert line in await refused(lambda: RemoteDraft(vllm_config(tokenizer)))
    (logged,) = caplog.messages
    assert logged.startswith("RemoteDraft cannot start: SPECPOOL_* variables: ")


async def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPOOL_DRAFT_ADDRESS", "127.0.0.1:1")
    text = await refused(lambda: RemoteDraft(vllm_config(str(tmp_path))))
    assert text.startswith(f"the tokenizer {tmp_path} cannot be read: ")


@pytest.mark.parametrize("trusted", [True, False])
async def test_code_of_a_model_runs_only_where_vllm_may_run_it(
    trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tokenizer(tmp_path)
    settings = {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": [None, "odd.Odd"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    code = "from transformers import PreTrainedTokenizerFast\nclass Odd(PreTrainedTokenizerFast):\n    pass\n"
    (tmp_path / "odd.py").write_text(f"{code}open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("SPECPOOL_DRAFT_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("SPECPOOL_DRAFT_START_SECONDS", "0")
    config = vllm_config(str(tmp_path))
    config.model_config.trust_remote_code = trusted
    text = await refused(lambda: RemoteDraft(config))
    assert ("contains custom code" in text) is not trusted
    assert (tmp_path / "ran").exists() is trusted


async def test_a_vllm_for_cpu_is_warned_of(
    tokenizer: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPECPOOL_DRAFT_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("SPECPOOL_DRAFT_START_SECONDS", "0")
    await refused(lambda: RemoteDraft(vllm_config(tokenizer, device_type="cpu")))
    assert any("greedy answers only" in message for message in caplog.messages)
