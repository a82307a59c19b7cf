"""Acceptance is a pure function, and these are all its rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from target_worker.acceptance import accept

# Few different tokens, so that drafts and choices often agree.
tokens = st.integers(0, 3)


@st.composite
def drafts_and_choices(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    draft = draw(st.lists(tokens, max_size=10))
    return draft, draw(st.lists(tokens, min_size=len(draft) + 1, max_size=len(draft) + 1))


def naive_accept(draft: list[int], choices: list[int]) -> list[int]:
    """What a target alone would generate: choose, and go on for as long as the draft had foreseen the choice."""
    gained = []
    for position, choice in enumerate(choices):
        gained.append(choice)
        if position == len(draft) or draft[position] != choice:
            break
    return gained


@given(drafts_and_choices())
def test_acceptance_equals_plain_decoding(case: tuple[list[int], list[int]]) -> None:
    draft, choices = case
    assert accept(draft, choices) == naive_accept(draft, choices)


@given(drafts_and_choices())
def test_gains_the_longest_matching_prefix_and_one_token(case: tuple[list[int], list[int]]) -> None:
    draft, choices = case
    gained = accept(draft, choices)
    accepted = len(gained) - 1
    assert gained[:accepted] == draft[:accepted]
    assert gained == choices[: accepted + 1]
    assert accepted == len(draft) or draft[accepted] != gained[accepted]


@given(st.lists(tokens, max_size=10), tokens)
def test_full_acceptance_gains_the_bonus_token(draft: list[int], bonus: int) -> None:
    assert accept(draft, [*draft, bonus]) == [*draft, bonus]


@given(st.lists(tokens, min_size=1, max_size=10), st.data())
def test_the_first_mismatch_ends_acceptance_whatever_follows(draft: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(draft) - 1))
    recovered = draft[at] + 1
    assert accept(draft, [*draft[:at], recovered, *draft[at + 1 :], 0]) == [*draft[:at], recovered]


def test_no_draft_gains_the_one_choice() -> None:
    assert accept([], [7]) == [7]


@given(drafts_and_choices())
def test_no_choice_after_the_first_mismatch_is_read(case: tuple[list[int], list[int]]) -> None:
    draft, choices = case
    left = iter(choices)
    gained = accept(draft, left)
    assert list(left) == choices[len(gained) :]


@given(st.lists(tokens, min_size=1, max_size=6))
def test_too_few_choices_are_an_error(draft: list[int]) -> None:
    with pytest.raises(ValueError, match=f"{len(draft)} choices for {len(draft)} draft tokens"):
        accept(draft, draft)


def test_arguments_are_left_alone_and_tuples_are_fine() -> None:
    draft, choices = (1, 2), (1, 5, 6)
    assert accept(draft, choices) == [1, 5]
    assert accept(list(draft), list(choices)) == [1, 5]
