"""Chat templates are code from elsewhere: whatever they do, the chat is refused, soon and with a reason."""

import math
import sys
import time
from unittest import mock

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from coordinator.prompts import templates
from coordinator.prompts.templates import ChatTemplate, ChatTemplateError

CHAT = [("system", "be brief"), ("user", "1 < 2 & 'ü'")]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}WORK{% endfor %}{% endfor %}"


def render(source: str, most_characters: float = math.inf, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render(CHAT, most_characters, lambda: None)


ORDINARY = [
    "{% for message in messages %}{{ message['role'] }}: {{ message.content | trim }}\n{% endfor %}",
    "{{ bos_token }}{% if add_generation_prompt %}>{% endif %}{{ messages | length }}{{ tools is none }}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m | tojson(indent=2) }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 2 ** 3 * 4 %}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ '-' * 3 }}{% endfor %}",
    "{% macro show(m) %}<{{ m.role }}>{% endmacro %}{{ show(messages[0]) }}{{ [1, 2] * 2 }}{{ 2.5 * 2 }}{{ 2 ** 0.5 }}",
]


@pytest.mark.parametrize("source", ORDINARY)
def test_a_template_writes_what_transformers_makes_it_write(source: str) -> None:
    conversation = [{"role": role, "content": content} for role, content in CHAT]
    theirs, _ = render_jinja_template(
        conversations=[conversation], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert render(source, bos_token="<s>") == theirs[0]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "these messages: roles must alternate"),
        ("{{ missing.roles }}", "UndefinedError: 'missing' is undefined"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content | int / 0 }}", "ZeroDivisionError"),
        ("{{ {}['a']['b'] }}", "UndefinedError"),
        ("{{ 2.0 ** 9999 }}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ range(10 ** 9) }}", "Range too big"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% include 'other' %}", "no loader"),
        ("{{ 9 ** 1000000000 }}", "a power is too large"),
        ("{{ 'a' * 10 ** 12 }}", "a product is too large"),
        ("{{ [0] * 10 ** 12 }}", "a product is too large"),
        ("{{ 10 ** 12 * ('a',) }}", "a product is too large"),
        ("{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}", "too large"),
    ],
)
def test_whatever_a_template_raises_refuses_the_chat(source: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match="refuses these messages") as caught:
        render(source)
    assert reason in str(caught.value)
    assert caught.value.__suppress_context__


def test_memory_that_runs_out_refuses_the_chat() -> None:
    with (
        mock.patch.object(templates, "_product", side_effect=MemoryError),
        pytest.raises(ChatTemplateError, match=r"MemoryError$"),
    ):
        render("{{ 'a' * 3 }}")


@pytest.mark.parametrize(
    "source",
    [
        LOOP.replace("WORK", ""),
        LOOP.replace("WORK", "{% set x = i * j %}"),
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
        "{% for i in range(99999) %}{% set x = range(99999) | map('string') | join %}{% endfor %}",
        "{% set x %}" + LOOP.replace("WORK", "x" * 9) + "{% endset %}",
    ],
)
def test_a_template_that_does_not_end_is_ended(source: str) -> None:
    with mock.patch.object(templates, "MOST_SECONDS", 0.05):
        before, began = sys.gettrace(), time.thread_time()
        with pytest.raises(ChatTemplateError, match=r"takes more than 0\.05 s"):
            render(source)
        assert time.thread_time() - began < 5
        assert sys.gettrace() is before


def test_a_template_that_writes_without_end_is_ended() -> None:
    with pytest.raises(ChatTemplateError, match="more than 1000 characters"):
        render(LOOP.replace("WORK", "xx"), most_characters=1000)
    assert render("x" * 1000, most_characters=1000) == "x" * 1000


def test_a_template_ends_when_nobody_waits() -> None:
    def leave() -> None:
        raise RuntimeError("the client has left")

    with pytest.raises(ChatTemplateError, match="has left"):
        ChatTemplate(LOOP, {}).render(CHAT, math.inf, leave)


@pytest.mark.parametrize("source", ["{% for %}", "{{ x | no_such_filter }}", "{% endif %}", "{{ " + "(" * 5000])
def test_a_template_that_does_not_compile_says_why(source: str) -> None:
    with pytest.raises(ValueError, match="the chat template does not compile: "):
        ChatTemplate(source, {})


def test_a_long_chat_takes_little_time() -> None:
    """The limits are looked at while it is rendered."""
    chat = [("user", "hi"), ("assistant", "hello")] * 512
    began = time.thread_time()
    text = ChatTemplate(ORDINARY[0], {}).render(chat, math.inf, lambda: None)
    assert text == "user: hi\nassistant: hello\n" * 512
    assert time.thread_time() - began < 1
