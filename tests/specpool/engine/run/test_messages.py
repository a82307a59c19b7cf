"""Rank 0 and the other ranks run the same spans."""

from hypothesis import given
from hypothesis import strategies as st

from specpool.engine.cache.spans import Span
from specpool.engine.run.messages import Command, decode, decode_run, encode_run

numbers = st.integers(0, 2**40)
tokens = st.lists(st.integers(0, 300_000), max_size=9)
spans = st.builds(Span, numbers, numbers, tokens, *4 * [numbers])


@given(sent=st.lists(spans, max_size=5), layers=st.lists(numbers, max_size=3).map(tuple))
def test_spans_survive_the_message(sent: list[Span], layers: tuple[int, ...]) -> None:
    command, arguments = decode(encode_run(sent, layers))
    assert command is Command.RUN
    assert decode_run(arguments) == (sent, layers)
