"""Both workers over real sockets: rounds, invalid requests, and the life cycle of worker processes."""

import asyncio
import itertools
import operator
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tiny_models import forget_all, random_tokens
from tiny_pair import MAX_MODEL_LEN
from tokenizers import Tokenizer
from worker_service import (
    CACHE_MISS,
    DRAFT,
    NO_SLOT,
    OK,
    PATIENCE_SECONDS,
    SLOTS,
    STALE_ROUND,
    TARGET,
    Role,
    Worker,
    failure,
    propose,
    serving,
    tokens_of,
    verify,
    violated_fields,
    wait_serving,
    worker_process,
)

from specpool.engine.config.options import EngineOptions
from specpool.engine.run.engine import Engine
from specpool.engine.startup import loading as startup
from specpool.protocol.rounds import MAX_ITEM_BRANCHES
from specpool.testing import CHAT_TEMPLATE, EOS_TOKEN_ID, byte_tokenizer
from specpool.v1 import common_pb2, draft_worker_pb2, target_worker_pb2
from specpool.worker.host import WorkerHost
from specpool.worker.streams import MAX_ROUNDS_AHEAD

# --- Rounds


@pytest.mark.parametrize("k", [0, 1, 3, 8])
async def test_speculation_matches_plain_decoding(target: Worker, draft: Worker, k: int) -> None:
    prompts = {1: random_tokens(5, 1), 2: random_tokens(31, 2), 3: random_tokens(70, 3)}
    tokens = {i: list(prompt) for i, prompt in prompts.items()}
    in_target, in_draft = dict.fromkeys(prompts, 0), dict.fromkeys(prompts, 0)
    accepted = 0
    while any(len(tokens[i]) < len(prompts[i]) + 40 for i in prompts):
        proposals: dict[int, list[int]] = {i: [] for i in prompts}
        if k:
            for result in await draft.round(*(propose(i, in_draft[i], tokens[i][in_draft[i] :], k) for i in prompts)):
                assert result.status == OK
                assert len(result.draft_token_ids) == k
                assert result.cached_length == len(tokens[result.sequence_id]) + k - 1
                proposals[result.sequence_id] = list(result.draft_token_ids)
        items = [verify(i, in_target[i], tokens[i][in_target[i] :], proposals[i]) for i in prompts]
        for result in await target.round(*items):
            i, gained = result.sequence_id, list(result.token_ids)
            assert result.status == OK
            assert gained[:-1] == proposals[i][: len(gained) - 1]
            accepted += len(gained) - 1
            cached_by_draft = len(tokens[i]) + min(len(gained) - 1, k - 1) if k else 0
            tokens[i] += gained
            assert result.cached_length == len(tokens[i]) - 1
            in_target[i], in_draft[i] = result.cached_length, cached_by_draft
    for i, prompt in prompts.items():
        assert tokens[i][len(prompt) :] == target.continuation(prompt, len(tokens[i]) - len(prompt))
    assert accepted > 0 or k == 0, "a pair that never agrees tests little"


@pytest.mark.parametrize("wrong_at", [0, 2, 4])
async def test_a_rejected_token_yields_the_recovered_token(target: Worker, wrong_at: int) -> None:
    prompt = random_tokens(9)
    truth = target.continuation(prompt, 7)
    proposal = [*truth[:wrong_at], (truth[wrong_at] + 1) % 256, *truth[wrong_at + 1 : 5]]
    (result,) = await target.round(verify(1, 0, prompt, proposal))
    assert list(result.token_ids) == truth[: wrong_at + 1]
    assert result.cached_length == target.cached(1) == 9 + wrong_at
    (result,) = await target.round(verify(1, 9 + wrong_at, truth[wrong_at : wrong_at + 1]))
    assert list(result.token_ids) == truth[wrong_at + 1 : wrong_at + 2]


@pytest.mark.parametrize("chunk", [1, 7, 30])
async def test_chunked_prefill_matches_a_single_prefill(target: Worker, chunk: int) -> None:
    prompt = random_tokens(61)
    for start in range(0, 60, chunk):
        piece = prompt[start : min(start + chunk, 60)]
        (result,) = await target.round(verify(1, start, piece, prefill_only=True))
        assert (result.status, list(result.token_ids)) == (OK, [])
        assert result.cached_length == target.cached(1) == start + len(piece)
    (result,) = await target.round(verify(1, 60, prompt[60:]))
    assert list(result.token_ids) == target.continuation(prompt, 1)


