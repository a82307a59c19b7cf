"""The soak: its audit finds what is wrong, and finds nothing in real processes whose connections are cut."""

import json
import sys
from typing import Any

import pytest
from benchmarks.soak import main, parse
from benchmarks.soak_load import WrongAnswerError, check_samples
from benchmarks.trio import memory

from specpool.v1 import generation_pb2 as pb

REQUEST = pb.GenerateRequest(request_id="a", sampling_params=pb.SamplingParams(max_tokens=2, n=2))


def sample(index: int, **fields: Any) -> pb.GenerateResponse:
    """A sample as it should be, but for some fields."""
    right = {"request_id": "a", "token_ids": [index, 5], "finish_reason": "length"}
    return pb.GenerateResponse(index=index, **{**right, **fields})


def test_samples_are_there_once_and_as_long_as_asked() -> None:
    assert check_samples(REQUEST, [sample(1), sample(0)]) == {0: [0, 5], 1: [1, 5]}


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([sample(0)], "1 answers"),
        ([sample(0), sample(1), sample(1)], "3 answers"),
        ([sample(0), sample(1, request_id="b")], "answered as b"),
        ([sample(0), sample(1, finish_reason="abort")], "ended by abort"),
        ([sample(0), sample(1, token_ids=[1])], "1 tokens"),
        ([sample(0), sample(1, token_ids=[1, 2, 3], finish_reason="stop")], "3 tokens"),
    ],
)
def test_samples_that_are_lost_doubled_or_of_others_are_found(samples: list[Any], reason: str) -> None:
    with pytest.raises(WrongAnswerError, match=reason):
        check_samples(REQUEST, samples)


def test_memory_counts_from_the_warm_up_or_for_a_queue_from_the_start() -> None:
    samples = [{"a": mib} for mib in (10.0, 50.0, 50.0, 50.0, 50.0, 90.0, 60.0, 60.0)]
    assert memory(samples, 0.25, to_the_most=False)["a"]["growth"] == 10.0
    assert memory(samples, 0.25, to_the_most=True)["a"]["growth"] == 80.0


def test_a_queue_is_sent_at_once() -> None:
    options = parse(["--queued", "500"])
    assert options.requests == options.concurrency == 500


@pytest.mark.rehearsal
def test_a_short_soak_with_cuts_finds_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--requests", "40", "--concurrency", "8", "--max-num-seqs", "4", "--cuts", "6", "--checked", "0.5"]
    monkeypatch.setattr(sys, "argv", ["soak", *flags])
    main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["faults"] == []
    assert sum(result["outcomes"].values()) == 40
    assert result["outcomes"]["answered"] > result["compared"] > 5
    assert 3 <= result["cuts"] <= 6
    assert set(result["resident_mib"]) == {"coordinator", "draft worker", "target worker"}
