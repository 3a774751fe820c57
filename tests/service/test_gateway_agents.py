"""Guards that requests with every field and item that coding agents and chat pages send are answered.

Bodies as of autumn 2026: what a client's current sources build, with the kinds of items that it sends back.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.helpers.agent_gateway import AgentGateway
from tests.helpers.fake_engine import MODEL

CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
USER = [{"role": "user", "content": "hi"}]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def gateway(gateway: AgentGateway) -> AgentGateway:
    """Returns the shared gateway; it says a short text."""
    gateway.says("It is done.")
    return gateway


def answer(gateway: AgentGateway, path: str, body: dict[str, Any], **headers: str) -> str:
    """Returns the text of a 200."""
    response = httpx.post(f"{gateway.url}{path}", json={"model": MODEL, **body}, headers=headers)
    assert response.status_code == 200, response.text
    return response.text


CLAUDE_TOOLS: list[dict[str, Any]] = [
    {
        "name": "Bash",
        "description": "runs",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
            "additionalProperties": False,
        },
        "eager_input_streaming": True,
        "strict": True,
        **CACHED,
    },
    {
        "name": "mcp__docs__find",
        "input_schema": {"type": "object", "properties": {}},
        "defer_loading": True,
        "input_examples": [{}],
        "allowed_callers": ["direct"],
    },
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "mcp_toolset", "mcp_server_name": "docs"},
]
CLAUDE: dict[str, Any] = {
    "max_tokens": 32_000,
    "system": [{"type": "text", "text": "You are an agent.", **CACHED}],
    "tools": CLAUDE_TOOLS,
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "metadata": {"user_id": '{"device_id": "x", "session_id": "y"}'},
    "thinking": {"type": "adaptive", "display": "summarized"},
    "output_config": {"effort": "max", "task_budget": {"type": "tokens", "total": 20_000}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "cache_control": {"type": "ephemeral"},
    "speed": "fast",
    "container": None,
    "mcp_servers": [],
    "service_tier": "auto",
    "temperature": 1,
    "stop_sequences": [],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Look around", **CACHED}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "where", "signature": "of another server"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look.", "citations": None},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "Bash",
                    "input": {"command": "ls"},
                    "caller": {"type": "direct"},
                },
                {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "q"}},
                {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [
                        {"type": "text", "text": "main.py"},
                        {"type": "tool_reference", "tool_name": "mcp__docs__find"},
                    ],
                    "is_error": False,
                    **CACHED,
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ],
}


def test_claude_code(gateway: AgentGateway) -> None:
    """Its turns, its count of tokens, and its small requests for a title."""
    beta = "claude-code-20250219,context-management-2025-06-27,effort-2025-11-24"
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": beta, "x-app": "cli"}
    text = answer(gateway, "/v1/messages?beta=true", {**CLAUDE, "stream": True}, **headers)
    assert text.rstrip().endswith('{"type":"message_stop"}')
    for part in ("You are an agent.", "Look around", "where", "I look.", '"ls"', "main.py", "Go on."):
        assert part in gateway.prompt(), part
    counted = {key: CLAUDE[key] for key in ("messages", "system", "tools", "thinking", "tool_choice")}
    tokens = json.loads(answer(gateway, "/v1/messages/count_tokens?beta=true", counted))["input_tokens"]
    assert tokens > 500
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    for field in ({"output_format": {"type": "json_schema", "schema": schema}}, {"output_config": None}):
        answer(gateway, "/v1/messages", {"max_tokens": 9, "messages": USER, "system": "Title", **field})


FOR_TURN = {"internal_chat_message_metadata_passthrough": {"turn_id": "t"}}
CODEX_ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask."}], **FOR_TURN},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it"}], **FOR_TURN},
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "how"}],
        "content": None,
    },
    {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I will."}],
        "phase": "commentary",
        "end_turn": False,
    },
    {"type": "function_call", "name": "shell", "arguments": '{"command":"ls"}', "call_id": "c1", **FOR_TURN},
    {"type": "function_call_output", "call_id": "c1", "output": "Exit code: 0", **FOR_TURN},
    {"type": "function_call", "name": "find", "namespace": "mcp__docs__", "arguments": "", "call_id": "c2"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "found"}]},
    {
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "c3",
        "name": "apply_patch",
        "input": "***",
    },
    {"type": "custom_tool_call_output", "call_id": "c3", "name": "apply_patch", "output": "applied"},
    {"type": "tool_search_call", "call_id": "c5", "execution": "client", "arguments": {"query": "x"}},
    {
        "type": "tool_search_output",
        "call_id": "c5",
        "status": "completed",
        "execution": "client",
        "tools": [],
    },
    {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "ghost_snapshot", "ghost_commit": {"id": "x"}},
    {"type": "compaction", "encrypted_content": "of another server"},
    {
        "type": "agent_message",
        "author": "/root",
        "recipient": "/root/helper",
        "content": [
            {"type": "input_text", "text": "Read the tests."},
            {"type": "encrypted_content", "encrypted_content": "x"},
        ],
    },
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
]
CODEX: dict[str, Any] = {
    "instructions": "You are an agent.",
    "input": CODEX_ITEMS,
    "tools": [
        {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "d",
            "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "***" /(.+)/'},
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}},
        {
            "type": "namespace",
            "name": "mcp__docs__",
            "description": "d",
            "tools": [
                {"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": False}
            ],
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "xhigh", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "priority",
    "prompt_cache_key": "0199",
    "prompt_cache_retention": "24h",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "x"},
}


def test_codex(gateway: AgentGateway) -> None:
    """Every kind of item that it sends back; what other agents said to this one is part of the prompt."""
    headers = {"originator": "codex_cli_rs", "session-id": "x", "x-codex-turn-state": "y"}
    text = answer(gateway, "/v1/responses", CODEX, **headers)
    assert '"type":"response.completed"' in text
    prompt = gateway.prompt()
    for part in (
        "You are an agent.",
        "Fix it",
        "how",
        "I will.",
        "Exit code: 0",
        "found",
        "applied",
        "Go on.",
    ):
        assert part in prompt, part
    assert "user\n[/root]\nRead the tests." in prompt
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "strict": True, "name": "codex_output_schema", "schema": schema}
    answer(gateway, "/v1/responses", {**CODEX, "tools": [], "reasoning": None, "text": {"format": wanted}})


HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": [{"type": "text", "text": "Fix it", **CACHED}], "name": "u"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "how",
        "reasoning_details": [{"type": "reasoning.text", "text": "how"}],
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "bash", "arguments": "{}"},
                "extra_content": {"google": {}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "name": "bash", "content": [{"type": "text", "text": "out"}]},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    },
    {"role": "user", "content": "Go on.", "cache_control": {"type": "ephemeral"}},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "runs",
        "parameters": {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {},
        },
        "strict": False,
    },
}
CHATS: dict[str, dict[str, Any]] = {
    "opencode": {
        "messages": HISTORY,
        "tools": [TOOL],
        "tool_choice": "auto",
        "reasoning_effort": "high",
        "thinking": {"type": "enabled"},
        "promptCacheKey": "x",
        "usage": {"include": True},
        "reasoning": {"effort": "high"},
        "verbosity": "low",
        "response_format": {"type": "text"},
        **STREAMED,
    },
    "aider": {"messages": USER, "temperature": 0, "num_ctx": 8192, "drop_params": True, "timeout": 600},
    "continue": {"messages": USER, "stop": ["a"] * 16, "prediction": {"type": "content", "content": "x"}},
    "open webui": {
        "messages": USER,
        "params": {},
        "tool_servers": [],
        "features": {"image_generation": False, "web_search": False},
        "variables": {"{{USER_NAME}}": "x"},
        "model_item": {"id": "x"},
        "session_id": "s",
        "chat_id": "c",
        "id": "i",
        "background_tasks": {"title_generation": True},
        "filter_ids": [],
        "files": [],
        "metadata": {"a": 1, "b": {"c": 2}},
        **STREAMED,
    },
    "cline": {"messages": USER, "reasoning_effort": None, "tools": None, "tool_choice": None, **STREAMED},
    "zed": {"messages": USER, "stop": [], "tools": [], "parallel_tool_calls": False, "prompt_cache_key": "x"},
    "copilot": {
        "messages": [{**USER[0], "copilot_cache_control": {"type": "ephemeral"}}],
        "intent": True,
        "snippy": {"enabled": False},
        "thinking_budget": 100,
    },
    "qwen code": {"messages": USER, "metadata": {"sessionId": "x"}, "vl_high_resolution_images": True},
}


@pytest.mark.parametrize("name", CHATS)
def test_chats(gateway: AgentGateway, name: str) -> None:
    """Agents, editors and pages over chat completions."""
    text = answer(gateway, "/v1/chat/completions", {"max_tokens": 32, **CHATS[name]})
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith(("data: {", "{"))]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    messages = [choice["delta" if "delta" in choice else "message"] for choice in choices]
    assert "".join(message.get("content") or "" for message in messages) == "It is done."
    if name == "opencode":
        for part in ("You are an agent.", "Fix it", "how", "out", "Go on."):
            assert part in gateway.prompt(), part


def test_open_webui_over_ollama(gateway: AgentGateway) -> None:
    """Every option that its page has, and fields without a value."""
    options = {
        "temperature": 0.8,
        "num_ctx": 2048,
        "num_gpu": 99,
        "mirostat": 0,
        "tfs_z": 1,
        "num_predict": 40,
    }
    body = {
        "messages": [{"role": "user", "content": "x", "images": None, "tool_calls": None}],
        "options": {**options, "use_mmap": True, "repeat_penalty": 1.1, "stop": None},
        "keep_alive": "5m",
        **dict.fromkeys(("think", "format", "tools", "template")),
        "truncate": True,
        "shift": True,
        "logprobs": False,
        "top_logprobs": 0,
        "stream": True,
    }
    lines = answer(gateway, "/api/chat", body).splitlines()
    assert "".join(json.loads(line)["message"]["content"] for line in lines) == "It is done."
