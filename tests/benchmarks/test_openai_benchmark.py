"""A short run of the benchmark of HTTP and gRPC streams."""

import json

import pytest

from benchmarks import openai


@pytest.mark.slow
def test_the_comparison_ends_in_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    openai.main(["--streams", "1,2", "--tokens", "8", "--repeats", "1", "--pass-ms", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["streams"] for row in result["rows"]] == [1, 2]
    assert all(row["http_tokens_per_s"] > 0 and row["grpc_tokens_per_s"] > 0 for row in result["rows"])
