"""`specpool` commands as users type them: in this process where possible, otherwise in a child process."""

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import version
from pathlib import Path

import grpc
import pytest
from loading_workers import LoadingTarget
from serving import Serving, free_address, serving
from template_target import TemplateTarget

from specpool.cli import main as command
from specpool.cli.generate import generate
from specpool.cli.generate_settings import GenerateSettings
from specpool.cli.processes import run_module, start_module
from specpool.client import AsyncClient, DivergedError
from specpool.client.prompts import PromptFileError, read_prompts
from specpool.testing import byte_tokenizer

ROOT = Path(__file__).parents[3]
Specpool = Callable[..., Awaitable[tuple[int, str, str]]]
slow = pytest.mark.slow


@pytest.fixture
def specpool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Specpool:
    """Run `specpool ...` in a thread; return exit status, standard output and standard error."""

    async def run(*arguments: str, stdin: str | bytes = "") -> tuple[int, str, str]:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        with pytest.raises(SystemExit) as end:
            await asyncio.to_thread(command.main, [*arguments])
        assert isinstance(end.value.code, int)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return end.value.code, captured.out, captured.err

    return run


@pytest.fixture
async def served() -> AsyncIterator[Serving]:
    async with serving() as running:
        yield running


def truth(served: Serving, text: str, count: int) -> list[int]:
    """Token ids of the answer to a text. The fake target has one token per byte."""
    return served.target.continuation(byte_tokenizer().encode(text).ids, count)


# --- generate


async def test_answers_keep_the_order_of_the_file(specpool: Specpool, served: Serving, tmp_path: Path) -> None:
    prompts = {7: "a", "seven": "bcd", "third": "e" * 30}
    lines = [json.dumps({"id": key, "prompt": text}) for key, text in prompts.items()]
    lines += ["", json.dumps({"id": "chat", "messages": [{"role": "user", "content": "hi"}]})]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(lines))
    options = ["--max-tokens", "9", "--num-speculative-tokens", "3", "--concurrency", "2", "--json"]
    status, out, err = await specpool("generate", "--address", served.address, "--prompts", str(file), *options)
    assert (status, err) == (0, "")
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["id"] for record in records] == [*prompts, "chat"]
    for record, text in zip(records, [*prompts.values(), "user: hi\n"], strict=True):
        assert record["token_ids"] == truth(served, text, 9)
        assert record["finish_reason"] == "length"
        assert record["usage"]["completion_tokens"] == 9
        assert record["usage"]["prompt_tokens"] == len(text)
        assert 0 < record["timings"]["time_to_first_token_s"] <= record["timings"]["total_s"]
        assert record["speculative_decoding"]["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (["--max-tokens", "5"], "[stopped after 5 tokens: --max-tokens]\n"),
        ([], "[stopped after 6 tokens: the limit of the server without --max-tokens]\n"),
    ],
)
async def test_an_answer_that_was_cut_says_so(specpool: Specpool, arguments: list[str], note: str) -> None:
    async with serving(default_max_tokens=6) as served:
        status, out, err = await specpool("generate", "--address", served.address, *arguments, "hello")
        assert (status, err) == (0, note)
        assert out.endswith("\n")


async def test_answers_to_a_file_are_readable(specpool: Specpool, served: Serving) -> None:
    lines = '{"id": "one\\u001b", "prompt": "a"}\n{"id": 2, "prompt": "b"}\n'
    options = ["--prompts", "-", "--max-tokens", "2"]
    status, out, err = await specpool("generate", "--address", served.address, *options, stdin=lines)
    texts = [byte_tokenizer().decode(truth(served, prompt, 2)).strip() for prompt in "ab"]
    assert (status, out) == (0, f"[one ]\n{texts[0]}\n\n[2]\n{texts[1]}\n\n")
    assert err.splitlines()[1] == "specpool generate: 2: stopped after 2 tokens: --max-tokens"


