"""The commands as a user types them, in processes of their own."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from serving import free_address, serving

from coordinator.config.settings import CoordinatorSettings
from coordinator.server import CoordinatorServer
from specpool.cli.generate import GenerateSettings, generate
from specpool.cli.main import run
from specpool.cli.up import UpSettings, running
from specpool.client import AsyncClient, DivergedError
from specpool.client.prompts import PromptFileError, own_prompts, read_prompts
from specpool.testing import FakeDraft, FakeTarget, byte_tokenizer
from specpool.v1 import generation_pb2 as pb


async def specpool(
    *arguments: str | bytes, stdin: str | bytes = "", environment: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of `specpool ...`."""
    process = await start_specpool(*arguments, environment=environment)
    out, err = await process.communicate(stdin.encode() if isinstance(stdin, str) else stdin)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def start_specpool(
    *arguments: str | bytes, environment: dict[str, str] | None = None
) -> asyncio.subprocess.Process:
    """`specpool ...` as a process with pipes to and from it."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "specpool.cli.main", *arguments, env={**os.environ, **(environment or {})},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


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
    assert (status, err) == (0, "")  # nothing about waiting: the server is there
    truth = target.continuation(tokenizer_of(target)("hello"), 20)
    assert out == byte_tokenizer().decode(truth) + "\n"


async def test_generate_without_a_server_says_so(tmp_path: Path) -> None:
    status, out, err = await specpool("generate", "--address", "127.0.0.1:9", "--wait-seconds", "0", "hello")
    assert (status, out) == (1, "")
    assert err.startswith("specpool generate: UNAVAILABLE")
    assert "Traceback" not in err


@contextlib.asynccontextmanager
async def waiting_generate(address: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`specpool generate`, which has said that it waits for the server at `address`."""
    process = await start_specpool("generate", "--address", address, *arguments)
    try:
        assert process.stderr is not None
        assert await process.stderr.readline() == f"specpool generate: waiting for {address}\n".encode()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_generate_waits_for_a_server_that_is_about_to_start() -> None:
    address = free_address()
    port = int(address.split(":")[1])
    async with waiting_generate(address, "--max-tokens", "5", "hello") as process, serving(port=port) as served:
        out, err = await process.communicate()
        truth = served.target.continuation(tokenizer_of(served.target)("hello"), 5)
    assert (process.returncode, err) == (0, b"")
    assert out.decode() == byte_tokenizer().decode(truth) + "\n"


async def test_generate_waits_for_a_server_that_does_not_serve_yet() -> None:
    flags = ["--max-tokens", "5", "--json"]
    async with serving(with_target=False) as served, waiting_generate(served.address, *flags, "hello") as process:
        await served.target.start(served.target_address)
        out, err = await process.communicate()
        truth = served.target.continuation(tokenizer_of(served.target)("hello"), 5)
    assert (process.returncode, err) == (0, b"")
    assert json.loads(out)["token_ids"] == truth


async def test_generate_waits_no_longer_than_it_should() -> None:
    address = free_address()
    status, out, err = await specpool("generate", "--address", address, "--wait-seconds", "0.5", "hello")
    assert (status, out) == (1, "")
    waiting, error = err.splitlines()
    assert waiting == f"specpool generate: waiting for {address}"
    assert error.startswith("specpool generate: UNAVAILABLE: ")


async def test_generate_does_not_wait_for_a_server_without_health_checks() -> None:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    status, out, err = await specpool("generate", "--address", address, "hello")
    await server.stop(None)
    assert (status, out) == (1, "")
    assert err.startswith("specpool generate: UNIMPLEMENTED: ")
    assert err.count("\n") == 1


async def test_ctrl_c_while_generate_waits_ends_quietly() -> None:
    async with waiting_generate(free_address(), "hello") as process:
        process.send_signal(signal.SIGINT)
        assert await process.communicate() == (b"", b"")
    assert process.returncode == 130


async def test_nothing_is_said_to_a_closed_standard_error() -> None:
    command = 'specpool generate --address "$1" --wait-seconds 0.1 hello 2>&-'
    assert await asyncio.to_thread(shell, command, free_address()) == (1, "", "")


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
        ('{"id": 1, "messages": [{"role": "user", "content": "x", "name": "y"}]}', "must be a list"),
        ('{"id": 1, "prompt": "x", "max_tokens": 5, "seed": 1}', 'unknown key "max_tokens", "seed"'),
        ('{"id": 1, "prompt": "\\ud800"}', "surrogate"),
        ('{"id": "\\udfff", "prompt": "x"}', "surrogate"),
        ('{"id": 1, "messages": [{"role": "user", "content": "\\ud83d"}]}', "surrogate"),
        ('{"id": NaN, "prompt": "x"}', "not JSON"),
        ('{"id": [-Infinity], "prompt": "x"}', "not JSON"),
        ('{"id": 1e999, "prompt": "x"}', "not JSON"),
        ('{"id": ' + "[" * 100_000 + "]" * 100_000 + ', "prompt": "x"}', "nested too deeply"),
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


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        (["--address", ""], "x", "address: String should have at least 1 character"),
        (["--max-tokens", "4294967296"], "x", "max-tokens: Input should be less than or equal to 4294967295"),
        (["--num-speculative-tokens", str(2**40)], "x", "num-speculative-tokens: Input should be less"),
        (["--wait-seconds", "-1"], "x", "wait-seconds: Input should be greater than or equal to 0"),
        (["--wait-seconds", "inf"], "x", "wait-seconds: Input should be less than or equal to 86400"),
        (["--timeout-seconds", "inf"], "x", "timeout-seconds: Input should be less than or equal to 86400"),
        (["--chat", "--prompts", "-"], "", "chat is for a prompt"),
        ([], b"caf\xe9", "standard input: 'utf-8' codec can't decode byte 0xe9"),
        (["--prompts", "-"], b'{"id": 1, "prompt": "\xff"}', "'utf-8' codec can't decode byte 0xff"),
        ([b"caf\xe9"], "", "is not UTF-8"),
        (["--prompts", "-"], '{"id": 1, "prompt": "x"}\n{"id": NaN, "prompt": "x"}', "line 2: not JSON"),
    ],
)
async def test_what_cannot_be_asked_is_refused_in_one_line(
    arguments: list[str | bytes], stdin: str | bytes, says: str
) -> None:
    status, out, err = await specpool("generate", *arguments, stdin=stdin, environment={"LC_ALL": "C"})
    assert (status, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("prompt", "chat"), [("None", False), ("null", True), ("\u2028é", False)])
