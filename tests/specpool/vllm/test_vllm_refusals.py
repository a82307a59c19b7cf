"""`RemoteDraft` refuses unusable settings, models and draft workers in one line."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from serving import RecordingDraft
from vllm_stand_in import save_tokenizer, vllm_config

from specpool.testing import FakeTarget
from specpool.vllm import RemoteDraft

NOWHERE = "127.0.0.1:1"
Refused = Callable[..., Awaitable[str]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Start with these variables and this vLLM configuration; return the one-line error."""

    async def start(config: Any, **variables: str) -> str:
        for name, value in variables.items():
            monkeypatch.setenv(f"SPECPOOL_{name}", value)
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - callers check the text
            await asyncio.to_thread(RemoteDraft, config)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return start


async def test_different_tokenizer_is_refused(tokenizer: str, refused: Refused) -> None:
    draft = RecordingDraft(FakeTarget(), fingerprint="another")
    text = await refused(vllm_config(tokenizer), DRAFT_ADDRESS=await draft.start())
    assert "the draft fake uses a different tokenizer than the target served" in text
    await draft.stop()


async def test_an_unreachable_draft_worker_is_refused(tokenizer: str, refused: Refused) -> None:
    text = await refused(vllm_config(tokenizer), DRAFT_ADDRESS=NOWHERE, DRAFT_START_SECONDS="0.3")
    assert text.startswith(f"cannot use the draft worker at {NOWHERE}: no answer in 0.3 s: UNAVAILABLE")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"async_scheduling": True}, "async_scheduling must be off"),
        ({"distributed_executor_backend": "external_launcher"}, "external_launcher is not supported"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1, not 0"),
    ],
)
async def test_unsupported_vllm_settings_are_refused(
    changes: dict[str, Any], text: str, tokenizer: str, refused: Refused
) -> None:
    assert text in await refused(vllm_config(tokenizer, **changes), DRAFT_ADDRESS=NOWHERE)


async def test_an_unknown_vllm_configuration_is_refused(tokenizer: str, refused: Refused) -> None:
    config = vllm_config(tokenizer)
    del config.parallel_config.rank
    assert "has no attribute 'rank' (tested: 0.32)" in await refused(config, DRAFT_ADDRESS=NOWHERE)


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"DRAFT_METHOD": "model"}, "--draft-method model needs a --draft-address"),
        ({"DRAFT_METHOD": "ngram", "DRAFT_ADDRESS": "a:1"}, "--draft-method ngram needs no draft worker"),
        ({"DRAFT_METHOD": "ngram", "LOOKUP_STORE_TOKENS": "9"}, "ngram does not use --lookup-store-tokens"),
        ({"DRAFT_METHOD": "prediction"}, "draft-method: Input should be 'model', 'ngram', 'suffix' or 'best'"),
        ({"DRAFT_ADDRESS": "a:1", "DRAFT_TIMEOUT_SECONDS": "0"}, "draft-timeout-seconds: "),
        ({"DRAFT_TIMEOUT_SECONDS": "0", "PREFILL_TOKENS": "0"}, '(got "0"); SPECPOOL_* variables: prefill-tokens: '),
        ({"DRAFT_ADDRESS": "a:1", "TLS_CERT": "x"}, "tls-cert: must be given with --tls-"),
        ({"DRAFT_ADDRES": "a:1"}, "unknown environment variable SPECPOOL_DRAFT_ADDRES"),
    ],
)
async def test_invalid_settings_are_refused(
    variables: dict[str, str], line: str, tokenizer: str, refused: Refused, caplog: pytest.LogCaptureFixture
) -> None:
    assert line in await refused(vllm_config(tokenizer), **variables)
    (logged,) = caplog.messages
    assert logged.startswith("RemoteDraft cannot start: SPECPOOL_* variables: ")


async def test_a_mistral_tokenizer_is_refused(tokenizer: str, refused: Refused) -> None:
    config = vllm_config(tokenizer)
    config.model_config.tokenizer_mode = "mistral"
    assert "tokenizer_mode mistral has no tokenizer.json" in await refused(config, DRAFT_ADDRESS=NOWHERE)


async def test_an_unreadable_tokenizer_is_named(tmp_path: Path, refused: Refused) -> None:
    text = await refused(vllm_config(str(tmp_path)), DRAFT_ADDRESS=NOWHERE)
    assert text.startswith(f"cannot read the tokenizer {tmp_path}: ")


@pytest.mark.parametrize("trusted", [True, False])
async def test_remote_code_runs_only_if_vllm_trusts_it(
    trusted: bool, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tokenizer(tmp_path)
    settings = {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": [None, "odd.Odd"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    code = "from transformers import PreTrainedTokenizerFast\nclass Odd(PreTrainedTokenizerFast):\n    pass\n"
    (tmp_path / "odd.py").write_text(f"{code}open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = vllm_config(str(tmp_path))
    config.model_config.trust_remote_code = trusted
    text = await refused(config, DRAFT_ADDRESS=NOWHERE, DRAFT_START_SECONDS="0")
    assert ("contains custom code" in text) is not trusted
    assert (tmp_path / "ran").exists() is trusted


async def test_vllm_for_cpu_logs_a_warning(tokenizer: str, refused: Refused, caplog: pytest.LogCaptureFixture) -> None:
    await refused(vllm_config(tokenizer, device_type="cpu"), DRAFT_ADDRESS=NOWHERE, DRAFT_START_SECONDS="0")
    assert any("greedy requests only" in message for message in caplog.messages)


@pytest.mark.parametrize("runner", ["v1", "v2", "only one"])
async def test_a_model_runner_other_than_v1_logs_a_warning(
    runner: str, tokenizer: str, refused: Refused, caplog: pytest.LogCaptureFixture
) -> None:
    config = vllm_config(tokenizer)
    config.use_v2_model_runner = runner == "v2"
    if runner == "only one":  # a later vLLM may have no choice left
        del config.use_v2_model_runner
    await refused(config, DRAFT_ADDRESS=NOWHERE, DRAFT_START_SECONDS="0")
    assert any("Model Runner V1" in message for message in caplog.messages) == (runner != "v1")
