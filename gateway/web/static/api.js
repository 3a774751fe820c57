// The gateway's HTTP interface. Addresses are relative to the page, which may be below any path.

/** A failed request, with a message for people; `status` 0: there was no answer. */
export class ApiFailure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const ENDED = "The connection ended before the answer did.";

async function readPiece(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFailure(0, ENDED); // browsers raise TypeError when a connection breaks
  }
}

/** The data of server-sent events in a stream of bytes, split as the standard requires. Raises ApiFailure. */
export async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await readPiece(reader);
      if (done) return;
      rest += value;
      // A carriage return at the end may be half of a line break.
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

const KEY = "moebius-api-key";

function kept(storage) {
  try {
    return globalThis[storage].getItem(KEY);
  } catch {
    return null; // the browser forbids storage
  }
}

export class Api {
  constructor() {
    /** The key that is sent, or an empty string. */
    this.key = kept("sessionStorage") ?? kept("localStorage") ?? "";
  }

  /** Keeps a key until the tab is closed, or on this device; where the browser forbids both, until the page is left. */
  setKey(key, onDevice) {
    this.key = key;
    try {
      sessionStorage.removeItem(KEY);
      localStorage.removeItem(KEY);
      if (key) (onDevice ? localStorage : sessionStorage).setItem(KEY, key);
    } catch {
      // `this.key` stays.
    }
  }

  async request(path, options = {}) {
    const headers = { ...options.headers };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiFailure(0, "The server cannot be reached.");
    }
    if (!response.ok) throw new ApiFailure(response.status, await failureText(response));
    return response;
  }

  /** The JSON that a GET returns. */
  async get(path, signal) {
    return (await this.request(path, { signal })).json();
  }

  /** Chunks of a streamed chat completion. Raises ApiFailure, also for an error within the stream. */
  async *chat(body, signal) {
    const response = await this.request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiFailure(200, chunk.error.message);
      yield chunk;
    }
    throw new ApiFailure(0, ENDED);
  }
}

async function failureText(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText || text.slice(0, 200)}`;
  }
}

/** An answer that grows by a stream's deltas: the texts to show, and the message to send back as history. */
export class Answer {
  /** `message` may have content already, which the answer continues. */
  constructor(message) {
    this.message = message;
    this.started = performance.now();
    this.first = null; // when the first token came
  }

  add(chunk) {
    if (chunk.usage) this.message.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { delta = {}, finish_reason: reason } = choice;
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    if (this.first === null && (thought || delta.content || delta.tool_calls)) this.first = performance.now();
    this.message.reasoning += thought;
    this.message.content += delta.content ?? "";
    for (const call of delta.tool_calls ?? []) this.addCall(call);
    if (reason) this.message.finish = reason;
  }

  addCall({ index = 0, id, function: made = {} }) {
    const calls = this.message.toolCalls;
    calls[index] ??= { id: "", name: "", arguments: "" };
    if (id) calls[index].id = id;
    calls[index].name += made.name ?? "";
    calls[index].arguments += made.arguments ?? "";
  }

  /** Ends it, for any reason; keeps times in seconds. */
  end() {
    const now = performance.now();
    this.message.toolCalls = this.message.toolCalls.filter(Boolean);
    this.message.times = {
      first: this.first === null ? null : (this.first - this.started) / 1000,
      rest: this.first === null ? null : (now - this.first) / 1000,
    };
  }
}

/** A conversation's messages in the form of requests. */
export function requestMessages(system, messages) {
  const sent = system ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    if (message.role === "user") sent.push({ role: "user", content: userContent(message) });
    else if (message.role === "tool") sent.push({ role: "tool", tool_call_id: message.toolCallId, content: message.content });
    else if (message.content || message.toolCalls.length) sent.push(assistantMessage(message));
  }
  return sent;
}

function userContent({ content, images = [] }) {
  if (!images.length) return content;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

function assistantMessage({ content, reasoning, toolCalls }) {
  const message = { role: "assistant", content: content || null };
  if (reasoning) message.reasoning_content = reasoning;
  if (toolCalls.length) {
    message.tool_calls = toolCalls.map(({ id, name, arguments: text }) => ({
      id,
      type: "function",
      function: { name, arguments: text },
    }));
  } else {
    message.content = content;
  }
  return message;
}
