"""The gRPC service of a target worker that carries a draft: settings, messages, and sharded targets."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from own_drafts import Generation, Rounds
from tiny_models import load_engine, random_tokens
from worker_service import OK, SLOTS, TARGET, Worker, failure, held, serving, violated_fields

from draft_worker.proposer import Proposer
from specpool.engine.run.engine import Engine
from specpool.protocol.responses import read_draft_rows, read_worker_info
from specpool.protocol.rounds import OwnDraftItem
from specpool.v1 import target_worker_pb2 as pb
from target_worker.server import TargetWorkerSettings, load_verifier
from target_worker.verifier import Verifier

PROMPT = random_tokens(12)
OWN = pb.OwnDraftItem(max_verified=3, num_draft_tokens=3, max_length=100)


@pytest.fixture(scope="module")
def engines(tiny_pair: tuple[Path, Path]) -> tuple[Engine, Engine]:
    """A target, and a draft with the same model."""
    return load_engine(tiny_pair[0]), load_engine(tiny_pair[0])


@asynccontextmanager
async def serving_both(engines: tuple[Engine, Engine]) -> AsyncIterator[Worker]:
    target, draft = engines

    def backend(engine: Engine) -> Any:
        return Verifier(engine, Proposer(draft))

    draft.slots.release_all("c")
    async with serving(replace(TARGET, backend=backend), target) as worker:
        yield worker


async def test_rounds_sent_ahead_verify_drafts_made_meanwhile(engines: tuple[Engine, Engine]) -> None:
    async with serving_both(engines) as worker:
        expected = worker.continuation(PROMPT, 9)
        stream = worker.open_stream()
        first = pb.VerifyItem(sequence_id=1, token_ids=PROMPT, own_draft=OWN)
        with held(worker) as hold:
            await stream.write(worker.request(first))
            for number in (1, 2):
                await stream.write(worker.request(pb.VerifyItem(sequence_id=1, after_round_id=number, own_draft=OWN)))
            hold.open.set()
            responses = [await stream.read() for _ in range(3)]
        await stream.done_writing()
    results = [response.results[0] for response in responses]
    assert [token for result in results for token in result.token_ids] == expected
    assert [result.own_draft.num_verified for result in results] == [0, 3, 3]
    assert [list(result.own_draft.draft_token_ids) for result in results] == [[], expected[1:4], expected[5:8]]
    assert [result.own_draft.status for result in results] == [OK] * 3
    assert [result.own_draft.cached_length for result in results] == [13, 17, 21]
    assert [read_draft_rows(response) for response in responses] == [[13, 1, 1], [2, 1, 1], [2, 1, 1]]
    assert all(response.draft_ns > 0 for response in responses)


async def test_a_repeated_round_gets_the_same_answer(engines: tuple[Engine, Engine]) -> None:
    async with serving_both(engines) as worker:
        await worker.round(pb.VerifyItem(sequence_id=1, token_ids=PROMPT, own_draft=OWN))
        item = pb.VerifyItem(sequence_id=1, after_round_id=1, own_draft=OWN)
        first, again = [await worker.round(item, round_id=2) for _ in range(2)]
        assert first == again
        (result,) = await worker.round(pb.VerifyItem(sequence_id=1, after_round_id=2, own_draft=OWN), round_id=3)
        assert result.own_draft.num_verified == 3


async def test_the_worker_describes_its_draft(engines: tuple[Engine, Engine]) -> None:
    async with serving_both(engines) as worker:
        before = read_worker_info(await worker.info())
        assert before.draft is not None
        assert (before.slots_in_use, before.draft.slots_in_use) == (0, 0)
        assert (before.draft.model, before.draft.instance_id) == (before.model, before.instance_id)
        host, spent = worker.host, worker.host.forward_ns
        response = await worker.respond(pb.VerifyItem(sequence_id=1, token_ids=PROMPT, own_draft=OWN))
        assert response.forward_ns == host.forward_ns - spent
        after = read_worker_info(await worker.info())
        assert after.draft is not None
        assert (after.slots_in_use, after.draft.slots_in_use) == (1, 1)
        assert await worker.release(1) == 1
        assert read_worker_info(await worker.info()).draft == before.draft


async def test_items_without_own_draft_do_not_run_the_draft(engines: tuple[Engine, Engine]) -> None:
    async with serving_both(engines) as worker:
        passes = worker.host.backend.passes
        response = await worker.respond(pb.VerifyItem(sequence_id=1, token_ids=PROMPT))
        assert not response.results[0].HasField("own_draft")
        assert not response.draft_rows
        assert worker.host.backend.passes == passes + 1
        assert engines[1].slots.in_use == 0


@pytest.mark.parametrize(("own", "field"), [
    ({"max_verified": 2**32 - 1}, "max_verified"),
    ({"num_draft_tokens": 2**32 - 1}, "num_draft_tokens"),
    ({"min_chance": math.nan}, "min_chance"),
    ({"next_chance": -1.0}, "next_chance"),
])  # fmt: skip
async def test_invalid_items_are_refused_by_field(engines: tuple[Engine, Engine], own: Any, field: str) -> None:
    async with serving_both(engines) as worker:
        item = pb.VerifyItem(sequence_id=1, token_ids=PROMPT, own_draft=pb.OwnDraftItem(**own))
        assert violated_fields(await failure(worker.round(item))) == [f"items[0].own_draft.{field}"]


async def test_a_worker_without_a_draft_refuses_items_for_one(engines: tuple[Engine, Engine]) -> None:
    async with serving(TARGET, engines[0]) as worker:
        error = await failure(worker.round(pb.VerifyItem(sequence_id=1, token_ids=PROMPT, own_draft=OWN)))
        assert violated_fields(error) == ["items[0].own_draft"]


def test_a_worker_loads_its_draft(tiny_pair: tuple[Path, Path]) -> None:
    target, draft = map(str, tiny_pair)
    settings = TargetWorkerSettings(model=target, draft=draft, threads=1, max_sequences=SLOTS, startup_cache=False)
    verifier = load_verifier(settings, lambda _: None)
    generation = Generation(1, tuple(PROMPT))
    Rounds(verifier).generate([generation], 3)
    assert generation.num_accepted > 0
    info = verifier.info()
    assert info.bitwise
    assert info.draft is not None
    assert (info.draft.slots_total, info.draft.tensor_parallel) == (SLOTS, 1)


@pytest.mark.slow
def test_rank_0_of_a_sharded_target_drafts(tiny_pair: tuple[Path, Path]) -> None:
    target, draft = map(str, tiny_pair)
    own, answers = OwnDraftItem(3, 3), []
    for changes in ({"draft": draft}, {"draft": draft, "tensor_parallel": 2}):
        settings = TargetWorkerSettings(model=target, device="cpu", threads=1, startup_cache=False, **changes)
        verifier = load_verifier(settings, lambda _: None)
        try:
            generation, rounds = Generation(1, tuple(PROMPT)), Rounds(verifier)
            while not generation.is_finished:
                rounds.send([(generation, generation.item(own))])
        finally:
            verifier.engine.close()
        assert generation.num_accepted > 0
        answers.append((generation.answer, generation.num_accepted))
    assert answers[0] == answers[1]
