"""Special tokens in texts: omitted by default, otherwise kept, but never the token that ends the answer."""

from serving import make_request, serving, stream
from tiny_tokenizers import BYTES

from specpool.testing import EOS_TOKEN_ID, FakeTarget


async def test_texts_keep_special_tokens_on_request() -> None:
    async with serving(FakeTarget(eos_rate=0.3)) as served:
        for seed in range(8):
            request = make_request([seed], 40, ignore_eos=True, skip_special_tokens=False)
            _, kept = await stream(served, request)
            assert kept.text == BYTES.decode(kept.token_ids, skip_special_tokens=False)
            assert kept.text.count("<eos>") == list(kept.token_ids).count(EOS_TOKEN_ID) > 0
            for omits in (True, None):
                response = await served.stub.Generate(
                    make_request([seed], 40, ignore_eos=True, skip_special_tokens=omits)
                )
                assert response.token_ids == kept.token_ids
                assert response.text == BYTES.decode(kept.token_ids)


async def test_the_token_that_ends_an_answer_is_not_in_its_text() -> None:
    async with serving(FakeTarget(eos_rate=0.3)) as served:
        request = make_request([1], 200, skip_special_tokens=False)
        response = await served.stub.Generate(request)
        assert response.matched_token_id == response.token_ids[-1] == EOS_TOKEN_ID
        assert response.text == BYTES.decode(response.token_ids)
        request.sampling_params.ignore_eos = True
        request.sampling_params.stop_token_ids.append(EOS_TOKEN_ID)
        assert (await served.stub.Generate(request)).text == response.text


async def test_a_kept_special_token_may_match_a_stop_string() -> None:
    async with serving(FakeTarget(eos_rate=0.3)) as served:
        for skips in (False, True):
            request = make_request([1], 40, ignore_eos=True, skip_special_tokens=skips, stop=["<eos>"])
            _, response = await stream(served, request)
            assert response.finish_reason == ("length" if skips else "stop")
            assert "<eos>" not in response.text
