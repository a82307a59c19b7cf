"""Plans drafts of requests with a fixed number of draft tokens. Pure."""

from collections.abc import Mapping

from specpool.drafting.acceptance import expected_gain, expected_tokens
from specpool.drafting.branching import BranchPlan
from specpool.drafting.draft_lengths import DraftLengths, DraftOptions
from specpool.drafting.plans import DraftPlan

# Draft tokens that a request with a fixed length always gets, even in a round with adaptive requests.
MIN_FIXED_TOKENS = 4


def plan_fixed(
    lengths: DraftLengths, options: Mapping[int, DraftOptions], sequences: int, max_branches: int, is_mixed: bool
) -> dict[int, DraftPlan]:
    """The draft plan of each sequence id, by the method with the higher expected acceptance.

    `is_mixed`: whether the round has adaptive sequences. The draft steps of their plan then limit the number of tokens,
    because they would wait for unprofitable steps, and their plan decides about branches.
    """
    plans = {}
    for i, option in options.items():
        k, rate = option.max_num_draft_tokens, lengths.acceptance.rate(i)
        if is_mixed:
            k = min(k, max(MIN_FIXED_TOKENS, len(lengths.plan.steps)))
        prefers_lookup = 1 + expected_gain(option.lookup.chances[:k]) > expected_tokens(rate, k)
        num_draft_tokens = k if option.has_model and not prefers_lookup else 0
        plans[i] = DraftPlan(num_draft_tokens, lookup_ids=option.lookup.token_ids[:k])
    drafted = {i: plan.num_draft_tokens for i, plan in plans.items() if plan.num_draft_tokens}
    branching = [i for i in drafted if options[i].can_branch]
    if branching and max_branches:
        branches = lengths.branches
        if not is_mixed:
            branches = _branches(lengths, drafted, len(branching), sequences, max_branches)
        plans |= {i: plans[i]._replace(num_branches=branches.num_branches) for i in branching}
    return plans


def _branches(
    lengths: DraftLengths, drafted: Mapping[int, int], branching: int, sequences: int, max_branches: int
) -> BranchPlan:
    """Return the fastest plan for branches; empty if drafting before the verification is as fast.

    `branching`: number of sequences that may have branches.
    """
    k, rate = max(drafted.values()), sum(map(lengths.acceptance.rate, drafted)) / len(drafted)
    gained = sum(expected_tokens(rate, each) - 1 for each in drafted.values())
    in_turn = lengths.costs.seconds(sequences, [sum(each > j for each in drafted.values()) for j in range(k)])
    best = lengths.branching.best(sequences, branching, rate, max_branches, range(k, k + 1))
    return best if best.speed * in_turn > sequences + gained else BranchPlan()
