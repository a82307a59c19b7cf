"""A device that waits instead of computing, and a meter that adds up the time of its passes."""

import mmap
import random
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from specpool.engine.cache.pages import PageTables
from specpool.engine.cache.slots import SlotTable
from specpool.engine.cache.spans import Span
from specpool.engine.run.sequences import Choices, SequenceEngine
from specpool.engine.sampling.rows import SequenceRows
from specpool.protocol.sampling import NO_LOGPROBS
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.protocol.worker_info import CacheLoad, WorkerInfo
from specpool.testing import CHAT_TEMPLATE, EOS_TOKEN_ID, MEASURED_ROWS, VOCAB_SIZE, byte_tokenizer

SLOTS, MAX_MODEL_LEN, MAX_ROWS = 128, 4096, 8192
PAGE_SIZE = 16
MAX_LATENESS, LATENESS_WEIGHT = 0.0003, 0.1
METER = struct.Struct("d")
"""Format of a meter: the total seconds of a device's passes, in a file that another process reads."""


def pass_seconds(first: float, more: float) -> Callable[[int], float]:
    """Seconds of a pass as a function of its rows, from milliseconds of the first row and of each further row."""
    return lambda rows: (first + more * (rows - 1)) / 1000


def open_meter(file: Path | None) -> mmap.mmap:
    """Create and map the file of a meter. None: no other process reads the meter."""
    if file is None:
        return mmap.mmap(-1, METER.size)
    file.write_bytes(METER.pack(0.0))
    with file.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), METER.size)


def read_meter(file: Path) -> float:
    """Return the seconds of all passes so far."""
    seconds: float = METER.unpack(file.read_bytes())[0]
    return seconds


class EmulatedDevice(SequenceEngine):
    def __init__(self, seconds: Callable[[int], float], acceptance: float, device: str, meter: mmap.mmap) -> None:
        """`seconds`: of a pass by rows. `acceptance`: probability of choosing the target's token."""
        self._seconds, self._acceptance, self._device, self._meter = seconds, acceptance, device, meter
        self._rng = random.Random(0)
        self._lateness = 0.0
        """Seconds by which sleeps overrun. Later sleeps are shorter, so that passes take the right time on average."""
        files = byte_tokenizer().to_str().encode()
        self._tokenizer = TokenizerFiles(files, CHAT_TEMPLATE, {}, (EOS_TOKEN_ID,))
        self._has_kernels = False
        self.engine: Any = SimpleNamespace(
            slots=SlotTable(SLOTS, PageTables(SLOTS, MAX_MODEL_LEN, SLOTS * MAX_MODEL_LEN, PAGE_SIZE)),
            vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_ROWS, passes=0, tokens=0, realign_ns=0, realigning=nullcontext,
            can_draft=lambda drafts: False, draft_loop=None, supports_branches=True,
            has_states=False, facts=SimpleNamespace(layers=0, hidden_size=0),
            loaded=SimpleNamespace(tokenizer=self._tokenizer, features=None), own_states=None,
        )  # fmt: skip

    @property
    def load(self) -> CacheLoad:
        slots = self.engine.slots
        return CacheLoad(slots.in_use, slots.tables.free)

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            model="emulated", architecture="none", dtype="float32", device=self._device, vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN, tokenizer_fingerprint="emulated", bitwise=True, parameters=1,
            embedding_parameters=0, slots_total=SLOTS, kv_bytes_per_token=1, kv_bytes_total=SLOTS * MAX_MODEL_LEN,
            kv_positions_total=SLOTS * MAX_MODEL_LEN, kv_positions_multiple=PAGE_SIZE, kv_layout="slots",
            weight_bytes=1, activation_bytes=1,
            step_seconds={rows: self._seconds(rows) for rows in MEASURED_ROWS}, step_cached=0,
            seconds_per_cached=0.0, max_rows=MAX_ROWS, weights_fingerprint="emulated",
            numerics_fingerprint="emulated", activations="float32", **self.load._asdict(),
        )  # fmt: skip

    def choose_rows(
        self,
        spans: Sequence[Span],
        rows: Sequence[SequenceRows],
        confidences: bool = False,
        state_layers: tuple[int, ...] = (),
    ) -> list[Choices]:
        with self._pass(sum(len(span.token_ids) for span in spans)):
            return [self._choices(each.token_ids, span, confidences) for span, each in zip(spans, rows, strict=True)]

    @contextmanager
    def _pass(self, rows: int) -> Iterator[None]:
        seconds = self._seconds(rows)
        ends = time.perf_counter() + seconds
        METER.pack_into(self._meter, 0, METER.unpack_from(self._meter)[0] + seconds)
        self.engine.passes += 1
        self.engine.tokens += rows
        yield
        time.sleep(max(0.0, ends - time.perf_counter() - self._lateness))
        late = max(-MAX_LATENESS, min(time.perf_counter() - ends, MAX_LATENESS))
        self._lateness = max(0.0, self._lateness + LATENESS_WEIGHT * late)

    def _choices(self, token_ids: Sequence[int], span: Span, confidences: bool) -> Choices:
        """The tokens after the last tokens of a span, up to the first that differs from its draft."""
        start = len(token_ids) - span.num_logits + 1
        digest, chosen = zlib.crc32(array("I", token_ids[:start])), list[int]()
        for draft in (*token_ids[start:], -1) if span.num_logits else ():
            chosen.append(token_of(digest))
            if self._rng.random() >= self._acceptance:
                chosen[-1] = (chosen[-1] + 1) % EOS_TOKEN_ID
            if chosen[-1] != draft:
                break
            digest = zlib.crc32(array("I", [draft]), digest)
        return Choices(chosen, [self._acceptance] * len(chosen) if confidences else [], NO_LOGPROBS)


def token_of(digest: int) -> int:
    """The target's choice for a context with this digest."""
    return digest // 10_000 % EOS_TOKEN_ID
