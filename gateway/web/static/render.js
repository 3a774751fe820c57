// Blocks and spans of `markdown.js` as DOM nodes.

import { codeBlock } from "./code.js";
import { element } from "./dom.js";
import { parseInline, splitBlocks } from "./markdown.js";
import { mathNode } from "./math.js";

const TAGS = { strong: "strong", emphasis: "em", strike: "s" };

function spans(parts) {
  return parts.map((part) => {
    if (typeof part === "string") return document.createTextNode(part);
    if (part.type === "break") return element("br");
    if (part.type === "code") return element("code", {}, part.text);
    if (part.type === "math") return mathNode(part.tex, part.isDisplay);
    if (part.type === "link") {
      const attributes = { href: part.address, target: "_blank", rel: "noopener noreferrer nofollow" };
      return element("a", attributes, spans(part.children));
    }
    return element(TAGS[part.type], {}, spans(part.children));
  });
}

const inline = (text) => spans(parseInline(text));

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
  if (one.type === "code") return one.language === "math" && one.isClosed ? mathNode(one.text, true) : codeBlock(one);
  if (one.type === "math") return one.isClosed ? mathNode(one.tex, true) : element("p", {}, one.tex);
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
    this.settled = ""; // the text before the block before the last: what comes cannot change it
    this.numSettled = 0;
    this.shown = []; // sources of the blocks after it
  }

  /** Takes the whole text so far. Only what follows the settled text is read again. */
  show(text) {
    const lines = text.replace(/\r\n?/g, "\n");
    if (!lines.startsWith(this.settled)) Object.assign(this, { settled: "", numSettled: 0, shown: [] });
    const blocks = splitBlocks(lines.slice(this.settled.length));
    let same = 0;
    while (same < blocks.length && same < this.shown.length && blocks[same].source === this.shown[same]) same++;
    while (this.node.children.length > this.numSettled + same) this.node.lastElementChild.remove();
    for (const one of blocks.slice(same)) this.node.append(block(one));
    const numNew = Math.max(0, blocks.length - 2);
    this.shown = blocks.slice(numNew).map((one) => one.source);
    this.numSettled += numNew;
    if (numNew) this.settled = lines.slice(0, this.settled.length + blocks[numNew].offset);
  }
}
