"""Known reasoning tags and tool call formats, detected from a model's chat template and vocabulary."""

import re
from collections.abc import Callable
from dataclasses import dataclass

AUTO, NONE = "auto", "none"
MAX_TAG_CHARACTERS = 256
# Whitespace that models may generate before the begin tag.
LEADING = ("\n", "\n\n", " ")


@dataclass(frozen=True)
class TagTexts:
    """The reasoning tags of a model, as strings."""

    begin: str
    end: str
    answer: str = ""
    """String that the model generates between the end tag and the answer."""

    @property
    def special(self) -> list[str]:
        """The parts of the tags that must be single tokens."""
        return re.findall(r"<\|\w+\|>", self.begin + self.end + self.answer) or [self.begin, self.end]


KNOWN_TAGS = (
    TagTexts("<think>", "</think>"),
    TagTexts("[THINK]", "[/THINK]"),
    TagTexts("<seed:think>", "</seed:think>"),
    TagTexts("<|START_THINKING|>", "<|END_THINKING|>"),
    TagTexts("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant<|channel|>final<|message|>"),
)
# Formats, and the strings in a template that identify them. The first match wins.
TOOL_CALL_FORMATS = (
    ("harmony", ("<|channel|>",)),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("glm", ("<arg_key>",)),
    ("mistral_args", ("[ARGS]",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
    ("llama3", ('"parameters": ', "<|start_header_id|>")),
)


def check_reasoning_tags(setting: str) -> str:
    """Validate the setting: `auto`, `none` or `BEGIN,END`. Raises ValueError."""
    tags = setting.split(",")
    are_tags = len(tags) == len(set(tags)) == 2 and all(1 <= len(tag) <= MAX_TAG_CHARACTERS for tag in tags)
    if setting not in (AUTO, NONE) and not are_tags:
        raise ValueError(f'"{setting}" is not {AUTO}, {NONE} or BEGIN,END')
    return setting


def find_tags(setting: str, template: str, is_token: Callable[[str], bool]) -> TagTexts | None:
    """Return the reasoning tags for a valid setting, or None.

    `auto` selects the first known tags that the chat template contains and the vocabulary has.
    """
    if setting not in (AUTO, NONE):
        return TagTexts(*setting.split(","))
    known = KNOWN_TAGS if setting == AUTO else ()
    mentioned = (tags for tags in known if tags.begin in template or tags.end in template)
    return next((tags for tags in mentioned if all(map(is_token, tags.special))), None)


def tool_call_format(template: str) -> str:
    """Return the tool call format that a chat template asks for. Empty if unknown."""
    found = (name for name, texts in TOOL_CALL_FORMATS if all(text in template for text in texts))
    return next(found, "")
