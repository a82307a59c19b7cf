"""The commands as a user types them, in processes of their own."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from specpool.v1 import generation_pb2 as pb

from coordinator.client import Client
from coordinator.commands.prompts import PromptFileError, own_prompts, read_prompts
from coordinator.commands.up import UpSettings, running
from coordinator.fakes import FakeDraft, FakeTarget, byte_tokenizer
from coordinator.server import CoordinatorServer
from coordinator.settings import CoordinatorSettings


async def specpool(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    """Exit status, standard output and standard error of `specpool ...`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator.cli", *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
async def served() -> AsyncIterator[tuple[str, FakeTarget]]:
    """The address of a coordinator with fake workers, and the fake that knows the truth."""
    target = FakeTarget()
    draft = FakeDraft(target)
    process = CoordinatorServer(
        CoordinatorSettings(
            port=0, drain_seconds=0, target_address=await target.start(), draft_address=await draft.start()
        )
    )
    port = await process.start()
    await process.coordinator.target.wait_ready()
    yield f"127.0.0.1:{port}", target
    process.server.stop()
    await process.wait_stopped()
    await target.stop()
    await draft.stop()


async def test_generate_prints_one_object_per_line_in_the_order_of_the_file(
    served: tuple[str, FakeTarget], tmp_path: Path
) -> None:
    address, target = served
    prompts = {7: "a", "seven": "bcd", "third": "e" * 30}
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": key, "prompt": text}) for key, text in prompts.items()]
    lines += ["", json.dumps({"id": "chat", "messages": [{"role": "user", "content": "hi"}]})]
    file.write_text("\n".join(lines))
    status, out, err = await specpool(
        "generate", "--address", address, "--prompts", str(file), "--max-tokens", "9",
        "--num-speculative-tokens", "3", "--concurrency", "2", "--json",
    )  # fmt: skip
    assert status == 0, err
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["id"] for record in records] == [*prompts, "chat"]
    # The fake target has one token per byte, in the order of the byte-level alphabet.
    encode = tokenizer_of(target)
    for record, text in zip(records, [*prompts.values(), "user: hi\n"], strict=True):
        assert record["token_ids"] == target.continuation(encode(text), 9)
        assert record["finish_reason"] == "length"
        assert record["speculative_decoding"]["num_draft_tokens"] > 0


def tokenizer_of(_: FakeTarget) -> Callable[[str], list[int]]:
    """The fake's encoding of a text."""
    tokenizer = byte_tokenizer()
    return lambda text: tokenizer.encode(text).ids


async def test_generate_streams_a_prompt_from_standard_input(served: tuple[str, FakeTarget]) -> None:
    address, target = served
    status, out, err = await specpool("generate", "--address", address, "--max-tokens", "20", stdin="hello")
    assert status == 0, err
    truth = target.continuation(tokenizer_of(target)("hello"), 20)
    assert out == byte_tokenizer().decode(truth) + "\n"


async def test_generate_without_a_server_says_so(tmp_path: Path) -> None:
    status, out, err = await specpool("generate", "--address", "127.0.0.1:9", "hello")
    assert (status, out) == (1, "")
    assert err.startswith("specpool generate: UNAVAILABLE")
    assert "Traceback" not in err


async def test_generate_reports_a_refused_prompt_and_goes_on(served: tuple[str, FakeTarget], tmp_path: Path) -> None:
    address, _ = served
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": 1, "prompt": ""}\n{"id": 2, "prompt": "x"}\n')
    status, out, err = await specpool(
        "generate", "--address", address, "--prompts", str(file), "--max-tokens", "2", "--json"
    )
    refused, answered = map(json.loads, out.splitlines())
    assert status == 1
    assert refused["id"] == 1
    assert "the prompt is empty" in refused["error"]
    assert len(answered["token_ids"]) == 2
    assert "the prompt is empty" in err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ('{"prompt": "x"}', '"id"'),
        ('{"id": 1}', "either"),
        ('{"id": 1, "prompt": "x", "messages": []}', "either"),
        ('{"id": 1, "prompt": 5}', "must be a string"),
        ('{"id": 1, "messages": [{"role": "user"}]}', "must be a list"),
    ],
)
def test_a_bad_line_is_named(line: str, says: str) -> None:
    with pytest.raises(PromptFileError, match="line 2") as caught:
        read_prompts(['{"id": 0, "prompt": "fine"}', line])
    assert says in str(caught.value)


async def test_bad_usage_ends_with_status_2_and_no_traceback(tmp_path: Path) -> None:
    for arguments in (["frobnicate"], ["generate", "--frob"], ["generate", "--prompts", str(tmp_path / "none")]):
        status, _, err = await specpool(*arguments)
        assert status == 2, arguments
        assert "Traceback" not in err


async def test_help_names_every_command() -> None:
    status, out, _ = await specpool("--help")
    assert status == 0
    assert all(f"\n  {name}" in out for name in ("up", "generate", "demo"))


def test_own_prompts_are_enough_for_a_comparison() -> None:
    prompts = own_prompts()
    assert len(prompts) == len({str(line.id) for line in prompts}) == 32


async def test_up_serves_a_pair_and_replaces_a_worker_that_dies(tiny_pair: tuple[Path, Path]) -> None:
    target, draft = tiny_pair
    settings = UpSettings(
        port=0, target=str(target), draft=str(draft), max_model_len=256, threads=1, drain_seconds=1, log_level="error"
    )
    async with running(settings) as address, Client(address) as client:
        request = pb.GenerateRequest(text="abc", sampling_params=pb.SamplingParams(max_tokens=30, ignore_eos=True))
        first = await client.stub.Generate(request)
        os.kill(process_of("target_worker.server", target), signal.SIGKILL)
        again = await client.stub.Generate(request)
        assert again.token_ids == first.token_ids


def process_of(module: str, model: Path) -> int:
    """The process id of a worker that serves `model`."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            arguments = command.read_bytes().decode().split("\0")
            if module in arguments and str(model) in arguments:
                return int(command.parent.name)
    raise AssertionError(f"no process runs {module} with {model}")


async def test_up_says_which_process_failed(tmp_path: Path) -> None:
    status, _, err = await specpool("up", "--port", "0", "--target", str(tmp_path), "--draft", "none")
    assert status == 1
    assert "is not a model folder" in err
    assert "the target worker ended with status 1" in err
    assert "Traceback" not in err
