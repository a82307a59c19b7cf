"""The sustained load: its figures, and short runs with a tiny pair and a stand-in for llama.cpp."""

import asyncio
import sys
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path

import pytest
from pair_service import serving_pair

from benchmarks import sustained
from benchmarks.llamacpp_process import Engine
from benchmarks.sustained import Meter, figures, measure, measure_prefix, numbered_lines, parse, prompts_of, shares
from specpool.client import AsyncClient
from specpool.client.prompts import PromptLine
from specpool.v1 import generation_pb2 as pb

Pair = tuple[Path, Path]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers, prefixes and a warm-up that fit a tiny pair."""
    sizes = {
        "WARM_UP_SECONDS": 0, "LENGTHS": (4, 8), "SHARED_TOKENS": 40, "MAX_PROMPT_TOKENS": 120, "PREFIX_TOKENS": 64,
    }  # fmt: skip
    for name, size in sizes.items():
        monkeypatch.setattr(sustained, name, size)


def test_meter_ignores_what_came_before_it_opens() -> None:
    meter = Meter(opens=10.0)
    for now, last, tokens in ((9.0, None, 4), (11.0, 9.0, 2), (12.0, None, 1), (12.5, 11.0, 3), (13.0, 12.5, 0)):
        meter.record(now, last, tokens)
    assert (meter.tokens, meter.gaps) == (6, [1.5, 0.5])


def test_figures_of_a_run() -> None:
    meter = Meter(0.0, 300, [0.01] * 98 + [0.02, 0.05])
    assert figures(meter, 2.0) == {
        "tokens_per_s": 150.0, "gap_p50_ms": 10.0, "gap_p99_ms": 20.0, "longest_gap_ms": 50.0, "longest_of_p50": 5.0,
    }  # fmt: skip
    assert figures(Meter(0.0), 1.0)["longest_of_p50"] is None


def test_shares_of_a_run_are_differences() -> None:
    before = pb.ServerCounters(prompt_tokens=100, cached_tokens=90, stage_seconds={"verify": 5, "realign": 5})
    after = pb.ServerCounters(prompt_tokens=300, cached_tokens=140, stage_seconds={"verify": 8, "realign": 6})
    assert shares(before, after) == {"realign_%": 25.0, "cached_%": 25.0}
    assert shares(after, after) == {"realign_%": None, "cached_%": None}


def test_prompts_differ_and_every_second_client_shares_a_prefix(tiny_pair: Pair) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "?"}]
    lines = [PromptLine(0, "why"), PromptLine(1, chat)]
    assert [line.prompt for line in islice(numbered_lines(lines, first=7), 3)] == [
        "7. why",
        [chat[0], {"role": "user", "content": "8. ?"}],
        "9. why",
    ]
    prompts = prompts_of(tiny_pair[0], lines, clients=4, seconds=3, first=1)
    assert [len(some) for some in prompts] == [3] * 4
    assert len({tuple(ids) for some in prompts for ids in some}) == 12
    heads = [{tuple(ids[:40]) for ids in some} for some in prompts]
    assert heads[1] == heads[3]
    assert [len(each) for each in heads] == [3, 1, 3, 1]


async def test_error_of_a_client_ends_the_run() -> None:
    async def broken(prompt: list[int], tokens: int) -> AsyncIterator[int]:
        yield 1
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        await sustained.load(None, broken, [[[1]]], 1000)


async def keep_busy(client: AsyncClient) -> None:
    while True:
        await client.generate([1, 2, 3], max_tokens=8, ignore_eos=True)


@pytest.mark.slow
async def test_all_systems_run_the_load(tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client keeps the service's counters changing, even while llama.cpp runs."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("stand_ins")))
    (tmp_path / "model.gguf").write_text("GGUF")
    engine = Engine(sys.executable, tmp_path / "model.gguf", 1)
    options = parse(["--clients", "1", "--plain", "--repeats", "1"])
    options.seconds = 2
    async with serving_pair(*tiny_pair, {"threads": 1}, max_num_seqs=2) as service:
        other = asyncio.create_task(keep_busy(service.client))
        rows = await measure(service.client, tiny_pair[0], engine, options)
        other.cancel()
        (prefix,) = await measure_prefix(service.client, tiny_pair[0], options)
    assert [(row["clients"], row["decoding"]) for row in rows] == [(1, "default"), (1, "plain"), (1, "llama.cpp")]
    for row in rows:
        assert row["tokens_per_s"] > 0
        assert row["gap_p50_ms"] <= row["gap_p99_ms"] <= row["longest_gap_ms"]
        assert (row["realign_%"] is None) == (row["decoding"] == "llama.cpp")
    assert prefix["cached_%"] > 0
    assert min(prefix["first_ms"], prefix["others_ms"]) > 0