async def test_a_round_without_device_memory_is_repeated_in_smaller_passes(
    target: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, run, sizes = random_tokens(250), target.engine.runner.run, list[int]()
    expected = target.continuation(prompt, 1)

    def run_if_small(spans: Any, *arguments: Any) -> Any:
        sizes.append(sum(len(span.token_ids) for span in spans))
        if sizes[-1] > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(spans, *arguments)

    monkeypatch.setattr(target.engine.runner, "run", run_if_small)
    monkeypatch.setattr(target.engine, "max_num_batched_tokens", target.engine.max_num_batched_tokens)  # restores it
    (result,) = await target.round(verify(1, 0, prompt))
    assert list(result.token_ids) == expected
    assert sizes[-4:] == [64, 64, 64, 58]


async def test_each_sequence_gets_its_number_of_draft_tokens(draft: Worker) -> None:
    prompts = [random_tokens(length, length) for length in (4, 11, 25)]
    results = await draft.round(*(propose(i, 0, p, k) for i, p, k in zip((5, 6, 7), prompts, (0, 2, 6), strict=True)))
    assert [len(result.draft_token_ids) for result in results] == [0, 2, 6]
    assert [result.cached_length for result in results] == [4, 12, 30]
    for result, prompt in zip(results, prompts, strict=True):
        count = len(result.draft_token_ids)
        assert not count or list(result.draft_token_ids) == draft.continuation(prompt, count)


async def test_an_unlikely_draft_ends_early(draft: Worker) -> None:
    def item(number: int, min_chance: float) -> draft_worker_pb2.ProposeItem:
        made = propose(number, 0, [1, 2, 3], 8)
        made.min_chance = min_chance
        return made

    whole, cut, surest = await draft.round(item(1, 1e-30), item(2, 0.2), item(3, 1.0))
    chances = list(itertools.accumulate(whole.confidences, operator.mul))
    assert all(0 < confidence <= 1 for confidence in whole.confidences)
    kept = next((i + 1 for i, chance in enumerate(chances) if chance < 0.2), 8)
    assert cut.draft_token_ids == whole.draft_token_ids[:kept]
    assert len(surest.draft_token_ids) == 1
    await draft.release(3)
    (unasked,) = await draft.round(propose(4, 0, [1, 2, 3], 8))
    assert (unasked.draft_token_ids, unasked.confidences) == (whole.draft_token_ids, [])


async def test_chances_calibrate_the_draft_probabilities(draft: Worker) -> None:
    item = propose(1, 0, [1, 2, 3], 8)
    item.min_chance = 0.5
    request = draft.request(item)
    for chances, drafted in (([0.0], 1), ([1.0], 8), ([1.0] * 10, 8)):
        request.chances[:] = chances
        (result,) = (await draft.stub.Propose(request)).results
        assert len(result.draft_token_ids) == drafted


async def test_a_draft_step_must_be_worth_its_cost(draft: Worker) -> None:
    def item(number: int) -> draft_worker_pb2.ProposeItem:
        made = propose(number, 0, [number, 2, 3], 8)
        made.min_chance, made.next_chance = 0.1, 0.5
        return made

    request = draft.request(item(1), item(2))
    request.chances[:] = [1.0]  # every token is accepted, so each further one gains 0.4
    for step_cost, drafted in ((0.0, 8), (0.79, 8), (0.81, 1)):
        request.step_cost = step_cost
        results = (await draft.stub.Propose(request)).results
        assert [len(result.draft_token_ids) for result in results] == [drafted, drafted]
    for step_cost in (-1.0, float("nan")):
        request.step_cost = step_cost
        assert violated_fields(await failure(draft.stub.Propose(request))) == ["step_cost"]


@pytest.mark.parametrize("chance", [-0.1, 1.5, float("nan")])
async def test_invalid_chances_are_refused_by_name(draft: Worker, chance: float) -> None:
    request = draft.request(propose(1, 0, [5], 2))
    request.chances[:] = [0.5, chance]
    error = await failure(draft.stub.Propose(request))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(error) == ["chances[1]"]
    item = propose(1, 0, [5], 1)
    item.min_chance = chance
    assert violated_fields(await failure(draft.round(item))) == ["items[0].min_chance"]


async def test_step_times_are_measured_at_load(tiny_pair: tuple[Path, Path]) -> None:
    engine = startup.load_engine(EngineOptions(model=str(tiny_pair[1]), device="cpu", max_sequences=3), exact=False)
    async with serving(DRAFT, engine) as worker:
        costs = (await worker.info()).costs
        # Up to three sequences with 16 draft tokens each. On a CPU times grow in steps.
        assert list(costs.rows) == [1, 2, 4, 8, 9, 12, 16, 17, 24, 32, 51]
        assert costs.max_rows == engine.max_num_batched_tokens
        assert all(0 < seconds < 1 for seconds in costs.seconds)
        assert worker.engine.slots.in_use == 0


async def test_the_draft_catches_up_with_its_own_last_token_after_a_full_acceptance(draft: Worker) -> None:
    prompt = random_tokens(12)
    (first,) = await draft.round(propose(1, 0, prompt, 4))
    bonus = 99
    committed = [*prompt, *first.draft_token_ids, bonus]
    (second,) = await draft.round(propose(1, first.cached_length, committed[first.cached_length :], 4))
    assert first.cached_length == len(committed) - 2
    assert second.cached_length == len(committed) + 3
    assert list(second.draft_token_ids) == draft.continuation(committed, 4)


async def test_the_draft_drops_rejected_tokens(draft: Worker) -> None:
    prompt = random_tokens(12)
    (first,) = await draft.round(propose(1, 0, prompt, 5))
    committed = [*prompt, first.draft_token_ids[0], (first.draft_token_ids[1] + 1) % 256]
    (second,) = await draft.round(propose(1, len(prompt) + 1, committed[-1:], 3))
    assert list(second.draft_token_ids) == draft.continuation(committed, 3)


# --- Cache misses, missing slots and stale rounds


@pytest.mark.parametrize("base_length", [1, 7, 400])
async def test_an_unknown_sequence_is_a_cache_miss_and_is_rebuilt(worker: Worker, base_length: int) -> None:
    prompt = random_tokens(8)
    (result,) = await worker.round(worker.item(1, base_length, prompt[7:]))
    assert (result.status, tokens_of(result), result.cached_length) == (CACHE_MISS, [], 0)
    assert worker.engine.slots.in_use == 0
    (result,) = await worker.round(worker.item(1, 0, prompt))
    assert (result.status, result.cached_length) == (OK, 8)
    assert tokens_of(result) == worker.continuation(prompt, 1)


async def test_a_short_cache_is_a_miss_and_stays_unchanged(worker: Worker) -> None:
    prompt = random_tokens(8)
    await worker.round(worker.item(1, 0, prompt))
    (result,) = await worker.round(worker.item(1, 9, [1]))
    assert (result.status, tokens_of(result)) == (CACHE_MISS, [])
    assert worker.cached(1) == 8
    longer = random_tokens(20)
    (result,) = await worker.round(worker.item(1, 0, longer))
    assert tokens_of(result) == worker.continuation(longer, 1)
    assert worker.engine.slots.in_use == 1


async def test_a_sequence_without_a_slot_does_not_fail_its_round(worker: Worker) -> None:
    prompts = {i: random_tokens(5 + i, i) for i in range(5)}
    await worker.round(worker.item(0, 0, prompts[0]))
    results = await worker.round(
        worker.item(1, 0, prompts[1]),
        worker.item(9, 3, [1]),
        worker.item(2, 0, prompts[2]),
        worker.item(3, 0, prompts[3]),
    )
    assert [result.status for result in results] == [OK, CACHE_MISS, OK, NO_SLOT]
    assert [bool(tokens_of(result)) for result in results] == [True, False, True, False]
    assert tokens_of(results[2]) == worker.continuation(prompts[2], 1)
    assert await worker.release(1) == 1
    (result,) = await worker.round(worker.item(3, 0, prompts[3]))
    assert tokens_of(result) == worker.continuation(prompts[3], 1)


async def test_a_delayed_round_changes_nothing(worker: Worker) -> None:
    prompt = random_tokens(8)
    await worker.round(worker.item(1, 0, prompt), round_id=5)
    for base_length in (0, 4, 8):
        (result,) = await worker.round(worker.item(1, base_length, [3]), round_id=4)
        assert (result.status, tokens_of(result)) == (STALE_ROUND, [])
        assert worker.cached(1) == 8
    (result,) = await worker.round(worker.item(1, 8, [7]), round_id=6)
    assert tokens_of(result) == worker.continuation([*prompt, 7], 1)


async def test_proposals_are_idempotent(draft: Worker) -> None:
    await draft.round(propose(1, 0, random_tokens(8), 2), round_id=1)
    items = [propose(1, 6, random_tokens(3, 1), 4), propose(2, 0, random_tokens(9, 2), 0), propose(3, 5, [1], 1)]
    await assert_idempotent(draft, items)


async def test_verifications_are_idempotent(target: Worker) -> None:
    prompt = random_tokens(8)
    right = target.continuation([*prompt, 5], 3)
    await target.round(verify(1, 0, prompt), round_id=1)
    items = [verify(1, 8, [5], [*right, 1, 2]), verify(2, 0, prompt, prefill_only=True), verify(3, 5, [1])]
    await assert_idempotent(target, items)


async def assert_idempotent(worker: Worker, items: list[Any]) -> None:
    responses = []
    for _ in range(3):
        response = await worker.respond(*items, round_id=2)
        assert response.forward_ns > 0
        response.ClearField("forward_ns")
        response.ClearField("realign_ns")
        responses.append((response.SerializeToString(deterministic=True), worker.cached(1), worker.cached(2)))
    assert [result.status for result in response.results] == [OK, OK, CACHE_MISS]
    assert response.round_id == 2
    assert responses[0] == responses[1] == responses[2]


async def test_coordinators_can_use_the_same_sequence_ids(worker: Worker) -> None:
    prompts = {"one": random_tokens(8, 1), "two": random_tokens(8, 2)}
    for name, prompt in prompts.items():
        await worker.round(worker.item(1, 0, prompt), coordinator_id=name)
    for name, prompt in prompts.items():
        (result,) = await worker.round(worker.item(1, 8, [5]), coordinator_id=name)
        assert tokens_of(result) == worker.continuation([*prompt, 5], 1)
    assert await worker.release(1, coordinator_id="one") == 1
    assert worker.cached(1, "two") == 9


async def test_a_sequence_may_fill_every_position(target: Worker, draft: Worker) -> None:
    tokens = random_tokens(MAX_MODEL_LEN)
    (result,) = await target.round(verify(1, 0, tokens[:-4], tokens[-4:]))
    assert result.status == OK
    (result,) = await draft.round(propose(1, 0, tokens[:-4], 5))
    assert (result.status, result.cached_length) == (OK, MAX_MODEL_LEN)


# --- Releasing sequences


async def test_release_counts_freed_sequences(worker: Worker) -> None:
    await worker.round(worker.item(1, 0, [5]), worker.item(2, 0, [6]))
    assert (await worker.info()).load.slots_in_use == 2
    assert await worker.release(1, 2, 3, 1) == 2
    assert await worker.release(1, 2, 3) == 0
    assert (await worker.info()).load.slots_in_use == 0
    (result,) = await worker.round(worker.item(1, 1, [5]))
    assert result.status == CACHE_MISS


async def test_all_sequences_of_a_coordinator_are_released(worker: Worker) -> None:
    for sequence_id, coordinator_id in ((1, "one"), (2, "one"), (1, "two")):
        await worker.round(worker.item(sequence_id, 0, [5]), coordinator_id=coordinator_id)
    response = await worker.stub.Release(common_pb2.ReleaseRequest(coordinator_id="one", all=True))
    assert (response.released, response.instance_id) == (2, worker.host.instance_id)
    assert (await worker.info()).load.slots_in_use == 1


async def test_responses_name_their_process(worker: Worker) -> None:
    response = await worker.respond(worker.item(1, 0, [5]))
    assert response.instance_id == worker.host.instance_id == (await worker.info()).instance_id


async def test_only_a_silent_coordinator_loses_its_sequences(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        "specpool.worker.host.time", SimpleNamespace(monotonic=lambda: clock.now, perf_counter_ns=time.perf_counter_ns)
    )
    lease = 0.04
    reaper = asyncio.create_task(worker.host.expire_leases(lease))
    await worker.round(worker.item(1, 0, [5]), worker.item(2, 0, [6]), coordinator_id="silent")
    await worker.round(worker.item(1, 0, [7]), coordinator_id="alive")
    clock.now = 0.75 * lease
    assert await worker.release(77, coordinator_id="alive") == 0  # any call renews the lease
    await asyncio.sleep(2 * lease)
    assert (await worker.info()).load.slots_in_use == 3
    clock.now = 1.5 * lease
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await worker.info()).load.slots_in_use == 3:  # noqa: ASYNC110 - the worker sends no notice
            await asyncio.sleep(0.005)
    await asyncio.sleep(2 * lease)
    assert (await worker.info()).load.slots_in_use == 1
    assert worker.cached(1, "alive") == 1
    (result,) = await worker.round(worker.item(1, 1, [5]), coordinator_id="silent")
    assert result.status == CACHE_MISS
    reaper.cancel()


