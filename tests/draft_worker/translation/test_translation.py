"""Translations between tokenizers of other kinds and sizes."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from other_tokenizers import byte_level, sentence_piece, vocabulary_of
from tiny_tokenizers import ascii_tokenizer
from tokenizers import Regex, Tokenizer, normalizers

from draft_worker.translation import building
from draft_worker.translation.building import build_translation
from draft_worker.translation.sample import SAMPLE
from draft_worker.translation.sequence import MAX_TEXT_BYTES, TranslatedSequence
from draft_worker.translation.translation import Translation
from draft_worker.translation.vocabulary import UnsupportedTokenizerError, num_incomplete

SMALL, LARGE, BPE, UNIGRAM = byte_level(300), byte_level(900), sentence_piece(700), sentence_piece(900, "unigram")
PAIRS = [(SMALL, LARGE), (LARGE, SMALL), (LARGE, BPE), (BPE, LARGE), (BPE, UNIGRAM), (UNIGRAM, BPE)]
IDS = ["small-large", "large-small", "large-bpe", "bpe-large", "bpe-unigram", "unigram-bpe"]
TEXTS = st.text(st.sampled_from("ab .\n1é👍🏽東\u0301\u200dß<>"), max_size=60)


@cache
def translation_of(target: Tokenizer, draft: Tokenizer) -> Translation:
    return build_translation(vocabulary_of(target), vocabulary_of(draft), target.get_vocab_size())[0]


def bytes_of(texts: dict[int, bytes], token_ids: list[int] | tuple[int, ...]) -> bytes:
    return b"".join(texts[token_id] for token_id in token_ids)


@pytest.mark.parametrize(("target", "draft"), PAIRS, ids=IDS)
@given(token_ids=st.lists(st.integers(3, 299), max_size=80), rounds=st.lists(st.tuples(st.integers(0, 9), TEXTS)))
@settings(deadline=None, max_examples=40)
def test_a_sequence_has_the_same_bytes_in_both_tokenizers(
    target: Tokenizer, draft: Tokenizer, token_ids: list[int], rounds: list[tuple[int, str]]
) -> None:
    translation = translation_of(target, draft)
    sequence, before = TranslatedSequence(translation), list[int]()
    for rejected, text in [(0, ""), *rounds]:
        base = max(0, len(before) - rejected)
        new = translation.target.encode(text.encode()) if before else token_ids
        assert sequence.extend(base, new)
        before = [*before[:base], *new]
        assert sequence.target_ids == before
        expected = TranslatedSequence(translation)
        expected.extend(0, before)
        assert bytes_of(translation.draft.texts, sequence.draft_ids) == bytes_of(translation.target.texts, before)
        assert sequence.draft_ids == expected.draft_ids
    assert not sequence.extend(len(before) + 1, [3])


@pytest.mark.parametrize(("target", "draft"), PAIRS, ids=IDS)
@given(prompt=TEXTS, text=TEXTS, limit=st.integers(0, 8))
@settings(deadline=None, max_examples=40)
def test_a_proposal_is_the_beginning_of_the_drafted_text(
    target: Tokenizer, draft: Tokenizer, prompt: str, text: str, limit: int
) -> None:
    translation = translation_of(target, draft)
    draft_ids = translation.draft.encode(text.encode())
    token_ids, chances = translation.proposal(draft_ids, [0.5] * len(draft_ids), limit)
    assert len(token_ids) == len(chances) <= limit
    proposed = bytes_of(translation.target.texts, token_ids)
    assert text.encode().startswith(proposed)
    everything, all_chances = translation.proposal(draft_ids, [0.5] * len(draft_ids), 1000)
    assert bytes_of(translation.target.texts, everything) == text.encode()
    product = 1.0
    for chance in all_chances:
        product *= chance
    assert product == pytest.approx(0.5 ** len(draft_ids))


def test_a_proposal_completes_a_character_of_the_target() -> None:
    translation = translation_of(LARGE, BPE)
    emoji = "🎉"
    token_ids = translation.target.encode(emoji.encode())
    assert len(token_ids) > 1
    sequence = TranslatedSequence(translation)
    sequence.extend(0, [*translation.target.encode(b"see you"), *token_ids[:1]])
    tail = sequence.incomplete
    assert tail == token_ids[:1]
    rest = emoji.encode()[len(translation.target.texts[token_ids[0]]) :]
    assert num_incomplete(emoji.encode()[: len(emoji.encode()) - len(rest)])
    draft_ids = translation.draft.encode(rest)
    assert translation.proposal(draft_ids, (), 8, tail)[0] == tuple(token_ids[1:])


def test_equal_texts_of_other_ids_are_shared() -> None:
    translation, fidelity = build_translation(vocabulary_of(SMALL), vocabulary_of(LARGE), 300)
    assert (translation.method, translation.coverage) == ("shared", 1.0)
    assert fidelity > 0.9
    eos = SMALL.token_to_id("<eos>")
    assert translation.to_draft[eos] == LARGE.token_to_id("<eos>")
    assert translation.proposal([LARGE.token_to_id("<eos>")], (), 4) == ((eos,), ())


def test_few_shared_tokens_are_encoded_again() -> None:
    translation, fidelity = build_translation(vocabulary_of(LARGE), vocabulary_of(UNIGRAM), 900)
    assert translation.method == "retokenized"
    assert fidelity > 0.7
    assert 0 < translation.coverage < 1


def test_a_word_is_not_encoded_twice() -> None:
    """Text before a border keeps its tokens, whatever follows."""
    translation = translation_of(LARGE, UNIGRAM)
    sequence, token_ids = TranslatedSequence(translation), translation.target.encode(SAMPLE.encode())
    whole = translation.draft.encode(SAMPLE.encode())
    for token_id in token_ids:
        sequence.extend(len(sequence.target_ids), [token_id])
    assert sequence.draft_ids == whole


def test_text_that_never_completes_a_character_is_translated_in_pieces() -> None:
    translation = translation_of(LARGE, UNIGRAM)
    lead, encoded = translation.target.byte_ids[0xF0], list[int]()
    draft = SimpleNamespace(prefix=(), encode=lambda text: [encoded.append(len(text)), *text][1:])
    sequence = TranslatedSequence(replace(translation, draft=draft))  # type: ignore[arg-type]
    for _ in range(8):
        sequence.extend(len(sequence.target_ids), [lead] * 512)
    assert len(sequence.draft_ids) == 8 * 512
    assert max(encoded) <= 2 * MAX_TEXT_BYTES + 1


def test_a_target_token_has_a_bounded_number_of_draft_tokens() -> None:
    whole = Tokenizer.from_str(LARGE.to_str())
    whole.normalizer = normalizers.Replace(Regex("[^ ]+"), "a")
    target = vocabulary_of(whole)
    translation = Translation("retokenized", target, vocabulary_of(SMALL), {}, {}, 0.0, 900)
    assert building._ratio(translation, "a" * 2000) <= building.MAX_RATIO


def test_a_lossy_draft_is_refused() -> None:
    lossy = Tokenizer.from_str(ascii_tokenizer().to_str())
    lossy.normalizer = normalizers.Replace(Regex("[a-z]"), "x")
    with pytest.raises(UnsupportedTokenizerError, match=r"only \d+% of its tokens accepted; the minimum is 50%"):
        build_translation(vocabulary_of(SMALL), vocabulary_of(lossy), 300)
