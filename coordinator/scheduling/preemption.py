"""Chooses sequences to preempt for lack of KV positions. Pure.

A client takes positions from the client that has reserved the most, if that one keeps at least as many or has reserved
twice as many. Neither could then take them back, so clients never preempt each other in turns.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items

from coordinator.scheduling.capacity import Reservations, protected_tokens
from coordinator.scheduling.sequence import Sequence

# How many times as many positions as the claimant a client has reserved that must give up its last sequence.
EXCESS = 2


def protect(sequence: Sequence) -> None:
    """Let a sequence that returns to the window make up for its second prefill."""
    length = len(sequence.token_ids)
    sequence.protected_until = length + protected_tokens(length)


def is_protected(sequence: Sequence) -> bool:
    return len(sequence.token_ids) < sequence.protected_until


def victims_for(
    claimant: Sequence,
    wanted: int,
    missing: int,
    members: Items[Sequence],
    others: Iterable[Sequence],
    held: Reservations,
) -> list[Sequence]:
    """The members to preempt so that `missing` more positions are free. Empty if the claimant must wait.

    `wanted`: positions that the claimant would reserve in addition. `members`, `others`: sequences in the window that
    can and cannot be preempted now.
    """
    client = claimant.request.client
    by_client: Counter[str] = Counter()
    for sequence in (*members, *others):
        by_client[sequence.request.client] += held[sequence.sequence_id]
    claim = by_client[client] + wanted
    candidates = [member for member in members if member.request.client != client and not is_protected(member)]
    victims: list[Sequence] = []
    while missing > 0:
        top = max((member.request.client for member in candidates), key=by_client.__getitem__, default=client)
        share = by_client[top]
        fair = [
            member
            for member in candidates
            if member.request.client == top and claim <= max(share - held[member.sequence_id], share / EXCESS)
        ]
        if not fair:
            return []
        victims.append(_cheapest(fair, missing, held))
        candidates.remove(victims[-1])
        by_client[top] -= held[victims[-1].sequence_id]
        missing -= held[victims[-1].sequence_id]
    return victims


def own_victim(
    claimant: Sequence, wanted: int, missing: int, members: Iterable[Sequence], held: Reservations
) -> Sequence | None:
    """A member of the same client to preempt for a shorter sequence. None if the claimant must wait."""
    candidates = [
        member
        for member in members
        if member.request.client == claimant.request.client
        and member.first_sample_id != claimant.first_sample_id
        and held[member.sequence_id] >= max(missing, EXCESS * wanted)
        and not is_protected(member)
    ]
    return min(candidates, key=lambda member: held[member.sequence_id], default=None)


def longest_of_largest(members: Iterable[Sequence], held: Reservations) -> Sequence:
    """The longest member of the client that has reserved the most, preferably an unprotected one."""
    by_client: Counter[str] = Counter()
    members = list(members)
    for member in members:
        by_client[member.request.client] += held[member.sequence_id]
    return max(
        members, key=lambda m: (not is_protected(m), by_client[m.request.client], held[m.sequence_id], m.sequence_id)
    )


def _cheapest(members: Items[Sequence], missing: int, held: Reservations) -> Sequence:
    """The shortest member with enough positions, otherwise the longest."""
    enough = [member for member in members if held[member.sequence_id] >= missing]
    if enough:
        return min(enough, key=lambda member: held[member.sequence_id])
    return max(members, key=lambda member: held[member.sequence_id])
