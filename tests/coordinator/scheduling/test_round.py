"""Simulated rounds match plain decoding, even if workers fail in every way the protocol allows."""

import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.scheduling.commits import Commit, Counters, DraftCounters
from coordinator.scheduling.drafts import DRAFT_BACKOFF_ROUNDS
from coordinator.scheduling.prefill import MAX_UNCHUNKED_TOKENS
from coordinator.scheduling.round import Round
from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Sequence
from coordinator.scheduling.text import TextStream
from specpool.drafting.plans import DraftMethod, DraftPlan, Lookup
from specpool.protocol.features import FeatureSpec, WantedFeatures
from specpool.protocol.rounds import MAX_ITEM_BRANCHES, Branch, ItemStatus, Proposal, ProposeItem, Verdict, VerifyItem
from specpool.protocol.sampling import SamplingParams
from specpool.protocol.worker_info import WorkerInfo
from specpool.testing.fake_caches import FakeCaches

VOCAB_SIZE = 11
DRAFT_VOCAB_SIZE = 13
NO_LIMIT, PAGE_SIZE = 10_000, 4
NO_LIMITS = WorkerInfo(
    max_model_len=NO_LIMIT, vocab_size=NO_LIMIT, max_branches=MAX_ITEM_BRANCHES, kv_positions_multiple=PAGE_SIZE
)
# No failures afterwards: with a budget of one token, a cache that keeps getting lost is never rebuilt.
FAILING_ROUNDS = 150


def choose(context: Iterable[int]) -> int:
    """The target's next token."""
    return zlib.crc32(bytes(context)) % VOCAB_SIZE


def decode_plainly(request: GenerationRequest) -> list[int]:
    tokens = list(request.prompt_ids)
    while len(tokens) < len(request.prompt_ids) + request.max_tokens:
        tokens.append(choose(tokens))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens[len(request.prompt_ids) :]


def forced_after(context: Iterable[int], limit: int) -> list[int]:
    """At most `limit` forced tokens after a context. The target tokenizes some texts differently."""
    context, forced = list(context), list[int]()
    digest = zlib.crc32(bytes([*context, 255]))
    for index in range(min(digest % 4, limit)):
        forced.append((choose(context) + (digest >> 8 + index) % 2) % VOCAB_SIZE)
        context.append(forced[-1])
    return forced


class Worker(FakeCaches):
    """A worker as the protocol defines it."""

    def __init__(self, slots: int = NO_LIMIT, kv_positions: int = 0) -> None:
        super().__init__(slots, kv_positions, PAGE_SIZE)
        self.last: dict[int, tuple[int, list[int]]] = {}
        """Last round of each sequence that yielded tokens, and those tokens."""

    def verify(self, item: VerifyItem, round_id: int = 0, num_masks: int = NO_LIMIT) -> Verdict:
        if item.after_round_id is not None:
            assert (item.base_length, item.token_ids, item.sampling) == (0, (), None)
            after, yielded = self.last.get(item.sequence_id, (None, [0]))
            if after != item.after_round_id or item.sequence_id not in self.caches:
                return Verdict(item.sequence_id, ItemStatus.CACHE_MISS, (), 0)
            item = replace(item, base_length=len(self.caches[item.sequence_id]), token_ids=(yielded[-1],))
            item.select_branch(len(yielded) - 1, yielded[-1])
        self.last.pop(item.sequence_id, None)
        status, prefix_length = self.realign(item.sequence_id, item, item.max_end)
        if status is not ItemStatus.OK:
            return Verdict(item.sequence_id, status, (), 0)
        tokens, gained = self.caches[item.sequence_id], []
        forced = forced_after([*tokens, *item.draft_token_ids], item.max_draft_tokens - len(item.draft_token_ids))
        for draft in (*item.draft_token_ids, *forced):
            if item.prefill_only or draft != choose(tokens):
                break
            tokens.append(draft)
            gained.append(draft)
        if not item.prefill_only:
            gained.append(choose(tokens))
            late = gained[num_masks:]
            del gained[num_masks:], tokens[len(tokens) - len(late) :]
            self.last[item.sequence_id] = round_id, gained
        self.keep(item.sequence_id)
        return Verdict(
            item.sequence_id,
            status,
            tuple(gained),
            len(tokens),
            num_forced_tokens=len(forced),
            prefix_length=prefix_length,
        )

    def propose(self, item: ProposeItem, is_right: list[bool]) -> Proposal:
        status, _ = self.realign(item.sequence_id, item, item.end)
        if status is not ItemStatus.OK:
            return Proposal(item.sequence_id, status, (), 0)
        self.keep(item.sequence_id)
        tokens = self.caches[item.sequence_id]
        if item.num_branches:
            branches = tuple(self.branches(item, tokens, is_right))
            return Proposal(item.sequence_id, status, (), len(tokens), branches=branches)
        start = len(tokens)
        for right in is_right[: item.num_draft_tokens]:
            tokens.append(choose(tokens) if right else DRAFT_VOCAB_SIZE - 1 - choose(tokens))
        drafts = tuple(tokens[start:])
        del tokens[max(start, len(tokens) - 1) :]  # the last draft token is not cached
        return Proposal(item.sequence_id, status, drafts, len(tokens))

    def branches(self, item: ProposeItem, tokens: list[int], is_right: list[bool]) -> Iterator[Branch]:
        """Branches of random outcomes, one of which comes true if the first draft is right."""
        start = len(tokens) - item.num_unverified
        accepted = next(
            (i for i in range(item.num_unverified) if tokens[start + i] != choose(tokens[: start + i])), None
        )
        accepted = item.num_unverified if accepted is None else accepted
        for index in range(item.num_branches):
            context = tokens[: start + accepted]
            right = is_right[0] and index == item.num_branches - 1
            context.append(choose(context) if right else DRAFT_VOCAB_SIZE - 1 - index)
            begin = len(context)
            for each in is_right[: item.num_draft_tokens]:
                context.append(choose(context) if each else DRAFT_VOCAB_SIZE - 1 - choose(context))
            yield Branch(accepted, context[begin - 1], tuple(context[begin:]))