async def test_other_prompts_continue_after_a_refused_one(specpool: Specpool, served: Serving) -> None:
    lines = '{"id": 1, "prompt": ""}\n{"id": 2, "prompt": "x"}\n'
    options = ["--prompts", "-", "--max-tokens", "2", "--json"]
    status, out, err = await specpool("generate", "--address", served.address, *options, stdin=lines)
    refused, answered = map(json.loads, out.splitlines())
    assert (status, refused["id"]) == (1, 1)
    assert "text: must not be empty" in refused["error"]
    assert "text: must not be empty" in err
    assert len(answered["token_ids"]) == 2


@pytest.mark.parametrize(("prompt", "chat"), [("None", False), ("null", True), ("\u2028é", False)])
async def test_any_word_can_be_a_prompt(specpool: Specpool, served: Serving, prompt: str, chat: bool) -> None:
    options = ["--max-tokens", "5", "--json", *(["--chat"] if chat else [])]
    status, out, err = await specpool("generate", "--address", served.address, *options, prompt)
    assert (status, err) == (0, "")
    assert json.loads(out)["token_ids"] == truth(served, f"user: {prompt}\n" if chat else prompt, 5)


async def test_template_options_apply_to_chats(specpool: Specpool, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a"}, chat, chat | {"chat_template_kwargs": {"x": [2]}, "tools": [{"f": 1}]}]
    file.write_text("\n".join(json.dumps({"id": i} | line) for i, line in enumerate(lines)))
    options = ["--max-tokens", "3", "--json", "--chat-template-kwargs", '{"x": 1}']
    async with serving(TemplateTarget("{{ messages[0].content }}{{ x }}{{ tools }}"), with_draft=False) as served:
        options = ["--address", served.address, *options]
        status, out, err = await specpool("generate", *options, "--prompts", str(file))
        assert (status, err) == (0, "")
        tokens = [json.loads(line)["token_ids"] for line in out.splitlines()]
        assert tokens == [truth(served, text, 3) for text in ("a", "hi1None", "hi[2][{'f': 1}]")]
        status, out, _ = await specpool("generate", *options, "--chat", "hi")
        assert json.loads(out)["token_ids"] == truth(served, "hi1None", 3)
        status, _, err = await specpool("generate", *options[:-1], '{"y": 1}', "--chat", "hi")
        assert status == 1
        assert 'the chat template has no option "y"; its options: x' in err


async def test_answers_can_be_constrained(specpool: Specpool, served: Serving, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": ["yes", "no"]}')
    grammar.write_text('start: "left" | "right"')
    cases = [
        (["--json-schema", str(schema), "--json-whitespace"], ('"yes"', '"no"')),
        (["--grammar", str(grammar)], ("left", "right")),
        (["--regex", "[ab]c"], ("ac", "bc")),
        (["--choice", "first, second", "--choice=[third]"], ("first, second", "[third]")),
        (["--choice", 'say "5"\\'], ('say "5"\\',)),
    ]
    for options, answers in cases:
        status, out, err = await specpool("generate", "--address", served.address, *options, "hello")
        assert (status, err) == (0, "")
        assert out.removesuffix("\n") in answers
    status, _, err = await specpool("generate", "--address", served.address, "--regex", "(a", "hello")
    assert status == 1
    assert "sampling_params.regex: does not compile: invalid regex: unclosed group" in err
    for options in (["--max-thinking-tokens", "9"], ["--constraint-after-reasoning", "--choice", "a"]):
        status, _, err = await specpool("generate", "--address", served.address, *options, "hello")
        assert status == 1
        assert "the model has no reasoning tags; see the server's --reasoning-tags" in err
    schema.write_text('{"type": "foo"}')
    for options, prefix in ([], f"{schema}: "), (["--json"], f"0: {schema}: "):
        arguments = [*options, "--json-schema", str(schema), "hello"]
        status, _, err = await specpool("generate", "--address", served.address, *arguments)
        assert status == 1
        assert err.startswith(f"specpool generate: {prefix}INVALID_ARGUMENT: sampling_params.json_schema: does not")


async def test_predictions_come_from_files_and_lines(specpool: Specpool, served: Serving, tmp_path: Path) -> None:
    file = tmp_path / "old.txt"
    file.write_bytes(b"\r\nold")
    options = ["--address", served.address, "--max-tokens", "5", "--prediction", str(file)]
    seen: list[tuple[int, ...]] = []
    submit = served.process.coordinator.queue.submit
    served.process.coordinator.queue.submit = (  # type: ignore[method-assign]
        lambda samples: (seen.extend(sample.request.prediction for sample in samples), submit(samples))[1]
    )
    status, out, err = await specpool("generate", *options, "hello")
    old, other = (tuple(byte_tokenizer().encode(text).ids) for text in ("\r\nold", "b"))
    assert (status, seen) == (0, [old])
    assert re.fullmatch(r"\[prediction: \d+ tokens accepted, \d+ rejected\]\n\[stopped after 5 .*\n", err)
    lines = '{"id": 1, "prompt": "a"}\n{"id": 2, "messages": [{"role": "user", "content": "a"}], "prediction": "b"}\n'
    status, out, err = await specpool("generate", *options, "--prompts", "-", "--json", stdin=lines)
    assert (status, sorted(seen[1:])) == (0, sorted([old, other]))
    usages = [json.loads(line)["usage"] for line in out.splitlines()]
    assert all({"accepted_prediction_tokens", "rejected_prediction_tokens"} <= usage.keys() for usage in usages)
    status, out, err = await specpool("generate", *options, "--prompts", "-", stdin=lines)
    assert "specpool generate: 2: prediction: " in err


@pytest.mark.parametrize(
    ("content", "arguments", "status", "reason"),
    [
        (None, [], 2, "{}: No such file or directory"),
        (b"", [], 2, "{}: is empty"),
        (b"caf\xe9 ", [], 2, "{}: is not UTF-8"),
        (b"a", ["--prediction", "b"], 2, "--prediction: give it only once"),
        (
            b"a",
            ["--draft-method", "ngram"],
            1,
            "speculative.prediction: requires the method best or prediction, not ngram",
        ),
        (b"x" * 5000, [], 1, "{}: INVALID_ARGUMENT: speculative.prediction.text: has 5000 tokens, more than 4095"),
        (b"x" * 2**20, [], 1, "bytes, more than the server's --max-request-bytes, 1048576"),
    ],
)
async def test_unusable_predictions_are_refused(
    specpool: Specpool,
    served: Serving,
    tmp_path: Path,
    content: bytes | None,
    arguments: list[str],
    status: int,
    reason: str,
) -> None:
    file = tmp_path / "old.txt"
    if content is not None:
        file.write_bytes(content)
    flags = ["--address", served.address, "--prediction", str(file), *arguments]
    actual, out, err = await specpool("generate", *flags, "hi")
    assert (actual, out, err.count("\n")) == (status, "", 1)
    assert reason.format(file) in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--json-schema", "/nowhere"], "specpool generate: /nowhere: No such file or directory"),
        (["--choice", "a", "--regex", "b"], "give only one of --regex, --choice"),
        (["--choice"], "argument --choice: expected one argument"),
        (["--regex", "a", "--regex=b"], "specpool generate: --regex: give it only once"),
        (["--json-schema", "a", "--json-schema", "b"], "specpool generate: --json-schema: give it only once"),
    ],
)
async def test_invalid_constraints_are_refused(specpool: Specpool, arguments: list[str], reason: str) -> None:
    status, out, err = await specpool("generate", "hi", *arguments)
    assert (status, out) == (2, "")
    assert reason in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["{", "--chat"], "chat-template-kwargs: not JSON (Expecting property name"),
        (["[" * 100_000, "--chat"], "chat-template-kwargs: not JSON"),
        (["[]", "--chat"], "chat-template-kwargs: must be a JSON object"),
        (["{}"], "--chat-template-kwargs needs --chat, or a file of prompts with chats"),
    ],
)
async def test_invalid_template_options_are_refused(specpool: Specpool, arguments: list[str], reason: str) -> None:
    status, out, err = await specpool("generate", "--chat-template-kwargs", *arguments, "hi")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"specpool generate: {reason}")


