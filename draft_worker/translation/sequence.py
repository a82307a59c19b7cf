"""Incremental translation of a sequence of the target's tokens that grows and may be truncated."""

from collections.abc import Sequence

from draft_worker.translation.translation import Translation
from draft_worker.translation.vocabulary import num_incomplete

BORDER_DISTANCE = 16
"""Minimum number of target tokens between two remembered borders."""
MAX_CHARACTER_BYTES = 4
MAX_TEXT_BYTES = 512
"""Bytes of text after which to end an encoding at the next boundary of a token and character, up to twice as many."""


class TranslatedSequence:
    """Translates text between borders. The encoding of the text before a border does not depend on the text after."""

    def __init__(self, translation: Translation, max_length: int = 2**31) -> None:
        """`max_length`: number of draft tokens after which to stop translating."""
        self.translation, self._max_length = translation, max_length
        self.target_ids: list[int] = []
        self.draft_ids: list[int] = [*translation.draft.prefix]
        self._borders = [(0, len(self.draft_ids))]
        """Number of target tokens and of draft tokens before each border."""
        self._text = bytearray()
        """Text not encoded yet."""

    def extend(self, base_length: int, token_ids: Sequence[int]) -> bool:
        """Keep the first `base_length` target tokens and append `token_ids`. Return False if there are fewer tokens."""
        if base_length > len(self.target_ids):
            return False
        while self._borders[-1][0] > base_length:
            self._borders.pop()
        start, count = self._borders[-1]
        new = [*self.target_ids[start:base_length], *token_ids]
        self.target_ids[start:] = new
        del self.draft_ids[count:]
        self._translate(start, new)
        return True

    def num_draft_ids(self, length: int) -> int:
        """Return the number of draft tokens for the first `length` target tokens, up to their last border."""
        return next(count for border, count in reversed(self._borders) if border <= length)

    @property
    def incomplete(self) -> list[int]:
        """The last target tokens, if their text ends inside a character; else empty."""
        texts, last = self.translation.target.texts, self.target_ids[-MAX_CHARACTER_BYTES:]
        sizes = [len(texts.get(token_id, b"")) for token_id in last]
        rest = num_incomplete(b"".join(texts.get(token_id, b"") for token_id in last))
        count = 0
        while rest > 0:
            count += 1
            rest -= sizes[-count]
        return last[len(last) - count :]

    def _translate(self, start: int, token_ids: Sequence[int]) -> None:
        """Append the translation of target tokens. `start`: index of the first one."""
        translation, text = self.translation, self._text
        texts, to_draft = translation.target.texts, translation.to_draft
        for index, token_id in enumerate(token_ids, start):
            if len(self.draft_ids) > self._max_length:
                break
            draft_id = to_draft.get(token_id)
            if draft_id is None:
                own = texts.get(token_id, b"")
                if text and (_is_border(text, own) or _is_long(text)):
                    self._flush(index)
                text += own
                continue
            self._flush(index)
            if index or token_id != translation.target.bos_token_id or not translation.draft.prefix:
                self.draft_ids.append(draft_id)
            self._mark(index + 1)
        self.draft_ids += translation.draft.encode(bytes(text))
        text.clear()

    def _flush(self, index: int) -> None:
        """Encode the text before a border. `index`: number of target tokens before it."""
        if self._text:
            self.draft_ids += self.translation.draft.encode(bytes(self._text))
            self._text.clear()
            self._mark(index)

    def _mark(self, index: int) -> None:
        if index - self._borders[-1][0] >= BORDER_DISTANCE:
            self._borders.append((index, len(self.draft_ids)))


def _is_border(before: bytes | bytearray, after: bytes) -> bool:
    """Whether a word ends and a space follows. No tokenizer merges across such a border."""
    return after[:1] == b" " and not before[-1:].isspace()


def _is_long(text: bytes | bytearray) -> bool:
    return len(text) > MAX_TEXT_BYTES and (len(text) > 2 * MAX_TEXT_BYTES or not num_incomplete(text))