def check_first_contact(item: ProposeItem | VerifyItem, sequence: Sequence, predicted: int) -> None:
    """Only the first contact with a sequence carries its namespace and sampling parameters."""
    assert item.cache_namespace == (None if item.base_length else sequence.cache_namespace)
    assert item.sampling == (None if item.base_length else sequence.request.worker_sampling)
    if isinstance(item, ProposeItem) and item.base_length:
        predicted = 0  # the draft worker keeps what it has
    assert item.expected_prefix_length == max(0, predicted - item.base_length)
    assert item.expected_prefix_length < len(item.token_ids)


def check_propose_items(group: list[Sequence], items: list[ProposeItem], budget: int, draft_max_len: int) -> None:
    by_id = {sequence.sequence_id: sequence for sequence in group}
    long = 0
    for item in items:
        sequence = by_id.pop(item.sequence_id)
        length = len(sequence.token_ids)
        end = item.base_length + len(item.token_ids)
        assert item.token_ids
        assert item.base_length == min(sequence.draft_base_length, length - 1)
        check_first_contact(item, sequence, 0 if item.base_length else sequence.draft.predicted)
        assert list(item.token_ids) == sequence.token_ids[item.base_length : end]
        assert 0 <= item.num_draft_tokens <= sequence.request.num_speculative_tokens
        assert item.num_draft_tokens <= max(0, sequence.request.max_tokens - sequence.num_generated - 1)
        assert item.num_draft_tokens == 0 or end == length
        assert end + max(0, item.num_draft_tokens - 1) <= draft_max_len
        long += long_tokens(item, length)
    assert long <= budget


def long_tokens(item: ProposeItem | VerifyItem, length: int) -> int:
    """Return how many tokens of an item count as prefill. `length`: length of its sequence."""
    start = item.base_length + item.expected_prefix_length
    return item.max_num_new_tokens if length - start > MAX_UNCHUNKED_TOKENS else 0


def send(round_: Round, group: list[Sequence], budget: int) -> list[VerifyItem]:
    """The items of a round, checked."""
    by_id = {sequence.sequence_id: sequence for sequence in group if sequence.finish is None}
    before = {
        number: (cache.base_length, cache.pending.copy(), sequence.is_decoding, cache.max_pending_gain, cache.predicted)
        for number, sequence in by_id.items()
        for cache in [sequence.target]
    }
    items = round_.verify_items()
    long = 0
    for item in items:
        sequence = by_id.pop(item.sequence_id)
        base_length, pending, _, pending_gain, predicted = before[item.sequence_id]
        end = item.base_length + len(item.token_ids)
        assert len(pending) <= 1, "two rounds are pending"
        assert len(item.draft_token_ids) <= max(0, sequence.remaining - pending_gain - 1)
        assert item.max_draft_tokens <= max(0, sequence.remaining - pending_gain - 1)
        assert item.max_draft_tokens <= sequence.request.num_speculative_tokens
        assert sequence.request.sampling.grammar or not item.max_draft_tokens
        assert all(token < VOCAB_SIZE for token in item.token_ids + item.draft_token_ids)
        assert sequence.target.pending[-1].max_gain == (0 if item.prefill_only else item.max_num_draft_tokens + 1)
        assert item.after_round_id is not None or not item.branches
        for branch in item.branches:
            assert not item.draft_token_ids
            assert 0 < len(branch.draft_token_ids) <= sequence.remaining - branch.num_accepted - 2
            assert all(token < VOCAB_SIZE for token in branch.draft_token_ids)
        if pending_gain:
            assert item.after_round_id == pending[-1].round_id
            assert (item.base_length, item.token_ids, item.prefill_only) == (0, (), False)
            continue
        assert item.after_round_id is None
        assert item.token_ids
        assert item.base_length == base_length
        check_first_contact(item, sequence, predicted)
        assert list(item.token_ids) == sequence.token_ids[item.base_length : end]
        assert item.prefill_only == (end < len(sequence.token_ids))
        assert not item.draft_token_ids or len(item.token_ids) == 1
        long += long_tokens(item, len(sequence.token_ids))
    assert long <= budget
    assert not any(before[number][2] for number in by_id), "a decoding sequence was left out"
    return items


