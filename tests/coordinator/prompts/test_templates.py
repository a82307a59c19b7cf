"""Chat templates render as in transformers, and their errors reject the chat with a reason."""

import math

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from coordinator.prompts.templates import Chat, ChatTemplate, ChatTemplateError

CHAT = Chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 < 2 & 'ü'"}])
LOOP = "{% for i in range(99999) %}xx{% endfor %}"


def render(source: str, max_characters: float = math.inf, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render(CHAT, max_characters)


@pytest.mark.parametrize(
    "source",
    [
        "{% for message in messages %}{{ message['role'] }}: {{ message.content | trim }}\n{% endfor %}",
        "{{ bos_token }}{% if add_generation_prompt %}>{% endif %}{{ messages | length }}{{ tools is none }}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m | tojson(indent=2) }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 2 ** 3 * 4 %}{% endfor %}{{ ns.n }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ '-' * 3 }}{% endfor %}",
        "{{ strftime_now('%%') }}{{ dict(a=1).a }}{{ dict.fromkeys('ab') }}{{ range(3) | map('string') | join('-') }}",
        "{{ 'ab' | center(9) | indent | replace('a', 'é') }}{{ 2 ** 70 }}{{ '%5s' % 'x' }}",
        "{{ '{0.__class__}'.format(1) }}{{ dict.__class__ }}{{ [none, true, 1.5] | tojson }}",
        "{{ messages[0] | tojson(sort_keys=True, separators=(',', ':')) }}{% set a | upper %}b{% endset %}{{ a }}",
        "{{ '<b>' }}{{ missing }}{{ missing is defined }}{{ namespace(self=2).self }}{{ cycler('x', 'y').next() }}",
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{% endfor %}",
        "  {% if true %}\n  kept\n  {% endif %}\n{# note #}\n{{ 'é' ~ 3 }}",
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
        ("{{ dict.__class__.mro }}", "SecurityError"),
        ("{{ dict.fromkeys.__globals__.x }}", "SecurityError"),
        ("{% set ns = namespace(_x=1) %}", "SecurityError"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.x }}", "SecurityError"),
    ],
)
def test_errors_of_a_template_reject_the_chat(source: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match="rejects these messages") as caught:
        render(source)
    assert reason in str(caught.value)
    assert caught.value.__suppress_context__


def test_output_is_limited() -> None:
    with pytest.raises(ChatTemplateError, match="more than 1000 characters"):
        render(LOOP, max_characters=1000)
    assert render("x" * 1000, max_characters=1000) == "x" * 1000


@pytest.mark.parametrize(
    "source",
    [
        "{{ 9 ** (9 ** 9) }}",
        "{{ f(9 ** (9 ** 9)) }}",
        "{{ 'x' * 10 ** 12 }}",
        "{% set x = 9 ** (9 ** 9) %}",
    ],
)
def test_nothing_is_evaluated_while_a_template_compiles(source: str) -> None:
    assert ChatTemplate("{% if messages is none %}" + source + "{% endif %}", {}).render(CHAT, 9) == ""


@pytest.mark.parametrize("source", ["{% for %}", "{{ x | no_such_filter }}", "{{ " + "(" * 5000])
def test_templates_that_do_not_compile_are_rejected(source: str) -> None:
    with pytest.raises(ValueError, match="the chat template does not compile: "):
        ChatTemplate(source, {})
