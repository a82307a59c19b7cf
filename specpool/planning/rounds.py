"""Simulates a server's rounds on recorded answers, to predict what each draft method gains. Pure and deterministic.

`Drafting`, the server's own code, plans the rounds and learns from them. Recorded answers decide which draft tokens
the target accepts; measured costs give the time of a round.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from copy import deepcopy
from dataclasses import dataclass
from itertools import count, cycle

from specpool.drafting.acceptance import agreement_length, likely_tokens
from specpool.drafting.drafting import MODEL_METHODS, Drafting
from specpool.drafting.plans import NO_DRAFTS, DraftMethod, DraftPlan
from specpool.drafting.sequences import DraftWorker
from specpool.planning.prediction import MeasuredPair
from specpool.planning.replaying import Commit, DraftCache, ModelDraft, Recording, Request, Sequence
from specpool.protocol.rounds import Proposal

TOKENS, TOKENS_PER_SEQUENCE = 3072, 32
"""Minimum number of tokens to simulate, in total and per sequence. The warm-up before takes as many."""


@dataclass(frozen=True)
class SourceSpeed:
    """Predicted speed of a batch with a draft method."""

    batch: int
    method: DraftMethod
    tokens_per_second: float
    of_plain: float
    """Speed relative to plain decoding."""
    tokens_per_round: float
    """Mean tokens per sequence and round, with or without draft tokens."""
    from_model: float
    """Accepted draft tokens from the model among `tokens_per_round`."""
    from_lookup: float
    """Accepted draft tokens from prompt lookup among `tokens_per_round`."""


def simulate(
    pair: MeasuredPair, recordings: Items[Recording], batch: int, method: DraftMethod, max_k: int
) -> SourceSpeed:
    """Predict the speed of a server that keeps answering the recorded prompts, `batch` at a time."""
    server = _Server(pair, recordings, batch, method, max_k)
    tokens = max(TOKENS, TOKENS_PER_SEQUENCE * batch)
    server.run(tokens)
    seconds, gained, rounds = server.run(tokens)
    speed = gained.tokens / seconds
    sequence_rounds = batch * rounds
    return SourceSpeed(
        batch,
        method,
        speed,
        of_plain=speed * pair.costs.seconds(batch, []) / batch,
        tokens_per_round=gained.tokens / sequence_rounds,
        from_model=gained.model / sequence_rounds,
        from_lookup=gained.lookup / sequence_rounds,
    )


@dataclass
class _Gained:
    """Tokens gained by all sequences, and accepted draft tokens among them."""

    tokens: int = 0
    model: int = 0
    lookup: int = 0


@dataclass(frozen=True)
class _Result:
    """A finished round that the coordinator has not observed yet."""

    commits: Items[Commit]
    seconds: float
    method: DraftMethod | None
    is_trial: bool


class _Server:
    """A simulated coordinator and its workers. The target worker may carry the draft.

    Rounds run ahead: unless a draft worker drafts for them, they are planned before the last result is known.
    """

    def __init__(
        self, pair: MeasuredPair, recordings: Items[Recording], batch: int, method: DraftMethod, max_k: int
    ) -> None:
        self._pair, self._is_own = pair, pair.carried
        self._request = Request(method, max_k)
        self._drafting = Drafting(max_k, deepcopy(pair.costs))
        self._recordings, self._ids, self._round_ids = cycle(recordings), count(1), count(1)
        self._unsettled: _Result | None = None
        self._sequences = [self._begin(place / batch) for place in range(batch)]

    def run(self, tokens: int) -> tuple[float, _Gained, int]:
        """Run rounds until they gain this many tokens. Return seconds, gained tokens and rounds."""
        seconds, gained, rounds = 0.0, _Gained(), 0
        while gained.tokens < tokens:
            seconds += self._run_round(gained)
            rounds += 1
        return seconds, gained, rounds

    def _begin(self, share: float = 0.0) -> Sequence:
        """Begin the next answer. `share`: fraction of it already generated."""
        recording = next(self._recordings)
        known = [*recording.prompt, *recording.token_ids[: max(1, int(share * len(recording.token_ids)))]]
        cache = DraftCache(len(known) - 1)
        sequence = Sequence(next(self._ids), self._request, recording, known, cache)
        self._drafting.sources.propose(sequence, self._request.num_speculative_tokens)  # indexes the prompt
        sequence.is_decoding = True
        return sequence

    def _run_round(self, gained: _Gained) -> float:
        """Run a round and return its duration in seconds."""
        worker = None
        if self._request.method in MODEL_METHODS:
            worker = DraftWorker(2**31, next(self._round_ids), is_own=self._is_own)
        plans = self._drafting.plan_round(self._sequences, worker)
        self._settle()  # the plan did not know the last round's result
        plans = {s.sequence_id: plans.get(s.sequence_id, NO_DRAFTS) for s in self._sequences}
        proposals, steps = self._proposals(plans)
        commits = [self._verify(s, plans[s.sequence_id], proposals.get(s.sequence_id)) for s in self._sequences]
        if self._is_own:
            steps = self._make_own_drafts(plans)
        for commit in commits:
            gained.tokens += len(commit.token_ids)
            gained.model += commit.num_agreed * (commit.method is DraftMethod.MODEL)
            gained.lookup += commit.num_agreed * (commit.method not in (DraftMethod.MODEL, None))
        verified = sum(commit.drafted for commit in commits)
        used = next((commit.method for commit in commits if commit.drafted), None)
        if any(plan.num_draft_tokens for plan in plans.values()):
            used = DraftMethod.MODEL
        seconds = self._pair.round_seconds(len(commits), steps, verified)
        self._unsettled = _Result(commits, seconds, used, any(plan.is_trial for plan in plans.values()))
        if used is DraftMethod.MODEL and not self._is_own:
            self._settle()  # the draft worker needs the result
        return seconds

    def _proposals(self, plans: Mapping[int, DraftPlan]) -> tuple[dict[int, Proposal], list[int]]:
        """Return the model's drafts to verify by sequence id, and the number of rows in each draft step."""
        if self._is_own:
            found = {s.sequence_id: s.own_draft for s in self._sequences if plans[s.sequence_id].num_draft_tokens}
            for sequence in self._sequences:
                sequence.own_draft = None
            return {i: draft for i, draft in found.items() if draft is not None}, []
        drafts, steps = self._draft({i: plan for i, plan in plans.items() if plan.num_draft_tokens})
        return {draft.sequence.sequence_id: draft.finished() for draft in drafts}, steps

    def _draft(self, plans: Mapping[int, DraftPlan]) -> tuple[list[ModelDraft], list[int]]:
        """Draft until another step would gain too little. Return the drafts, and the number of rows in each step."""
        drafts = [
            ModelDraft(s, plan, min(plan.num_draft_tokens, s.max_num_draft_tokens))
            for s in self._sequences
            if (plan := plans.get(s.sequence_id)) is not None
        ]
        _, step_cost = self._drafting.hints
        active, steps = [draft for draft in drafts if draft.limit], list[int]()
        while active:
            steps.append(len(active) + sum(draft.lag for draft in active) * (not steps))
            for draft in active:
                token, confidence = draft.sequence.predict(len(draft.token_ids))
                draft.token_ids.append(token)
                draft.confidences.append(confidence)
                draft.chance *= self._drafting.chance(confidence)
            active = [draft for draft in active if draft.wants_more]
            active = active if sum(draft.gain for draft in active) >= step_cost else []
        for draft in drafts:
            if draft.token_ids:
                draft.sequence.draft.start = draft.sequence.length + len(draft.token_ids) - 1
        return drafts, steps

    def _make_own_drafts(self, plans: Mapping[int, DraftPlan]) -> list[int]:
        """Draft in the target worker for the next round. Return the number of rows in each step."""
        drafts, steps = self._draft({i: plan for i, plan in plans.items() if plan.drafts_next})
        for draft in drafts:
            draft.sequence.own_draft = draft.finished() if draft.token_ids else None
        return steps

    def _verify(self, sequence: Sequence, plan: DraftPlan, proposal: Proposal | None) -> Commit:
        """Verify the draft tokens that are likely enough, otherwise those of prompt lookup."""
        drafted: tuple[int, ...] = ()
        if proposal is not None:
            chances = map(self._drafting.chance, proposal.confidences)
            drafted = likely_tokens(proposal.draft_token_ids[: plan.num_draft_tokens], chances, plan.min_chance)
            drafted = drafted[: sequence.max_num_draft_tokens]
        method = DraftMethod.MODEL if drafted else plan.lookup.source.method
        drafted = drafted or sequence.remaining_lookup(plan)
        accepted = agreement_length(drafted, sequence.following(len(drafted)))
        kept = sequence.length + (accepted if method is DraftMethod.MODEL else 0)
        sequence.draft.start = min(sequence.draft.start, kept)
        sequence.pending_ids, sequence.num_pending_tokens = sequence.following(accepted + 1), len(drafted) + 1
        return Commit(sequence, sequence.pending_ids, len(drafted), method if drafted else None, proposal, plan.lookup)

    def _settle(self) -> None:
        """Learn from the last round, and replace complete sequences."""
        if self._unsettled is None:
            return
        result, self._unsettled = self._unsettled, None
        for commit in result.commits:
            commit.sequence.settle()
            self._drafting.observe(commit)
        tokens = sum(len(commit.token_ids) for commit in result.commits)
        ledger = self._drafting.lengths.ledger
        ledger.observe(len(result.commits), tokens, result.seconds, result.method, result.is_trial)
        if complete := [sequence.sequence_id for sequence in self._sequences if sequence.is_complete]:
            self._drafting.forget(complete)
            self._sequences = [self._begin() if s.is_complete else s for s in self._sequences]