@dataclass
class Simulation:
    """Runs rounds of random groups until all sequences have finished. `rng` decides about failures and drafts."""

    sequences: list[Sequence]
    budget: int
    rng: random.Random
    draft_max_len: int = NO_LIMIT
    acceptance: float = 0.7
    failure_rate: float = 0.0
    cancel: float = 0.0
    ahead: float = 0.0
    """Share of rounds with another round ahead."""
    target: Worker = field(default_factory=Worker)
    draft: Worker = field(default_factory=Worker)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def fails(self) -> bool:
        return self.rounds <= FAILING_ROUNDS and self.rng.random() < self.failure_rate

    def lose_caches(self) -> None:
        for worker in (self.target, self.draft):
            if self.fails():
                worker.forget()
            for caches in (worker.caches, worker.prefix_cache):
                if caches and self.fails():
                    caches.pop(self.rng.choice(list(caches)))  # type: ignore[call-overload]

    def run(self) -> None:
        unfinished = [sequence for sequence in self.sequences if sequence.finish is None]
        group = self.rng.sample(unfinished, self.rng.randint(1, len(unfinished)))
        self.rounds += 1
        self.lose_caches()
        self.predict(group)
        round_ = Round(self.rounds, group, self.budget, self.plans(group))
        self.propose(round_, group)
        verdicts = self.verify(round_, group)
        continuing = [sequence for sequence in unfinished if sequence.finish is None and sequence.can_continue]
        if continuing and self.rng.random() < self.ahead:
            self.lose_caches()
            self.run_ahead(round_, group, verdicts, continuing)
        else:
            self.draft_ahead(round_, group)
            self.commit(round_, group, verdicts)
        for sequence in self.sequences:
            assert not sequence.target.pending
            if sequence.finish is not None:
                self.target.release(sequence.sequence_id)
                self.draft.release(sequence.sequence_id)
            elif sequence in group:
                self.check_caches(sequence)

    def predict(self, group: list[Sequence]) -> None:
        """Predict prefixes of sequences that prefill as their window does, but sometimes wrongly."""
        for sequence in group:
            for cache in (sequence.target, sequence.draft):
                is_at_page = not cache.continues and cache.base_length % PAGE_SIZE == 0
                if cache.is_mispredicted or not is_at_page or sequence.is_decoding:
                    cache.is_mispredicted = False
                    continue
                pages = sequence.page_digests(PAGE_SIZE, len(sequence.token_ids) - 1)
                cached = takewhile(self.target.prefix_cache.__contains__, pages)
                number = sum(1 for _ in cached) if self.rng.random() < 0.8 else self.rng.randint(0, len(pages))
                cache.predicted = PAGE_SIZE * number

    def run_ahead(
        self, first: Round, group: list[Sequence], verdicts: list[Verdict], continuing: list[Sequence]
    ) -> None:
        """Send the next round before the response to the last one, but after its branches."""
        others = self.rng.sample(continuing, self.rng.randint(1, len(continuing)))
        self.rounds += 1
        plans = {
            number: plan if plan.num_branches else plan._replace(num_draft_tokens=0)
            for number, plan in self.plans(others).items()
        }
        second = Round(self.rounds, others, self.budget, plans)
        self.draft_ahead(first, group)
        second.take_branches()
        later = self.verify(second, others)
        self.commit(first, group, verdicts)
        second.complete_items()
        self.draft_ahead(second, others)
        self.commit(second, others, later)

    @property
    def draft_limits(self) -> WorkerInfo:
        return replace(NO_LIMITS, max_model_len=self.draft_max_len)

    def plans(self, group: list[Sequence]) -> dict[int, DraftPlan]:
        """Random plans for most sequences: by the model (before or during verification), by lookup, or neither."""
        num_branches = self.rng.choice([0, self.rng.randint(1, 5)])
        plans = {}
        for sequence in group:
            looked_up = self.lookup_ids(sequence)
            if self.rng.random() < 0.7:
                plans[sequence.sequence_id] = DraftPlan(
                    num_draft_tokens=self.rng.randint(0, 9),
                    num_branches=num_branches,
                    min_chance=self.rng.choice([0.0, 0.5, 1.0]),
                    lookup_ids=looked_up[: self.rng.randint(0, max(0, sequence.max_num_draft_tokens))],
                    lookup=Lookup(looked_up),
                    allows_forced_tokens=self.rng.random() < 0.8,
                )
        return plans

    def lookup_ids(self, sequence: Sequence) -> tuple[int, ...]:
        """Random prompt-lookup tokens, mostly right."""
        context, looked_up = sequence.token_ids.copy(), list[int]()
        for _ in range(self.rng.randint(0, 12)):
            token = choose(context)
            looked_up.append(token if self.rng.random() < self.acceptance else (token + 1) % VOCAB_SIZE)
            context.append(looked_up[-1])
        return tuple(looked_up) if self.rng.random() < 0.5 else ()

    def check_caches(self, sequence: Sequence) -> None:
        """Unless it was lost, a cache holds at least the tokens that the sequence expects."""
        for worker, length in (
            (self.target, sequence.target.num_cached_tokens),
            (self.draft, sequence.draft.num_cached_tokens),
        ):
            assert 0 <= length <= len(sequence.token_ids)
            cached = worker.caches.get(sequence.sequence_id)
            assert cached is None or cached[:length] == sequence.token_ids[:length]

    def propose(self, round_: Round, group: list[Sequence]) -> None:
        if self.fails():  # the draft worker is unavailable
            return
        if round_.drafts_ahead:
            round_.take_branches()
            return
        items = round_.propose_items(lambda _: self.draft_limits)
        check_propose_items(group, items, self.budget, self.draft_max_len)
        is_right = [self.rng.random() < self.acceptance for _ in range(20)]
        proposals = [self.draft.propose(item, is_right) for item in items]
        if self.fails():  # the response is lost
            return
        round_.take_proposals([self.spoiled_proposal(proposal) for proposal in proposals], VOCAB_SIZE)

    def spoiled_proposal(self, proposal: Proposal) -> Proposal:
        if self.fails():
            return Proposal(proposal.sequence_id, ItemStatus.STALE_ROUND, (), 0)
        return proposal

    def draft_ahead(self, round_: Round, group: list[Sequence]) -> None:
        if not round_.drafts_ahead or self.fails():  # the draft worker is unavailable
            return
        items = round_.ahead_items(lambda _: self.draft_limits)
        by_id, long = {sequence.sequence_id: sequence for sequence in group}, 0
        for item in items:
            sequence = by_id.pop(item.sequence_id)
            length, num_committed = len(sequence.token_ids), len(item.token_ids) - item.num_unverified
            assert list(item.token_ids[:num_committed]) == sequence.token_ids[item.base_length :][:num_committed]
            assert num_committed > 0
            check_first_contact(item, sequence, 0 if item.base_length else sequence.draft.predicted)
            if item.num_branches:
                assert item.num_draft_tokens > 0
                assert item.base_length + num_committed == length
                assert item.end + 1 + item.num_draft_tokens <= min(sequence.max_length, self.draft_max_len)
            else:
                assert (item.num_draft_tokens, item.num_unverified) == (0, 0)
            long += long_tokens(replace(item, token_ids=item.token_ids[:num_committed]), length)
        assert long <= self.budget
        is_right = [self.rng.random() < self.acceptance for _ in range(20)]
        proposals = [self.draft.propose(item, is_right) for item in items]
        if not self.fails():
            round_.take_ahead([self.spoiled_proposal(proposal) for proposal in proposals], VOCAB_SIZE)

    def verify(self, round_: Round, group: list[Sequence]) -> list[Verdict]:
        if self.rng.random() < self.cancel:
            self.cancel_one(group)
        items = send(round_, group, self.budget)
        return [self.verdict(item, round_.round_id) for item in items]

    def verdict(self, item: VerifyItem, round_id: int) -> Verdict:
        has_grammar = self.sequences[item.sequence_id].request.sampling.grammar
        if has_grammar and item.sampling is not None and self.fails():
            return Verdict(item.sequence_id, ItemStatus.GRAMMAR_NOT_READY)
        num_masks = self.rng.randint(1, 3) if has_grammar and self.fails() else NO_LIMIT
        return self.target.verify(item, round_id, num_masks)

    def commit(self, round_: Round, group: list[Sequence], verdicts: list[Verdict]) -> None:
        if self.fails():  # the response is lost
            round_.discard()
            return
        if self.rng.random() < self.cancel:
            self.cancel_one(group)
        before = {sequence.sequence_id: sequence.token_ids.copy() for sequence in group}
        decoding = {
            sequence.sequence_id
            for sequence in group
            for pending in sequence.target.pending[:1]
            if sequence.finish is None and pending.round_id == round_.round_id and pending.max_gain
        }
        commits = round_.commit(verdicts)
        gained = {commit.sequence.sequence_id: list(commit.token_ids) for commit in commits}
        for sequence in group:
            assert sequence.token_ids == before[sequence.sequence_id] + gained.get(sequence.sequence_id, [])
        answered = {verdict.sequence_id for verdict in verdicts if verdict.status is ItemStatus.OK}
        assert decoding & answered <= set(gained)
        self.drafted += sum(commit.drafted + commit.forced for commit in commits)
        self.accepted += sum(commit.accepted + commit.accepted_forced for commit in commits)
        for commit in commits:
            assert commit.sequence.request.sampling.grammar or not commit.forced
            assert commit.accepted <= commit.drafted
            assert commit.accepted_forced <= (commit.forced if commit.accepted == commit.drafted else 0)

    def cancel_one(self, group: list[Sequence]) -> None:
        sequence = self.rng.choice(group)
        if sequence.finish is None:  # as `AdmittingWindow.abort` does
            sequence.end(Finish(FinishReason.ABORT))

    def run_to_the_end(self) -> None:
        while any(sequence.finish is None for sequence in self.sequences):
            self.run()
            assert self.rounds < 20_000, "the sequences never finish"


