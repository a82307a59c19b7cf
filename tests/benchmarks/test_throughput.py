"""The throughput benchmark: its figures, and a tiny pair on which every answer is exact."""

import json
from pathlib import Path

import pytest
from pair_service import serving_pair

from benchmarks.answers import Answer, sustained, token_latencies
from benchmarks.prompts import load_by_category
from benchmarks.report import percentile
from benchmarks.throughput import (
    KINDS,
    Load,
    measure,
    parse,
    plan,
    show_all,
    summary,
)
from specpool.v1 import generation_pb2 as pb

Pair = tuple[Path, Path]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Three questions of one category, one of another."""
    categories = ["math", "math", "qa", "math"]
    records = [{"question_id": i, "category": name, "turns": [f"ask {i}"]} for i, name in enumerate(categories)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return tmp_path / "questions.jsonl"


def test_latencies_and_percentiles() -> None:
    assert token_latencies([(1.0, 1), (2.0, 2), (2.5, 1)]) == [0.5, 0.5, 0.5]
    assert token_latencies([(1.0, 3)]) == []
    values = [float(i) for i in range(200, 0, -1)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 100, 198, 200]
    assert percentile([7.0], 0.99) == 7
    assert percentile([], 0.5) is None


def test_ratios_are_taken_within_a_repeat() -> None:
    def runs(*speeds: float) -> list[dict[str, float]]:
        return [{"tokens_per_s": speed, "exact_match": 1.0} for speed in speeds]

    row = summary(Load(1, [], []), "k1", runs(20, 5, 30), runs(10, 5, 10))
    assert (row["tokens_per_s"], row["ratio"], row["ratio_min"], row["ratio_max"]) == (20, 2, 1, 3)


def test_sustained_speed_is_that_until_the_last_request_begins() -> None:
    def answer(began: float, *arrivals: tuple[float, int]) -> Answer:
        return Answer(pb.GenerateResponse(), began, list(arrivals))

    first, second = answer(0.0, (1.0, 1), (2.0, 3)), answer(0.0, (2.0, 2), (9.0, 1))
    assert sustained([first, second, answer(4.0, (5.0, 1))]) == 6 / 4
    assert sustained([first, second]) is None


def test_loads_mix_all_categories(questions: Path) -> None:
    assert {name: len(lines) for name, lines in load_by_category(questions).items()} == {"math": 3, "qa": 1}
    loads = plan(parse(["--prompts", str(questions), "--concurrencies", "4,1", "--kinds", "best,k2"]))
    assert [(load.concurrency, load.category) for load in loads] == [(1, None), (4, None), (1, "math"), (1, "qa")]
    assert [[line.id for line in load.lines] for load in loads] == [
        [0, 2, 1, 3], [0, 2, 1, 3] * 4, [0, 1, 3, 0], [2, 2, 2, 2],
    ]  # fmt: skip
    assert [load.kinds for load in loads] == [["plain", "k2", "best"]] * 2 + [["plain", "best"]] * 2


@pytest.mark.slow
async def test_every_kind_gives_plain_tokens(tiny_pair: Pair, questions: Path) -> None:
    arguments = ["--prompts", str(questions), "--concurrencies", "1,2", "--repeats", "1", "--max-tokens", "12"]
    options = parse([*arguments, "--num-prompts", "3"])
    async with serving_pair(*tiny_pair, {"threads": 1}, max_num_seqs=2, prefix_caching=False) as service:
        rows = await measure({"default": service.client}, plan(options), options)
    mixed = [(row["concurrency"], row["kind"]) for row in rows if row["category"] is None]
    assert mixed == [(concurrency, kind) for concurrency in (1, 2) for kind in KINDS]
    assert [(row["category"], row["kind"]) for row in rows[len(mixed) :]] == [
        (category, kind) for category in ("math", "qa") for kind in ("plain", "best")
    ]
    for row in rows:
        assert (row["arrangement"], row["exact_match"], row["of_first"]) == ("default", 1, None)
        assert row["tokens_per_s"] > 0
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
        assert row["token_p50_ms"] <= row["token_p99_ms"]
        assert (row["predicted_ratio"] is None) == (row["kind"] not in ("adaptive", "ngram", "best"))
        assert (row["acceptance_length"] is None) == (row["rounds_drafted"] == 0)
        if row["kind"] == "plain":
            assert (row["ratio"], row["sustained_ratio"], row["rounds_drafted"]) == (1, 1, 0)
        elif row["kind"] in ("k1", "k5"):
            assert row["draft_busy"] > 0
            assert 1 < row["acceptance_length"] <= 1 + int(row["kind"][1])
    show_all(rows)
