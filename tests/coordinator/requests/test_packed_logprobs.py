"""Log-probabilities of an answer take little more than their bytes, in no objects that garbage collections visit."""

import gc
import tracemalloc

import pytest

from coordinator.requests.generation import Sample
from coordinator.scheduling.commits import Commit
from coordinator.scheduling.sequence import GenerationRequest, Sequence
from specpool.protocol.codec import logprobs_message, verify_response
from specpool.protocol.responses import read_verdicts
from specpool.protocol.rounds import ItemStatus, Verdict, VerifyItem
from specpool.protocol.sampling import Logprobs
from specpool.v1 import common_pb2

TOKENS, VOCAB = 2000, 50_000


def position(token: int, top: int) -> tuple[float, list[int], list[float]]:
    """Different numbers at each position."""
    return -1.0 - token, [(token + i) % VOCAB for i in range(top)], [-0.5 - i - token for i in range(top)]


def received(token: int, top: int) -> Logprobs:
    """Log-probabilities of one token, through the wire."""
    item = VerifyItem(1, 10, (5,), logprobs=top)
    verdict = Verdict(1, ItemStatus.OK, (token,), 11, Logprobs.of(top, [position(token, top)]))
    message = verify_response(1, [verdict], {}, instance_id="a")
    (read,) = read_verdicts(type(message).FromString(message.SerializeToString()), 1, [item], VOCAB)
    return read.logprobs


@pytest.mark.parametrize(("top", "most_bytes"), [(20, 200), (0, 16)])
async def test_kept_log_probabilities_are_packed(top: int, most_bytes: int) -> None:
    sequence = Sequence(1, GenerationRequest("r", (1,), TOKENS, frozenset(), 0, logprobs=top))
    sample = Sample(sequence, 0, 0.0)
    received(1, top)
    gc.collect()
    objects = len(gc.get_objects())
    tracemalloc.start()
    for token in range(TOKENS):
        sample.read(Commit(sequence, (token,), lambda: "", received(token, top)))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    gc.collect()
    assert held / TOKENS < most_bytes
    assert len(gc.get_objects()) - objects < 100
    found = [logprobs_message(entry) for part in [part async for part in sample.logprobs()] for entry in part]
    assert found == [
        common_pb2.TokenLogprobs(logprob=logprob, top_token_ids=ids, top_logprobs=values)
        for logprob, ids, values in (position(token, top) for token in range(TOKENS))
    ]


def test_slices_keep_the_alternatives_of_their_tokens() -> None:
    packed = Logprobs.of(3, [position(token, 3) for token in range(5)])
    assert [list(each.top_token_ids) for each in packed[1:3]] == [[1, 2, 3], [2, 3, 4]]
    assert packed[:0] == Logprobs(3)
    assert packed[:9] == packed
