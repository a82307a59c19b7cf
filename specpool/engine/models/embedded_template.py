"""The embedded target's chat template for chats with tools, which its own template ignores."""

TOOL_TEMPLATE = """\
{%- set is_given = messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' }}
{{- messages[0].content if is_given else 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' }}
{{- '\\n\\nYou can call these functions:\\n<tools>' }}
{%- for tool in tools %}
    {{- '\\n' + tool | tojson }}
{%- endfor %}
{{- '\\n</tools>\\n\\nTo call a function, answer with its name and arguments as JSON:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- for message in (messages[1:] if is_given else messages) %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
    {%- if message.role == 'tool' %}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Calls have the "hermes" format."""
