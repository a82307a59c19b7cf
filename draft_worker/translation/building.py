"""Builds the translation for a pair of tokenizers, with the method that has the higher fidelity."""

from collections.abc import Mapping
from dataclasses import replace

from draft_worker.translation.sample import SAMPLE
from draft_worker.translation.sequence import TranslatedSequence
from draft_worker.translation.translation import RETOKENIZED, SHARED, Translation
from draft_worker.translation.vocabulary import UnsupportedTokenizerError, Vocabulary

EQUAL_COVERAGE = 0.99
"""Minimum coverage to prefer `SHARED` in any case, so that the draft sees the target's exact tokens."""
MIN_FIDELITY = 0.5
"""Minimum fidelity of a translation. See docs/decisions.md."""
MEASURED_DRAFT_TOKENS = 4
MAX_RATIO = 8.0
"""Maximum number of draft tokens per target token. Each takes a forward pass."""
TEXT_BYTES = 16 * MEASURED_DRAFT_TOKENS
"""Bytes of following text known to the simulated draft."""


def build_translation(target: Vocabulary, draft: Vocabulary, vocab_size: int) -> tuple[Translation, float]:
    """Return the better translation and its fidelity. `vocab_size`: of the target.

    Raises UnsupportedTokenizerError if the fidelity is below `MIN_FIDELITY`.
    """
    specials = _special_map(target, draft)
    ids = {text: token_id for token_id, text in draft.texts.items()}
    shared = {token_id: ids[text] for token_id, text in target.texts.items() if text in ids}
    coverage = len(shared) / max(1, len(target.texts))
    methods = [
        Translation(method, target, draft, to_draft, _inverse(to_draft, target, draft), coverage, vocab_size)
        for method, to_draft in ((SHARED, shared | specials), (RETOKENIZED, specials))
    ]
    methods = [replace(translation, ratio=_ratio(translation)) for translation in methods]
    measured = [(translation, fidelity(translation)) for translation in methods]
    best, measure = measured[0] if coverage >= EQUAL_COVERAGE else max(measured, key=lambda each: each[1])
    if measure < MIN_FIDELITY:
        reason = f"even a perfect draft would get only {measure:.0%} of its tokens accepted"
        raise UnsupportedTokenizerError(f"{reason}; the minimum is {MIN_FIDELITY:.0%}")
    return best, measure


def fidelity(translation: Translation, sample: str = SAMPLE, count: int = MEASURED_DRAFT_TOKENS) -> float:
    """Return the acceptance rate of a perfect draft, which knows the sample text. `count`: draft tokens per round."""
    target, draft = translation.target, translation.draft
    token_ids, sequence, place = target.encode(sample.encode()), TranslatedSequence(translation), 0
    num_accepted = num_rounds = 0
    while place + count < len(token_ids):
        sequence.extend(len(sequence.target_ids), token_ids[len(sequence.target_ids) : place + 1])
        following = token_ids[place + 1 :]
        text = b"".join(target.texts.get(token_id, b"") for token_id in following[:TEXT_BYTES])[:TEXT_BYTES]
        draft_ids = draft.encode(text)[: translation.num_draft_tokens(count)]
        proposed, _ = translation.proposal(draft_ids, (), count, sequence.incomplete)
        accepted = next(
            (i for i, pair in enumerate(zip(proposed, following, strict=False)) if pair[0] != pair[1]), len(proposed)
        )
        num_accepted += accepted
        num_rounds += 1
        place += accepted + 1
    return num_accepted / max(1, count * num_rounds)


def _ratio(translation: Translation, sample: str = SAMPLE) -> float:
    draft_ids = translation.draft.encode(sample.encode())
    count = len(translation.proposal(draft_ids, (), len(sample.encode()))[0])
    return min(MAX_RATIO, len(draft_ids) / max(1, count))


def _special_map(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """Map special tokens with the same text, and the tokens that begin or end a sequence."""
    mapped = {
        token_id: draft.special_ids[text] for text, token_id in target.special_ids.items() if text in draft.special_ids
    }
    if target.bos_token_id is not None and draft.bos_token_id is not None:
        mapped[target.bos_token_id] = draft.bos_token_id
    if draft.eos_token_ids:
        mapped |= {token_id: mapped.get(token_id, draft.eos_token_ids[0]) for token_id in target.eos_token_ids}
    return mapped


def _inverse(to_draft: Mapping[int, int], target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    inverse = {draft_id: target_id for target_id, draft_id in to_draft.items()}
    if target.eos_token_ids:
        ends = dict.fromkeys(draft.eos_token_ids, target.eos_token_ids[0])
        inverse = ends | inverse
    return inverse