REQUESTS = st.builds(
    GenerationRequest,
    request_id=st.just("r"),
    prompt_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40).map(tuple),
    max_tokens=st.integers(1, 24),
    stop_token_ids=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=1),
    num_speculative_tokens=st.integers(0, 8),
    sampling=st.sampled_from([SamplingParams(), SamplingParams(grammar="g")]),
)


@settings(max_examples=100)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=6),
    budget=st.integers(1, 60),
    seed=st.integers(0, 2**32),
    draft_max_len=st.sampled_from([1, 8, 20, 45, NO_LIMIT]),
    acceptance=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
    failure_rate=st.sampled_from([0.0, 0.02, 0.2]),
    cancel=st.sampled_from([0.0, 0.02]),
    ahead=st.sampled_from([0.0, 0.5, 1.0]),
    draft_slots=st.sampled_from([0, 1, 3, NO_LIMIT]),
    target_slots=st.sampled_from([1, 2, NO_LIMIT]),
    shared=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20),
)
def test_rounds_give_the_tokens_of_plain_decoding(
    requests: list[GenerationRequest],
    budget: int,
    seed: int,
    draft_max_len: int,
    acceptance: float,
    failure_rate: float,
    cancel: float,
    ahead: float,
    draft_slots: int,
    target_slots: int,
    shared: list[int],
) -> None:
    """`shared`: the common prefix of all prompts."""
    simulation = Simulation(
        [Sequence(i, replace(each, prompt_ids=(*shared, *each.prompt_ids))) for i, each in enumerate(requests)],
        budget,
        random.Random(seed),
        draft_max_len,
        acceptance,
        failure_rate,
        cancel,
        ahead,
        Worker(target_slots),
        Worker(draft_slots),
    )
    simulation.run_to_the_end()
    for sequence in simulation.sequences:
        expected = decode_plainly(sequence.request)
        assert sequence.finish is not None
        if sequence.finish.reason is FinishReason.ABORT:
            assert cancel
            assert sequence.generated_ids == expected[: sequence.num_generated]
        else:
            assert sequence.generated_ids == expected
    assert sum(sequence.speculation.draft_tokens for sequence in simulation.sequences) == simulation.drafted
    assert sum(sequence.speculation.accepted_tokens for sequence in simulation.sequences) == simulation.accepted