# --- A worker's description


async def test_a_worker_describes_itself(worker: Worker) -> None:
    await worker.round(worker.item(1, 0, [5]))
    info = worker.engine.info()
    response = await worker.info()
    assert response.model == common_pb2.ModelInfo(
        model=info.model,
        architecture="llama",
        dtype="float32",
        device="cpu",
        vocab_size=257,
        max_model_len=MAX_MODEL_LEN,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        equivalence=common_pb2.EQUIVALENCE_BITWISE if worker.role is TARGET else common_pb2.EQUIVALENCE_NUMERIC,
        parameters=info.parameters,
        weights_fingerprint=info.weights_fingerprint,
        numerics_fingerprint=info.numerics_fingerprint,
        tensor_parallel=1,
        weight_kinds={"float32": info.weight_kinds["float32"]},
        activations="float32",
        hidden_size=96,
        num_layers=3,
    )
    assert bool(info.numerics_fingerprint) == (worker.role is TARGET)
    assert re.fullmatch("[0-9a-f]{32}", response.instance_id)
    assert (await worker.info()).instance_id == response.instance_id
    assert response.load == common_pb2.WorkerLoad(
        slots_total=SLOTS,
        slots_in_use=1,
        kv_bytes_per_token=info.kv_bytes_per_token,
        kv_bytes_total=info.kv_bytes_total,
        kv_layout="slots",
        weight_bytes=info.weight_bytes,
        activation_bytes=info.activation_bytes,
        kv_positions_total=info.kv_positions_total,
        kv_positions_free=info.kv_positions_total - 16,
        kv_positions_multiple=16,
        max_rounds_ahead=MAX_ROUNDS_AHEAD if worker.role is TARGET else 0,
        max_branches=0 if worker.role is TARGET else MAX_ITEM_BRANCHES,
        returns_features=worker.role is TARGET,
        supports_grammars=True,
    )


