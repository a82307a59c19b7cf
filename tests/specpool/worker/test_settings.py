"""Settings: flags outrank variables, the file and defaults in this order; anything unknown or invalid is refused."""

import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.config.settings import CoordinatorSettings
from draft_worker.server import DraftWorkerSettings
from specpool.cli.generate import GenerateSettings
from specpool.cli.main import COMMANDS, known_keys
from specpool.cli.up import UpSettings, services_of
from target_worker.server import TargetWorkerSettings

ROOT = Path(__file__).parents[3]


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


def test_defaults_hold_without_anything() -> None:
    settings = load()
    assert (settings.host, settings.port, settings.policy) == ("127.0.0.1", 50050, "ragged")
    assert settings.draft_address is None
    assert settings.max_request_bytes == 2**20


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
def test_flags_go_before_variables_before_the_file_before_defaults(
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


@pytest.mark.parametrize("in_file", ["max_num_seqs", "window_size"])
@pytest.mark.parametrize("in_environment", ["SPECPOOL_MAX_NUM_SEQS", "SPECPOOL_WINDOW_SIZE"])
@pytest.mark.parametrize("flag", ["--max-num-seqs", "--window-size"])
def test_former_names_have_the_same_precedence(
    in_file: str, in_environment: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--config", write(tmp_path, f"{in_file} = 3\n")]
    assert load(*arguments).max_num_seqs == 3
    monkeypatch.setenv(in_environment, "4")
    assert load(*arguments).max_num_seqs == 4
    assert load(*arguments, flag, "5").max_num_seqs == 5


def test_the_file_may_be_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPOOL_CONFIG", write(tmp_path, 'draft_address = "draft:1"\n'))
    assert load().draft_address == "draft:1"


def test_variables_may_be_in_lower_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("specpool_config", write(tmp_path, 'draft_address = "draft:1"\n'))
    monkeypatch.setenv("specpool_max_num_seqs", "3")
    assert (load().draft_address, load().max_num_seqs) == ("draft:1", 3)


def test_the_prefix_is_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSON", "not for us")
    assert not GenerateSettings.load("specpool generate", []).json_lines
    monkeypatch.setenv("SPECPOOL_JSON", "true")
    assert GenerateSettings.load("specpool generate", []).json_lines


def test_commands_know_the_variables_of_all_processes_and_refuse_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = DraftWorkerSettings.keys() | TargetWorkerSettings.keys()
    assert known_keys() >= workers
    commands = set().union(*(settings.keys() for settings, _ in COMMANDS.values()))
    assert known_keys() == workers | CoordinatorSettings.keys() | commands
    monkeypatch.setenv("SPECPOOL_KV_MEMORY", "8GiB")
    assert load_up().max_num_seqs == 16
    monkeypatch.setenv("SPECPOOL_WINDOW_SIZ", "3")
    with pytest.raises(SystemExit):
        load_up()
    assert capsys.readouterr().err == "specpool up: unknown environment variable SPECPOOL_WINDOW_SIZ\n"


def test_commands_know_these_without_torch() -> None:
    program = "import specpool.cli.main, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def load_up(*arguments: str) -> UpSettings:
    return UpSettings.load("specpool up", list(arguments), other_settings=known_keys())


def test_what_up_allows_its_processes_allow_too(capsys: pytest.CaptureFixture[str]) -> None:
    settings = load_up("--max-num-seqs", "4096", "--num-speculative-tokens", "16", "--threads", "1024")
    target, draft, coordinator = services_of(settings, "target", "draft")
    TargetWorkerSettings.load("target", target.arguments)
    DraftWorkerSettings.load("draft", draft.arguments)
    CoordinatorSettings.load("coordinator", coordinator.arguments)


@pytest.mark.parametrize("port", [9100, 9102])
def test_up_needs_its_port_for_itself(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_up("--metrics-port", "9100", "--port", str(port))
    assert capsys.readouterr().err == "specpool up: port must not be metrics_port or one of the 2 after it\n"
    assert load_up("--metrics-port", "9100", "--port", "9103").metrics_port == 9100


def test_no_text_stands_for_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_up("--target", "None").target == "None"
    with pytest.raises(SystemExit):
        load_up("--help")
    printed = capsys.readouterr().out
    assert "default: None" not in printed
    assert printed.isprintable() or set(printed) - set(filter(str.isprintable, printed)) == {"\n"}


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_may_have_brackets(host: str) -> None:
    assert load("--host", host).host == "::1"


@pytest.mark.parametrize("style", [["--port", "7"], ["--port=7"]])
def test_both_styles_of_flags_work(style: list[str]) -> None:
    assert load(*style).port == 7


@pytest.mark.parametrize("style", ["--config {}", "--config={}"])
def test_both_styles_of_naming_the_file_work(style: str, tmp_path: Path) -> None:
    assert load(*style.format(write(tmp_path, "port = 7\n")).split(" ")).port == 7


def test_sizes_can_have_units() -> None:
    assert load("--max-request-bytes", "2MiB").max_request_bytes == 2 * 2**20


@pytest.mark.parametrize("flag", ["--no-such-flag", "--max-num", "--max_num_seq", "stray"])
def test_unknown_flags_are_refused_by_name(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert flag in refusal(capsys, flag, "3")


def test_unknown_variables_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECPOOL_WINDOW_SIZ", "3")
    assert "SPECPOOL_WINDOW_SIZ" in refusal(capsys)


def test_variables_of_others_are_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDOW_SIZE", "3")
    assert load().max_num_seqs == 16


@pytest.mark.parametrize("key", ["max_num_seq", "server.port"])
def test_unknown_keys_of_the_file_are_refused_by_name(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(capsys, "--config", write(tmp_path, f"{key} = 3\n"))
    assert key.split(".")[0].replace("_", "-") in error.replace("_", "-")


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/nowhere/settings.toml" in refusal(capsys, "--config", "/nowhere/settings.toml")


def test_a_missing_file_of_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECPOOL_CONFIG", "/nowhere/settings.toml")
    assert "/nowhere/settings.toml" in refusal(capsys)


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "port: 7\n")
    error = refusal(capsys, "--config", path)
    assert path in error
    assert "line 1" in error


def test_a_file_cannot_name_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, 'config = "other.toml"\n')
    assert f"{path}: a config file cannot name another config file" in refusal(capsys, "--config", path)


def test_what_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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
    ("host", "", "1"),
    ("target-address", "", "1"),
    ("max-request-bytes", "10", "1024"),
    ("max-request-bytes", "4 parsecs", "byte"),
    ("default-max-tokens", "0", "1"),
    ("log-level", "loud", "debug"),
]


@pytest.mark.parametrize(("key", "value", "limit"), WRONG)
def test_wrong_flags_are_refused_with_key_and_limit(
    key: str, value: str, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(capsys, f"--{key}={value}")
    assert key in error
    assert limit in error


@pytest.mark.parametrize(("key", "value", "limit"), WRONG)
def test_wrong_variables_and_files_are_refused_with_key_and_limit(
    key: str,
    value: str,
    limit: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = key.replace("-", "_")
    error = refusal(capsys, "--config", write(tmp_path, f"{name} = {json.dumps(value)}\n"))
    assert key in error
    assert limit in error
    monkeypatch.setenv(f"SPECPOOL_{name.upper()}", value)
    error = refusal(capsys)
    assert key in error
    assert limit in error


def test_more_drafts_by_default_than_allowed_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, "--num-speculative-tokens", "5", "--max-num-speculative-tokens", "4")
    assert ": : " not in error
    assert "num_speculative_tokens" in error
    assert "max_num_speculative_tokens" in error


def test_several_mistakes_are_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, "--port", "-1", "--max-num-seqs", "0")
    assert "port" in error
    assert "max-num-seqs" in error


def test_settings_cannot_be_changed_afterwards() -> None:
    settings = load()
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1


def test_the_resolved_settings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load("--max-num-seqs", "5").log_resolved()
    logged = json.loads(caplog.messages[0].removeprefix("settings: "))
    assert logged["max_num_seqs"] == 5
    assert set(logged) == set(CoordinatorSettings.model_fields) - {"config"}


def test_help_names_every_key_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name, field in CoordinatorSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description
        assert field.description.split()[0] in text


def test_the_process_itself_refuses_with_status_2() -> None:
    command = [sys.executable, "-m", "coordinator.server", "--nonsense", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--nonsense" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.1"])
def test_an_address_that_is_not_ours_is_said_with_the_reason(host: str) -> None:
    command = [sys.executable, "-m", "coordinator.server", "--host", host, "--port", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    [said] = [line for line in done.stderr.splitlines() if line.startswith("specpool-coordinator: ")]
    assert said.startswith(f"specpool-coordinator: cannot listen on {host}:0: ")
    assert "Failed to bind" not in said
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_said_without_a_stack_trace(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "coordinator.server", "--port", port]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr
