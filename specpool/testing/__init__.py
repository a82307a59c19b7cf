"""Test tools for everything but the models: fakes of both workers, workers that answer garbage, and a proxy that cuts.

Real gRPC servers and sockets, and no torch.
"""

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
from specpool.testing.garbage import DRAFT_FAULTS, TARGET_FAULTS, GarbageDraft, GarbageTarget
from specpool.testing.proxy import CuttingProxy

__all__ = [
    "CHAT_TEMPLATE",
    "DRAFT_FAULTS",
    "EOS_TOKEN_ID",
    "MEASURED_ROWS",
    "TARGET_FAULTS",
    "VOCAB_SIZE",
    "CuttingProxy",
    "FakeDraft",
    "FakeTarget",
    "FakeWorker",
    "GarbageDraft",
    "GarbageTarget",
    "byte_tokenizer",
]
