"""Converts changes of cached pages to the gateway's messages."""

import time
from collections.abc import Iterator, Sequence

from smg_grpc_proto.generated import common_pb2

from coordinator.scheduling.cache_events import CachedPage, Change

MAX_BATCH_EVENTS = 1024
"""Keeps a message well below the 4 MiB that gRPC accepts by default."""
HASH_BYTES = 8


def batches(starts_over: bool, changes: Sequence[Change], number: int) -> Iterator[common_pb2.KvEventBatch]:
    """Yield messages with all changes. `number`: sequence number of the first message.

    With `starts_over`, the messages form a snapshot that replaces everything the gateway knows.
    """
    events = [common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())] if starts_over else []
    events += map(_event, changes)
    parts = [events[start : start + MAX_BATCH_EVENTS] for start in range(0, len(events), MAX_BATCH_EVENTS)]
    for index, part in enumerate(parts):
        batch = common_pb2.KvEventBatch(sequence_number=number + index, timestamp=time.time(), events=part)
        if starts_over:
            batch.snapshot.MergeFrom(common_pb2.KvSnapshotChunk(index=index, count=len(parts), blocks=len(changes)))
        yield batch


def _event(change: Change) -> common_pb2.KvCacheEvent:
    if not isinstance(change, CachedPage):
        return common_pb2.KvCacheEvent(removed=common_pb2.KvBlocksRemoved(block_hashes=[_hash(change)]))
    block = common_pb2.KvBlock(
        block_hash=_hash(change.digest), token_ids=change.token_ids, block_size=len(change.token_ids)
    )
    parent = None if change.parent is None else _hash(change.parent)
    return common_pb2.KvCacheEvent(stored=common_pb2.KvBlocksStored(blocks=[block], parent_block_hash=parent))


def _hash(digest: bytes) -> int:
    return int.from_bytes(digest[:HASH_BYTES], signed=True)
