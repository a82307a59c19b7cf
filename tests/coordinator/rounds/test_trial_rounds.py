"""Trials of a draft worker: rounds count as trials, although the next round is planned before their time is known."""

from typing import Any
from unittest import mock

from serving import RecordingDraft, RecordingTarget, make_request, serving

from specpool.drafting.ledger import FREE_TRIALS, Ledger
from specpool.drafting.plans import DraftMethod


async def test_drafts_of_a_new_model_count_as_trials() -> None:
    target = RecordingTarget()
    drafts: list[bool] = []
    observe = Ledger.observe

    def watch(ledger: Ledger, *arguments: Any, **others: Any) -> None:
        *_, method, is_trial = arguments
        if method is DraftMethod.MODEL:
            drafts.append(is_trial)
        observe(ledger, *arguments, **others)

    with mock.patch.object(Ledger, "observe", watch):
        async with serving(target, RecordingDraft(target), num_speculative_tokens=None) as served:
            await served.expect(make_request(max_tokens=100))
            await served.until_idle()
    assert sum(drafts) >= FREE_TRIALS
