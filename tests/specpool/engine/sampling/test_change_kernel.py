"""A kernel changes the logits of a round like torch operations, bit for bit, after one copy to the device."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from specpool.engine.sampling import batch, change_kernel
from specpool.engine.sampling import sampler as sampling
from specpool.engine.sampling.batch import Sampler
from specpool.engine.sampling.change_kernel import change_rows
from specpool.engine.sampling.head import Head
from specpool.engine.sampling.lexers import mask_of
from specpool.engine.sampling.rows import SequenceRows
from specpool.engine.sampling.rules import Changes, SequenceRules
from specpool.engine.sampling.sampler import changed
from specpool.protocol.sampling import SamplingParams

pytest.importorskip("triton")

META = torch.device("meta")


class Uploads(TorchDispatchMode):
    """Records the bytes of each copy to another device, and whether the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, bool]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if isinstance(result, torch.Tensor) and any(
            isinstance(each, torch.Tensor) and each.device != result.device for each in args
        ):
            self.found.append((result.nbytes, not kwargs.get("non_blocking", False)))
        return result


class Grammar:
    """Stands in for a grammar that allows the same tokens in each row."""

    def __init__(self, vocab_size: int) -> None:
        self._mask = mask_of(range(0, vocab_size, 2), vocab_size)

    def masks(self, token_ids: list[int], count: int) -> list[np.ndarray]:
        return [self._mask.copy() for _ in range(count)]


def test_a_sampled_round_uploads_twice_without_a_wait() -> None:
    """8 sequences of 5 rows. Each has a bias, a penalty, a minimum length and a grammar."""
    vocab, grammar = 151_936, Grammar(151_936)
    params = SamplingParams(
        1.0, repetition_penalty=1.2, min_tokens=9, stop_token_ids=(4,), logit_bias=((5, 1.0),), prompt_length=3,
        grammar="root",
    )  # fmt: skip
    sequences = [SequenceRows(SequenceRules(params, grammar), [*range(100)], 5, num_logprobs=20) for _ in range(8)]
    logits, reads = torch.empty(40, vocab, dtype=torch.bfloat16, device=META), list[torch.Tensor]()

    def read(found: torch.Tensor) -> list[list[float]]:
        reads.append(found)
        values: list[list[float]] = np.zeros(found.shape).tolist()
        return values

    with (
        mock.patch.object(batch, "kernel_is_exact", return_value=True),
        mock.patch.object(sampling, "sample_rows", return_value=([0] * 40, [True] * 40)),
        mock.patch.object(change_kernel, "_change_rows", mock.MagicMock()) as kernel,
        mock.patch.object(torch.Tensor, "tolist", read),
        Uploads() as uploads,
    ):
        chosen = Sampler(Head(vocab), META)(logits, sequences)
    assert [each.token_ids for each in chosen] == [[0]] * 8, "the first token differs from the draft"
    assert not any(is_blocking for _, is_blocking in uploads.found)
    changes, rows_with_logprobs = (size for size, _ in uploads.found)
    assert changes < 1.1 * 40 * vocab / 8, "one bit per token"
    assert rows_with_logprobs == 8 * 2 * 8, "the row and the token of each log-probability, in int64"
    kernel.__getitem__.assert_called_once()
    assert len(reads) == 1


def arrays_of(vocab: int, values: st.SearchStrategy[Any], dtype: Any) -> st.SearchStrategy[Any]:
    """Distinct tokens with a value each."""
    pairs = st.dictionaries(st.integers(0, vocab - 1), values, max_size=40)
    return pairs.map(lambda found: (np.array([*found], np.int32), np.array([*found.values()], dtype)))


def changes_of(vocab: int) -> st.SearchStrategy[Changes]:
    token_ids = st.sets(st.integers(0, vocab - 1))
    return st.builds(
        lambda biased, masked, allowed, counted: Changes(
            *biased, np.array([*masked], np.int32), None if allowed is None else mask_of(allowed, vocab), *counted
        ),
        arrays_of(vocab, st.sampled_from([-100.0, -0.3, 0.1, 2.5]), np.float32),
        token_ids,
        st.none() | token_ids,
        arrays_of(vocab, st.sampled_from([-1, 0, 1, 7]), np.int32),
    )


params_of = st.builds(
    SamplingParams,
    temperature=st.just(1.0),
    repetition_penalty=st.sampled_from([1.0, 1.1, 0.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.1]),
    presence_penalty=st.sampled_from([0.0, 1.3]),
)


@settings(max_examples=25)
@given(data=st.data(), vocab=st.sampled_from([1, 31, 64, 150]), half=st.booleans(), seed=st.integers(0, 99))
def test_the_kernel_gives_the_bits_of_torch_operations(data: st.DataObject, vocab: int, half: bool, seed: int) -> None:
    """In batches of rows with and without changes, whose programs read a part of a row in several steps."""
    rows = data.draw(st.lists(st.tuples(params_of, st.none() | changes_of(vocab)), min_size=1, max_size=3))
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed)) * 4
    logits[0, seed % vocab] = data.draw(st.sampled_from([0.0, -0.0, -torch.inf, torch.inf, torch.nan]))
    logits = logits.to(torch.float16 if half else torch.float32)  # the interpreter does not support bfloat16
    expected = [changed(row.float(), params, changes) for row, (params, changes) in zip(logits, rows, strict=True)]
    with mock.patch.multiple(change_kernel, PART=64, BLOCK=16):
        actual = change_rows(logits, rows)
    torch.testing.assert_close(actual, torch.stack(expected), rtol=0, atol=0, equal_nan=True)


def test_rows_of_a_sequence_share_arrays() -> None:
    """The table holds a bias once, and the ids of counted tokens once per sequence."""
    params = SamplingParams(1.0, repetition_penalty=1.5, logit_bias=((3, 5.0),))

    def size(count: int) -> int:
        rules = SequenceRules(params)
        return len(change_kernel._pack([(params, each) for each in rules.changes([*range(20)], count)], False))

    assert size(5) - size(4) == change_kernel.FIELDS + 20, "a further row adds its fields and counts"
