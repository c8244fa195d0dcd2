"""The chat template that the demo pair ships: plain ChatML without tools, and Qwen3's section of tools."""

import pytest

from app import demo
from app.engine.checkpoint.files import DEMO
from app.text.chat_template import ChatTemplate
from app.text.tokenizer import Tokenizer

CHATML = ChatTemplate(
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    {},
)
TOKENIZER = Tokenizer(DEMO / "target")


@pytest.mark.parametrize("domain", demo.held_out())
def test_without_tools_it_writes_plain_chatml(domain: str) -> None:
    for prompt in demo.held_out()[domain][:60]:
        assert TOKENIZER.chat_template.render(prompt["messages"]) == CHATML.render(prompt["messages"])


@pytest.mark.parametrize("domain", demo.held_out())
def test_stored_token_ids_are_those_of_the_template_and_the_tokenizer(domain: str) -> None:
    stored = [prompt for prompt in demo.held_out()[domain] if "token_ids" in prompt]
    assert len(stored) == 24 and len(demo.held_out()[domain]) == 200
    for prompt in stored:
        text = TOKENIZER.chat_template.render(prompt["messages"])
        assert prompt["token_ids"] == TOKENIZER.encode(text, add_special_tokens=False)
    assert demo.stop_token_ids() == list(TOKENIZER.eos_ids)


def test_the_tools_section_is_qwens() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "1 + 2, 3 + 4"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}},
                {"id": "y", "type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}},
            ],
        },
        {"role": "tool", "tool_call_id": "x", "content": "3"},
        {"role": "tool", "tool_call_id": "y", "content": "7"},
    ]
    assert TOKENIZER.chat_template.render(messages, tools=[tool]) == (
        "<|im_start|>system\nBe kind.\n\n# Tools\n\nYou may call one or more functions to assist with the user query."
        "\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
        'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n1 + 2, 3 + 4<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
