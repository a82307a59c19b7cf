"""Rounds of a target worker that carries a draft match plain decoding, even after either cache is lost."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_round import VOCAB_SIZE, choose, decode_plainly

from coordinator.scheduling.commits import Commit
from coordinator.scheduling.drafts import DRAFT_BACKOFF_ROUNDS
from coordinator.scheduling.round import Round
from coordinator.scheduling.sequence import GenerationRequest, Sequence
from specpool.drafting.plans import DraftMethod, DraftPlan, Lookup
from specpool.protocol.rounds import ItemStatus, OwnDraft, OwnDraftItem, Verdict, VerifyItem
from specpool.protocol.worker_info import WorkerInfo

WRONG = VOCAB_SIZE + 1
OWN = WorkerInfo(max_model_len=1000, vocab_size=VOCAB_SIZE)
READER = replace(OWN, feature_layers=(1,), feature_width=4)


@dataclass
class CarryingWorker:
    """A target worker whose draft is right with probability `acceptance`."""

    acceptance: float = 1.0
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    draft_status: ItemStatus = ItemStatus.OK
    cached: dict[int, list[int]] = field(default_factory=dict)
    last: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    drafts: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """By sequence: the position after the committed tokens, and the draft that begins there."""

    def verify(self, item: VerifyItem, round_id: int) -> Verdict:
        number = item.sequence_id
        if item.after_round_id is not None:
            after, yielded = self.last.get(number, (None, [0]))
            if after != item.after_round_id or number not in self.cached:
                return Verdict(number, ItemStatus.CACHE_MISS)
            item = replace(item, base_length=len(self.cached[number]), token_ids=(yielded[-1],))
            item.select_branch(len(yielded) - 1, yielded[-1])
        if item.base_length and len(self.cached.get(number, ())) < item.base_length:
            return Verdict(number, ItemStatus.CACHE_MISS)
        tokens = self.cached.setdefault(number, [])
        del tokens[item.base_length :]
        tokens.extend(item.token_ids)
        found, own = self._found(item, len(tokens)), None
        drafts, gained = found[: item.own_draft.max_verified] if item.own_draft else (), list[int]()
        num_verified = len(drafts)
        for draft in drafts or item.draft_token_ids:
            if draft != choose(tokens):
                break
            tokens.append(draft)
            gained.append(draft)
        if not item.prefill_only:
            gained.append(choose(tokens))
            self.last[number] = round_id, gained
        if item.own_draft is not None:
            cached = len(tokens) if self.draft_status is ItemStatus.OK else 0
            own = OwnDraft(number, self.draft_status, found, cached, num_verified=num_verified)
            self._draft(number, item.own_draft, [*tokens, *gained[-1:]])
        return Verdict(number, ItemStatus.OK, tuple(gained), len(tokens), own_draft=own)

    def _found(self, item: VerifyItem, length: int) -> tuple[int, ...]:
        begin, drafted = self.drafts.get(item.sequence_id, (0, ()))
        return drafted if begin == length and len(item.token_ids) == 1 and not item.prefill_only else ()

    def _draft(self, number: int, own: OwnDraftItem, context: list[int]) -> None:
        drafted: list[int] = []
        for _ in range(min(own.num_draft_tokens, own.max_length - len(context))):
            drafted.append(choose([*context, *drafted]) if self.rng.random() < self.acceptance else WRONG)
        self.drafts[number] = len(context), tuple(drafted) if self.draft_status is ItemStatus.OK else ()


def make_sequence(max_tokens: int = 30, k: int = 4, prompt: tuple[int, ...] = (1, 2, 3)) -> Sequence:
    return Sequence(0, GenerationRequest("r", prompt, max_tokens, frozenset(), k))


def run(sequence: Sequence, worker: CarryingWorker, plans: Iterable[DraftPlan], own: WorkerInfo = OWN) -> list[Commit]:
    """Run rounds ahead with these plans, while the sequence can continue."""
    commits: list[Commit] = []
    pending: tuple[Round, list[Verdict]] | None = None
    for number, plan in enumerate(plans, 1):
        if sequence.finish is not None:
            break
        sent = None
        if sequence.can_continue:
            round_ = Round(number, [sequence], 100, {0: plan}, own_draft=own)
            assert not round_.wants_drafts, "there is no draft worker to ask"
            round_.take_branches()
            longest = sequence.next_length
            (item,) = round_.verify_items()
            sent = round_, [worker.verify(item, number)]
            assert len(worker.cached.get(0, ())) <= longest
        if pending is not None:
            commits += pending[0].commit(pending[1])
            if sent is not None:
                sent[0].complete_items()
        pending = sent
    return commits


def run_in_turn(sequence: Sequence, worker: CarryingWorker, plan: DraftPlan, rounds: int) -> list[Commit]:
    """Run rounds that each wait for the last result."""
    commits: list[Commit] = []
    for _ in range(rounds):
        round_ = Round(9, [sequence], 100, {0: plan}, own_draft=OWN)
        commits += round_.commit([worker.verify(item, 9) for item in round_.verify_items()])
    return commits


def test_the_next_round_verifies_a_round_s_draft() -> None:
    sequence, worker = make_sequence(), CarryingWorker()
    commits = run(sequence, worker, [DraftPlan(4)] * 20)
    assert sequence.generated_ids == decode_plainly(sequence.request)
    assert [commit.drafted for commit in commits] == [0, 4, 4, 4, 4, 4, 3], "the last draft ends at max_tokens"
    assert [commit.accepted for commit in commits] == [commit.drafted for commit in commits]
    assert {commit.method for commit in commits[1:]} == {DraftMethod.MODEL}
    assert all(commit.proposal is not None and commit.num_dropped == 0 for commit in commits)


@settings(deadline=None)
@given(
    max_tokens=st.integers(1, 40),
    k=st.integers(0, 8),
    acceptance=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
    failure_rate=st.sampled_from([0.0, 0.1, 0.3]),
    lookup=st.sampled_from([(), (3, 4, 5)]),
)
def test_tokens_equal_plain_decoding(
    max_tokens: int, k: int, acceptance: float, seed: int, failure_rate: float, lookup: tuple[int, ...]
) -> None:
    rng = random.Random(seed)
    sequence, worker = make_sequence(max_tokens, k), CarryingWorker(acceptance, rng)

    def plans() -> Iterable[DraftPlan]:
        for number in range(400):
            fails = number < 100 and rng.random() < failure_rate
            if fails and rng.random() < 0.5:
                worker.cached.clear()
            if fails:
                worker.drafts.clear()
            found = Lookup(lookup) if lookup else Lookup()
            yield DraftPlan(rng.randint(0, k), lookup_ids=lookup, lookup=found, drafts_next=rng.random() < 0.8)

    commits = run(sequence, worker, plans())
    assert sequence.generated_ids == decode_plainly(sequence.request)
    stats = sequence.speculation
    assert stats.draft_tokens == sum(commit.drafted for commit in commits)


def test_lookup_tokens_are_verified_where_the_worker_has_no_draft() -> None:
    sequence, worker = make_sequence(), CarryingWorker(draft_status=ItemStatus.CACHE_MISS)
    truth = tuple(decode_plainly(sequence.request))
    run_in_turn(sequence, worker, DraftPlan(4), rounds=2)
    plan = DraftPlan(4, lookup_ids=truth[2:4], lookup=Lookup(truth[2:4]))
    (commit,) = run_in_turn(sequence, worker, plan, rounds=1)
    assert (commit.method, commit.drafted, commit.accepted) == (DraftMethod.NGRAM, 2, 2)


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_lookup_tokens_continue_a_round_with_an_own_draft(acceptance: float) -> None:
    sequence, worker = make_sequence(), CarryingWorker(acceptance)
    truth = tuple(decode_plainly(sequence.request))
    lookup = DraftPlan(lookup_ids=truth[2:6], lookup=Lookup(truth[1:12]))
    commits = run(sequence, worker, [DraftPlan(4), DraftPlan(4), lookup, DraftPlan(), DraftPlan()])
    methods = [(commit.method, commit.accepted) for commit in commits[1:3]]
    assert methods == [(DraftMethod.MODEL, 4 * acceptance), (DraftMethod.NGRAM, 4)]


def test_a_plan_without_drafts_asks_for_none() -> None:
    sequence = make_sequence()
    (item,) = Round(1, [sequence], 100, {0: DraftPlan()}, own_draft=OWN).verify_items()
    assert item.own_draft is None


def test_the_second_round_of_a_trial_drafts_nothing() -> None:
    sequence, worker = make_sequence(), CarryingWorker()
    trial = DraftPlan(1, is_trial=True)
    commits = run(sequence, worker, [DraftPlan(), trial, trial._replace(drafts_next=False), DraftPlan(), DraftPlan()])
    assert [commit.drafted for commit in commits] == [0, 0, 1, 0]


def test_prompt_chunks_let_the_draft_follow() -> None:
    sequence, worker = make_sequence(prompt=tuple(range(200))), CarryingWorker()
    round_ = Round(1, [sequence], 150, {0: DraftPlan(4)}, own_draft=OWN)
    (item,) = round_.verify_items()
    assert item.prefill_only
    assert item.own_draft is not None
    assert (item.own_draft.max_verified, item.own_draft.num_draft_tokens) == (0, 4)
    round_.commit([worker.verify(item, 1)])
    assert sequence.draft.num_cached_tokens == sequence.target.num_cached_tokens == len(item.token_ids)


@pytest.mark.parametrize("own", [OWN, READER])
def test_a_draft_that_reads_states_asks_to_keep_them(own: WorkerInfo) -> None:
    rests, waits = DraftPlan(reads_states=False), DraftPlan()
    for plan in (DraftPlan(2), rests, waits):
        (item,) = Round(1, [make_sequence()], 100, {0: plan}, own_draft=own).verify_items()
        assert item.want_features is (own is READER and plan is not rests)
        assert (item.own_draft is not None) is (plan.num_draft_tokens > 0 or item.want_features)
        assert item.own_draft is None or item.own_draft.is_idle is (plan is waits)


def test_the_worker_reports_the_state_of_its_draft_cache() -> None:
    sequence, worker = make_sequence(), CarryingWorker()
    commits = run_in_turn(sequence, worker, DraftPlan(4), rounds=2)
    assert sequence.draft.num_cached_tokens == len(sequence.token_ids) - 1
    worker.draft_status = ItemStatus.NO_SLOT
    commits += run_in_turn(sequence, worker, DraftPlan(4), rounds=1)
    assert [(commit.method, commit.drafted) for commit in commits[1:]] == [(DraftMethod.MODEL, 4)] * 2
    assert sequence.draft.num_cached_tokens == 0
    assert sequence.draft.backoff_until == 9 + DRAFT_BACKOFF_ROUNDS
