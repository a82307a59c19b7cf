"""A round's prefill budget and its shares: max-min fair among clients, shortest remainder first within a client. Pure.

Prefill must not take worker time away from the clients whose sequences decode. While some decode, prefill takes as much
time as they do, times the clients that prefill per client that decodes. Otherwise it takes the time of a few steps,
because a sequence that arrives during a pass waits for its end.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from coordinator.scheduling.sequence import Sequence

# Catch-ups of up to this many tokens are never chunked. A draft worker regularly lacks two tokens.
MAX_UNCHUNKED_TOKENS = 8
# With more clients than shares of this size, clients take turns.
MIN_SHARE = 16
# A sequence that was left out of this many rounds goes before the shorter ones of its client.
MAX_WAIT_ROUNDS = 8

# Unless sequences of other clients decode, prefill adds at most the time of this many steps of one sequence.
MAX_STEPS = 4

Catchup = tuple[Sequence, int]
"""A sequence, and the number of committed tokens that a worker lacks."""


def timely_budget(
    catchups: Iterable[Catchup], num_draft_tokens: int, budget: int, pass_seconds: Callable[[int], float]
) -> int:
    """Return how many tokens of long catch-ups a round may run: at most `budget`, and at least one.

    `num_draft_tokens`: draft tokens that the round verifies. `pass_seconds`: seconds of a pass by rows.
    """
    decoding_rows, prefilling, decoding = num_draft_tokens, set(), set()
    for sequence, missing in catchups:
        if missing > MAX_UNCHUNKED_TOKENS:
            prefilling.add(sequence.request.client)
        else:
            decoding_rows += missing
            if not sequence.request.is_background:
                decoding.add(sequence.request.client)
    if not prefilling:
        return budget
    own_seconds, others = pass_seconds(decoding_rows), len(decoding - prefilling)
    added = own_seconds * len(prefilling) / others if others else MAX_STEPS * pass_seconds(1)
    limit = own_seconds + added
    return max(1, bisect_right(range(1, budget + 1), limit, key=lambda rows: pass_seconds(decoding_rows + rows)))


def with_short_background(catchups: Items[Catchup]) -> Items[Catchup]:
    """Run only a few tokens of each background sequence in a round with others, so that its prompt delays no token."""
    if all(sequence.request.is_background for sequence, _ in catchups):
        return catchups
    return [(s, min(n, MAX_UNCHUNKED_TOKENS) if s.request.is_background else n) for s, n in catchups]


def share_prefill(catchups: Iterable[Catchup], budget: int) -> dict[int, int]:
    """Return how many tokens of each sequence, by id, a worker runs in this round. `budget`: for long catch-ups."""
    shares: dict[int, int] = {}
    by_client: dict[str, list[Catchup]] = {}
    for sequence, missing in catchups:
        if missing <= MAX_UNCHUNKED_TOKENS:
            shares[sequence.sequence_id] = missing
        else:
            by_client.setdefault(sequence.request.client, []).append((sequence, missing))
    for catchups_of_client, share in _share_among_clients(list(by_client.values()), budget):
        left = share
        for sequence, missing in sorted(catchups_of_client, key=_turn):
            shares[sequence.sequence_id] = min(missing, left)
            left -= shares[sequence.sequence_id]
    return shares


def _share_among_clients(clients: list[list[Catchup]], budget: int) -> Iterable[tuple[list[Catchup], int]]:
    """Yield a share for each client. The longest waiting clients take a turn; small demands leave more for others."""
    if len(clients) * MIN_SHARE > budget:
        clients.sort(key=lambda client: -max(sequence.prefill_waits for sequence, _ in client))
        turns = max(1, budget // MIN_SHARE)
        yield from ((client, 0) for client in clients[turns:])
        clients = clients[:turns]
    demands = [(sum(missing for _, missing in client), client) for client in clients]
    demands.sort(key=lambda demand: demand[0])
    for left, (demand, client) in zip(range(len(demands), 0, -1), demands, strict=True):
        share = min(demand, -(-budget // left))
        budget -= share
        yield client, share


def _turn(catchup: Catchup) -> tuple[bool, bool, int, int]:
    """Rank of a sequence within its client."""
    sequence, missing = catchup
    # A sequence without a free slot would waste the share of another.
    is_overdue = sequence.prefill_waits >= MAX_WAIT_ROUNDS and not sequence.target.had_no_slot
    return not is_overdue, sequence.target.had_no_slot, sequence.request.priority, missing
