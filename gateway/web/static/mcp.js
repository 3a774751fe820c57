// Tools of MCP servers that the operator has configured; this page's own server lists and calls them.

export class McpTools {
  constructor(api) {
    this.api = api;
    this.found = []; // of the latest listing
  }

  /** Returns {servers, problem}: each server's tools, or why it has none; `problem`: why there is no list, or empty. */
  async tools() {
    try {
      const { data } = await this.api.get("v1/mcp/tools");
      const servers = data.map((server) => ({ ...server, tools: server.tools.map((tool) => this.#tool(server, tool)) }));
      this.found = servers.flatMap((server) => server.tools);
      return { servers, problem: "" };
    } catch (error) {
      return { servers: [], problem: error.status === 404 ? "" : `MCP tools cannot be listed: ${error.message}` };
    }
  }

  #tool(server, { id, name, description, input_schema: parameters }) {
    const definition = { type: "function", function: { name: id, description, parameters } };
    return { id, name, description, server: server.name, definition };
  }

  /** The tools with these ids. Raises Error naming those that no server has now. */
  async chosen(ids) {
    if (!ids.every((id) => this.toolNamed(id))) await this.tools();
    const missing = ids.filter((id) => !this.toolNamed(id));
    if (missing.length) throw new Error(`No MCP server has ${missing.join(", ")} now: leave it out in the settings.`);
    return this.found;
  }

  /** The tool with a function's name, or undefined. */
  toolNamed(id) {
    return this.found.find((tool) => tool.id === id);
  }

  /** Returns the text of a call's result; what fails is said in it, for the user and the model. */
  async call(tool, text) {
    try {
      const given = text.trim() ? JSON.parse(text) : {};
      const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ tool: tool.id, arguments: given }) };
      const result = await (await this.api.request("v1/mcp/calls", options)).json();
      return result.is_error ? `Error: ${result.text}` : result.text;
    } catch (error) {
      return `Error: ${error.message}`;
    }
  }
}
