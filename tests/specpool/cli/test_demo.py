"""The results of `specpool demo` and its table."""

import io

import pytest
from rich.console import Console

from specpool.cli.demo import Run, result_of, table_of
from specpool.v1 import common_pb2
from specpool.v1 import generation_pb2 as pb


def response(tokens: int, rounds: int = 0, drafted: int = 0, accepted: int = 0) -> pb.GenerateResponse:
    answer = pb.GenerateResponse(token_ids=range(tokens), usage=pb.Usage(completion_tokens=tokens))
    answer.speculative_decoding.num_spec_steps = rounds
    answer.speculative_decoding.num_draft_tokens = drafted
    answer.speculative_decoding.num_accepted_draft_tokens = accepted
    return answer


INFO = pb.GetModelInfoResponse(target=common_pb2.ModelInfo(equivalence=common_pb2.EQUIVALENCE_BITWISE))
PLAIN = Run([response(60), response(40)], 1.0)


def test_rounds_without_drafts_count() -> None:
    result = result_of([PLAIN], [Run([response(60, 10, 30, 20), response(40)], 0.8)], INFO)
    assert (result["plain_tokens_per_s"], result["speedup"], result["exact_match"]) == (100.0, 1.25, 1.0)
    assert result["tokens_per_round"] == 100 / 80
    assert result["drafted_share"] == 10 / 80
    assert result["mean_acceptance_length"] == 3.0
    assert result["draft_acceptance_rate"] == pytest.approx(2 / 3, abs=0.001)
    assert result_of([PLAIN], [PLAIN], INFO)["tokens_per_round"] == 1.0


def test_the_table_has_names_for_all_results() -> None:
    result = result_of([PLAIN], [PLAIN], INFO)
    console = Console(file=io.StringIO(), width=80)
    console.print(table_of(result))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "plain decoding" in shown
    assert "100.0 tokens/s" in shown
    assert "_" not in shown