async def test_the_target_sends_its_tokenizer(target: Worker) -> None:
    response = await target.stub.GetTokenizer(target_worker_pb2.GetTokenizerRequest())
    text = "Zoë said: 你好"
    assert Tokenizer.from_buffer(response.tokenizer_json).encode(text).ids == byte_tokenizer().encode(text).ids
    assert response.chat_template == CHAT_TEMPLATE
    assert response.special_tokens == {"eos_token": "<eos>"}
    assert list(response.eos_token_ids) == [EOS_TOKEN_ID]


# --- Bad requests


BAD_ITEMS = [
    ([(1, 0, [])], "items[0].token_ids"),
    ([(1, 0, [5]), (2, 3, [])], "items[1].token_ids"),
    ([(1, 0, [5, 257])], "items[0].token_ids"),
    ([(1, 0, [2**32 - 1])], "items[0].token_ids"),
    ([(1, 0, [5]), (2, 0, [5]), (1, 1, [6])], "items[2].sequence_id"),
    ([(1, MAX_MODEL_LEN, [5])], "items[0]"),
    ([(1, 2**32 - 1, [5])], "items[0]"),
    ([(1, 0, [5] * (MAX_MODEL_LEN + 1))], "items[0]"),
]


@pytest.mark.parametrize(("items", "field"), BAD_ITEMS, ids=[f"{field}-{i}" for i, (_, field) in enumerate(BAD_ITEMS)])
async def test_an_invalid_item_fails_its_round_by_name(
    worker: Worker, items: list[tuple[int, int, list[int]]], field: str
) -> None:
    error = await failure(worker.round(*(worker.item(*item) for item in items)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(f"{field}: ")
    assert violated_fields(error) == [field]
    assert worker.engine.slots.in_use == 0


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (verify(1, 0, [5], [6], prefill_only=True), "items[0].draft_token_ids"),
        (verify(1, 0, [5], [6, 257]), "items[0].draft_token_ids"),
        (verify(1, 0, [5] * (MAX_MODEL_LEN - 1), [6, 7]), "items[0]"),
    ],
)
async def test_an_invalid_draft_is_refused_by_name(
    target: Worker, item: target_worker_pb2.VerifyItem, field: str
) -> None:
    error = await failure(target.round(item))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(error) == [field]
    assert target.engine.slots.in_use == 0


