"""A server of the Model Context Protocol over stdio with one tool: `python mcp_server.py`."""

import json
import sys

TOOL = {
    "name": "get_weather",
    "description": "Return the current weather in a city.",
    "inputSchema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SERVER = {"capabilities": {"tools": {}}, "serverInfo": {"name": "weather", "version": "1"}}

for line in sys.stdin:
    message = json.loads(line)
    results = {
        "initialize": SERVER | {"protocolVersion": message.get("params", {}).get("protocolVersion")},
        "tools/list": {"tools": [TOOL]},
        "tools/call": {"content": [{"type": "text", "text": "sunny"}]},
    }
    if "id" in message:
        print(
            json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": results.get(message["method"], {})}),
            flush=True,
        )
