"""The demo's chat template: plain ChatML, and tools as Qwen3's template writes them."""

import json
from collections.abc import Sequence
from typing import Any

from tools.demo_pair.corpus.sample import Message
from tools.demo_pair.corpus.tools import text_of

_BEFORE_TOOLS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
_BEHIND_TOOLS = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
CHAT_TEMPLATE = f"""\
{{%- if tools %}}
    {{{{- '<|im_start|>system\\n' }}}}
    {{%- if messages[0].role == 'system' %}}
        {{{{- messages[0].content + '\\n\\n' }}}}
    {{%- endif %}}
    {{{{- {json.dumps(_BEFORE_TOOLS)} }}}}
    {{%- for tool in tools %}}
        {{{{- '\\n' }}}}
        {{{{- tool | tojson }}}}
    {{%- endfor %}}
    {{{{- {json.dumps(_BEHIND_TOOLS)} }}}}
    {{{{- '<|im_end|>\\n' }}}}
{{%- endif %}}
{{%- for message in messages %}}
    {{%- if message.role == 'tool' %}}
        {{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}}
            {{{{- '<|im_start|>user' }}}}
        {{%- endif %}}
        {{{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}}}
        {{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}}
            {{{{- '<|im_end|>\\n' }}}}
        {{%- endif %}}
    {{%- elif not (tools and loop.first and message.role == 'system') %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}}}
        {{%- for tool_call in message.tool_calls or [] %}}
            {{%- if message.content or not loop.first %}}
                {{{{- '\\n' }}}}
            {{%- endif %}}
            {{%- if tool_call.function %}}
                {{%- set tool_call = tool_call.function %}}
            {{%- endif %}}
            {{{{- '<tool_call>\\n{{"name": "' + tool_call.name + '", "arguments": ' }}}}
            {{{{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}}}
            {{{{- '}}\\n</tool_call>' }}}}
        {{%- endfor %}}
        {{{{- '<|im_end|>\\n' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
    {{{{- '<|im_start|>assistant\\n' }}}}
{{%- endif %}}
"""
Turns = list[tuple[str, str]]
"""Roles of ChatML and their texts."""


def turns_of(messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Turns:
    """Return the turns that the template writes."""
    turns: Turns = []
    messages = list(messages)
    if tools:
        system = [f"{messages.pop(0)['content']}\n\n"] if messages and messages[0]["role"] == "system" else []
        lines = (f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
        turns.append(("system", "".join([*system, _BEFORE_TOOLS, *lines, _BEHIND_TOOLS])))
    before = ""
    for message in messages:
        role, text = message["role"], text_of(message)
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
            if before == "tool":
                text = f"{turns.pop()[1]}\n{text}"
        turns.append((role, text))
        before = message["role"]
    return turns
