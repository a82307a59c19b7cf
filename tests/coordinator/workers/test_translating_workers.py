"""Draft workers with another tokenizer: the handover of the target's, refusals, and invalid answers."""

from typing import Any

import pytest
from serving import RecordingDraft, RecordingTarget, make_request, serving

from specpool.testing import byte_tokenizer
from specpool.v1 import draft_worker_pb2
from specpool.v1 import generation_pb2 as pb


class TranslatingDraft(RecordingDraft):
    """Has another tokenizer. `changes` replace fields of its answer to the handover."""

    changes: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed

    def __init__(self, target: RecordingTarget, **knobs: Any) -> None:
        super().__init__(target, **{"fingerprint": "other", "translation": "retokenized", **knobs})

    async def UseTokenizer(self, request: Any, context: Any) -> draft_worker_pb2.UseTokenizerResponse:
        response = await super().UseTokenizer(request, context)
        for name, value in self.changes.items():
            setattr(response, name, value)
        return response


async def test_a_draft_that_translates_gets_the_tokenizer_after_each_start() -> None:
    target = RecordingTarget()
    draft = TranslatingDraft(target)
    async with serving(target, draft, overlap="on") as served:
        info = await served.info()
        model = info.draft_workers[0].model
        assert (model.tokenizer_translation, model.vocabulary_coverage) == ("retokenized", 0.5)
        assert "translates tokens (retokenized): the draft has 50% of the target's vocabulary" in model.notes
        for starts in (1, 2):
            response = await served.expect(make_request(max_tokens=64, k=4, method=pb.DRAFT_METHOD_MODEL))
            assert response.speculative_decoding.num_accepted_draft_tokens > 0
            assert draft.tokenizers == starts * [byte_tokenizer().to_str().encode()]
            await draft.stop()
            await draft.start(served.draft_address or "")
            await served.until(lambda info, starts=starts: len(draft.tokenizers) > starts)
            await served.until_ready()
        assert {request.translation_id for request in draft.requests} == {"fake"}
        assert not any(item.num_branches for request in draft.requests for item in request.items)


async def test_a_draft_that_cannot_translate_is_refused_once() -> None:
    target = RecordingTarget()
    draft = TranslatingDraft(target, translation="")
    async with serving(target, draft, wait_for_draft=False) as served:
        info = await served.until(lambda info: info.draft.state == "refused")
        assert info.draft.reason == (
            "the draft fake uses a different tokenizer than the target fake, "
            "which its worker cannot translate: the fake has none"
        )
        await served.expect(make_request(k=4))
    assert len(draft.tokenizers) == 1
    assert draft.requests == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"instance_id": "another"}, "the translation comes from another process than the description"),
        ({"translation_id": ""}, "neither a translation nor a refusal, or both"),
        ({"refusal": "no"}, "neither a translation nor a refusal, or both"),
        ({"translation_id": "a" * 200}, "the id of the translation is too long"),
        ({"method": "guessed"}, "method is 'guessed'"),
        ({"vocabulary_coverage": float("nan")}, "vocabulary_coverage is nan"),
    ],
)
async def test_invalid_answers_leave_the_draft_unused(changes: dict[str, Any], reason: str) -> None:
    target = RecordingTarget()
    draft = TranslatingDraft(target)
    draft.changes = changes
    async with serving(target, draft, wait_for_draft=False) as served:
        info = await served.until(lambda info: reason in info.draft.reason)
        assert info.draft.state in ("resting", "connecting")
        await served.expect(make_request(k=4))
    assert draft.requests == []


async def test_draft_tokens_outside_the_vocabulary_are_dropped() -> None:
    class Liar(TranslatingDraft):
        async def Propose(self, request: Any, context: Any) -> Any:
            response = await super().Propose(request, context)
            for result in response.results:
                result.draft_token_ids[:] = [2**31 - 1] * len(result.draft_token_ids)
            return response

    target = RecordingTarget()
    async with serving(target, Liar(target)) as served:
        response = await served.expect(make_request(max_tokens=32, k=4, method=pb.DRAFT_METHOD_MODEL))
        assert response.speculative_decoding.num_draft_tokens == 0


async def test_a_draft_that_lies_about_its_tokenizer_soon_drafts_little() -> None:
    """It claims the target's, so nothing is translated, and all of its tokens are wrong."""
    target = RecordingTarget(pass_seconds=lambda rows: 0.004)
    draft = RecordingDraft(target, acceptance=0.0, pass_seconds=lambda rows: 0.001)
    async with serving(target, draft, num_speculative_tokens=None) as served:
        for _ in range(12):
            await served.expect(make_request(max_tokens=64, method=pb.DRAFT_METHOD_MODEL))
        (state,) = (await served.info()).drafts
    assert (draft.tokenizers, state.accepted_draft_tokens) == ([], 0)
    assert 0 < state.draft_tokens < state.completion_tokens / 10
