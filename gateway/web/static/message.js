// One message of a conversation on the page.

import { announce, copyButton, element } from "./dom.js";
import { MarkdownView } from "./render.js";

const NAMES = { user: "You", assistant: "Assistant", tool: "Tool result" };
const REASONS = { length: "cut off: the token limit was reached", content_filter: "cut off by a filter" };

/**
 * The node of a message. `actions`: `edit(text)`, `again()`, `goOn()` and `results(texts)`, which continue from here;
 * `mcp`, which runs tools; `isLast`, `isRunning`. The node of an assistant's message has `update()`, for when it has
 * grown, and `showProgress(text)`.
 */
export function messageNode(message, actions) {
  const node = element("article", { class: `message ${message.role}`, "aria-label": NAMES[message.role] });
  if (message.role === "assistant") fillAssistant(node, message, actions);
  else if (message.role === "user") fillUser(node, message, actions);
  else node.append(element("h2", {}, NAMES.tool), element("pre", { tabindex: "0" }, message.content));
  return node;
}

function button(text, action, label = null) {
  return element("button", { type: "button", class: "quiet", "aria-label": label, onclick: action }, text);
}

function setRunning(node, buttons, isRunning) {
  node.setRunning = (runs) => buttons.forEach((one) => (one.disabled = runs));
  node.setRunning(isRunning);
}

function fillUser(node, message, actions) {
  const text = element("div", { class: "text" }, message.content);
  const images = (message.images ?? []).map((url, index) => element("img", { src: url, alt: `attached image ${index + 1}` }));
  const edit = button("Edit", () => editInPlace(node, message, actions), "Edit this message");
  const row = element("div", { class: "actions" }, edit, copyButton(() => message.content));
  node.append(element("h2", {}, NAMES.user), ...images, text, row);
  setRunning(node, [edit], actions.isRunning);
}

function editInPlace(node, message, actions) {
  const field = element("textarea", { rows: Math.min(12, message.content.split("\n").length + 1), "aria-label": "Edited message" });
  field.value = message.content;
  const restore = () => {
    node.replaceChildren();
    fillUser(node, message, actions);
    node.querySelector(".actions button").focus();
  };
  const send = () => actions.edit(field.value.trim());
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") restore();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
  });
  const row = element("div", { class: "actions" }, button("Send again", send), button("Cancel", restore));
  node.replaceChildren(element("h2", {}, NAMES.user), field, row);
  field.focus();
}

const views = new WeakMap(); // message -> its rendered texts, which stay when the message is shown again

function viewsOf(message) {
  if (!views.has(message)) views.set(message, [0, 1].map(() => new MarkdownView(element("div", { class: "markdown" }))));
  return views.get(message);
}

function fillAssistant(node, message, actions) {
  const thought = element("details", { class: "reasoning", hidden: true });
  const summary = element("summary", {}, "Reasoning");
  const [thoughtView, view] = viewsOf(message);
  thought.append(summary, thoughtView.node);
  const calls = element("div", { class: "calls" });
  const progress = element("p", { class: "progress muted", hidden: true });
  const end = element("p", { class: "end" });
  node.append(element("h2", {}, NAMES.assistant), thought, view.node, calls, progress, end);
  node.showProgress = (words) => {
    progress.textContent = words;
    progress.hidden = !words;
  };
  node.update = () => {
    const isThinking = message.reasoning && !message.content && !message.toolCalls.length && !message.times;
    thought.hidden = !message.reasoning;
    summary.textContent = isThinking ? "Reasoning…" : "Reasoning";
    // Folded text is rendered when it is unfolded.
    if (thought.open) thoughtView.show(message.reasoning);
    view.show(message.content);
    calls.replaceChildren(...message.toolCalls.filter(Boolean).map(callNode));
  };
  thought.addEventListener("toggle", () => thought.open && thoughtView.show(message.reasoning));
  node.update();
  if (message.times) finishAssistant(node, message, actions, end);
}

function finishAssistant(node, message, actions, end) {
  const problem = message.error ?? (message.stopped ? "stopped" : REASONS[message.finish]);
  end.replaceChildren(
    problem ? element("strong", { class: message.error ? "error" : "warning" }, problem) : "",
    element("span", { class: "muted" }, figures(message)),
  );
  const row = element("div", { class: "actions" });
  const buttons = [button("Regenerate", actions.again, "Regenerate this answer")];
  // Only the last message can be continued, and only its content: reasoning that was cut off cannot.
  const isCut = problem && message.content && !message.toolCalls.length;
  if (actions.isLast && isCut) buttons.unshift(button("Continue", actions.goOn, "Continue this answer"));
  row.append(...buttons, copyButton(() => message.content));
  if (actions.isLast && message.toolCalls.length && !message.stopped && !message.error) node.append(resultsForm(message, actions));
  node.append(row);
  setRunning(node, buttons, actions.isRunning);
}

function figures({ usage, times }) {
  const parts = [];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  const hasRate = usage && times.rest > 0 && usage.completion_tokens > 1;
  if (hasRate) parts.push(`${((usage.completion_tokens - 1) / times.rest).toFixed(1)} tokens/s`);
  if (times.first !== null) parts.push(`first after ${times.first.toFixed(2)} s`);
  if (usage) parts.push(`prompt ${usage.prompt_tokens}`);
  return parts.join(" · ");
}

function callNode(call) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    // Still growing: shown as it is.
  }
  return element(
    "div",
    { class: "call" },
    element("div", { class: "code-head" }, element("span", {}, "Tool call ", element("code", {}, call.name))),
    element("pre", { tabindex: "0", "aria-label": `arguments of ${call.name}` }, shown),
  );
}

/** Asks the user for the results of tool calls. Tools of MCP servers run when the user presses a button, never before. */
function resultsForm(message, { results, mcp }) {
  const send = button("Send results", () => results(fields.map((field) => field.value)));
  const fields = message.toolCalls.map((call) => element("textarea", { rows: 2, class: "code-field", "aria-label": `Result of ${call.name}` }));
  const rows = message.toolCalls.map((call, index) => {
    const tool = mcp.toolNamed(call.name);
    const run = tool ? runButton(call, tool, mcp, fields[index], send) : null;
    return element("div", {}, element("label", {}, `Result of ${call.name}`, fields[index]), run);
  });
  return element("div", { class: "results" }, ...rows, send);
}

/** Runs a call with the arguments that are shown above it; the user sees the result before it is sent. */
function runButton(call, tool, mcp, field, send) {
  const text = `Run on ${tool.server}`;
  const run = button(text, async () => {
    run.disabled = true;
    run.textContent = "Running…";
    field.value = await mcp.call(tool, call.arguments);
    run.disabled = false;
    run.textContent = `${text} again`;
    announce(`Result of ${call.name} is there`);
    send.focus();
  });
  return run;
}
