"""`vllm.grpc.engine.VllmEngine` as the gateway calls it: the results of our own service in other messages."""

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import grpc
import pytest
from serving import PATIENCE_SECONDS, Serving, expected_tokens, make_request, serving
from smg_grpc_proto import vllm_engine_pb2 as smg
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from tokenizers import Tokenizer

from coordinator.config.settings import CoordinatorSettings
from specpool.cli.up_settings import UpSettings
from specpool.environment.extras import install_command
from specpool.rpc.config.settings import Settings
from specpool.testing import CHAT_TEMPLATE, EOS_TOKEN_ID, FakeTarget

PROMPT = (1, 2, 3)


@pytest.fixture
async def served() -> AsyncIterator[Serving]:
    async with serving(smg=True) as started:
        yield started


def engine(served: Serving) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(served.channel)


def request(stream: bool = False, request_id: str = "", **params: Any) -> smg.GenerateRequest:
    return smg.GenerateRequest(
        request_id=request_id,
        tokenized=smg.TokenizedInput(input_ids=PROMPT, original_text="ignored"),
        sampling_params=smg.SamplingParams(**{"temperature": 0, "max_tokens": 24, **params}),
        stream=stream,
    )


async def answers(call: Any) -> list[smg.GenerateResponse]:
    return [message async for message in call]


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await (answers(call) if hasattr(call, "__aiter__") else call)
    return refused.value


async def test_response_equals_that_of_our_own_service(served: Serving) -> None:
    (answer,) = await answers(engine(served).Generate(request(logprobs=2)))
    ours = await served.stub.Generate(make_request(PROMPT, logprobs=2))
    complete = answer.complete
    assert list(complete.output_ids) == list(ours.token_ids) == expected_tokens(served.target, make_request(PROMPT))
    assert (complete.finish_reason, complete.index, complete.WhichOneof("matched_stop")) == ("length", 0, None)
    assert (complete.prompt_tokens, complete.completion_tokens) == (3, 24)
    assert complete.spec_draft_tokens >= complete.spec_accepted_tokens > 0
    logprobs = complete.output_logprobs
    assert list(logprobs.token_ids) == list(complete.output_ids)
    assert list(logprobs.token_logprobs) == [entry.logprob for entry in ours.logprobs]
    assert [list(top.token_ids) for top in logprobs.top_logprobs] == [list(e.top_token_ids) for e in ours.logprobs]
    assert [list(top.values) for top in logprobs.top_logprobs] == [list(e.top_logprobs) for e in ours.logprobs]


async def test_stream_sends_every_token_once(served: Serving) -> None:
    *chunks, end = await answers(engine(served).Generate(request(stream=True, logprobs=1)))
    tokens = [token for message in chunks for token in message.chunk.token_ids]
    assert tokens == expected_tokens(served.target, make_request(PROMPT))
    assert all(message.chunk.completion_tokens == len(message.chunk.token_ids) > 0 for message in chunks)
    assert all(message.chunk.output_logprobs.token_ids == message.chunk.token_ids for message in chunks)
    assert (list(end.complete.output_ids), end.complete.completion_tokens) == ([], 24)


async def test_end_reports_the_matched_stop(served: Serving) -> None:
    tokens = expected_tokens(served.target, make_request(PROMPT))
    (by_id,) = await answers(engine(served).Generate(request(stop_token_ids=[tokens[5]])))
    assert by_id.complete.matched_token_id == tokens[5]
    assert list(by_id.complete.output_ids) == tokens[: tokens.index(tokens[5]) + 1]
    printable = next(token for token in tokens if token < 94)
    (by_text,) = await answers(engine(served).Generate(request(stop=[chr(33 + printable)])))
    assert by_text.complete.matched_stop_str == chr(33 + printable)
    assert (by_text.complete.finish_reason, by_text.complete.output_ids[-1]) == ("stop", printable)


async def test_headers_are_sent_before_the_first_token_and_after_validation() -> None:
    async with serving(with_draft=False, smg=True) as served:
        served.target.open.clear()
        call = engine(served).Generate(request(stream=True))
        await call.initial_metadata()
        bad = await refusal(engine(served).Generate(request(max_tokens=0)))
        assert (bad.code(), bad.initial_metadata()) == (grpc.StatusCode.INVALID_ARGUMENT, ())
        served.target.open.set()
        assert len(await answers(call)) > 1


async def test_requests_of_both_services_share_ids_and_the_queue() -> None:
    async with serving(with_draft=False, smg=True, max_num_seqs=1, queue_size=0) as served:
        served.target.open.clear()
        ours = served.stub.Generate(make_request(PROMPT, request_id="a"))
        await served.until(lambda info: info.running)
        same_id = await refusal(engine(served).Generate(request(request_id="a")))
        assert same_id.code() == grpc.StatusCode.ALREADY_EXISTS
        full = await refusal(engine(served).Generate(request(request_id="b")))
        assert full.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        served.target.open.set()
        await ours


