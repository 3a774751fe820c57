// Blocks and spans of `markdown.js` as DOM nodes.

import { copyButton, element } from "./dom.js";
import { parseInline, splitBlocks } from "./markdown.js";

const TAGS = { strong: "strong", emphasis: "em", strike: "s" };

function spans(parts) {
  return parts.map((part) => {
    if (typeof part === "string") return document.createTextNode(part);
    if (part.type === "break") return element("br");
    if (part.type === "code") return element("code", {}, part.text);
    if (part.type === "link") {
      const attributes = { href: part.address, target: "_blank", rel: "noopener noreferrer nofollow" };
      return element("a", attributes, spans(part.children));
    }
    return element(TAGS[part.type], {}, spans(part.children));
  });
}

const inline = (text) => spans(parseInline(text));

function codeBlock({ language, text }) {
  const code = element("code", {}, text);
  const head = element("div", { class: "code-head" }, element("span", {}, language || "text"), copyButton(() => code.textContent));
  // Wide code scrolls, which by keyboard requires that it can have the focus.
  const pre = element("pre", { tabindex: "0", "aria-label": `code${language ? `, ${language}` : ""}` }, code);
  return element("div", { class: "code" }, head, pre);
}

function table({ header, align, rows }) {
  const cell = (tag, text, column) =>
    element(tag, { class: `align-${align[column] ?? "left"}`, scope: tag === "th" ? "col" : null }, inline(text));
  const row = (tag, cells) => element("tr", {}, cells.map((text, column) => cell(tag, text, column)));
  const body = rows.map((cells) => row("td", header.map((_, column) => cells[column] ?? "")));
  return element("div", { class: "table" }, element("table", {}, element("thead", {}, row("th", header)), element("tbody", {}, body)));
}

function list({ isOrdered, start, items }) {
  const made = items.map(({ blocks, task }) => {
    const content = blocks.length === 1 && blocks[0].type === "paragraph" ? inline(blocks[0].text) : blocks.map(block);
    const box = task === null ? null : element("input", { type: "checkbox", disabled: true, checked: task, "aria-label": task ? "done" : "to do" });
    return element("li", { class: task === null ? null : "task" }, box, content);
  });
  return isOrdered ? element("ol", { start: start === 1 ? null : String(start) }, made) : element("ul", {}, made);
}

function block(one) {
  if (one.type === "code") return codeBlock(one);
  if (one.type === "rule") return element("hr");
  // The page's own headings are above those of messages.
  if (one.type === "heading") return element(`h${Math.min(6, one.level + 2)}`, {}, inline(one.text));
  if (one.type === "quote") return element("blockquote", {}, one.blocks.map(block));
  if (one.type === "list") return list(one);
  if (one.type === "table") return table(one);
  return element("p", {}, inline(one.text));
}

/** Shows growing text in a node; unchanged parts keep their nodes. */
export class MarkdownView {
  constructor(node) {
    this.node = node;
    this.shown = [];
  }

  /** Takes the whole text so far. */
  show(text) {
    const blocks = splitBlocks(text);
    let same = 0;
    while (same < blocks.length && same < this.shown.length && blocks[same].source === this.shown[same]) same++;
    while (this.node.children.length > same) this.node.lastElementChild.remove();
    for (const one of blocks.slice(same)) this.node.append(block(one));
    this.shown = blocks.map((one) => one.source);
  }
}
