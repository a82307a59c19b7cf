"""Translations of a draft worker, one per tokenizer of its coordinators' targets."""

import asyncio
import hashlib
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable
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
MIN_IDLE_SECONDS = 60.0
"""Idle time after which a translation is freed if another coordinator needs room."""


@dataclass
class _Entry:
    result: Translation | str
    """The translation, or the reason for refusing it."""
    used: float


class Translations:
    """Builds and caches translations."""

    def __init__(
        self,
        draft: TokenizerFiles,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
        vet: Callable[[TokenizerFiles, int], Awaitable[None]] = vet,
    ) -> None:
        """`vet`: raises UnsupportedTokenizerError for a tokenizer that is not safe to read in this process."""
        self._files, self._vocab_size, self._clock, self._vet = draft, vocab_size, clock, vet
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()
        self._building = asyncio.Lock()

    @cached_property
    def _draft(self) -> Vocabulary:
        return _read("draft", self._files, self._vocab_size)

    async def use(self, target: TokenizerFiles, vocab_size: int) -> tuple[str, Translation | str]:
        """Return the id of the translation for a target's tokenizer, and the translation or the reason for refusing it.

        The first call for a tokenizer takes seconds. Raises UnavailableError if too many translations are in use.
        """
        translation_id = _id_of(target, vocab_size)
        async with self._building:  # builds one translation at a time
            if (known := self._entries.get(translation_id)) is None:
                self._make_room()
                known = _Entry(await self._build(target, vocab_size), self._clock())
                with self._lock:
                    self._entries[translation_id] = known
            known.used = self._clock()
            return translation_id, known.result

    def get(self, translation_id: str) -> Translation:
        """Return a translation. Thread-safe. Raises NotFoundError if it was freed; the coordinator then asks again."""
        entry = self._entries.get(translation_id)
        if entry is None or isinstance(entry.result, str):
            raise NotFoundError("translation_id: call UseTokenizer first")
        entry.used = self._clock()
        return entry.result

    def expire(self) -> None:
        """Free idle translations. Thread-safe."""
        with self._lock:
            for translation_id in [each for each, entry in self._entries.items() if self._idle(entry) > IDLE_SECONDS]:
                del self._entries[translation_id]

    def _idle(self, entry: _Entry) -> float:
        return self._clock() - entry.used

    def _make_room(self) -> None:
        """If full, remove a refusal or else an idle translation. Raises UnavailableError if there is neither."""
        with self._lock:
            if len(self._entries) < MAX_TRANSLATIONS:
                return
            refusals = {each: entry for each, entry in self._entries.items() if isinstance(entry.result, str)}
            oldest, entry = min((refusals or self._entries).items(), key=lambda item: item[1].used)
            if not refusals and self._idle(entry) <= MIN_IDLE_SECONDS:
                raise UnavailableError(f"all {MAX_TRANSLATIONS} translations are in use")
            del self._entries[oldest]

    async def _build(self, target: TokenizerFiles, vocab_size: int) -> Translation | str:
        began = time.perf_counter()
        try:
            await self._vet(target, vocab_size)
            translation, fidelity = await asyncio.to_thread(self._translation, target, vocab_size)
        except UnsupportedTokenizerError as error:
            log.warning("cannot translate between the tokenizers: %s", error)
            return str(error)
        log.info(
            "translating tokens (%s): the draft has %.0f%% of the target's vocabulary, and a perfect draft would get "
            "%.0f%% of its tokens accepted; prepared in %.1f s",
            translation.method, 100 * translation.coverage, 100 * fidelity, time.perf_counter() - began,
        )  # fmt: skip
        return translation

    def _translation(self, target: TokenizerFiles, vocab_size: int) -> tuple[Translation, float]:
        return build_translation(_read("target", target, vocab_size), self._draft, vocab_size)


def _read(model: str, files: TokenizerFiles, vocab_size: int) -> Vocabulary:
    try:
        return Vocabulary.read(files, vocab_size)
    except UnsupportedTokenizerError as error:
        raise UnsupportedTokenizerError(f"the {model}'s tokenizer is not supported: {error}") from None


def _id_of(files: TokenizerFiles, vocab_size: int) -> str:
    """Return a hash of everything that the translation depends on."""
    rest = json.dumps([vocab_size, files.eos_token_ids, files.special_tokens], sort_keys=True).encode()
    return hashlib.sha256(hashlib.sha256(files.tokenizer_json).digest() + rest).hexdigest()