async def test_abort_ends_own_requests_and_ignores_others(served: Serving) -> None:
    served.target.open.clear()
    call = engine(served).Generate(request(request_id="mine"))
    await call.initial_metadata()
    with mock.patch("coordinator.smg.service.client_of", return_value="another"):
        await engine(served).Abort(smg.AbortRequest(request_ids=["mine"]))
    assert (await served.info()).running == 1
    await engine(served).Abort(smg.AbortRequest(request_ids=["unknown", "mine"]))
    served.target.open.set()
    (answer,) = await answers(call)
    assert answer.complete.finish_reason == "abort"
    await served.until_idle()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("Embed", smg.EmbedRequest()),
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
    ],
)
async def test_unsupported_methods_are_unimplemented(served: Serving, method: str, message: Any) -> None:
    error = await refusal(getattr(engine(served), method)(message))
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED
    assert error.details().startswith(f"{method}: ")


async def test_model_and_server_info(served: Serving) -> None:
    model = await engine(served).GetModelInfo(smg.GetModelInfoRequest())
    assert (model.served_model_name, model.model_type, model.is_generation) == ("fake", "fake", True)
    assert (model.max_context_length, model.vocab_size) == (4096, 257)
    assert list(model.eos_token_ids) == [EOS_TOKEN_ID]
    server = await engine(served).GetServerInfo(smg.GetServerInfoRequest())
    assert (server.server_type, server.max_num_seqs, server.model_dtype) == ("vllm-grpc", 16, "float32")


async def test_load(served: Serving) -> None:
    served.target.open.clear()
    call = engine(served).Generate(request(temperature=1, n=20))
    await call.initial_metadata()
    await served.until(lambda info: info.running == 16)
    (load,) = (await engine(served).GetLoads(smg.GetLoadsRequest())).loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (16, 4, 20)
    assert (load.max_running_requests, load.utilization) == (16, 1.0)
    served.target.open.set()
    await answers(call)
    assert (await engine(served).GetLoads(smg.GetLoadsRequest())).loads[0].num_total_reqs == 0


async def test_tokenizer_archive_holds_the_targets_files(served: Serving) -> None:
    with mock.patch("coordinator.smg.service.CHUNK_BYTES", 1000):
        chunks = [chunk async for chunk in engine(served).GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len(chunks) > 1
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        contents = {name: archive.read(name).decode() for name in archive.namelist()}
    assert Tokenizer.from_str(contents["tokenizer.json"]).encode("hi").ids == [71, 72]
    assert contents["chat_template.jinja"] == CHAT_TEMPLATE
    assert json.loads(contents["config.json"])["eos_token_id"] == [EOS_TOKEN_ID]
    again = [chunk.sha256 async for chunk in engine(served).GetTokenizer(common_pb2.GetTokenizerRequest())]
    assert again[-1] == chunks[-1].sha256


async def test_health_follows_the_target_and_the_drain(served: Serving) -> None:
    async def health() -> smg.HealthCheckResponse:
        return await engine(served).HealthCheck(smg.HealthCheckRequest())

    assert await served.status("vllm.grpc.engine.VllmEngine") == await served.status()
    assert (await health()).healthy
    await served.target.stop()
    await served.until(lambda info: info.target.state != "ready")
    assert await health() == smg.HealthCheckResponse(healthy=False, message="the target worker is connecting")
    await served.target.start(served.target_address)
    await served.until_ready()
    assert (await health()).healthy
    with mock.patch("specpool.rpc.server.server.Server.stopping", True):  # a drain takes calls only briefly
        assert await health() == smg.HealthCheckResponse(healthy=False, message="the server is shutting down")
        refused = await refusal(engine(served).Generate(request()))
        assert refused.code() == grpc.StatusCode.UNAVAILABLE


async def test_service_is_unavailable_before_the_target_is_ready() -> None:
    async with serving(FakeTarget(), with_draft=False, with_target=False, smg=True) as served:
        assert not (await engine(served).HealthCheck(smg.HealthCheckRequest())).healthy
        for call in (
            engine(served).GetModelInfo(smg.GetModelInfoRequest()),
            engine(served).GetTokenizer(common_pb2.GetTokenizerRequest()),
            engine(served).Generate(request()),
        ):
            assert (await refusal(call)).code() == grpc.StatusCode.UNAVAILABLE
        (load,) = (await engine(served).GetLoads(smg.GetLoadsRequest())).loads
        assert load.num_total_reqs == 0
        assert (await engine(served).GetServerInfo(smg.GetServerInfoRequest())).model_dtype == ""


async def test_service_needs_the_flag() -> None:
    async with serving(with_draft=False) as served:
        error = await refusal(engine(served).HealthCheck(smg.HealthCheckRequest()))
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("settings", [CoordinatorSettings, UpSettings])
def test_flag_without_the_extra_names_the_package(settings: type[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("specpool.environment.extras.find_spec", return_value=None), pytest.raises(SystemExit):
        settings.load("a", ["--smg"])
    assert capsys.readouterr().err == f"a: smg: needs smg_grpc_proto: {install_command('smg')}\n"


@pytest.mark.parametrize("stream", [False, True])
async def test_unread_responses_are_ended(stream: bool) -> None:
    small_window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with (
        serving(with_draft=False, smg=True, stream_stall_seconds=0.1) as served,
        grpc.aio.insecure_channel(served.address, options=small_window) as channel,
    ):
        message = request(stream, max_tokens=3000) if stream else request(max_tokens=300, logprobs=20)
        call = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(message)
        await call.initial_metadata()
        await served.until(lambda info: info.counters.finished["abort" if stream else "length"])
        async with asyncio.timeout(PATIENCE_SECONDS):
            while served.process.coordinator.in_flight._samples:  # noqa: ASYNC110 - the state has no event
                await asyncio.sleep(0.01)
