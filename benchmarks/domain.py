"""Prompts of a narrow domain: requests to answer support messages about one product."""

import random
from itertools import product

PROMPT = "Write an email from the support team of the Brewlet 2, a coffee machine, to a customer who wrote: {message}"
PROBLEMS = (
    "my Brewlet 2 does not turn on", "my Brewlet 2 leaks water from the bottom", "the coffee is not hot enough",
    "the coffee tastes bitter", "the milk frother makes no foam", "the red light keeps blinking", "the grinder is loud",
    "the water tank has a crack", "the pump stops after a few seconds", "the display shows error E4",
    "I lost the manual", "I do not know how to descale it", "the app cannot find the machine", "the timer is wrong",
    "the drip tray overflows", "the lid of the bean hopper broke",
)  # fmt: skip
HISTORIES = (
    "I bought it last week.", "I bought it two years ago.", "It was a gift.", "I ordered it in your online shop.",
    "It worked well until yesterday.", "I have already cleaned it twice.",
    "I use it every morning.", "We have it in our office.",
)  # fmt: skip
WISHES = (
    "What can I do?", "Can I get a replacement?", "I would like my money back.", "Where can I have it repaired?",
    "Please call me.",
)  # fmt: skip


def domain_prompts(seed: int = 0) -> list[str]:
    """Return all prompts, without duplicates, in random order."""
    messages = [f"{problem}. {history} {wish}" for problem, history, wish in product(PROBLEMS, HISTORIES, WISHES)]
    random.Random(seed).shuffle(messages)
    return [PROMPT.format(message=message[0].upper() + message[1:]) for message in messages]
