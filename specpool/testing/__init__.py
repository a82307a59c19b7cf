"""Fakes of both workers for tests: real gRPC servers on real sockets, without torch."""

from specpool.testing.fakes import (
    CHAT_TEMPLATE,
    EOS_TOKEN_ID,
    MEASURED_ROWS,
    VOCAB_SIZE,
    FakeDraft,
    FakeTarget,
    FakeWorker,
    byte_tokenizer,
)

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
