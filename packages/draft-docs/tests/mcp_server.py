"""A small real MCP server for the tests. `die` ends the process; `paged` listing is the SDK's own."""

import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

server = MCPServer("lengths")


@server.tool(annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True))
def convert(value: float, unit: str) -> str:
    """Convert."""
    factors = {"m": 3.28084, "ft": 0.3048}
    if unit not in factors:
        raise ToolError(f"unit must be one of m, ft, got {unit}")
    return str(value * factors[unit])


@server.tool()
def die() -> str:
    """End the server."""
    print("the server says goodbye", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def environment() -> str:
    """Names of the environment variables."""
    return " ".join(sorted(os.environ))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