async def test_a_drain_ends_streams_after_their_round(worker: Worker) -> None:
    waiting, playing = worker.open_stream(), worker.open_stream()
    for number, stream in enumerate((waiting, playing), 1):
        await stream.write(worker.request(worker.item(number, 0, [5])))
        await stream.read()
    await playing.write(worker.request(worker.item(3, 0, [5])))
    worker.host.drain()
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            answers = [await stream.read() for stream in (waiting, playing)]
            assert answers[0] is grpc.aio.EOF
            assert answers[1] is grpc.aio.EOF or await playing.read() is grpc.aio.EOF
    finally:
        worker.host.streams._draining = False


async def test_a_sequence_finds_the_pages_of_an_ended_one(worker: Worker) -> None:
    prompt = random_tokens(40)
    expected = worker.continuation(prompt, 1)
    for number, namespace, found in ((7, b"a", 0), (8, b"b", 0), (9, b"a", 32), (10, None, 0)):
        item = worker.item(number, 0, prompt)
        if namespace is not None:
            item.cache_namespace = namespace
        before = worker.engine.tokens
        (result,) = await worker.round(item)
        assert tokens_of(result) == expected
        assert worker.engine.tokens - before == len(prompt) - found
        if worker.role is TARGET:
            assert result.prefix_length == found
        await worker.release(number)
    worker.engine.slots.check_integrity()


