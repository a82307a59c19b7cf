"""Command line of the health check."""

import sys

import pytest

from specpool import healthcheck


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["127.0.0.1:1", "--timeout", "nan"], "argument --timeout: nan is not a positive number"),
        (["127.0.0.1:1", "--timeout", "-1"], "argument --timeout: -1 is not a positive number"),
        (["127.0.0.1:1", "--timeout", "soon"], "argument --timeout: invalid seconds value: 'soon'"),
        (["127.0.0.1:1", "--service", "\udcff"], "argument --service: '\\udcff' is not UTF-8"),
        (["\udcff:1"], "argument HOST:PORT: '\\udcff:1' is not UTF-8"),
        (["localhost"], "argument HOST:PORT: localhost has no port: use HOST:PORT, such as localhost:50050"),
    ],
)
def test_invalid_arguments_fail_with_one_line(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        healthcheck.main(arguments)
    assert capsys.readouterr().err.splitlines()[-1] == f"specpool.healthcheck: error: {error}"


def test_a_refused_connection_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert healthcheck.main(["127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "127.0.0.1:1: UNAVAILABLE: cannot connect to 127.0.0.1:1: Connection refused\n"


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc_health", None)
    with pytest.raises(SystemExit, match=r"^specpool\.healthcheck: needs grpc_health: .*\[cli\]"):
        healthcheck.main(["127.0.0.1:1"])
