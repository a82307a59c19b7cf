"""Fakes of both workers for tests: real gRPC servers on real sockets, without torch."""

from specpool.testing.fake_grammars import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer
from specpool.testing.fakes import CHAT_TEMPLATE, MEASURED_ROWS, FakeDraft, FakeTarget, FakeWorker

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
