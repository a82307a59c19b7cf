"""Branches get the logits and tokens of a sequence that holds their tokens, and leave their own sequence as it is."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted_kernels import imitate_graphs
from tiny_models import decode_alone, forget_all, load_engine, random_tokens, save_model, small_config

from specpool.engine.cache.slots import SequenceKey
from specpool.engine.cache.spans import Span
from specpool.engine.passes.drafts import Branch, Draft, DraftRound
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.run.engine import Engine
from specpool.engine.run.sequences import Choices, SequenceEngine
from specpool.protocol.rounds import ItemStatus, SequenceItem
from specpool.protocol.sampling import SamplingParams

# On both sides of vectors of positions, and of the blocks and splits of the GPU kernels.
PREFIX_LENGTHS = (1, 15, 16, 17, 63, 64, 65, 255, 256, 257)
LENGTH = 9  # tokens of a branch
SAMPLED = {
    "greedy": None,
    "with noise": SamplingParams(temperature=0.9, seed=3),
    "limited": SamplingParams(temperature=1.2, top_k=40, top_p=0.95, seed=4),
    "penalized": SamplingParams(
        temperature=0.8, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.3, min_tokens=9,
        stop_token_ids=(7,), logit_bias=((5, 1.0),), seed=5, prompt_length=6,
    ),
    "penalized argmax": SamplingParams(repetition_penalty=1.6, prompt_length=6),
}  # fmt: skip
each_rule = pytest.mark.parametrize("rules", SAMPLED)


@pytest.fixture(scope="module")
def engine(tiny_pair: tuple[Path, Path]) -> Engine:
    return load_engine(tiny_pair[1])


@pytest.fixture
def backend(engine: Engine) -> Iterator[SequenceEngine]:
    yield SequenceEngine(engine)
    forget_all(engine, 8)


def start(
    backend: SequenceEngine, sequence_id: int, params: SamplingParams | None, max_length: int = 100
) -> SequenceKey:
    item = SequenceItem(sequence_id, 0, (1,), sampling=params)
    assert backend._realign_admitted(("a", sequence_id), 1, item) is ItemStatus.OK
    return "a", sequence_id


def commit(backend: SequenceEngine, key: SequenceKey, tokens: Sequence[int]) -> list[int]:
    """Append tokens to a sequence. Return the next token, if it is decoded without a draft."""
    span = backend.span(key, list(tokens), 1)
    chosen = backend.choose({key: span})[key]
    backend.keep(key, span.end)
    return chosen.token_ids


def choose_branches(backend: SequenceEngine, branches: Sequence[Branch], confidences: bool = False) -> list[Choices]:
    """Run the branches in one forward pass, and choose the tokens after their last tokens."""
    slots = [backend.engine.slots[branch.key] for branch in branches]
    spans = [branch.span(slot) for branch, slot in zip(branches, slots, strict=True)]
    rows = [branch.rows(slot) for branch, slot in zip(branches, slots, strict=True)]
    return backend.choose_rows(spans, rows, confidences)


def cached(engine: Engine, slot: int, length: int) -> list[torch.Tensor]:
    columns = engine.layout.arena.columns_of(slot, 0, length)
    return [layer[:, columns].clone() for layer in (*engine.layout.arena.keys, *engine.layout.arena.values)]


# --- Logits


def check_logits(engine: Engine, prefix_length: int, offsets: Sequence[int], steps: Sequence[int], exact: bool) -> None:
    """Run several branches in common passes of `steps` tokens each, beside other sequences."""
    prefix, count = random_tokens(prefix_length, seed=1), sum(steps)
    branches = [random_tokens(count, seed=10 + index) for index in range(len(offsets))]
    truth = [decode_alone(engine, [*prefix, *tokens], slot=1)[prefix_length:] for tokens in branches]
    other = random_tokens(20, seed=2)
    (alone,) = decode_alone(engine, other, slot=2)[-1:]
    own = random_tokens(3, seed=3)
    engine.forward([Span(0, 0, [*prefix, *own], 0)])
    before, at = cached(engine, 0, prefix_length + len(own)), 0
    collected: list[list[torch.Tensor]] = [[] for _ in offsets]
    for size in steps:
        spans = [
            Span(0, prefix_length + at, tokens[at : at + size], size, prefix_length, offset)
            for tokens, offset in zip(branches, offsets, strict=True)
        ]
        logits = engine.forward([*spans, Span(2, 19, other[-1:], 1)])
        *rows, last = logits.split([*[size] * len(spans), 1])
        for of_branch, own_rows in zip(collected, rows, strict=True):
            of_branch.append(own_rows)
        assert torch.allclose(last[0], alone, atol=1e-4)
        at += size
    for of_branch, expected in zip(collected, truth, strict=True):
        if exact:
            assert torch.equal(torch.cat(of_branch), expected)
        else:
            torch.testing.assert_close(torch.cat(of_branch), expected, atol=1e-5, rtol=1e-5)
    assert all(map(torch.equal, cached(engine, 0, prefix_length + len(own)), before))


@pytest.mark.parametrize("prefix_length", PREFIX_LENGTHS)
def test_branches_get_the_bits_of_a_sequence_of_their_own(engine: Engine, prefix_length: int) -> None:
    assert isinstance(engine.forward_pass, NativeModel)
    assert engine.supports_branches
    check_logits(engine, prefix_length, (3, 3 + LENGTH, 40), (1, 1, 4, 3), exact=True)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prefix_length=st.integers(1, 130),
    gaps=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    steps=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    limit=st.sampled_from([1, 5, 16, 512]),
)
def test_branches_of_any_size_and_place_get_the_same_bits(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    prefix_length: int,
    gaps: list[int],
    steps: list[int],
    limit: int,
) -> None:
    """Also if their tokens are split into several passes."""
    monkeypatch.setattr(engine, "max_num_batched_tokens", limit)
    offsets = [3 + gaps[0]]
    for gap in gaps[1:]:
        offsets.append(offsets[-1] + sum(steps) + gap)
    check_logits(engine, prefix_length, offsets, steps, exact=True)


def test_a_branch_runs_in_the_pass_that_caches_its_prefix(engine: Engine) -> None:
    prefix, tokens = random_tokens(20), random_tokens(4, seed=1)
    expected = decode_alone(engine, [*prefix, *tokens], slot=1)
    engine.forward([Span(0, 0, prefix[:10], 0)])
    together = engine.forward([Span(0, 10, prefix[10:], 1), Span(0, 20, tokens, 4, 20, 6)])
    assert torch.equal(together, expected[19:])


@pytest.mark.parametrize("options", [{"native": False}, {"kv_layout": "padded"}])
def test_some_engines_have_no_branches(tiny_pair: tuple[Path, Path], options: dict[str, object]) -> None:
    engine = load_engine(tiny_pair[1], exact=False, max_sequences=2, **options)
    assert not engine.supports_branches
    engine.forward([Span(0, 0, [1, 2], 1)])
    with pytest.raises(AssertionError, match="no branches"):
        engine.forward([Span(0, 2, [1], 1, 2, 5)])


# --- On a GPU


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Engine:
    """An engine with imitated kernels. The parameter: whether it captures CUDA graphs."""
    pytest.importorskip("triton")
    imitate_graphs(monkeypatch)
    folder = save_model(tmp_path, small_config("qwen3"))
    options = {"native": False, "cuda_graphs": request.param, "max_sequences": 3, "max_model_len": 320}
    return load_engine(folder, exact=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [False, True], indirect=True)
def test_branches_on_a_gpu_match_sequences_of_their_own(gpu: Engine) -> None:
    assert gpu.supports_branches
    check_logits(gpu, 256, (3, 3 + LENGTH, 40), (1, 1, 1, 4, 2), exact=False)


@pytest.mark.parametrize("gpu", [True], indirect=True)
@pytest.mark.parametrize("prefix_length", [1, 254])
def test_the_device_drafts_branches(gpu: Engine, prefix_length: int) -> None:
    prefix = random_tokens(prefix_length)
    lengths, starts = (5, 0, 3), [random_tokens(2, seed=index) for index in range(3)]
    expected = []
    for tokens, length in zip(starts, lengths, strict=True):
        own = Draft(Span(1, 0, [*prefix, *tokens], 1), None, [*prefix, *tokens], max(1, length), needs_confidences=True)
        gpu.draft([DraftRound([own])])
        expected.append((own.token_ids[:length], own.confidences[:length]))
    gpu.forward([Span(0, 0, [*prefix, 1, 2], 0)])
    before = cached(gpu, 0, prefix_length + 2)
    for _ in range(3):  # the second draft captures a graph, and the third one replays it
        drafts = [
            Draft(
                Span(0, prefix_length, tokens, min(1, length), prefix_length, 2 + 10 * index), None,
                [*prefix, *tokens], length, prefix_length=prefix_length, needs_confidences=True,
            )
            for index, (tokens, length) in enumerate(zip(starts, lengths, strict=True))
        ]  # fmt: skip
        gpu.draft([DraftRound(drafts)])
        for draft, (token_ids, confidences) in zip(drafts, expected, strict=True):
            assert draft.token_ids == token_ids
            assert draft.confidences == pytest.approx(confidences, rel=1e-4)
        assert all(map(torch.equal, cached(gpu, 0, prefix_length + 2), before))


# --- Choices


def choices_of(
    backend: SequenceEngine, sequence_id: int, params: SamplingParams | None, tokens: list[int]
) -> list[int]:
    """The tokens that `choose` chooses after the last LENGTH + 1 tokens of a sequence, committed one by one."""
    key = start(backend, sequence_id, params)
    commit(backend, key, tokens[: -LENGTH - 1])
    return [commit(backend, key, [token])[0] for token in tokens[-LENGTH - 1 :]]


@each_rule
def test_branches_choose_the_tokens_of_a_committed_sequence(backend: SequenceEngine, rules: str) -> None:
    """Also several branches at a time, of different prefixes, and of several sequences."""
    params, prefix = SAMPLED[rules], random_tokens(30)
    places = [(0, 30, 10), (0, 30, 11 + LENGTH), (0, 27, 40), (1, 30, 5)]  # sequence, prefix length, offset
    tails = [random_tokens(12, seed=index)[-LENGTH - 1 :] for index in range(len(places))]
    expected = [
        choices_of(backend, 10 + index, params, [*prefix[:length], *tails[index]])
        for index, (_, length, _) in enumerate(places)
    ]
    for key in [("a", 10 + index) for index in range(len(places))]:
        backend.engine.slots.release([key])
    keys = [start(backend, sequence, params, max_length=140) for sequence in (0, 1)]
    for key in keys:
        commit(backend, key, prefix)

    def step(first: int, end: int, num_logits: int = 1) -> list[list[int]]:
        branches = [
            Branch(keys[sequence], length, offset, tails[index][:end], first, num_logits)
            for index, (sequence, length, offset) in enumerate(places)
        ]
        return [choices.token_ids for choices in choose_branches(backend, branches)]

    for at in range(4):
        assert step(at, at + 1) == [[own[at]] for own in expected]
    # The rest in one pass: up to the first choice that differs from the next token.
    rest = step(4, LENGTH + 1, LENGTH - 3)
    for own, tail, chosen in zip(expected, tails, rest, strict=True):
        right = sum(1 for _ in _agreeing(own[4:], tail[5:]))
        assert chosen == own[4 : 5 + right]


def _agreeing(choices: Sequence[int], tokens: Sequence[int]) -> Iterator[int]:
    for choice, token in zip(choices, tokens, strict=False):
        if choice != token:
            return
        yield token


@each_rule
def test_branches_change_no_later_choice_of_their_sequence(backend: SequenceEngine, rules: str) -> None:
    params, tokens = SAMPLED[rules], random_tokens(40)
    expected = choices_of(backend, 1, params, tokens)
    key = start(backend, 0, params)
    commit(backend, key, tokens[: -LENGTH - 1])
    chosen = []
    for at in range(40 - LENGTH - 1, 40):
        branches = [Branch(key, at - 5 * i, 10 + 20 * i, [tokens[-1], *random_tokens(i + 1)], 0, 2) for i in range(2)]
        choose_branches(backend, branches)
        chosen += commit(backend, key, [tokens[at]])
    assert chosen == expected


def test_branches_have_confidences(backend: SequenceEngine) -> None:
    key, tokens = start(backend, 0, None), random_tokens(12)
    commit(backend, key, tokens[:10])
    other = start(backend, 1, None)
    expected = backend.choose({other: backend.span(other, tokens, 1)}, confidences=True)[other]
    (choices,) = choose_branches(backend, [Branch(key, 10, 5, tokens[10:])], confidences=True)
    assert choices == expected


# --- Rankings


@each_rule
def test_the_first_of_a_ranking_is_the_choice(backend: SequenceEngine, rules: str) -> None:
    params, tokens, count = SAMPLED[rules], random_tokens(40), 4
    choices = choices_of(backend, 1, params, tokens)
    keys = start(backend, 0, params), start(backend, 2, None)
    for key in keys:
        commit(backend, key, tokens[: -LENGTH - 1])
    spans = {key: backend.span(key, tokens[-LENGTH - 1 :], LENGTH + 1) for key in keys}
    ranked = backend.rank(spans, count)
    assert [row[0][0] for row in ranked[keys[0]]] == choices
    assert [row[0][0] for row in ranked[keys[1]]] == choices_of(backend, 3, None, tokens)
    for row in (*ranked[keys[0]], *ranked[keys[1]]):
        assert len(row) == count
        assert len({token for token, _ in row}) == count
        probabilities = [probability for _, probability in row]
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) <= 1 + 1e-5
    # A ranking leaves the sequence as it is: its tokens may still be committed one by one.
    again = [commit(backend, keys[0], [token])[0] for token in tokens[-LENGTH - 1 :]]
    assert again == choices


def test_greedy_rankings_are_the_most_probable_tokens(backend: SequenceEngine) -> None:
    key, tokens = start(backend, 0, None), random_tokens(20)
    logits = decode_alone(backend.engine, tokens, slot=7)[-6:]
    ranked = backend.rank({key: backend.span(key, tokens, 6)}, 5)[key]
    best = logits.softmax(-1).topk(5)
    assert [[token for token, _ in row] for row in ranked] == best.indices.tolist()
    for row, expected in zip(ranked, best.values.tolist(), strict=True):
        assert [probability for _, probability in row] == pytest.approx(expected, rel=1e-4)
