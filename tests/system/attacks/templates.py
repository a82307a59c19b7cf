"""Chats for a hostile chat template."""

from attacks.attack import attack
from attacks.floods import flood, generation
from attacks.service import Service

from specpool.v1 import generation_pb2 as pb

TEMPLATE = ("--chat-template", "tests/system/attacks/hostile.jinja")
CALLS = 16


def chat(role: str) -> pb.GenerateRequest:
    """A chat for which the template takes much memory or time."""
    return pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role=role, content="x")]))


@attack("chat templates that take 2 GB", flags=TEMPLATE)
async def large_templates(service: Service) -> None:
    await flood(service, CALLS, generation(chat("memory")))


@attack("chat templates that take hours", flags=TEMPLATE)
async def slow_templates(service: Service) -> None:
    await flood(service, CALLS, generation(chat("time")))
