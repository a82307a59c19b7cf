"""Reasoning tags and tool call formats of known chat templates, and prompts that end within a reasoning block."""

import json
from dataclasses import replace

import pytest
from thinking_template import THINKING_TEMPLATE
from tiny_tokenizers import BYTES

from coordinator.prompts.chat_formats import KNOWN_TAGS, check_reasoning_tags, tool_call_format
from coordinator.prompts.description import TokenizerDescription, read_description
from coordinator.prompts.templates import Chat
from coordinator.prompts.tokenizer import TargetTokenizer, TokenizerError
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.testing import EOS_TOKEN_ID, byte_tokenizer

THINK = ("<think>", "</think>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
ALWAYS = "{% for m in messages %}<|u|>{{ m.content }}<|e|>{% endfor %}<|a|><think>\n"


def tokenizer_of(template: str, *tokens: str, special: bool = False, vocab_size: int | None = None) -> TargetTokenizer:
    """Return a tokenizer of bytes and these tokens."""
    library = byte_tokenizer()
    (library.add_special_tokens if special else library.add_tokens)(list(tokens))
    return TargetTokenizer(TokenizerFiles(library.to_str().encode(), template, {}, (EOS_TOKEN_ID,)), vocab_size)


def described(tokenizer: TargetTokenizer, setting: str = "auto") -> TokenizerDescription:
    return read_description(json.dumps(tokenizer.describe(setting)).encode(), tokenizer.files)


@pytest.mark.parametrize(
    ("template", "tokens", "found"),
    [
        (THINKING_TEMPLATE, THINK, THINK),
        ("{{ '[THINK]' }}", ("[THINK]", "[/THINK]"), ("[THINK]", "[/THINK]")),
        ("{{ '<|channel|>analysis<|message|>' }}", HARMONY, ("<|channel|>analysis<|message|>", "<|end|>")),
        (THINKING_TEMPLATE, (), None),
        (THINKING_TEMPLATE, ("<think>",), None),
        ("{{ messages }}", THINK, None),
        ("<|user|>{{ messages }}<|end|>", ("<|user|>", "<|end|>"), None),
    ],
)
def test_tags_are_found_if_the_template_mentions_them_and_they_are_tokens(
    template: str, tokens: tuple[str, ...], found: tuple[str, str] | None
) -> None:
    tags = described(tokenizer_of(template, *tokens, special=True)).reasoning
    assert (None if tags is None else (tags.begin, tags.end)) == found


def test_settings_replace_the_tags_that_are_found() -> None:
    tokenizer = tokenizer_of(THINKING_TEMPLATE, *THINK)
    assert described(tokenizer, "none").reasoning is None
    tags = described(tokenizer, "<t>,</t>").reasoning
    assert tags is not None
    assert [BYTES.decode(ids) for ids in (tags.begin_ids, tags.end_ids, tags.answer_ids)] == ["<t>", "</t>", ""]


@pytest.mark.parametrize("setting", ["", "<think>", ",", "a,", ",a", "a,a", "a,b,c", "a," + "b" * 257])
def test_settings_must_name_two_tags(setting: str) -> None:
    with pytest.raises(ValueError, match="is not auto, none or BEGIN,END"):
        check_reasoning_tags(setting)


def test_tags_outside_the_model_vocabulary_are_ignored() -> None:
    tokenizer = tokenizer_of(THINKING_TEMPLATE, *THINK, vocab_size=EOS_TOKEN_ID + 1)
    assert described(tokenizer).reasoning is None
    with pytest.raises(TokenizerError, match="no tokens for the reasoning tags <think> and </think>"):
        tokenizer.describe("<think>,</think>")


def test_long_tags_are_refused() -> None:
    with pytest.raises(TokenizerError, match="a reasoning tag has more than 64 tokens"):
        tokenizer_of("").describe(f"a,{'b' * 65}")


def test_whitespace_tokens_may_precede_the_tag() -> None:
    tags = described(tokenizer_of(THINKING_TEMPLATE, *THINK)).reasoning
    assert tags is not None
    assert [BYTES.decode([token_id]) for token_id in tags.leading_ids] == ["\n", " "]


def test_the_answer_of_harmony_begins_in_its_final_channel() -> None:
    tags = described(tokenizer_of("{{ '<|channel|>analysis<|message|>' }}", *HARMONY)).reasoning
    assert tags is not None
    library = byte_tokenizer()
    library.add_tokens(list(HARMONY))
    assert library.decode([*tags.end_ids, *tags.answer_ids]) == KNOWN_TAGS[-1].end + KNOWN_TAGS[-1].answer


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<|start|>functions.x<|channel|>commentary", "harmony"),
        ("<tool_call>\n<function=f>\n<parameter=a>", "qwen3_coder"),
        ("<tool_call>f\n<arg_key>a</arg_key>", "glm"),
        ("[TOOL_CALLS]f[ARGS]{}", "mistral_args"),
        ('[TOOL_CALLS][{"name"', "mistral"),
        ('<tool_call>\n{"name"', "hermes"),
        ('<|start_header_id|>{"name": name, "parameters": dictionary', "llama3"),
        ('{"name": name, "parameters": dictionary', ""),
        ('<function=f>{"a": 1}</function>', ""),
        ("<seed:tool_call><function=f><parameter=a>", ""),
        ("", ""),
    ],
)
def test_tool_call_formats_are_read_from_the_template(template: str, expected: str) -> None:
    assert tool_call_format(template) == expected


def test_the_format_is_that_of_the_template_for_tools() -> None:
    reading, silent = "{{ tools }}<tool_call>", "{{ messages }}<tool_call>"
    files = tokenizer_of(reading).files
    assert described(TargetTokenizer(files)).tool_call_format == "hermes"
    assert described(TargetTokenizer(replace(files, chat_template=silent))).tool_call_format == ""
    assert described(TargetTokenizer(replace(files, chat_template=""))).tool_call_format == ""
    own = replace(files, chat_template=silent, tool_chat_template="{{ tools }}[TOOL_CALLS]")
    assert described(TargetTokenizer(own)).tool_call_format == "mistral"


@pytest.mark.parametrize("tokens", [THINK, ()], ids=["tokens", "bytes"])
def test_texts_end_within_the_block_that_they_begin_last(tokens: tuple[str, ...]) -> None:
    tokenizer = tokenizer_of("", *tokens)
    description = described(tokenizer, "<think>,</think>")
    for text, expected in (
        ("a", False),
        ("<think>", True),
        ("<think>a", True),
        ("<think></think>", False),
        ("<think>a</think>b<think>c", True),
        ("</think>", False),
        ("<think", False),
        ("<<think>a<", True),
    ):
        assert description.starts_in_reasoning(tokenizer.encode_text(text), False) is expected, text


@pytest.mark.parametrize("content", ["hi", "<think>", "</think>", "<think>a</think>", "<think>\n"])
@pytest.mark.parametrize("special", [False, True])
def test_in_a_chat_only_the_template_begins_the_block(content: str, special: bool) -> None:
    chat = Chat([{"role": "user", "content": content}])
    for template, expected in (
        (ALWAYS, True),
        (ALWAYS.replace("\n", ""), True),
        (ALWAYS.replace("\n", "</think>"), False),
        (ALWAYS.replace("<think>\n", "{# <think> #}"), False),
        (THINKING_TEMPLATE, False),
    ):
        tokenizer = tokenizer_of(template, *THINK, "<|u|>", "<|e|>", "<|a|>", special=special)
        prompt_ids = tokenizer.encode_chat(chat)
        assert described(tokenizer).starts_in_reasoning(prompt_ids, True) is expected, template
