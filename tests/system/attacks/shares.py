"""One client's long answers and many samples, which must leave others their share of the KV cache, slots and time."""

from attacks.attack import attack
from attacks.floods import flood, generation, prompt
from attacks.service import Service

ANSWER = 2000
"""Tokens of an answer that fills the KV cache."""
# Room for one such answer of the embedded target.
SMALL_CACHE = ("--max-model-len", "2048", "--kv-memory", "90MiB")
RULES = {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "frequency_penalty": 0.2}


@attack("an answer of 2,000 tokens that fills the KV cache", "pair", worker_flags=SMALL_CACHE)
async def filling_answer(service: Service) -> None:
    await flood(service, 1, generation(prompt([5, 6, 7], max_tokens=ANSWER, ignore_eos=True)))


@attack("4 answers of 2,000 tokens that fill the KV cache", "pair", worker_flags=SMALL_CACHE)
async def filling_answers(service: Service) -> None:
    await flood(service, 4, generation(prompt([5, 6, 7], max_tokens=ANSWER, ignore_eos=True)))


@attack("n = 64 greedy", "pair", victims=4)
async def greedy_samples(service: Service) -> None:
    await flood(service, 64, generation(prompt([1, 2, 3], max_tokens=400, ignore_eos=True)))


@attack("n = 64 sampled", "pair", victims=4)
async def sampled(service: Service) -> None:
    await flood(service, 1, generation(prompt([1, 2, 3], n=64, temperature=1.0, max_tokens=400, ignore_eos=True)))


@attack("n = 64 with all sampling rules and 20 log-probabilities", "pair", victims=4)
async def with_rules(service: Service) -> None:
    bias = dict.fromkeys(range(200), 0.5)
    request = prompt(
        [1, 2, 3], n=64, temperature=1.0, max_tokens=400, ignore_eos=True, logprobs=20, logit_bias=bias, **RULES
    )
    await flood(service, 1, generation(request))
