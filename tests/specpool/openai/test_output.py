"""Parsing of answers without tools."""

import pytest
from read_answers import Answer, read

from specpool.openai.bodies import ChatBody
from specpool.openai.calls import chat_work
from specpool.openai.deltas import Content, Reasoning
from specpool.openai.output import plan_output
from specpool.v1.generation_pb2 import GetModelInfoResponse, ReasoningTags

THINKING = GetModelInfoResponse(reasoning=ReasoningTags(begin="<think>", end="</think>"))


@pytest.mark.parametrize(
    ("text", "starts_in_reasoning", "reasoning", "content"),
    [
        ("<think>\nHm.\n\nYes.\n</think>\n\n42\n", False, "Hm.\n\nYes.", "42\n"),
        ("\n<think>a</think>b", False, "a", "b"),
        ("Hm.\n</think>\n42", True, "Hm.", "42"),
        ("<think>\n\n</think>\n\n42", False, "", "42"),
        ("<think>endless </thin", False, "endless </thin", ""),
        ("still thinking\n", True, "still thinking\n", ""),
        (" \nplain <think>not a block</think>\n", False, "", " \nplain <think>not a block</think>\n"),
        ("<think", False, "", "<think"),
        ("", False, "", ""),
    ],
)
def test_reasoning_is_split_from_the_content(
    text: str, starts_in_reasoning: bool, reasoning: str, content: str
) -> None:
    for chunks in (list(text), [text]):
        assert read(plan_output(THINKING), chunks, starts_in_reasoning) == Answer(content, reasoning)


def test_models_without_reasoning_answer_with_content_only() -> None:
    plan = plan_output(GetModelInfoResponse())
    assert plan.skip_special_tokens
    assert not plan.constraint
    reader = plan.reader(False)
    assert reader.feed("<think>a ") == [Content("<think>a ")]
    assert reader.feed("b</think>\n") == [Content("b</think>\n")]
    assert reader.finish() == []


def test_text_is_read_as_soon_as_it_cannot_begin_a_tag() -> None:
    reader = plan_output(THINKING).reader(True)
    assert reader.feed("a < b <") == [Reasoning("a < b ")]
    assert reader.feed("/th") == []
    assert reader.feed("e") == [Reasoning("</the")]
    assert reader.feed("</think>c") == [Content("c")]


@pytest.mark.parametrize(("after", "expected"), [(None, Answer("", "42")), (False, Answer("42"))])
def test_text_that_a_constraint_describes_from_the_first_token_is_no_reasoning(
    after: bool | None, expected: Answer
) -> None:
    body = ChatBody.model_validate(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "Hi"}],
            "structured_outputs": {"regex": "42"},
            "constraint_after_reasoning": after,
        }
    )
    plan = chat_work(body, THINKING, "id").plan
    assert plan is not None
    assert read(plan, ["42"], starts_in_reasoning=True) == expected