async def test_waits_for_a_server_to_start(specpool: Specpool) -> None:
    address = free_address()
    waiting = asyncio.create_task(specpool("generate", "--address", address, "--max-tokens", "5", "--json", "hello"))
    await asyncio.sleep(0.5)
    async with serving(port=int(address.split(":")[1]), with_target=False) as served:
        await asyncio.sleep(0.5)
        await served.target.start(served.target_address)
        status, out, err = await waiting
        first, *_ = err.splitlines()
        assert (status, first) == (0, f"specpool generate: waiting for {address}: no answer")
        assert json.loads(out)["token_ids"] == truth(served, "hello", 5)


async def test_waits_only_for_wait_seconds(specpool: Specpool) -> None:
    address = free_address()
    status, out, err = await specpool("generate", "--address", address, "--wait-seconds", "0.5", "hello")
    assert (status, out) == (1, "")
    waiting, error = err.splitlines()
    assert waiting == f"specpool generate: waiting for {address}: no answer"
    assert error.startswith("specpool generate: UNAVAILABLE: ")
    _, _, err = await specpool("generate", "--address", address, "--wait-seconds", "0", "hello")
    assert err.startswith("specpool generate: UNAVAILABLE: ")


async def test_a_failed_startup_ends_the_wait_at_once(specpool: Specpool) -> None:
    target = LoadingTarget()
    async with serving(target, with_draft=False, with_target=False) as served:
        await target.start(served.target_address)
        flags = ["--address", served.address, "--wait-seconds", "3600"]
        waiting = asyncio.create_task(specpool("generate", *flags, "hello"))
        await served.until(lambda info: info.target.state == "loading")
        await target.fail("model.gguf: no such file")
        status, out, err = await asyncio.wait_for(waiting, 20)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == "specpool generate: the target worker cannot start: model.gguf: no such file"


