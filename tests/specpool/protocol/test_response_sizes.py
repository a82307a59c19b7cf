"""The size limits allow the largest valid responses."""

from hypothesis import given
from hypothesis import strategies as st

from specpool.protocol.features import FeatureSpec, WantedFeatures
from specpool.protocol.prefixes import DIGEST_BYTES, MAX_EVICTED_PAGES
from specpool.protocol.responses import MAX_ERROR_CHARACTERS, MAX_SMALL_BYTES, max_propose_bytes, max_verify_bytes
from specpool.protocol.rounds import ProposeItem, VerifyItem
from specpool.v1 import common_pb2, draft_worker_pb2, target_worker_pb2

UINT32, UINT64 = 2**32 - 1, 2**64 - 1
VERDICTS = st.lists(
    st.builds(
        VerifyItem,
        st.just(1),
        st.just(0),
        st.integers(0, 40).map((1,).__mul__),
        draft_token_ids=st.integers(0, 16).map((1,).__mul__),
        logprobs=st.none() | st.integers(0, 20),
        max_draft_tokens=st.integers(0, 40),
        want_features=st.booleans(),
    ),
    max_size=4,
)
PROPOSALS = st.lists(
    st.builds(
        ProposeItem,
        st.just(1),
        st.just(0),
        st.just((1,)),
        num_draft_tokens=st.integers(0, 16),
        num_branches=st.integers(0, 64),
    ),
    max_size=4,
)


@given(items=VERDICTS, features=st.none() | st.just(WantedFeatures(FeatureSpec((1, 2), 2048), 16)))
def test_verdicts_of_any_valid_size_fit(items: list[VerifyItem], features: WantedFeatures | None) -> None:
    response = target_worker_pb2.VerifyResponse(
        round_id=UINT64,
        forward_ns=UINT64,
        realign_ns=UINT64,
        instance_id="i" * 64,
        evicted_pages=[bytes(DIGEST_BYTES)] * MAX_EVICTED_PAGES,
    )
    for item in items:
        drafted = item.max_num_draft_tokens
        result = response.results.add(
            sequence_id=UINT64,
            status=1,
            cached_length=UINT32,
            num_forced_tokens=UINT32,
            prefix_length=UINT32,
            error="é" * MAX_ERROR_CHARACTERS,
        )
        result.token_ids.extend([UINT32] * (drafted + 1))
        if item.logprobs is not None:
            top = {"top_token_ids": [UINT32] * item.logprobs, "top_logprobs": [-1.5] * item.logprobs}
            result.logprobs.extend([common_pb2.TokenLogprobs(logprob=-1.5, **top)] * (drafted + 1))
        if features is not None:
            result.features = bytes(item.num_features(features.window, drafted) * features.spec.row_bytes)
    assert response.ByteSize() <= max_verify_bytes(items, features)


@given(items=PROPOSALS)
def test_proposals_of_any_valid_size_fit(items: list[ProposeItem]) -> None:
    response = draft_worker_pb2.ProposeResponse(
        round_id=UINT64, forward_ns=UINT64, realign_ns=UINT64, instance_id="i" * 64
    )
    for item in items:
        drafted = {"draft_token_ids": [UINT32] * item.num_draft_tokens, "confidences": [0.5] * item.num_draft_tokens}
        result = response.results.add(sequence_id=UINT64, status=1, cached_length=UINT32)
        if item.num_branches:
            branch = common_pb2.Branch(num_accepted=UINT32, token_id=UINT32, **drafted)
            result.branches.extend([branch] * item.num_branches)
        else:
            result.MergeFrom(draft_worker_pb2.ProposeResult(**drafted))
    assert response.ByteSize() <= max_propose_bytes(items)


def test_unrequested_features_exceed_the_limit() -> None:
    items = [VerifyItem(1, 0, (1,)) for _ in range(6)]
    assert max_verify_bytes(items, None) < 3 * MAX_SMALL_BYTES
