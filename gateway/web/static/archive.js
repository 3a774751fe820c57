// Conversations as files: JSON that can be imported again, and Markdown for people. Pure text, no page.

import { NO_SETTINGS, NUMBERS } from "./fields.js";

const FORMAT = "moebius-conversations";
const VERSION = 1;
const ROLES = ["user", "assistant", "tool"];
const IMAGE = /^data:image\/(png|jpeg|webp);base64,[A-Za-z0-9+/=]*$/;

/** Returns the text of a file with these conversations. */
export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations });
}

/** Returns the conversations of such a file. Raises Error with a sentence that says what the file is instead. */
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON. Import takes the file that Export writes.");
  }
  if (file?.format !== FORMAT) throw new Error(`This JSON is not of this page: it has no "format": "${FORMAT}".`);
  if (file.version !== VERSION) throw new Error(`This file has version ${file.version}; this page reads version ${VERSION}.`);
  if (!Array.isArray(file.conversations)) throw new Error('This file has no list "conversations".');
  return file.conversations.map((one, index) => {
    try {
      return conversation(one);
    } catch (error) {
      throw new Error(`Conversation ${index + 1} of this file: ${error.message}`);
    }
  });
}

function need(isRight, what) {
  if (!isRight) throw new Error(what);
}

const isText = (value) => typeof value === "string";
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** Takes over what the page knows, and nothing else; not the choice of MCP tools, which the user makes here. */
function conversation(found) {
  need(isObject(found) && isText(found.id) && found.id, "'id' is no text");
  need(Array.isArray(found.messages), "'messages' is no list");
  const settings = { ...NO_SETTINGS, numbers: {} };
  for (const name of ["system", "stop", "tools", "extra"]) if (isText(found.settings?.[name])) settings[name] = found.settings[name];
  for (const [name] of NUMBERS) if (Number.isFinite(found.settings?.numbers?.[name])) settings.numbers[name] = found.settings.numbers[name];
  const title = isText(found.title) ? found.title.slice(0, 60) : "";
  const updated = Number.isFinite(found.updated) ? found.updated : 0;
  return { id: found.id, title, updated, settings, messages: found.messages.map(message) };
}

function message(found, index) {
  const name = `message ${index + 1}`;
  need(isObject(found) && ROLES.includes(found.role), `'role' of ${name} is none of ${ROLES.join(", ")}`);
  need(isText(found.content), `'content' of ${name} is no text`);
  const { role, content } = found;
  if (role === "tool") return { role, content, toolCallId: String(found.toolCallId ?? "") };
  if (role === "user") {
    const images = found.images ?? [];
    need(Array.isArray(images) && images.every((url) => isText(url) && IMAGE.test(url)), `'images' of ${name} are no PNG, JPEG or WebP`);
    return { role, content, images };
  }
  const calls = Array.isArray(found.toolCalls) ? found.toolCalls.filter(isObject) : [];
  return {
    role,
    content,
    reasoning: isText(found.reasoning) ? found.reasoning : "",
    toolCalls: calls.map((call) => ({ id: String(call.id ?? ""), name: String(call.name ?? ""), arguments: String(call.arguments ?? "") })),
    times: { first: null, rest: null },
  };
}

/** Returns a conversation for people to read. */
export function asMarkdown({ title, settings, messages }) {
  const names = { user: "You", assistant: "Assistant", tool: "Tool result" };
  const parts = [`# ${title || "Conversation"}`];
  if (settings.system) parts.push("## System prompt", settings.system);
  for (const { role, content, images = [], toolCalls = [] } of messages) {
    parts.push(`## ${names[role]}`);
    if (images.length) parts.push(`(${images.length} ${images.length === 1 ? "image" : "images"})`);
    if (content) parts.push(content);
    for (const call of toolCalls) parts.push(`Tool call \`${call.name}\`:`, `\`\`\`json\n${call.arguments}\n\`\`\``);
  }
  return `${parts.join("\n\n")}\n`;
}
