"""Figures of the vLLM benchmark, from made-up runs."""

from typing import Any

from benchmarks import vllm


def run(seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "outputs": [[1, 2, 3, 4]], "seconds": seconds, "steps": 4, "draft_tokens": 0, "accepted": 0, **more,
    }  # fmt: skip


def test_ratios_are_taken_within_a_repeat_and_the_first_run_is_apart() -> None:
    drafting = {"draft_tokens": 4, "accepted": 3}
    runs = {
        "plain": [run(8.0), run(1.0), run(2.0), run(4.0)],
        "remote": [run(16.0), *(run(seconds, **drafting) for seconds in (1.0, 1.0, 2.0))],
    }
    plain, remote = vllm.summaries(runs, 1)
    assert (plain["ratio"], plain["tokens_per_s"]) == (1.0, 2.0)
    assert [remote[name] for name in ("ratio_first", "ratio", "ratio_min", "ratio_max")] == [0.5, 2.0, 1.0, 2.0]
    assert remote["accepted"] == 0.75
