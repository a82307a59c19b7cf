"""Acceptance is a pure function, and these are all its rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from target_worker.verifier import accept

# Few different tokens, so drafts and choices often agree.
tokens = st.integers(0, 3)


@st.composite
def drafts_and_choices(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    draft = draw(st.lists(tokens, max_size=10))
    choices = draw(st.lists(tokens, min_size=len(draft) + 1, max_size=len(draft) + 1))
    agree = draw(st.integers(0, len(draft)))
    return draft, [*draft[:agree], *choices[agree:]]


@given(drafts_and_choices())
def test_acceptance_takes_the_longest_matching_prefix_and_one_choice(case: tuple[list[int], list[int]]) -> None:
    draft, choices = case
    left = iter(choices)
    gained = accept(draft, left)
    accepted = len(gained) - 1
    assert gained == choices[: accepted + 1]
    assert gained[:accepted] == draft[:accepted]
    assert accepted == len(draft) or draft[accepted] != gained[accepted]
    assert list(left) == choices[len(gained) :], "a choice after the first mismatch was read"


@pytest.mark.parametrize(
    ("draft", "choices", "gained"),
    [([], [7], [7]), ([1, 2], [1, 2, 9], [1, 2, 9]), ((1, 2), (1, 5, 6), [1, 5]), ([1, 2], [3, 2, 9], [3])],
    ids=["no draft", "bonus token", "recovered token", "nothing accepted"],
)
def test_examples(draft: list[int], choices: list[int], gained: list[int]) -> None:
    assert accept(draft, choices) == gained


@given(st.lists(tokens, min_size=1, max_size=6), st.integers(0, 5))
def test_choices_that_end_early_accept_only_draft_tokens(draft: list[int], count: int) -> None:
    assert accept(draft, draft[:count]) == draft[:count]
