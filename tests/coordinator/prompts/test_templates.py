"""Chat templates are untrusted code: whatever they do, the chat is rejected quickly and with a reason."""

import math
import sys
import time
from unittest import mock

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from coordinator.prompts import templates
from coordinator.prompts.templates import Chat, ChatTemplate, ChatTemplateError

CHAT = Chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 < 2 & 'ü'"}])
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}WORK{% endfor %}{% endfor %}"


def render(source: str, max_characters: float = math.inf, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render(CHAT, max_characters, lambda: None)


@pytest.mark.parametrize(
    "source",
    [
        "{% for message in messages %}{{ message['role'] }}: {{ message.content | trim }}\n{% endfor %}",
        "{{ bos_token }}{% if add_generation_prompt %}>{% endif %}{{ messages | length }}{{ tools is none }}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m | tojson(indent=2) }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 2 ** 3 * 4 %}{% endfor %}{{ ns.n }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ '-' * 3 }}{% endfor %}",
        "{% macro show(m) %}<{{ m.role }}>{% endmacro %}{{ show(messages[0]) }}{{ [1, 2] * 2 }}{{ 2 ** 0.5 }}",
    ],
)
def test_templates_render_as_in_transformers(source: str) -> None:
    expected, _ = render_jinja_template(
        conversations=[CHAT.messages], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert render(source, bos_token="<s>") == expected[0]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "these messages: roles must alternate"),
        ("{{ missing.roles }}", "UndefinedError: 'missing' is undefined"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
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
def test_errors_of_a_template_reject_the_chat(source: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match="rejects these messages") as caught:
        render(source)
    assert reason in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    "source",
    [
        LOOP.replace("WORK", ""),
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
        "{% for i in range(99999) %}{% set x = range(99999) | map('string') | join %}{% endfor %}",
        "{% set x %}" + LOOP.replace("WORK", "x" * 9) + "{% endset %}",
    ],
)
def test_endless_templates_time_out(source: str) -> None:
    with mock.patch.object(templates, "MAX_SECONDS", 0.05):
        before, began = sys.gettrace(), time.thread_time()
        with pytest.raises(ChatTemplateError, match=r"takes more than 0\.05 s"):
            render(source)
        assert time.thread_time() - began < 5
        assert sys.gettrace() is before


def test_output_is_limited() -> None:
    with pytest.raises(ChatTemplateError, match="more than 1000 characters"):
        render(LOOP.replace("WORK", "xx"), max_characters=1000)
    assert render("x" * 1000, max_characters=1000) == "x" * 1000


def test_rendering_stops_when_the_check_raises() -> None:
    def leave() -> None:
        raise RuntimeError("the client disconnected")

    with pytest.raises(ChatTemplateError, match="disconnected"):
        ChatTemplate(LOOP, {}).render(CHAT, math.inf, leave)


@pytest.mark.parametrize("source", ["{% for %}", "{{ x | no_such_filter }}", "{{ " + "(" * 5000])
def test_templates_that_do_not_compile_are_rejected(source: str) -> None:
    with pytest.raises(ValueError, match="the chat template does not compile: "):
        ChatTemplate(source, {})
