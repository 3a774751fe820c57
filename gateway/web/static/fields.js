// Settings of a conversation, and the request fields that they mean.

// name, label, lowest, highest, step
export const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.05],
  ["top_p", "Top p", 0, 1, 0.01],
  ["top_k", "Top k", 0, null, 1],
  ["min_p", "Min p", 0, 1, 0.01],
  ["max_tokens", "Most tokens", 1, null, 1],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1],
  ["repetition_penalty", "Repetition penalty", 0, null, 0.05],
  ["seed", "Seed", 0, null, 1],
];

/** `mcp`: the ids of tools of MCP servers that the conversation may use. */
export const NO_SETTINGS = { system: "", numbers: {}, stop: "", tools: "", extra: "", mcp: [] };

/** The request fields of the settings; `offered`: tools of MCP servers. Raises Error naming the field that is no JSON. */
export function requestFields({ numbers, stop, tools, extra, mcp = [] }, offered = []) {
  const fields = { ...numbers };
  const stops = stop.split("\n").filter(Boolean);
  if (stops.length) fields.stop = stops;
  const own = tools.trim() ? parsed(tools, "Tools", Array.isArray, "a list") : [];
  const chosen = offered.filter((tool) => mcp.includes(tool.id)).map((tool) => tool.definition);
  if (own.length || chosen.length) fields.tools = [...own, ...chosen];
  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
  if (extra.trim()) Object.assign(fields, parsed(extra, "Further fields", isObject, "an object"));
  return fields;
}

function parsed(text, name, isRight, what) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
  if (!isRight(value)) throw new Error(`${name}: JSON, but not ${what}`);
  return value;
}