def make_sequence(
    prompt: Iterable[int] = (1, 2, 3), max_tokens: int = 40, k: int = 4, sequence_id: int = 0
) -> Sequence:
    return Sequence(sequence_id, GenerationRequest("r", tuple(prompt), max_tokens, frozenset(), k))


def run_once(
    sequences: list[Sequence], target: Worker, draft: Worker, is_right: list[bool], budget: int = 100, round_id: int = 1
) -> tuple[list[ProposeItem], list[VerifyItem]]:
    """Run a round. `is_right`: for each draft token, whether it equals the target's choice."""
    round_ = Round(round_id, sequences, budget)
    propose_items = round_.propose_items(lambda _: NO_LIMITS)
    round_.take_proposals([draft.propose(item, is_right) for item in propose_items], VOCAB_SIZE)
    verify_items = round_.verify_items()
    round_.commit([target.verify(item) for item in verify_items])
    return propose_items, verify_items


PROMPT = tuple(number % VOCAB_SIZE for number in range(20))


def test_a_predicted_prefix_is_sent_but_not_run() -> None:
    """It takes nothing from the prefill budget."""
    target, draft = Worker(), Worker()
    run_once([make_sequence(PROMPT, sequence_id=1)], target, draft, [])
    sequence = make_sequence(PROMPT, sequence_id=2)
    sequence.target.predicted, sequence.draft.predicted = 8, 9  # the draft worker has other pages
    (proposed,), (item,) = run_once([sequence], target, draft, [], budget=9)
    assert (proposed.base_length, proposed.expected_prefix_length, len(proposed.token_ids)) == (0, 8, 17)
    assert (item.base_length, len(item.token_ids), item.max_num_new_tokens) == (0, 17, 1)
    assert (sequence.target.num_cached_tokens, sequence.cached_tokens) == (17, 16), "the target has found more"
    assert sequence.draft.num_cached_tokens == 17


def test_a_wrong_prediction_loses_no_cache() -> None:
    sequence, target, draft = make_sequence(PROMPT), Worker(), Worker()
    run_once([sequence], target, draft, [], budget=8)
    sequence.target.predicted = sequence.draft.predicted = 16
    round_ = Round(2, [sequence], 100)
    round_.take_proposals([draft.propose(item, []) for item in round_.propose_items(lambda _: NO_LIMITS)], VOCAB_SIZE)
    (item,) = round_.verify_items()
    assert (item.base_length, item.expected_prefix_length) == (8, 8)
    round_.commit([target.verify(item)])
    assert (sequence.target.num_cached_tokens, sequence.target.predicted, sequence.target.is_mispredicted) == (
        8,
        0,
        True,
    )
    assert (round_.cache_misses, sequence.blame.cache_misses) == (0, 0)
    _, (item,) = run_once([sequence], target, draft, [], round_id=3)
    assert (item.base_length, item.expected_prefix_length) == (8, 0)
    assert sequence.num_generated == 1


def test_recomputed_positions_are_no_cached_prefix() -> None:
    """The draft worker computes them again, with states that have arrived since."""
    wanted, sequence = WantedFeatures(FeatureSpec((1,), 1), window=64), make_sequence(PROMPT)
    sequence.draft.predicted = 16
    sequence.draft.commit(20)
    sequence.target.commit(19)
    sequence.draft.add_features(bytes(9 * wanted.spec.row_bytes), 19, wanted)  # of the positions from 10 on
    (item,) = Round(1, [sequence], 100).propose_items(
        lambda _: replace(NO_LIMITS, feature_layers=(1,), feature_width=1)
    )
    assert (item.base_length, item.token_ids, item.expected_prefix_length) == (11, PROMPT[11:], 0)
    assert len(item.features) == 9 * wanted.spec.row_bytes


def test_cached_tokens_count_what_the_target_found_before_the_first_token() -> None:
    target, draft = Worker(), Worker()
    run_once([make_sequence(PROMPT, sequence_id=1)], target, draft, [])
    sequence = make_sequence((*PROMPT, *PROMPT), sequence_id=2)
    run_once([sequence], target, draft, [], budget=16)  # the target finds more than was predicted
    assert (sequence.cached_tokens, sequence.num_generated) == (12, 0)
    run_once([make_sequence((*PROMPT, *PROMPT), sequence_id=3)], target, draft, [])
    sequence.target.predicted = 36
    run_once([sequence], target, draft, [])
    assert (sequence.cached_tokens, sequence.num_generated) == (12 + 20, 1)
    run_once([sequence], target, draft, [True] * 4)
    assert sequence.cached_tokens == 32


