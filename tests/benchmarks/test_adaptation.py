"""The adaptation benchmark: prompts and measurements."""

from benchmarks.adaptation import acceptance
from benchmarks.domain import domain_prompts
from specpool.v1 import generation_pb2 as pb


def test_prompts_are_distinct_and_deterministic() -> None:
    prompts = domain_prompts()
    assert len(set(prompts)) == len(prompts) == 640
    assert prompts == domain_prompts() != sorted(prompts)


def test_acceptance_is_over_all_answers() -> None:
    responses = [
        pb.GenerateResponse(token_ids=range(tokens), speculative_decoding=statistics)
        for tokens, statistics in (
            (10, pb.SpeculativeDecodingStats(num_draft_tokens=8, num_accepted_draft_tokens=5)),
            (4, pb.SpeculativeDecodingStats()),
            (6, pb.SpeculativeDecodingStats(num_draft_tokens=12, num_accepted_draft_tokens=5)),
        )
    ]
    assert acceptance(responses) == {"tokens": 20, "acceptance_rate": 0.5, "tokens_per_round": 2.0}