async def test_does_not_wait_for_a_server_without_health_checks(specpool: Specpool) -> None:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    status, out, err = await specpool("generate", "--address", address, "hello")
    await server.stop(None)
    assert (status, out) == (1, "")
    assert err.startswith("specpool generate: UNIMPLEMENTED: ")
    assert err.count("\n") == 1


def test_a_diverged_stream_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stream(*_: object, **__: object) -> AsyncIterator[None]:
        raise DivergedError("sample 0 has other tokens from position 3")
        yield

    monkeypatch.setattr(AsyncClient, "stream", stream)
    assert generate(GenerateSettings(prompt="a", wait_seconds=0)) == 1
    assert capsys.readouterr().err == "specpool generate: sample 0 has other tokens from position 3\n"


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["frobnicate"], "", "specpool: unknown command frobnicate; see specpool --help\n"),
        (["generat"], "", "specpool: unknown command generat (did you mean generate?); see specpool --help\n"),
        (["generate", "--temprature", "1"], "", "--temprature (did you mean --temperature?)\n"),
        (
            ["generate", "--address", "localhost"],
            "x",
            "address: localhost has no port: use HOST:PORT, such as local",
        ),
        (["generate", "--frob"], "", "--frob"),
        (["generate", "--prompts", "/nowhere"], "", "specpool generate: /nowhere: No such file or directory\n"),
        (["generate", "--address", ""], "x", "address: must not be empty"),
        (["generate", "--max-tokens", "4294967296"], "x", "max-tokens: Input should be less than or equal to"),
        (["generate", "--num-speculative-tokens", str(2**40)], "x", "num-speculative-tokens: Input should be less"),
        (["generate", "--wait-seconds", "-1"], "x", "wait-seconds: Input should be greater than or equal to 0"),
        (["generate", "--timeout-seconds", "inf"], "x", "timeout-seconds: Input should be less than or equal to 86400"),
        (["generate", "--chat", "--prompts", "-"], "", "--chat is for a prompt"),
        (["generate", "--draft-method", "prediction"], "x", "--draft-method prediction needs --prediction"),
        (["generate"], b"caf\xe9", "standard input: is not UTF-8\n"),
        (["generate", "--prompts", "-"], b'{"id": 1, "prompt": "\xff"}', "specpool generate: -: is not UTF-8\n"),
        (["generate", "caf\udce9"], "", "is not UTF-8"),
        (["generate", "--prompts", "-"], '{"id": 1, "prompt": "x"}\n{"id": NaN, "prompt": "x"}', "line 2: not JSON"),
        (["demo", "--prompts", "-"], "\n", "no prompts found"),
        (["demo", "--prompts", "/nowhere"], "", "specpool demo: /nowhere: No such file or directory\n"),
    ],
)
async def test_invalid_usage_ends_with_status_2(
    specpool: Specpool, arguments: list[str], stdin: str | bytes, message: str
) -> None:
    status, out, err = await specpool(*arguments, stdin=stdin)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1 or "usage" in err


