"""The order of dialogues, and the noise of their questions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specpool.distill.agenda import Agenda, exponential_noise


@given(missing=st.sets(st.integers(0, 40)), lag=st.integers(1, 12), slots=st.integers(1, 10), data=st.data())
def test_a_dialogue_begins_once_those_far_before_it_have_ended(
    missing: set[int], lag: int, slots: int, data: st.DataObject
) -> None:
    agenda, running, ended = Agenda(sorted(missing), lag), list[int](), set[int]()
    while len(ended) < len(missing):
        while len(running) < slots and (number := agenda.take()) is not None:
            assert all(other in ended for other in missing if other < number - lag)
            running.append(number)
        done = data.draw(st.sampled_from(running))
        running.remove(done)
        agenda.end(done)
        ended.add(done)
    assert agenda.take() is None


def test_noise_is_exponential_and_depends_on_seed_and_position_only() -> None:
    seeds, positions = torch.arange(200), torch.arange(200) % 7
    noise = exponential_noise(seeds, positions, 64)
    assert torch.equal(noise[50:60], exponential_noise(seeds[50:60], positions[50:60], 64))
    assert noise.mean().item() == pytest.approx(1, abs=0.05)
    assert noise.median().item() == pytest.approx(0.693, abs=0.05)
    assert noise.unique().numel() > 0.99 * noise.numel()