@pytest.mark.parametrize("accepted", range(5))
def test_rounds_gain_one_token_more_than_they_accept(accepted: int) -> None:
    sequence, target, draft = make_sequence(), Worker(), Worker()
    run_once([sequence], target, draft, [True] * 4)  # the prompt
    run_once([sequence], target, draft, [i != accepted for i in range(4)])
    assert sequence.num_generated == 1 + accepted + 1
    (item,), _ = run_once([sequence], target, draft, [True] * 4)
    # After full acceptance the draft also lacks its own last token.
    expected = decode_plainly(sequence.request)[min(accepted + 1, 4) : accepted + 2]
    assert list(item.token_ids) == expected
    assert item.base_length == len(sequence.request.prompt_ids) + min(accepted + 1, 4)


@pytest.mark.parametrize(("k", "max_tokens"), [(0, 6), (4, 2)])
def test_nothing_is_drafted_without_speculation_or_for_the_last_token(k: int, max_tokens: int) -> None:
    sequence, target, draft = make_sequence(k=k, max_tokens=max_tokens), Worker(), Worker()
    run_once([sequence], target, draft, [True] * 4)
    while sequence.finish is None:
        proposed, (item,) = run_once([sequence], target, draft, [True] * 4)
        assert (proposed, item.draft_token_ids) == ([], ())
    assert sequence.generated_ids == decode_plainly(sequence.request)
    assert sequence.speculation.rounds == 0


def test_a_draft_without_a_free_slot_backs_off() -> None:
    sequence, target, draft = make_sequence(max_tokens=100), Worker(), Worker(slots=0)
    rounds = range(1, DRAFT_BACKOFF_ROUNDS + 3)
    uses_draft = [bool(run_once([sequence], target, draft, [], round_id=i)[0]) for i in rounds]
    assert uses_draft == [True] + [False] * (DRAFT_BACKOFF_ROUNDS - 1) + [True, False]


def test_nothing_is_drafted_while_the_target_has_no_slot() -> None:
    """The draft worker's slots are for sequences that make progress."""
    sequence = Sequence(0, GenerationRequest("0", (1, 2), 10, frozenset(), 4))
    for status, num_items in ((ItemStatus.NO_SLOT, 0), (ItemStatus.OK, 1)):
        round_ = Round(1, [sequence], prefill_tokens=100)
        (item,) = round_.verify_items()
        token_ids = (5,) if status is ItemStatus.OK else ()
        round_.commit([Verdict(0, status, token_ids, len(item.token_ids))])
        worker = WorkerInfo(max_model_len=100, vocab_size=300)
        assert len(Round(2, [sequence], prefill_tokens=100).propose_items(lambda _, limits=worker: limits)) == num_items


def test_stale_responses_change_no_tokens() -> None:
    sequence, target, draft = make_sequence(), Worker(), Worker()
    run_once([sequence], target, draft, [True] * 4)
    before = sequence.token_ids.copy()
    round_ = Round(2, [sequence], 100)
    round_.verify_items()
    assert round_.commit([Verdict(0, ItemStatus.STALE_ROUND, (), 0)]) == []
    assert sequence.token_ids == before
    run_once([sequence], target, draft, [True] * 4)
    assert sequence.generated_ids == decode_plainly(sequence.request)[: sequence.num_generated]


def test_tokens_after_a_stop_do_not_count_as_accepted() -> None:
    expected = decode_plainly(make_sequence().request)
    stop = expected[2]
    assert stop not in expected[:2]
    sequence = Sequence(0, GenerationRequest("r", (1, 2, 3), 40, frozenset({stop}), 4))
    target, draft = Worker(), Worker()
    run_once([sequence], target, draft, [True] * 4)
    run_once([sequence], target, draft, [True] * 4)
    assert sequence.generated_ids == expected[:3]
    assert sequence.speculation.histogram == [0, 1]
    assert sequence.speculation.mean_acceptance_length == 2, "the round emitted two tokens"


@given(
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=4),
    max_tokens=st.integers(1, 30),
    stops=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=3),
    stop=st.lists(st.text("abcde", min_size=1, max_size=3), max_size=2).map(tuple),
    k=st.integers(0, 6),
    rights=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=30),
)
def test_statistics_agree_with_the_tokens_emitted(
    prompt: list[int],
    max_tokens: int,
    stops: frozenset[int],
    stop: tuple[str, ...],
    k: int,
    rights: list[list[bool]],
) -> None:
    """A stop token, a stop string or `max_tokens` may cut the last round anywhere."""
    request = GenerationRequest("r", tuple(prompt), max_tokens, stops, k, stop=stop)
    sequence, counters = Sequence(0, request, TextStream(Letters(), stop)), Counters()
    target, draft, by_round = Worker(), Worker(), []
    for number, is_right in enumerate([*rights, *[[True] * 6] * max_tokens], 1):
        if sequence.finish is not None:
            break
        round_ = Round(number, [sequence], 100)
        round_.take_proposals(
            [draft.propose(item, is_right) for item in round_.propose_items(lambda _: NO_LIMITS)], VOCAB_SIZE
        )
        (item,) = round_.verify_items()
        for commit in round_.commit([target.verify(item)]):
            counters.add_commit(commit)
            by_round.append((commit.drafted, len(commit.token_ids)))
    stats, drafted = sequence.speculation, [tokens for drafted, tokens in by_round if drafted]
    assert (
        stats.histogram == [drafted.count(i + 1) for i in range(max(drafted, default=0))] == counters.accepted_lengths
    )
    assert stats.mean_acceptance_length == pytest.approx(sum(drafted) / len(drafted) if drafted else 0)
    assert stats.accepted_tokens == counters.accepted_draft_tokens == sum(drafted) - len(drafted)
    assert stats.draft_tokens == counters.draft_tokens == sum(drafted for drafted, _ in by_round)
    assert counters.completion_tokens == sequence.num_generated == sum(tokens for _, tokens in by_round)


