"""Fakes of both workers for tests: real gRPC servers on real sockets, without torch.

Their caches are lists of token ids. The fake target hashes the context to choose each token, so one lost, repeated or
reordered token changes all later ones. Both fakes assert that the coordinator follows the protocol.
`FakeTarget.continuation` returns the tokens of plain decoding. Limits on reasoning have no effect: grammars apply
from the first token.
"""

from specpool.testing.fake_draft import FakeDraft
from specpool.testing.fake_grammars import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer
from specpool.testing.fake_own_draft import FakeOwnDraft
from specpool.testing.fake_target import CHAT_TEMPLATE, FakeTarget
from specpool.testing.fake_worker import MEASURED_ROWS, FakeWorker

__all__ = [
    "CHAT_TEMPLATE",
    "EOS_TOKEN_ID",
    "MEASURED_ROWS",
    "VOCAB_SIZE",
    "FakeDraft",
    "FakeOwnDraft",
    "FakeTarget",
    "FakeWorker",
    "byte_tokenizer",
]