async def test_version(specpool: Specpool) -> None:
    expected = version("specpool")
    assert await specpool("--version") == (0, f"specpool {expected}\n", "")
    assert await specpool("generate", "--version") == (0, f"specpool generate {expected}\n", "")


# --- Prompt files


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ('{"prompt": "x"}', '"id"'),
        ('{"id": 1}', "either"),
        ('{"id": 1, "prompt": "x", "messages": []}', "either"),
        ('{"id": 1, "prompt": 5}', "must be a string"),
        ('{"id": 1, "messages": "hi"}', "must be a list"),
        ('{"id": 1, "messages": [1, 2]}', "message 0 must be a dictionary"),
        ('{"id": 1, "messages": [{"role": "user"}]}', "message 0: content must be a string"),
        ('{"id": 1, "messages": [{"role": "user", "content": "x", "nme": "y"}]}', "message 0: unknown key 'nme'"),
        ('{"id": 1, "messages": [], "tools": {}}', "tools: must be a list"),
        ('{"id": 1, "messages": [], "chat_template_kwargs": []}', "chat_template_kwargs: must be a dictionary"),
        ('{"id": 1, "prompt": "x", "tools": []}', 'unknown key "tools"'),
        ('{"id": 1, "prompt": "x", "max_tokens": 5, "seed": 1}', 'unknown key "max_tokens", "seed"'),
        ('{"id": "\\udfff", "prompt": "x"}', "surrogate"),
        ('{"id": 1, "messages": [{"role": "user", "content": "\\ud83d"}]}', "surrogate"),
        ('{"id": NaN, "prompt": "x"}', "not JSON"),
        ('{"id": 1e999, "prompt": "x"}', "not JSON"),
        ('{"id": ' + "[" * 100_000 + "]" * 100_000 + ', "prompt": "x"}', "nested too deeply"),
    ],
)
def test_invalid_lines_are_named(line: str, message: str) -> None:
    with pytest.raises(PromptFileError, match="line 2") as caught:
        read_prompts(['{"id": 0, "prompt": "fine"}', line])
    assert message in str(caught.value)


# --- Child processes


