"""Sequences free the pages before all windows. Their tokens are those of a cache that keeps every page."""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixes import Case, assert_equal, make_prompt, play
from pair_service import LogitsTap, serving_pair
from tiny_models import load_engine, random_tokens, save_model, small_config
from transformers import AutoConfig, AutoModelForCausalLM

from specpool.engine.cache.pages import PageTables
from specpool.engine.cache.slots import SequenceKey, SlotTable
from specpool.engine.config.architectures import RECURRENT_LAYERS
from specpool.engine.passes.families import FAMILIES, WINDOWED, longest_window
from specpool.engine.passes.fused import FusedModel
from specpool.engine.run.sequences import SequenceEngine
from specpool.protocol.rounds import ItemStatus, SequenceItem
from specpool.protocol.sampling import Logprobs

WINDOW, MAX_LENGTH, MAX_TOKENS = 40, 288, 50
PROMPTS = [make_prompt((seed % 2, 60 + 60 * seed)) for seed in range(4)]
KEY = "a", 0
Round = tuple[bool, int, int, int]
"""Whether prefixes are shared, then the numbers of tokens, rejected tokens, and releases before the round."""
rounds = st.tuples(st.booleans(), st.integers(1, MAX_TOKENS), st.integers(0, 8), st.sampled_from([0, 0, 0, 1]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("windows"), small_config("mistral", sliding_window=WINDOW))


@pytest.fixture(scope="module")
def workers(model: Path) -> tuple["Worker", "Worker"]:
    """A worker that frees pages, and one that keeps them."""
    return Worker(model), Worker(model, frees=False)


class Worker:
    """A worker that runs rounds of a few sequences."""

    def __init__(self, model: Path, frees: bool = True) -> None:
        self.engine = load_engine(model, exact=False, max_sequences=2, max_model_len=MAX_LENGTH)
        self.worker, self.tables, self.rounds = SequenceEngine(self.engine), self.engine.slots.tables, count(1)
        if not frees:
            self.engine.slots._window = None

    def play(self, schedule: Sequence[Round]) -> Iterator[tuple[ItemStatus, int, list[int], Logprobs]]:
        """Yield the status, the number of tokens found in the prefix cache, and the choices of each round."""
        lengths = [0, 0]
        for shares, size, rejected, released in schedule:
            number = int(shares)
            self.worker.release("a", [number] * released)
            base = 0 if released else lengths[number]
            if base + size > MAX_LENGTH:
                continue
            accepted = max(0, size - rejected)
            tokens = random_tokens(MAX_LENGTH, seed=number)[base : base + accepted]
            tokens += random_tokens(size - accepted, seed=2)
            namespace = b"" if shares and base == 0 else None
            item = SequenceItem(number, base, tuple(tokens), cache_namespace=namespace)
            (status,) = self.worker.realign("a", next(self.rounds), [item])
            key, start = ("a", number), item.base_length
            span = self.worker.span(key, item.token_ids, len(item.token_ids))
            self._overwrite_unused_pages()
            choices = self.worker.choose({key: span}, num_logprobs={key: 0})[key]
            lengths[number] = max(start, base + accepted)
            self.worker.keep(key, lengths[number])
            self.engine.slots.check_integrity()
            yield status, start - base, choices.token_ids, choices.logprobs
        self.worker.release("a", None)
        self.tables.pool.clear()

    def _overwrite_unused_pages(self) -> None:
        arena, size = self.engine.layout.arena, self.tables.page_size
        columns = [page * size + column for page in self.tables.pool._unused for column in range(size)]
        for cache in (*arena.keys, *arena.values):
            cache[:, columns] = 100.0


@settings(max_examples=20, deadline=None)
@given(st.lists(rounds, min_size=8, max_size=16))
def test_freed_pages_change_no_token(workers: tuple[Worker, Worker], schedule: list[Round]) -> None:
    frees, keeps = workers
    for found, expected in zip(frees.play(schedule), keeps.play(schedule), strict=True):
        assert found == expected
        assert max(map(len, frees.tables.held)) <= (WINDOW + MAX_TOKENS) // frees.tables.page_size + 2


def test_only_rounds_before_the_last_one_miss_freed_pages() -> None:
    table = SlotTable(1, PageTables(1, max_length=64, columns=64, page_size=4), window=8)
    for start in range(0, 48, 8):
        assert table.realign(KEY, start, SequenceItem(0, start, (0,) * 8), start + 8) is ItemStatus.OK
        table.keep(KEY, start + 8)
    assert table.tables.free == 64 - 16  # the window of the last round, and its tokens
    assert table.realign(KEY, 40, SequenceItem(0, 40, (0,) * 8), 48) is ItemStatus.OK
    assert table.realign(KEY, 48, SequenceItem(0, 32, (0,) * 8), 48) is ItemStatus.CACHE_MISS
    assert table.realign(KEY, 49, SequenceItem(0, 0, (0,) * 8), 8) is ItemStatus.OK
    table.check_integrity()


async def test_workers_free_pages_of_long_sequences(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts run in parts, so no sequence ever holds all of its pages."""
    worker = {"max_sequences": 4, "max_model_len": MAX_LENGTH, "threads": 1}
    async with serving_pair(model, model, worker, max_num_seqs=4, prefill_tokens=64) as service:
        hosts = [host for host in (service.target, service.draft) if host is not None]
        slots = [host.backend.engine.slots for host in hosts]
        tap = LogitsTap(service.target.backend.engine)
        with monkeypatch.context() as keeping:
            for table in slots:
                keeping.setattr(table, "_window", None)
            plain = [Case(prompt, 40, 0, True, 0, None) for prompt in PROMPTS]
            expected = [await play(service.client, case) for case in plain]
            await service.wait_idle()
            for host in hosts:
                await service.forget(host)
        held = list[int]()
        for table in slots:
            monkeypatch.setattr(table, "keep", partial(_keep, table, held))
        mix = [Case(prompt, 40, 3, True, 0, None) for prompt in PROMPTS]
        got = await asyncio.gather(*(play(service.client, case) for case in mix))
        assert_equal(mix, got, expected)
        assert 3 <= max(held) <= (WINDOW + 64) // slots[0].tables.page_size + 2
        assert tap.compared > 100
        assert not tap.different


def _keep(table: SlotTable, held: list[int], key: SequenceKey, num_cached_tokens: int) -> None:
    """Call `keep`, and record the pages of the sequence."""
    SlotTable.keep(table, key, num_cached_tokens)
    held.append(len(table.tables.held[table[key].index]))


@pytest.mark.parametrize("uses_windows", [True, False])
@pytest.mark.parametrize("family", sorted(FAMILIES - RECURRENT_LAYERS.keys()))
def test_the_longest_window_is_that_of_all_layers(family: str, uses_windows: bool) -> None:
    known = AutoConfig.for_model(family)
    layers = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": uses_windows}
    changes = {name: value for name, value in layers.items() if hasattr(known, name)}
    config = small_config(family, sliding_window=WINDOW if uses_windows else None, **changes)
    model = FusedModel(AutoModelForCausalLM.from_config(config))
    windows = [layer.attention.window for layer in model.layers]
    assert longest_window(config) == (None if None in windows else max(windows))
    assert (None in windows) == (not uses_windows or family not in WINDOWED)
