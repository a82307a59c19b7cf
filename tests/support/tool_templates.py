"""Tool call parts of published chat templates, one per format and model family."""

HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {{- message.content or '' }}
    {%- for tool_call in message.tool_calls or [] %}
        {%- if not loop.first or message.content %}
            {{- '\\n' }}
        {%- endif %}
        {{- '<tool_call>\\n{"name": "' }}
        {{- tool_call.function.name }}
        {{- '", "arguments": ' }}
        {{- tool_call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
"""

LLAMA3 = """\
{%- if tools %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- '}' }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
"""

MISTRAL = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {{- ', ' if not loop.last else ']</s>' }}
        {%- endfor %}
    {%- else %}
        {{- ' ' + message.content + '</s>' }}
    {%- endif %}
{%- endfor %}
"""

MISTRAL_ARGS = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- else %}
        {{- message.content or '' }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + tool_call.function.name }}
            {{- '[ARGS]' }}
            {{- tool_call.function.arguments | tojson }}
        {%- endfor %}
        {{- '</s>' }}
    {%- endif %}
{%- endfor %}
"""

GLM = """\
[gMASK]<sop>
{%- if tools %}
    {{- '<|system|>\\n# Tools\\n<tools>\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(ensure_ascii=False) + '\\n' }}
    {%- endfor %}
    {{- '</tools>\\n<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>...' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {{- '\\n' + message.content if message.content }}
    {%- for tool_call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' + tool_call.function.name + '\\n' }}
        {%- for k, v in tool_call.function.arguments.items() %}
            {{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}
            {{- v | tojson(ensure_ascii=False) if v is not string else v }}
            {{- '</arg_value>\\n' }}
        {%- endfor %}
        {{- '</tool_call>' }}
    {%- endfor %}
{%- endfor %}
"""

QWEN3_CODER = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n<function>\\n<name>' + tool.function.name + '</name>' }}
    {%- endfor %}
    {{- '\\n</tools>\\n<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\n' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role }}
    {{- '\\n' + message.content if message.content }}
    {%- for tool_call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n<function=' + tool_call.function.name + '>\\n' }}
        {%- for name, value in tool_call.function.arguments.items() %}
            {{- '<parameter=' + name + '>\\n' }}
            {{- value | tojson if value is mapping or value is iterable and value is not string else value | string }}
            {{- '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
"""

HARMONY = """\
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {' }}
    {%- for tool in tools %}
        {{- '\\ntype ' + tool.function.name + ' = (_: any) => any;' }}
    {%- endfor %}
    {{- '\\n}<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.reasoning_content %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + tool_call.name + '<|channel|>commentary json<|message|>' }}
        {{- tool_call.arguments | tojson }}
        {{- '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
"""

TEMPLATES = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral_args": MISTRAL_ARGS,
    "glm": GLM,
    "qwen3_coder": QWEN3_CODER,
    "harmony": HARMONY,
}
"""By format."""