async def start_specpool(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "specpool.cli.main", *arguments, env={**os.environ, **environment},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def test_generate_streams_in_utf8_in_any_locale(served: Serving) -> None:
    locale = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    process = await start_specpool("generate", "--address", served.address, "--max-tokens", "40", **locale)
    out, err = await process.communicate("h\u2028é".encode())
    assert (process.returncode, err) == (0, b"[stopped after 40 tokens: --max-tokens]\n")
    assert out.decode() == byte_tokenizer().decode(truth(served, "h\u2028é", 40)) + "\n"


async def test_ctrl_c_ends_a_waiting_command_quietly() -> None:
    process = await start_specpool("generate", "--address", free_address(), "hello")
    assert process.stderr is not None
    await process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert await process.communicate() == (b"", b"")
    assert process.returncode == 130


@slow
async def test_a_terminal_shows_the_phase_and_the_time() -> None:
    address, target = free_address(), LoadingTarget()
    controller, terminal = os.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "specpool.cli.main", "generate", "--address", address, "--max-tokens", "5", "hello",
        stdout=subprocess.PIPE, stderr=terminal, env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )  # fmt: skip
    os.close(terminal)
    async with serving(target, with_draft=False, with_target=False, port=int(address.split(":")[1])) as served:
        await target.start(served.target_address)
        target.report("testing [bold]batch\x1b invariance")
        shown = b""
        while b"invariance" not in shown:
            shown += await asyncio.to_thread(os.read, controller, 2**16)
        await target.loaded()
        out, _ = await process.communicate()
        assert out.decode() == byte_tokenizer().decode(truth(served, "hello", 5)) + "\n"
    os.close(controller)
    text = re.sub(r"\x1b\[[?\d;]*\w", "", shown.decode())
    assert re.search(r"0:00:\d\d waiting for [\d.:]+: testing \[bold\]batch  invariance", text)


def shell(script: str, *arguments: str) -> tuple[int, str, str]:
    """Result of a shell script that calls `specpool`."""
    program = f'set -o pipefail; specpool() {{ {sys.executable} -m specpool.cli.main "$@"; }}; {script}'
    done = subprocess.run(
        ["bash", "-c", program, "bash", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("script", "status", "message"),
    [
        ('specpool generate --address "$1" --prompts "$2" --json | head -1 >/dev/null', 1, ""),
        ('specpool generate --address "$1" abc >&-', 1, "standard output is closed"),
        pytest.param('specpool generate --address "$1" abc >/dev/full', 1, "No space left on device", marks=slow),
        pytest.param('specpool generate --address "$1" <&-', 2, "standard input: it is closed", marks=slow),
        pytest.param("specpool generate --address localhost:1 --wait-seconds 0.1 hello 2>&-", 1, "", marks=slow),
    ],
)
async def test_an_unusable_stream_is_reported_in_one_line(
    served: Serving, tmp_path: Path, script: str, status: int, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"id": {i}, "prompt": "x"}}\n' for i in range(300)))
    code, out, err = await asyncio.to_thread(shell, script, served.address, str(file))
    assert (code, out) == (status, "")
    assert message in err
    assert err.count("\n") == bool(message)


# --- Modules of the current directory


def test_commands_import_nothing_from_the_current_directory(tmp_path: Path) -> None:
    for name in ("grpc", "coordinator", "rpc", "engine", "specpool", "json"):
        (tmp_path / f"{name}.py").write_text(f"import sys\nsys.exit('imported {name} of the current directory')\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = [*run_module("coordinator.server"), "--help"]
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "usage" in done.stdout) == (0, True), done.stderr


async def test_all_processes_start_without_the_current_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    async def start(*command: str, **_: object) -> None:
        started.append(list(command))

    monkeypatch.setattr("asyncio.create_subprocess_exec", start)

    def replace_process(_: str, command: list[str], environment: dict[str, str]) -> None:
        started.append(command)
        raise SystemExit

    monkeypatch.setattr("os.execve", replace_process)
    await start_module("coordinator.server", "--port", "1")
    with pytest.raises(SystemExit):
        command.run("plan", ["--help"])
    assert started == [
        [*run_module("coordinator.server"), "--port", "1"],
        [*run_module("specpool.planning"), "--help"],
    ]
