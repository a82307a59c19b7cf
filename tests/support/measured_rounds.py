"""Draft lengths whose ledger knows plain rounds, and rounds as the cost model predicts them."""

from collections.abc import Mapping

from specpool.drafting.acceptance import expected_tokens
from specpool.drafting.draft_lengths import DraftLengths, DraftOptions
from specpool.drafting.plain_times import MIN_PLAIN
from specpool.drafting.plans import DraftMethod, DraftPlan


def measure_plain_rounds(lengths: DraftLengths) -> None:
    """Report plain rounds of all batch sizes up to 127."""
    for sequences in (1, 2, 4, 8, 16, 32, 64):
        for _ in range(MIN_PLAIN):
            lengths.ledger.observe(sequences, sequences, lengths.costs.seconds(sequences, []), None)


def confirm_costs(lengths: DraftLengths) -> None:
    """Report plain rounds, and use up the free trials of the model."""
    measure_plain_rounds(lengths)
    while lengths.ledger.has_free_trial(DraftMethod.MODEL, 1):
        lengths.ledger.may_try(DraftMethod.MODEL, 1, 0.0, 0.0)


def run_round(lengths: DraftLengths, options: Mapping[int, DraftOptions]) -> dict[int, DraftPlan]:
    """Choose, and report a round that takes the predicted time and gains the expected tokens."""
    plans = lengths.choose(options)
    drafted = {i: plan.num_draft_tokens for i, plan in plans.items()}
    steps = [sum(k > j for k in drafted.values()) for j in range(max(drafted.values()))]
    tokens = sum(expected_tokens(lengths.acceptance.rate(i), k) for i, k in drafted.items())
    method = DraftMethod.MODEL if steps else None
    is_trial = any(plan.is_trial for plan in plans.values())
    lengths.ledger.observe(len(plans), tokens, lengths.costs.seconds(len(plans), steps), method, is_trial)
    return plans
