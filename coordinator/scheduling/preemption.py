"""Chooses sequences to preempt for lack of pages in the KV cache. Pure.

A client takes pages from the client that holds the most, if that one keeps at least as many or holds twice as many.
Neither could then take them back, so clients never preempt each other in turns.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items

from coordinator.scheduling.capacity import HeldPages, protected_tokens
from coordinator.scheduling.sequence import Sequence

# How many times as many pages as the claimant a client holds that must give up its last sequence.
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
    leaving: Iterable[int],
    held: HeldPages,
) -> list[Sequence]:
    """The members to preempt so that `missing` more pages are free. Empty if the claimant must wait.

    `wanted`: pages that the claimant would hold in addition. `members`: sequences that can be preempted now.
    `leaving`: sequences that leave the window anyway.
    """
    client, by_client = claimant.request.client, held.by_client(leaving)
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
    claimant: Sequence, wanted: int, missing: int, members: Iterable[Sequence], held: HeldPages
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


def longest_of_largest(members: Iterable[Sequence], held: HeldPages) -> Sequence:
    """The longest member of the client that holds the most pages, preferably an unprotected one."""
    by_client = held.by_client(())
    return max(
        members, key=lambda m: (not is_protected(m), by_client[m.request.client], held[m.sequence_id], m.sequence_id)
    )


def _cheapest(members: Items[Sequence], missing: int, held: HeldPages) -> Sequence:
    """The shortest member with enough pages, otherwise the longest."""
    enough = [member for member in members if held[member.sequence_id] >= missing]
    if enough:
        return min(enough, key=lambda member: held[member.sequence_id])
    return max(members, key=lambda member: held[member.sequence_id])
