"""A client whose requests need the most expensive sampling."""

from itertools import count

from attacks.attack import attack
from attacks.floods import flood, generations
from attacks.service import Service

from specpool.v1 import generation_pb2 as pb

SAMPLES, MAX_TOKENS, BIASES, TOP = 64, 64, 1024, 20


def expensive(seed: int) -> pb.GenerateRequest:
    """A request for many samples with all sampling rules and log-probabilities."""
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=[1, *range(100, 400)]),
        sampling_params=pb.SamplingParams(
            temperature=2.0,
            top_k=20_000,
            top_p=0.99,
            min_p=1e-6,
            repetition_penalty=1.1,
            frequency_penalty=0.2,
            presence_penalty=0.1,
            logit_bias={7 * token: 1.0 for token in range(BIASES)},
            min_tokens=MAX_TOKENS,
            max_tokens=MAX_TOKENS,
            logprobs=TOP,
            n=SAMPLES,
            seed=seed,
        ),
    )


@attack("64 samples with all rules and 20 log-probabilities", "pair")
async def expensive_samples(service: Service) -> None:
    """One request after the other; each fills every slot."""
    seeds = count(0, SAMPLES)
    await flood(service, 1, generations(lambda: expensive(next(seeds)), timeout=None))