async def test_a_prefix_that_is_not_cached_is_a_cache_miss(worker: Worker) -> None:
    item = worker.item(7, 0, random_tokens(40, seed=3))
    item.cache_namespace, item.expected_prefix_length = b"a", 16
    (result,) = await worker.round(item)
    assert result.status == common_pb2.ITEM_STATUS_CACHE_MISS
    assert worker.engine.slots.in_use == 0
    item.expected_prefix_length = 40
    error = await failure(worker.round(item))
    assert violated_fields(error) == ["items[0].expected_prefix_length"]


@pytest.mark.parametrize(
    ("k", "field", "limit"), [(3, "items[0]", MAX_MODEL_LEN), (2**32 - 1, "items[0].num_draft_tokens", 1024)]
)
async def test_a_draft_beyond_the_last_position_is_refused(draft: Worker, k: int, field: str, limit: int) -> None:
    error = await failure(draft.round(propose(1, 0, [5] * (MAX_MODEL_LEN - 1), k)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(error) == [field]
    assert str(limit) in error.details()


@pytest.mark.parametrize(
    "payload",
    [b"\x0a\x02\xff\xfe", b"\x0a\x03a", b"\xff\xff\xff"],
    ids=["coordinator_id is not UTF-8", "cut off", "no protobuf"],
)
@pytest.mark.parametrize("method", ["round", "rounds", "Release"])
async def test_a_malformed_request_is_a_bad_request(worker: Worker, payload: bytes, method: str) -> None:
    one = "Propose" if worker.role is DRAFT else "Verify"
    if method == "rounds":
        stream = worker.channel.stream_stream(f"/specpool.v1.{worker.role.name}/{one}Stream")()
        await stream.write(payload)
        error = await failure(stream.read())
    else:
        call = worker.channel.unary_unary(f"/specpool.v1.{worker.role.name}/{one if method == 'round' else method}")
        error = await failure(call(payload))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_stream_rounds_are_answered_in_order_until_one_is_refused(worker: Worker) -> None:
    stream = worker.open_stream()
    prompts = ([5], [6, 7])
    for prompt in prompts:
        await stream.write(worker.request(worker.item(prompt[0], 0, prompt)))
    results = [(await stream.read()).results[0] for _ in prompts]
    assert [tokens_of(result) for result in results] == [worker.continuation(prompt, 1) for prompt in prompts]
    await stream.write(worker.request(worker.item(1, 0, [5]), coordinator_id="another"))
    error = await failure(stream.read())
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(error) == ["coordinator_id"]


async def test_an_internal_error_reveals_no_details(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("secret of the backend")

    with monkeypatch.context() as patched:
        patched.setattr(worker.engine, "forward", broken)
        error = await failure(worker.round(worker.item(1, 0, [5])))
    assert error.code() == grpc.StatusCode.INTERNAL
    incident = re.fullmatch(r"internal error (\w+); the server's log has the details", error.details())
    assert incident
    assert incident[1] in caplog.text
    assert "secret of the backend" in caplog.text
    (result,) = await worker.round(worker.item(1, 0, [5]))
    assert tokens_of(result) == worker.continuation([5], 1)


# --- Starting and stopping


@pytest.mark.parametrize("role", [TARGET, DRAFT], ids=["target", "draft"])
async def test_a_loading_worker_is_unavailable_and_serves_later(
    role: Role, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines[role.name]
    forget_all(engine, SLOTS)
    loaded = threading.Event()

    def load(report: object) -> Any:
        assert loaded.wait(PATIENCE_SECONDS)
        return role.backend(engine)

    names = ["", f"specpool.v1.{role.name}"]
    async with (
        worker_process(role, load, monkeypatch) as started,
        grpc.aio.insecure_channel(started.address) as channel,
    ):
        worker = Worker(role, WorkerHost(load), channel, engine)
        health = health_pb2_grpc.HealthStub(channel)
        try:
            calls = [worker.round(worker.item(1, 0, [5])), worker.release(1), worker.info()]
            if role is TARGET:
                calls.append(worker.stub.GetTokenizer(target_worker_pb2.GetTokenizerRequest()))
            for call in calls:
                error = await failure(call)
                assert error.code() == grpc.StatusCode.UNAVAILABLE
                assert error.details() == "the model is still loading"
            for name in names:
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        finally:
            loaded.set()
        for name in names:
            await wait_serving(channel, name)
        (result,) = await worker.round(worker.item(1, 0, [5]))
        assert result.status == OK
    assert started.task.exception() is None


# --- Real processes


@pytest.fixture
def process(tiny_pair: tuple[Path, Path]) -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPECPOOL_")}
    environment |= {"HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "30000", "PYTHONUNBUFFERED": "1"}
    options = ["--model", str(tiny_pair[0]), "--port", "0", "--threads", "1"]
    command = [sys.executable, "-m", "target_worker.server", *options]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
async def test_a_process_logs_its_port_and_drains_on_sigterm(
    process: subprocess.Popen[str], engines: dict[str, Engine]
) -> None:
    assert process.stderr is not None
    log: list[str] = []
    port = None
    while port is None:
        line = await asyncio.to_thread(process.stderr.readline)
        assert line, f"ended: {log}"
        log.append(line)
        port = re.search(r"listening on 127\.0\.0\.1:(\d+)$", line)
    assert ' INFO target-worker specpool.rpc.config.settings: settings: model="' in log[0]
    assert " threads=1" in log[0]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port[1]}") as channel:
        await wait_serving(channel)
        worker = Worker(TARGET, WorkerHost(lambda report: None), channel, engines[TARGET.name])
        prompt = random_tokens(10)
        truth = worker.continuation(prompt, 4)
        (result,) = await worker.round(verify(1, 0, prompt, truth[:3]))
        assert list(result.token_ids) == truth
        process.send_signal(signal.SIGTERM)
        _, rest = await asyncio.to_thread(process.communicate, timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert rest.splitlines()[-1].endswith(": stopped")
    assert "Traceback" not in rest
