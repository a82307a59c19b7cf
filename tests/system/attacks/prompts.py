"""Long prompts of one client, which another client's short prompts must not wait for."""

from itertools import count

from attacks.attack import attack
from attacks.floods import flood, generations, prompt
from attacks.service import Service

from specpool.v1 import generation_pb2 as pb

VOCAB_SIZE = 40_000
TIMEOUT_SECONDS = 600


async def send_prompts(service: Service, prompts: int, length: int) -> None:
    """Keep this many prompts in progress. All differ, so that none is cached."""
    numbers = count()

    def another() -> pb.GenerateRequest:
        start = next(numbers)
        return prompt([(start * 7919 + position * 31) % VOCAB_SIZE for position in range(length)])

    await flood(service, prompts, generations(another, TIMEOUT_SECONDS))


@attack("8 prompts of 4,000 tokens", "pair")
async def prompts_of_4000_tokens(service: Service) -> None:
    await send_prompts(service, 8, 4000)


@attack("15 prompts of 8,000 tokens", "pair")
async def prompts_of_8000_tokens(service: Service) -> None:
    await send_prompts(service, 15, 8000)