class Letters:
    """Detokenizer that maps token 0 to "a", 1 to "b", and so on."""

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(chr(97 + token) for token in token_ids)

    def flush(self) -> str:
        return ""


def test_the_branch_that_came_true_becomes_the_next_draft() -> None:
    sequence = make_sequence(k=3)
    target, draft = Worker(), Worker()
    drafted = []
    for number in range(1, 6):
        round_ = Round(number, [sequence], 100, {sequence.sequence_id: DraftPlan(3, num_branches=4)})
        assert round_.drafts_ahead
        round_.take_branches()
        verified = round_.verify_items()
        (item,) = round_.ahead_items(lambda _: NO_LIMITS)
        assert (item.num_branches, item.num_unverified) == (4, len(verified[0].draft_token_ids))
        round_.take_ahead([draft.propose(item, [True] * 9)], VOCAB_SIZE)
        (commit,) = round_.commit([target.verify(each) for each in verified])
        assert commit.branch is not None
        assert commit.num_branches == 4
        drafted.append((commit.drafted, commit.accepted))
    assert drafted == [(0, 0)] + [(3, 3)] * 4
    assert sequence.generated_ids == decode_plainly(sequence.request)[: sequence.num_generated]


def test_the_target_selects_the_branch_that_came_true() -> None:
    """A round sent ahead carries all branches."""
    sequence = make_sequence(k=3)
    target, draft = Worker(), Worker()
    plans = {sequence.sequence_id: DraftPlan(3, num_branches=4)}
    round_ = Round(1, [sequence], 100, plans)
    answers, drafted = [target.verify(each, 1) for each in round_.verify_items()], []
    for number in range(2, 7):
        (item,) = round_.ahead_items(lambda _: NO_LIMITS)
        round_.take_ahead([draft.propose(item, [True] * 9)], VOCAB_SIZE)
        following = Round(number, [sequence], 100, plans)
        following.take_branches()
        (sent,) = following.verify_items()
        assert (sent.after_round_id, sent.draft_token_ids) == (number - 1, ())
        assert {len(branch.draft_token_ids) for branch in sent.branches} == {3}
        later = [target.verify(sent, number)]
        (commit,) = round_.commit(answers)
        following.complete_items()
        drafted.append((commit.drafted, commit.accepted))
        round_, answers = following, later
    assert drafted == [(0, 0)] + [(3, 3)] * 4
    assert sequence.generated_ids == decode_plainly(sequence.request)[: sequence.num_generated]


@pytest.mark.parametrize("wrong", [None, 0, 2])
def test_lookup_tokens_continue_the_pending_round(wrong: int | None) -> None:
    """They form a branch for the outcome that the lookup predicts."""
    sequence, target = make_sequence(k=3), Worker()
    truth = tuple(decode_plainly(sequence.request))
    looked_up = tuple((token + 1) % VOCAB_SIZE if i == wrong else token for i, token in enumerate(truth))
    first = Round(1, [sequence], 100)
    first.commit([target.verify(each, 1) for each in first.verify_items()])
    plans = {sequence.sequence_id: DraftPlan(lookup_ids=looked_up[1:4], lookup=Lookup(looked_up[1:9]))}
    second, third = Round(2, [sequence], 100, plans), Round(3, [sequence], 100, plans)
    answers = [target.verify(each, 2) for each in second.verify_items()]
    third.take_branches()
    (sent,) = third.verify_items()
    later = [target.verify(sent, 3)]
    second.commit(answers)
    third.complete_items()
    (commit,) = third.commit(later)
    right = wrong != 2
    assert (commit.drafted, commit.accepted) == ((3, 3) if right else (0, 0))
    assert commit.method == (DraftMethod.NGRAM if right else None)
    assert sequence.generated_ids == list(truth[: sequence.num_generated])


def test_a_failed_round_ahead_keeps_the_result_of_the_one_before() -> None:
    sequence, target = make_sequence(k=0), Worker()
    first, second = Round(1, [sequence], 100), Round(2, [sequence], 100)
    answers = [target.verify(each, 1) for each in first.verify_items()]
    second.verify_items()
    second.discard()
    assert [len(commit.token_ids) for commit in first.commit(answers)] == [1]


def test_a_sequence_without_its_branch_is_verified_without_drafts() -> None:
    covered, missed = make_sequence(k=3, sequence_id=1), make_sequence(k=3, sequence_id=2)
    target, draft = Worker(), Worker()
    plans = {sequence.sequence_id: DraftPlan(3, num_branches=2) for sequence in (covered, missed)}
    for number in range(1, 3):
        round_ = Round(number, [covered, missed], 100, plans)
        round_.take_branches()
        verified = round_.verify_items()
        answers = [
            draft.propose(i, [i.sequence_id == covered.sequence_id] * 9)
            for i in round_.ahead_items(lambda _: NO_LIMITS)
        ]
        round_.take_ahead(answers, VOCAB_SIZE)
        commits = round_.commit([target.verify(each) for each in verified])
    assert [commit.drafted for commit in commits] == [3, 0]
    assert missed.draft.num_cached_tokens == len(missed.token_ids) - 1


