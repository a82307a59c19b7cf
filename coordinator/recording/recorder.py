"""Records the token ids of finished answers for training, on its own thread. See docs/recording.md.

The event loop selects answers and never waits for the disk. If the disk is slow or fails, answers are dropped.
"""

import asyncio
import logging
import secrets
import time
from array import array
from hashlib import blake2b
from itertools import count
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple

from coordinator.config.settings import CoordinatorSettings
from coordinator.recording.shard_writer import Bounds, ShardWriter
from coordinator.requests.in_flight import COMPLETED
from coordinator.scheduling.sequence import Sequence
from specpool.protocol.recordings import Header, RecordedAnswer

log = logging.getLogger(__name__)

RECORDED, QUEUE_FULL, DISK_ERROR = RESULTS = ("recorded", "queue_full", "disk_error")
MAX_WAITING_TOKENS = 2**22
"""Maximum tokens that wait for the disk: 16 MiB."""
ANSWER_TOKENS = 128
"""Overhead of a waiting answer, in tokens."""
RETRY_SECONDS = 30.0
CLOSE_SECONDS = 5.0
"""Time limit for writing the waiting answers at shutdown."""
GOLDEN_RATIO = 0.6180339887498949


class _Waiting(NamedTuple):
    header: Header
    client: str
    token_ids: "array[int]"


def is_selected(number: int, share: float) -> bool:
    """Whether to record answer `number`, counted from 0. Multiples of the golden ratio spread the selection evenly."""
    return number * GOLDEN_RATIO % 1 < share


def recorder_of(settings: CoordinatorSettings) -> "Recorder | None":
    """Return a recorder that is not started yet; None if recording is off."""
    if settings.record is None:
        return None
    bounds = Bounds(settings.record_max_bytes, settings.record_max_age_seconds)
    share = 1.0 if settings.record_share is None else settings.record_share
    return Recorder(ShardWriter(settings.record, bounds), share, bounds.shard_seconds)


class Recorder:
    def __init__(self, shards: ShardWriter, share: float, tick_seconds: float) -> None:
        """`share`: of answers to record, 0 to 1. `tick_seconds`: interval of `shards.tick` while no answers arrive."""
        self.results = dict.fromkeys(RESULTS, 0)
        """Number of selected answers by result."""
        self._shards, self._share, self._tick_seconds = shards, share, tick_seconds
        self._numbers = count()
        self._key = secrets.token_bytes(32)
        """Key for hashing client ids. Never stored, so nobody can link answers to clients after a restart."""
        self._queue: SimpleQueue[_Waiting | None] = SimpleQueue()
        self._offered = self._taken = 0
        """Tokens that the event loop has queued, and that the thread has finished, including `ANSWER_TOKENS`."""
        self._retry_at: float | None = None
        """When to try the disk again after a failure."""
        self._thread = Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        log.info("recording %g%% of finished answers in %s", 100 * self._share, self._shards.folder)
        self._thread.start()

    def offer(self, sequence: Sequence, header: Header) -> None:
        """Record the answer of a sequence if it is complete and selected. `header`: describes the target.

        Requests with a cache salt are never recorded, because they ask for isolation from other clients.
        """
        finish, request = sequence.finish, sequence.request
        if finish is None or finish.reason not in COMPLETED or request.is_background or request.cache_salt:
            return
        if not is_selected(next(self._numbers), self._share):
            return
        token_ids = array("I", sequence.generated_ids)
        size = len(token_ids) + ANSWER_TOKENS
        if self._offered - self._taken + size > MAX_WAITING_TOKENS:
            self.results[QUEUE_FULL] += 1
            return
        client = blake2b(request.client.encode(), key=self._key, digest_size=8).hexdigest()
        self._offered += size
        self._queue.put(_Waiting(header, client, token_ids))

    async def close(self) -> None:
        """Write the waiting answers and finish the shard. Give up after `CLOSE_SECONDS`."""
        if self._thread.is_alive():
            self._queue.put(None)
            await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)
            if self._thread.is_alive():
                log.warning("failed to write the last recorded answers within %g s", CLOSE_SECONDS)

    def _run(self) -> None:
        self._try(None)
        while True:
            try:
                waiting = self._queue.get(timeout=self._tick_seconds)
            except Empty:
                self._try(None)
                continue
            if waiting is None:
                return self._finish()
            self.results[RECORDED if self._try(waiting) else DISK_ERROR] += 1
            self._taken += len(waiting.token_ids) + ANSWER_TOKENS

    def _try(self, waiting: _Waiting | None) -> bool:
        """Enforce the bounds, and write an answer if given. Return whether both succeeded. Warn once per outage."""
        if self._retry_at is not None and time.monotonic() < self._retry_at:
            return False
        try:
            self._shards.tick()
            if waiting is not None:
                self._shards.append(waiting.header, RecordedAnswer(waiting.client, tuple(waiting.token_ids)))
        except OSError as error:
            if self._retry_at is None:
                folder = self._shards.folder
                log.warning("recording answers in %s failed (%s); retrying every %g s", folder, error, RETRY_SECONDS)
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return False
        if self._retry_at is not None:
            log.info("recording resumed")
            self._retry_at = None
        return True

    def _finish(self) -> None:
        try:
            self._shards.finish()
        except OSError as error:
            log.warning("finishing the recording failed (%s)", error)
