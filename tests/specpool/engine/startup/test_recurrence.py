"""The self-test detects states that depend on rejections, repeated rounds, prefix hits or the cuts of a prompt."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from delta_nets import save_delta_net
from tiny_models import load_engine, random_tokens

from specpool.engine.cache.checkpoints import NONE, Checkpoints, Segment
from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine
from specpool.engine.startup import step_times
from specpool.engine.startup.recurrence import recurrence_agrees
from specpool.engine.startup.step_times import measure_step_times

Change = Callable[[Segment], Segment]
plan = Checkpoints.segment


LONG: list[dict[str, Any]] = [{}, {"native": False}, {"kv_layout": "padded"}]
long_engines = pytest.mark.parametrize("engine", LONG, ids=str, indirect=True)


@pytest.fixture(scope="module", params=[*LONG, {"max_model_len": 16}], ids=str)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_engine(save_delta_net(tmp_path_factory.mktemp("delta_net")), max_sequences=2, **request.param)


def agrees(engine: Engine) -> bool:
    engine.forget_all()
    return recurrence_agrees(engine, random_tokens(engine.max_model_len))


def test_an_engine_that_works_passes(engine: Engine) -> None:
    assert engine.bitwise
    assert agrees(engine)


def _without_replay(segment: Segment) -> Segment:
    return segment._replace(read_position=segment.start)


def _without_prefix(segment: Segment) -> Segment:
    return segment._replace(read=NONE) if segment.start % 32 == 0 else segment


def _late_state(segment: Segment) -> Segment:
    return segment._replace(write_position=segment.start + segment.num_rows)


@long_engines
@pytest.mark.parametrize("change", [_without_replay, _without_prefix, _late_state])
def test_other_segments_fail(engine: Engine, monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    if engine.layout.is_padded and change is _without_prefix:
        pytest.skip("this layout caches no prefixes")
    monkeypatch.setattr(Checkpoints, "segment", lambda *arguments: change(plan(*arguments)))
    assert not agrees(engine)


@long_engines
def test_another_order_of_sums_in_long_pieces_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the bits of a state differ, as in a scan by chunks."""
    run = engine.runner.run

    def disturb(spans: Sequence[Span], *arguments: object) -> object:
        result = run(spans, *arguments)
        if len(spans[0].token_ids) > 90 and engine.layout.arena.recurrent is not None:
            states = engine.layout.arena.recurrent.states
            states.copy_(torch.nextafter(states, torch.full_like(states, torch.inf)))
        return result

    monkeypatch.setattr(engine.runner, "run", disturb)
    assert not agrees(engine)


def test_measured_passes_read_and_write_states(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = list[Segment]()

    def record(checkpoints: Checkpoints, span: Span, first_row: int) -> Segment:
        segments.append(plan(checkpoints, span, first_row))
        return segments[-1]

    monkeypatch.setattr(Checkpoints, "segment", record)
    engine.forget_all()
    measure_step_times(engine, [2, 8])
    measured = [segment for segment in segments if segment.num_rows in (1, 4)]
    assert all(NONE not in (segment.read, segment.write) for segment in measured[-2 * step_times.REPEATS :])
