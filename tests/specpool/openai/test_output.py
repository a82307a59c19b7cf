"""Reading of answers: reasoning, calls and content."""

import pytest

from specpool.openai.deltas import Content, Delta, Reasoning
from specpool.openai.output import OutputPlan, plan_output
from specpool.v1.generation_pb2 import GetModelInfoResponse, ReasoningTags

THINKING = GetModelInfoResponse(reasoning=ReasoningTags(begin="<think>", end="</think>"))


def read(plan: OutputPlan, text: str, starts_in_reasoning: bool = False, size: int = 1) -> list[Delta]:
    """Read a text in chunks of `size` characters, and as a whole."""
    reader = plan.reader(starts_in_reasoning)
    deltas = [delta for begin in range(0, len(text), size) for delta in reader.feed(text[begin : begin + size])]
    return deltas + reader.finish()


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
    for size in (1, 3, 1000):
        deltas = read(plan_output(THINKING), text, starts_in_reasoning, size)
        assert "".join(delta.text for delta in deltas if isinstance(delta, Reasoning)) == reasoning
        assert "".join(delta.text for delta in deltas if isinstance(delta, Content)) == content


def test_models_without_reasoning_answer_with_content_only() -> None:
    plan = plan_output(GetModelInfoResponse())
    assert plan.skip_special_tokens
    assert not plan.constraint
    reader = plan.reader(False)
    assert reader.feed("<think>a") == [Content("<think>a")]
    assert reader.feed("b</think>") == [Content("b</think>")]
    assert reader.finish() == []


def test_text_is_read_as_soon_as_it_cannot_begin_a_tag() -> None:
    reader = plan_output(THINKING).reader(True)
    assert reader.feed("a < b <") == [Reasoning("a < b ")]
    assert reader.feed("/th") == []
    assert reader.feed("e") == [Reasoning("</the")]
    assert reader.feed("</think>c") == [Content("c")]