def test_branches_that_the_worker_did_not_draft_count_as_misses() -> None:
    sequence = make_sequence(k=3)
    round_ = Round(1, [sequence], 100, {sequence.sequence_id: DraftPlan(3, num_branches=4)})
    verified = round_.verify_items()
    (item,) = round_.ahead_items(lambda _: NO_LIMITS)
    proposal = Worker().propose(item, [True] * 9)
    round_.take_ahead([replace(proposal, branches=proposal.branches[:1])], VOCAB_SIZE)
    (commit,) = round_.commit([Worker().verify(each) for each in verified])
    assert (commit.branch, commit.num_branches) == (None, 4)


def test_a_sequence_without_branches_keeps_its_draft_cache() -> None:
    """In a round in which another one drafts branches."""
    first, second = make_sequence(k=3, sequence_id=1), make_sequence(k=3, sequence_id=2)
    target, draft = Worker(), Worker()
    for number, num_branches in ((1, 2), (2, 0)):
        plans = {1: DraftPlan(3, num_branches=2), 2: DraftPlan(3, num_branches=num_branches)}
        round_ = Round(number, [first, second], 100, plans)
        round_.take_branches()
        verified = round_.verify_items()
        items = [item for item in round_.ahead_items(lambda _: NO_LIMITS) if item.sequence_id == 1 or number == 1]
        round_.take_ahead([draft.propose(item, [True] * 9) for item in items], VOCAB_SIZE)
        before = second.draft.num_cached_tokens
        round_.commit([target.verify(each) for each in verified])
    assert second.draft.num_cached_tokens == before > 0


# --- Grammars


def make_constrained(max_tokens: int = 40, k: int = 4) -> Sequence:
    request = GenerationRequest("r", (1, 2, 3), max_tokens, frozenset(), k, SamplingParams(grammar="g"))
    return Sequence(0, request)


def verify_once(sequence: Sequence, answer: Callable[[VerifyItem], Verdict], plan: DraftPlan) -> Commit | None:
    round_ = Round(1, [sequence], 100, {0: plan})
    (item,) = round_.verify_items()
    return next(iter(round_.commit([answer(item)])), None)


def test_forced_tokens_count_apart_from_those_of_the_draft_method() -> None:
    lookup = DraftPlan(lookup_ids=(5, 6), lookup=Lookup((5, 6)))
    cases: list[tuple[tuple[int, ...], tuple[int, int, int, int]]] = [
        ((5, 6, 7, 8, 9), (2, 2, 2, 2)),
        ((5, 6, 7, 3), (2, 2, 2, 1)),
        ((5, 6, 3), (2, 2, 2, 0)),
        ((5, 3), (2, 1, 2, 0)),
        ((3,), (2, 0, 2, 0)),
    ]
    for gained, expected in cases:
        sequence = make_constrained()
        sequence.target.commit(2)

        def answer(item: VerifyItem, gained: tuple[int, ...] = gained) -> Verdict:
            assert (item.draft_token_ids, item.max_draft_tokens) == ((5, 6), 4)
            return Verdict(0, ItemStatus.OK, gained, 2 + len(gained), num_forced_tokens=2)

        commit = verify_once(sequence, answer, lookup)
        assert commit is not None
        assert commit.method is DraftMethod.NGRAM
        assert (commit.drafted, commit.accepted, commit.forced, commit.accepted_forced) == expected
        assert sequence.speculation.draft_tokens == 4
        assert sequence.speculation.accepted_tokens == len(gained) - 1
        counters = Counters()
        counters.add_commit(commit)
        assert counters.drafts["grammar"] == DraftCounters(*expected[2:])
        assert counters.drafts["ngram"] == DraftCounters(*expected[:2])
        assert (counters.draft_tokens, counters.accepted_draft_tokens) == (4, len(gained) - 1)
        assert (counters.draft_lengths[4], counters.accepted_lengths[len(gained) - 1]) == (1, 1)


@pytest.mark.parametrize(("max_tokens", "k", "expected"), [(40, 4, 4), (3, 4, 2), (1, 4, 0), (40, 0, 0)])
def test_forced_tokens_keep_to_the_limits_of_the_request(max_tokens: int, k: int, expected: int) -> None:
    (item,) = Round(1, [make_constrained(max_tokens, k)], 100).verify_items()
    assert item.max_draft_tokens == expected
    plan = DraftPlan(allows_forced_tokens=False)
    (item,) = Round(1, [make_constrained(max_tokens, k)], 100, {0: plan}).verify_items()
    assert item.max_draft_tokens == 0


def test_a_grammar_that_is_not_ready_costs_no_cache() -> None:
    sequence = make_constrained()
    for waits in (1, 2):
        assert verify_once(sequence, lambda item: Verdict(0, ItemStatus.GRAMMAR_NOT_READY), DraftPlan()) is None
        assert (sequence.grammar_waits, sequence.target.pending, sequence.blame.cache_misses) == (waits, [], 0)
    assert verify_once(sequence, Worker().verify, DraftPlan()) is not None
    assert (sequence.grammar_waits, sequence.target.num_cached_tokens > 0) == (0, True)
    cached = sequence.target.num_cached_tokens
    verify_once(sequence, lambda item: Verdict(0, ItemStatus.GRAMMAR_NOT_READY), DraftPlan())
    assert (sequence.target.num_cached_tokens, sequence.is_decoding) == (cached, True)


def test_a_grammar_that_failed_has_a_reason() -> None:
    sequence = make_constrained()
    verify_once(sequence, lambda item: Verdict(0, ItemStatus.GRAMMAR_FAILED, error="too complex"), DraftPlan())
    assert (sequence.grammar_error, sequence.blame.cache_misses) == ("too complex", 0)
