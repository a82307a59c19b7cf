"""The load generator and the soak report wrong answers, and find no fault in a service whose links are cut."""

import asyncio
import json
from typing import Any

import pytest
from lab import chaos
from lab.load import Case, Load, WrongAnswerError, check_samples
from lab.soak import main

from specpool.v1 import generation_pb2 as pb

REQUEST = pb.GenerateRequest(request_id="a", sampling_params=pb.SamplingParams(max_tokens=2, n=2))


def sample(index: int, **fields: Any) -> pb.GenerateResponse:
    """A right sample, except for some fields."""
    right = {"request_id": "a", "token_ids": [index, 5], "finish_reason": "length"}
    return pb.GenerateResponse(index=index, **{**right, **fields})


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
def test_wrong_samples_are_reported(samples: list[Any], reason: str) -> None:
    assert check_samples(REQUEST, [sample(1), sample(0)]) == {0: [0, 5], 1: [1, 5]}
    with pytest.raises(WrongAnswerError, match=reason):
        check_samples(REQUEST, samples)


async def test_tally_counts_every_outcome() -> None:
    async def send(case: Case) -> dict[int, list[int]]:
        if case.cancelled_after is not None:
            await asyncio.sleep(60)
        return {0: [1, 2]}

    known = [Case(REQUEST, expected={0: [1, token]}) for token in (2, 3)]
    cases = [*known, Case(REQUEST, cancelled_after=0.01)]
    load = Load(send, cases, concurrency=2, keep=lambda case: True)
    await load.run()
    assert load.tally.outcomes == {"answered": 1, "wrong": 1, "cancelled": 1}
    assert (load.tally.tokens, load.tally.kept) == (2, [(REQUEST, {0: [1, 2]})])
    assert load.tally.faults == ["a: the tokens differ from plain decoding"]


@pytest.mark.slow
def test_short_soak_with_cuts_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--requests", "40", "--concurrency", "8", "--max-num-seqs", "4", "--cuts", "6", "--checked", "0.5"]
    main(flags)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["faults"] == []
    assert sum(result["outcomes"].values()) == 40
    assert result["outcomes"]["answered"] > result["compared"] > 5
    assert 3 <= result["cuts"] <= 6
    assert set(result["resident_mib"]) == {"coordinator", "draft worker", "target worker"}


@pytest.mark.slow
def test_short_soak_with_faults_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--requests", "600", "--concurrency", "8", "--max-num-seqs", "4", "--workers", "2", "--faults", "4"]
    main(flags)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["faults"] == []
    assert result["faults_of_workers"] >= 1
    assert sum(result["outcomes"].values()) == 600
    assert result["audited"]["equal"] >= 1


@pytest.mark.slow
@pytest.mark.real_pair
def test_short_chaos_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--faults", "6", "--restarts", "1", "--requests", "8", "--max-tokens", "16", "--kinds", "kill,short stop"]
    chaos.main(flags)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["problems"] == []
    assert result["faults"] == 7
    assert result["answers"] > 0