async def test_every_word_may_be_a_prompt(served: tuple[str, FakeTarget], prompt: str, chat: bool) -> None:
    address, target = served
    flags = ["--chat"] if chat else []
    status, out, err = await specpool("generate", "--address", address, "--max-tokens", "5", "--json", *flags, prompt)
    assert status == 0, err
    encoded = tokenizer_of(target)(f"user: {prompt}\n" if chat else prompt)
    assert json.loads(out)["token_ids"] == target.continuation(encoded, 5)


async def test_output_is_utf8_whatever_the_locale(served: tuple[str, FakeTarget]) -> None:
    locale = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    line = '{"id": "é", "prompt": "\u2028"}'
    flags = ["--address", served[0], "--max-tokens", "40", "--prompts", "-", "--json"]
    status, out, err = await specpool("generate", *flags, stdin=line, environment=locale)
    assert status == 0, err
    assert json.loads(out)["id"] == "é"
    assert '"é"' in out


def shell(command: str, *arguments: str) -> tuple[int, str, str]:
    """What a command line with `specpool` in it gives."""
    program = f'set -o pipefail; specpool() {{ {sys.executable} -m specpool.cli.main "$@"; }}; {command}'
    done = subprocess.run(
        ["bash", "-c", program, "bash", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        ('specpool generate --address "$1" --prompts "$2" --json | head -1 >/dev/null', 1, "Broken pipe"),
        ('specpool generate --address "$1" abc | true', 1, "Broken pipe"),
        ('specpool generate --address "$1" abc >/dev/full', 1, "No space left on device"),
        ("specpool --help >/dev/full", 1, "No space left on device"),
        ('specpool generate --address "$1" abc >&-', 1, "standard output is closed"),
        ('specpool generate --address "$1" <&-', 2, "standard input: it is closed"),
        ('specpool generate --address "$1" --prompts - <&-', 2, "it is closed"),
    ],
)
async def test_a_stream_that_cannot_be_used_is_said_in_one_line(
    served: tuple[str, FakeTarget], tmp_path: Path, command: str, status: int, says: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"id": {i}, "prompt": "x"}}\n' for i in range(300)))
    found, out, err = await asyncio.to_thread(shell, command, served[0], str(file))
    assert (found, out) == (status, "")
    assert says in err
    assert err.count("\n") == 1


async def test_ctrl_c_while_a_prompt_is_typed_ends_quietly() -> None:
    process = await start_specpool("generate")
    assert process.stdin is not None
    process.stdin.write(b"x" * 2**20)
    await process.stdin.drain()  # more than a pipe holds: it has begun to read
    while process.returncode is None:  # a signal just before the next read is noticed after it
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 2)
    assert await process.communicate() == (b"", b"")
    assert process.returncode == 130


async def test_demo_without_prompts_says_so_before_it_starts_anything(tmp_path: Path) -> None:
    file = tmp_path / "empty.jsonl"
    file.write_text("\n")
    for path, says in {str(file): "there are no prompts in it", str(tmp_path / "none"): "No such file"}.items():
        status, out, err = await specpool("demo", "--prompts", path)
        assert (status, out) == (2, "")
        assert path in err
        assert says in err
        assert err.count("\n") == 1


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
    async with running(settings) as address, AsyncClient(address) as client:
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


@pytest.mark.parametrize("name", ["up", "demo", "plan", "distill"])
def test_a_command_that_needs_torch_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specpool.cli.processes.find_spec", lambda _: None)
    assert run(name, []) == 1
    assert capsys.readouterr().err == f"specpool {name}: needs torch: pip install 'specpool[worker]'\n"


def test_a_stream_that_cannot_go_on_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stream(*_: object, **__: object) -> AsyncIterator[None]:
        raise DivergedError("sample 0 has other tokens from its token 3 on")
        yield

    monkeypatch.setattr(AsyncClient, "stream", stream)
    assert generate(GenerateSettings(prompt="a", wait_seconds=0)) == 1
    assert capsys.readouterr().err == "specpool generate: sample 0 has other tokens from its token 3 on\n"
