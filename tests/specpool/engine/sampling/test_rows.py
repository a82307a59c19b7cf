"""The rows of branches leave the rules of their sequence as they are."""

from hypothesis import given, settings
from hypothesis import strategies as st

from specpool.engine.sampling.rows import SequenceRows
from specpool.engine.sampling.rules import SequenceRules
from specpool.protocol.sampling import SamplingParams

PARAMS = SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, prompt_length=2)
tokens = st.integers(0, 5)


def counts(rows: SequenceRows) -> list[dict[int, int]]:
    """Occurrences of the tokens that a row has seen, for each row."""
    changes = [each for each in rows.changes() if each is not None]
    assert len(changes) == rows.count
    return [
        {int(token): int(count) for token, count in zip(each.counted_ids, each.counts, strict=True) if count >= 0}
        for each in changes
    ]


def alone(context: list[int], count: int) -> list[dict[int, int]]:
    """The same for new rules."""
    return counts(SequenceRows(SequenceRules(PARAMS), context, count))


@settings(max_examples=200)
@given(data=st.data(), sequence=st.lists(tokens, min_size=4, max_size=12))
def test_rules_count_the_tokens_of_each_branch_and_of_the_sequence(data: st.DataObject, sequence: list[int]) -> None:
    rules, length = SequenceRules(PARAMS), 1
    while length < len(sequence):
        for _ in range(data.draw(st.integers(0, 3))):
            prefix_length = data.draw(st.integers(1, length))
            branch = data.draw(st.lists(tokens, min_size=1, max_size=5))
            context, count = [*sequence[:prefix_length], *branch], data.draw(st.integers(1, len(branch)))
            rows = SequenceRows(rules, context, count, prefix_length=prefix_length)
            assert counts(rows) == alone(context, count)
        count = data.draw(st.integers(1, len(sequence) - length))
        length += count
        assert counts(SequenceRows(rules, sequence[:length], count)) == alone(sequence[:length], count)
