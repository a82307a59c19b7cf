"""`RemoteDraft` refuses unusable settings, models and draft workers in one line."""

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
    """The one-line error of a failing start."""
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
    assert text.startswith("cannot use the draft worker at 127.0.0.1:1: no answer in 0.3 s: UNAVAILABLE")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"async_scheduling": True}, "async_scheduling must be off"),
        ({"distributed_executor_backend": "external_launcher"}, "external_launcher is not supported"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1, not 0"),
    ],
)
async def test_unsupported_vllm_settings_are_refused(
    changes: dict[str, Any], text: str, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECPOOL_DRAFT_ADDRESS", "127.0.0.1:1")
    assert text in await refused(lambda: RemoteDraft(vllm_config(tokenizer, **changes)))


async def test_an_unknown_vllm_configuration_is_refused(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPOOL_DRAFT_ADDRESS", "127.0.0.1:1")
    config = vllm_config(tokenizer)
    del config.parallel_config.rank
    assert "has no attribute 'rank' (tested: 0.32)" in await refused(lambda: RemoteDraft(config))


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
async def test_invalid_settings_are_refused(
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


async def test_an_unreadable_tokenizer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPOOL_DRAFT_ADDRESS", "127.0.0.1:1")
    text = await refused(lambda: RemoteDraft(vllm_config(str(tmp_path))))
    assert text.startswith(f"cannot read the tokenizer {tmp_path}: ")


@pytest.mark.parametrize("trusted", [True, False])
async def test_remote_code_runs_only_if_vllm_trusts_it(
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


async def test_vllm_for_cpu_logs_a_warning(
    tokenizer: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPECPOOL_DRAFT_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("SPECPOOL_DRAFT_START_SECONDS", "0")
    await refused(lambda: RemoteDraft(vllm_config(tokenizer, device_type="cpu")))
    assert any("greedy requests only" in message for message in caplog.messages)
