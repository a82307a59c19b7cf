"""Settings: flags override variables, then the file, then defaults. Anything unknown or invalid is refused."""

import json
import logging
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.config.settings import CoordinatorSettings
from draft_worker.server import DraftWorkerSettings
from specpool.cli.generate_settings import GenerateSettings
from specpool.cli.main import COMMANDS, known_keys
from specpool.cli.up import services_of
from specpool.cli.up_settings import UpSettings
from specpool.openai.settings import OpenAISettings
from specpool.planning.settings import PlanSettings
from specpool.rpc.config.help import name_of, options_of, with_flags
from specpool.rpc.config.settings import Settings
from target_worker.server import TargetWorkerSettings

ROOT = Path(__file__).parents[3]
ANY_PORT = ["--port", "0"]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("SPECPOOL_"):
            monkeypatch.delenv(name)


def load(*arguments: str) -> CoordinatorSettings:
    return CoordinatorSettings.load("specpool-coordinator", list(arguments))


def write(folder: Path, text: str) -> str:
    path = folder / "coordinator.toml"
    path.write_text(text)
    return str(path)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The text on stderr when the settings are refused."""
    with pytest.raises(SystemExit) as caught:
        load(*arguments)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert "specpool-coordinator" in captured.err
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("in_file", "in_environment", "in_flags", "expected"),
    [
        (False, False, False, 16),
        (True, False, False, 3),
        (True, True, False, 4),
        (False, True, False, 4),
        (True, False, True, 5),
        (False, True, True, 5),
        (True, True, True, 5),
    ],
)
def test_precedence_is_flag_variable_file_default(
    in_file: bool,
    in_environment: bool,
    in_flags: bool,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = []
    if in_file:
        arguments += ["--config", write(tmp_path, "max_num_seqs = 3\nqueue_size = 9\n")]
    if in_environment:
        monkeypatch.setenv("SPECPOOL_MAX_NUM_SEQS", "4")
    if in_flags:
        arguments += ["--max-num-seqs", "5"]
    settings = load(*arguments)
    assert settings.max_num_seqs == expected
    assert settings.queue_size == (9 if in_file else 256)


@pytest.mark.parametrize("upper", [True, False])
def test_variables_in_either_case_can_name_the_file(
    upper: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"SPECPOOL_CONFIG": write(tmp_path, 'draft_address = "draft:1"\n'), "SPECPOOL_MAX_NUM_SEQS": "3"}
    for name, value in variables.items():
        monkeypatch.setenv(name if upper else name.lower(), value)
    assert (load().draft_address, load().max_num_seqs) == ("draft:1", 3)


def test_variables_need_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSON", "not for us")
    assert not GenerateSettings.load("specpool generate", []).json_lines
    monkeypatch.setenv("SPECPOOL_JSON", "true")
    assert GenerateSettings.load("specpool generate", []).json_lines


def test_commands_accept_the_variables_of_all_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = DraftWorkerSettings.keys() | TargetWorkerSettings.keys()
    assert known_keys() >= workers
    commands = set().union(*(settings.keys() for settings, _ in COMMANDS.values()))
    assert known_keys() == workers | CoordinatorSettings.keys() | OpenAISettings.keys() | commands
    monkeypatch.setenv("SPECPOOL_KV_MEMORY", "8GiB")
    assert load_up().max_num_seqs == 16
    monkeypatch.setenv("SPECPOOL_MAX_NUM_SEQ", "3")
    with pytest.raises(SystemExit):
        load_up()
    error = "unknown environment variable SPECPOOL_MAX_NUM_SEQ (did you mean SPECPOOL_MAX_NUM_SEQS?)"
    assert capsys.readouterr().err == f"specpool up: {error}\n"


def load_up(*arguments: str) -> UpSettings:
    return UpSettings.load("specpool up", list(arguments), other_settings=known_keys())


def test_processes_accept_all_values_that_up_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    settings = load_up("--max-num-seqs", "4096", "--num-speculative-tokens", "16", "--threads", "1024")
    target, draft, coordinator = services_of(settings.model_copy(update={"startup_cache": False}), "target", "draft")
    assert not TargetWorkerSettings.load("target", target.arguments).startup_cache
    DraftWorkerSettings.load("draft", draft.arguments)
    CoordinatorSettings.load("coordinator", coordinator.arguments)


@pytest.mark.parametrize("port", [9100, 9102])
def test_up_refuses_a_port_conflict(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_up("--metrics-port", "9100", "--port", str(port))
    assert capsys.readouterr().err == "specpool up: --port must not be --metrics-port or one of the 2 ports after it\n"
    assert load_up("--metrics-port", "9100", "--port", "9103").metrics_port == 9100


def test_the_string_none_is_not_special(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_up("--target", "None").target == "None"
    with pytest.raises(SystemExit):
        load_up("--help")
    printed = capsys.readouterr().out
    assert "default: None" not in printed
    assert printed.isprintable() or set(printed) - set(filter(str.isprintable, printed)) == {"\n"}


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--host", "::1"], "host", "::1"),
        (["--host", "[::1]"], "host", "::1"),
        (["--port", "7"], "port", 7),
        (["--port=7"], "port", 7),
        (["--max-request-bytes", "2MiB"], "max_request_bytes", 2 * 2**20),
    ],
)
def test_values_can_be_written_in_several_ways(arguments: list[str], name: str, value: object) -> None:
    assert getattr(load(*arguments), name) == value


@pytest.mark.parametrize(
    ("flag", "similar"),
    [
        ("--no-such-flag", ""),
        ("--max-num", ""),
        ("--max_num_seq", " (did you mean --max-num-seqs?)"),
        ("stray", ""),
    ],
)
def test_unknown_flags_are_refused_by_name(flag: str, similar: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, flag, "3") == f"specpool-coordinator: unrecognized arguments: {flag} 3{similar}\n"


@pytest.mark.parametrize("flag", ["--max-num-seqs", "--config"])
def test_flags_without_a_value_are_refused_in_one_line(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, flag)
    assert error.startswith(f"specpool-coordinator: argument {flag}")
    assert error.endswith(": expected one argument\n")
    assert error.count("\n") == 1


def test_unknown_variables_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAX_NUM_SEQS", "3")
    assert load().max_num_seqs == 16
    monkeypatch.setenv("SPECPOOL_MAX_NUM_SEQ", "3")
    assert "SPECPOOL_MAX_NUM_SEQ" in refusal(capsys)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("max_num_seq = 3", "unknown setting max_num_seq (did you mean max_num_seqs?)\n"),
        ("max-num-seqs = 3", "unknown setting max-num-seqs (did you mean max_num_seqs?)\n"),
        ("server.port = 3", "unknown setting server\n"),
        ("port = 70000", "port: Input should be less than or equal to 65535 (got 70000)\n"),
        ("port = true", "port: Input should not be a boolean\n"),
        ("drain_seconds = false", "drain_seconds: Input should not be a boolean\n"),
        ("max_request_bytes = true", "max_request_bytes: Input should not be a boolean\n"),
        ("host = true", "host: Input should not be a boolean\n"),
        ("allowed_names = ['a', '']", "allowed_names.1: must not be empty\n"),
        ("port: 7", "line 1"),
        ('config = "other.toml"', "a config file cannot name another config file"),
    ],
)
def test_an_invalid_file_is_refused(text: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, f"{text}\n")
    printed = refusal(capsys, "--config", file)
    assert printed.startswith(f"specpool-coordinator: config: {file}: ")
    assert error in printed


def test_a_missing_file_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "/nowhere/settings.toml" in refusal(capsys, "--config", "/nowhere/settings.toml")
    monkeypatch.setenv("SPECPOOL_CONFIG", "/nowhere/settings.toml")
    assert "/nowhere/settings.toml" in refusal(capsys)


def test_invalid_utf8_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not UTF-8" in refusal(capsys, "--host", "caf\udce9")
    monkeypatch.setenv("SPECPOOL_HOST", "caf\udce9")
    assert "SPECPOOL_HOST" in refusal(capsys)


WRONG = [
    ("port", "70000", "65535"),
    ("port", "many", "integer"),
    ("max-num-seqs", "0", "1"),
    ("max-batch-size", "0", "1"),
    ("queue-size", "-1", "0"),
    ("policy", "alphabetical", "ragged"),
    ("draft-timeout-seconds", "0", "0"),
    ("draft-timeout-seconds", "nan", "86400"),
    ("target-timeout-seconds", "inf", "86400"),
    ("drain-seconds", "1e10", "86400"),
    ("max-num-seqs", "4097", "4096"),
    ("max-batch-size", "4097", "4096"),
    ("queue-size", "99999999999", "4294967295"),
    ("prefill-tokens", "4294967296", "4294967295"),
    ("default-max-tokens", "99999999999", "4294967295"),
    ("max-num-speculative-tokens", "1025", "1024"),
    ("max-request-bytes", "2GiB", "2147483647"),
    ("host", "", "empty"),
    ("target-address", "", "empty"),
    ("max-request-bytes", "10", "1024"),
    ("max-request-bytes", "4 parsecs", "byte"),
    ("default-max-tokens", "0", "1"),
    ("log-level", "loud", "debug"),
]


@pytest.mark.parametrize(("key", "value", "limit"), WRONG)
def test_invalid_values_are_refused_with_key_and_limit(
    key: str, value: str, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(capsys, f"--{key}={value}")
    assert key in error
    assert limit in error


@pytest.mark.parametrize(("key", "value", "limit"), WRONG[:3])
def test_invalid_values_in_variables_and_files_are_refused(
    key: str,
    value: str,
    limit: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = key.replace("-", "_")
    error = refusal(capsys, "--config", write(tmp_path, f"{name} = {json.dumps(value)}\n"))
    assert f": {name}: " in error
    assert limit in error
    monkeypatch.setenv(f"SPECPOOL_{name.upper()}", value)
    error = refusal(capsys)
    assert key in error
    assert limit in error


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ([], "model"),
        (["--model", "m", "--lease-seconds", "0"], "lease-seconds"),
        (["--model", "m", "--dtype", "int8"], "dtype"),
        (["--model", "m", "--max-sequences", "many"], "max-sequences"),
    ],
)
@pytest.mark.parametrize("settings", [TargetWorkerSettings, DraftWorkerSettings])
def test_workers_refuse_invalid_values(
    settings: type[Settings], arguments: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        settings.load("worker", arguments)
    assert caught.value.code == 2
    assert key in capsys.readouterr().err


def test_a_default_above_the_maximum_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, "--num-speculative-tokens", "5", "--max-num-speculative-tokens", "4")
    assert ": : " not in error
    assert error.endswith(": --num-speculative-tokens must not exceed --max-num-speculative-tokens\n")


def test_all_errors_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, "--port", "-1", "--max-num-seqs", "0")
    assert "port" in error
    assert "max-num-seqs" in error


def test_changed_settings_are_logged_and_all_of_them_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    load("--max-num-seqs", "5", "--queue-size", "256", "--host", "::", "--no-smg").log_resolved()
    changed, everything = caplog.records
    assert changed.getMessage() == 'settings: host="::" max_num_seqs=5'
    assert (changed.levelno, everything.levelno) == (logging.INFO, logging.DEBUG)
    logged = json.loads(everything.getMessage().removeprefix("all settings: "))
    assert (logged["max_num_seqs"], logged["queue_size"]) == (5, 256)
    assert set(logged) == set(CoordinatorSettings.model_fields) - {"config"}
    load().log_resolved()
    assert caplog.messages[2] == "settings: all defaults"


@pytest.mark.parametrize("settings", [*(kind for kind, _ in COMMANDS.values()), TargetWorkerSettings])
def test_help_describes_values_in_words(settings: type[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.load("program", ["--help"])
    printed = capsys.readouterr().out
    assert not re.findall(
        r"\[--[\w-]+ [^A-Z{|]|tuple|list\[|default factory|\(default: (?:None|True|False|\()", printed
    )
    options = {option.field: option for option in options_of(settings)}
    assert options.keys() == {name_of(name, field) for name, field in settings.model_fields.items()}
    helps = [with_flags(settings, option.help) for option in options.values() if "-" not in option.help]
    unwrapped = re.sub(r"(?<=\w-)\n +", "", printed)  # flags may be wrapped at a hyphen
    assert all(text in " ".join(unwrapped.split()) for text in helps)


def test_options_as_data() -> None:
    options = {option.field: option for option in options_of(DraftWorkerSettings)}
    assert options["fused"].flag == "--fused"
    assert (options["fused"].metavar, options["fused"].default) == ("", "on")
    assert (options["request_memory"].metavar, options["request_memory"].default) == ("SIZE", "128MiB")
    assert (options["dtype"].metavar, options["dtype"].default) == ("{auto,float32,bfloat16,float16}", "auto")
    assert (options["allowed_names"].metavar, options["allowed_names"].default) == ("NAMES", None)
    assert options["model"].is_required
    assert options["model"].help.endswith("(required)")
    [prompt] = [option for option in options_of(GenerateSettings) if option.flag is None]
    assert (prompt.field, prompt.metavar) == ("prompt", "PROMPT")
    assert {option.field: option.metavar for option in options_of(PlanSettings)}["batches"] == "INTS"
    assert {option.field: option.default for option in options_of(GenerateSettings)}["json"] == "off"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--host", "no-such-host.invalid", "--port", "0"], "host: cannot listen on no-such-host.invalid:0: "),
        (["--port", "{taken}"], "port: cannot listen on 127.0.0.1:{taken}: Address already in use"),
        (["--metrics-port", "{taken}", *ANY_PORT], "metrics-port: cannot listen on 127.0.0.1:{taken}: Address already"),
    ],
    ids=["unknown host", "port", "metrics port"],
)
def test_a_process_ends_with_one_line(arguments: list[str], reason: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "coordinator.server", *(text.format(taken=port) for text in arguments)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    *log, last = done.stderr.splitlines()
    assert last.startswith(f"specpool-coordinator: {reason.format(taken=port)}")
    assert all(" INFO coordinator " in line for line in log)
