"""Fakes of both workers for tests: real gRPC servers on real sockets, without torch."""

from specpool.testing.fake_draft import FakeDraft
from specpool.testing.fake_grammars import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer
from specpool.testing.fake_target import CHAT_TEMPLATE, FakeTarget
from specpool.testing.fake_worker import MEASURED_ROWS, FakeWorker

__all__ = [
    "CHAT_TEMPLATE",
    "EOS_TOKEN_ID",
    "MEASURED_ROWS",
    "VOCAB_SIZE",
    "FakeDraft",
    "FakeTarget",
    "FakeWorker",
    "byte_tokenizer",
]
