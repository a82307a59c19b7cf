"""Trials of a draft worker: rounds count as trials, although the next round is planned before their time is known."""

from unittest import mock

from serving import RecordingDraft, RecordingTarget, make_request, serving

from specpool.drafting.draft_lengths import NEW_TRIALS, DraftLengths
from specpool.drafting.plans import DraftMethod


async def test_drafts_of_a_new_model_count_as_trials() -> None:
    target = RecordingTarget()
    drafts: list[bool] = []
    observe = DraftLengths.observe

    def watch(
        lengths: DraftLengths, sequences: int, tokens: int, seconds: float, method: DraftMethod | None, is_trial: bool
    ) -> None:
        if method is DraftMethod.MODEL:
            drafts.append(is_trial)
        observe(lengths, sequences, tokens, seconds, method, is_trial)

    with mock.patch.object(DraftLengths, "observe", watch):
        async with serving(target, RecordingDraft(target), num_speculative_tokens=None) as served:
            await served.expect(make_request(max_tokens=100))
            await served.until_idle()
    assert sum(drafts) >= NEW_TRIALS
