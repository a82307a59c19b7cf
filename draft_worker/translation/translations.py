"""Translations of a draft worker, one per tokenizer of its coordinators' targets."""

import hashlib
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from draft_worker.translation.building import build_translation
from draft_worker.translation.translation import Translation
from draft_worker.translation.vetting import vet
from draft_worker.translation.vocabulary import UnsupportedTokenizerError, Vocabulary
from specpool.protocol.errors import NotFoundError, UnavailableError
from specpool.protocol.tokenizer import TokenizerFiles

log = logging.getLogger(__name__)

MAX_TRANSLATIONS = 4
"""Maximum number of translations and remembered refusals together. A translation takes up to about 100 MiB."""
IDLE_SECONDS = 3600.0
"""Idle time after which a translation is freed. Its coordinator then asks again."""


@dataclass
class _Entry:
    result: Translation | str
    """The translation, or the reason for refusing it."""
    used: float


class Translations:
    """Builds and caches translations. Thread-safe."""

    def __init__(
        self,
        draft: TokenizerFiles,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
        vet: Callable[[TokenizerFiles, int], None] = vet,
    ) -> None:
        """`vet`: raises UnsupportedTokenizerError for a tokenizer that is not safe to read in this process."""
        self._files, self._vocab_size, self._clock, self._vet = draft, vocab_size, clock, vet
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    @cached_property
    def _draft(self) -> Vocabulary:
        return _read("draft", self._files, self._vocab_size)

    def use(self, target: TokenizerFiles, vocab_size: int) -> tuple[str, Translation | str]:
        """Return the id of the translation for a target's tokenizer, and the translation or the reason for refusing it.

        The first call for a tokenizer takes seconds. Raises UnavailableError if too many translations are in use.
        """
        translation_id = _id_of(target, vocab_size)
        with self._lock:  # builds one translation at a time
            if (known := self._entries.get(translation_id)) is None:
                self._make_room()
                known = self._entries[translation_id] = _Entry(self._build(target, vocab_size), 0.0)
            self._touch(translation_id, known)
            return translation_id, known.result

    def get(self, translation_id: str) -> Translation:
        """Return a translation. Raises NotFoundError if it has been freed; the coordinator then asks again."""
        entry = self._entries.get(translation_id)
        if entry is None or isinstance(entry.result, str):
            raise NotFoundError("translation_id: call UseTokenizer first")
        entry.used = self._clock()
        return entry.result

    def expire(self) -> None:
        """Free idle translations."""
        if self._lock.acquire(blocking=False):  # a build may hold the lock for seconds
            try:
                for translation_id in [each for each, entry in self._entries.items() if self._is_idle(entry)]:
                    del self._entries[translation_id]
            finally:
                self._lock.release()

    def _touch(self, translation_id: str, entry: _Entry) -> None:
        entry.used = self._clock()
        self._entries.move_to_end(translation_id)

    def _is_idle(self, entry: _Entry) -> bool:
        return self._clock() - entry.used > IDLE_SECONDS

    def _make_room(self) -> None:
        """If full, remove an idle translation or a refusal. Raises UnavailableError if there is none."""
        if len(self._entries) < MAX_TRANSLATIONS:
            return
        free = (each for each, entry in self._entries.items() if isinstance(entry.result, str) or self._is_idle(entry))
        if (oldest := next(free, None)) is None:
            raise UnavailableError(f"all {MAX_TRANSLATIONS} translations are in use")
        del self._entries[oldest]

    def _build(self, target: TokenizerFiles, vocab_size: int) -> Translation | str:
        began = time.perf_counter()
        try:
            self._vet(target, vocab_size)
            translation, fidelity = build_translation(_read("target", target, vocab_size), self._draft, vocab_size)
        except UnsupportedTokenizerError as error:
            log.warning("cannot translate between the tokenizers: %s", error)
            return str(error)
        log.info(
            "translating tokens (%s): the draft has %.0f%% of the target's vocabulary, and a perfect draft would get "
            "%.0f%% of its tokens accepted; prepared in %.1f s",
            translation.method, 100 * translation.coverage, 100 * fidelity, time.perf_counter() - began,
        )  # fmt: skip
        return translation


def _read(model: str, files: TokenizerFiles, vocab_size: int) -> Vocabulary:
    try:
        return Vocabulary.read(files, vocab_size)
    except UnsupportedTokenizerError as error:
        raise UnsupportedTokenizerError(f"the {model}'s tokenizer is not supported: {error}") from None


def _id_of(files: TokenizerFiles, vocab_size: int) -> str:
    """Return a hash of everything that the translation depends on."""
    rest = json.dumps([vocab_size, files.eos_token_ids, files.special_tokens], sort_keys=True).encode()
    return hashlib.sha256(hashlib.sha256(files.tokenizer_json).digest() + rest).hexdigest()
