// Turns Markdown as models write it into DOM nodes. No HTML is ever parsed: text becomes text nodes, and a link is
// made only for the schemes below. Images become links, because loading one would send a model's text to its host.
// Time grows in proportion to the text: searches for closing marks are bounded.

import { readMath, readMathBlock } from "./mathtext.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const MARK_REACH = 1000; // characters between an opening mark and its closing one
const MOST_DEPTH = 12; // of quotes, lists and marks within one another

// Expressions that may backtrack over a long line are only tried on short ones.
const LONGEST_FENCE = 300;
const LONGEST_TABLE_RULE = 2000;
const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])(?:[ \t]+(.*)|)$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const ADDRESS = /https?:\/\/[^\s<>"'`\])]+[^\s<>"'`\]).,;:!?]/y;

const fenceOf = (line) => (line.length > LONGEST_FENCE ? null : FENCE.exec(line));
const isTableRule = (line) => line.length <= LONGEST_TABLE_RULE && line.includes("-") && TABLE_RULE.test(line);

/** The address if it may be followed, else null. */
export function safeAddress(text) {
  try {
    const found = new URL(text.trim());
    return SCHEMES.has(found.protocol) ? found.href : null;
  } catch {
    return null;
  }
}

/**
 * Top-level blocks of a text whose lines end with \n, each with its source and its offset in the text.
 * Appending to the text changes only the last one.
 */
export function splitBlocks(text) {
  const lines = text.split("\n");
  const starts = [0];
  for (const line of lines) starts.push(starts.at(-1) + line.length + 1);
  return parseBlocks(lines, 0).map((block) => {
    const offset = starts[block.from];
    return { ...block, offset, source: text.slice(offset, starts[block.to] - 1) };
  });
}

function parseBlocks(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const from = at;
    const line = lines[at];
    if (!line.trim()) {
      at += 1;
      continue;
    }
    let block;
    [block, at] = readBlock(lines, at, depth);
    blocks.push({ ...block, from, to: at });
  }
  return blocks;
}

function readBlock(lines, at, depth) {
  const line = lines[at];
  const fence = fenceOf(line);
  if (fence) return readFence(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [{ type: "heading", level: heading[1].length, text: withoutClosing(heading[2]) }, at + 1];
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  const math = readMathBlock(lines, at);
  if (math) return math;
  if (QUOTE.test(line) && depth < MOST_DEPTH) {
    const inner = [];
    while (at < lines.length && QUOTE.test(lines[at])) inner.push(lines[at++].replace(QUOTE, ""));
    return [{ type: "quote", blocks: parseBlocks(inner, depth + 1) }, at];
  }
  if (ITEM.test(line) && depth < MOST_DEPTH) return readList(lines, at, depth);
  if (line.includes("|") && at + 1 < lines.length && isTableRule(lines[at + 1])) return readTable(lines, at);
  const end = paragraphEnd(lines, at, depth);
  return [{ type: "paragraph", text: lines.slice(at, end).map((one) => one.trimStart()).join("\n") }, end];
}

/** A heading's text without the #s that may close it. */
function withoutClosing(text) {
  let end = text.length;
  while (end > 0 && " \t#".includes(text[end - 1])) end--;
  return text.slice(0, end);
}

function readFence(lines, at, fence) {
  const [, indent, marks, language] = fence;
  const code = [];
  let end = at + 1;
  let isClosed = false;
  for (; end < lines.length && !isClosed; end++) {
    const text = lines[end].trim();
    isClosed = text.length >= marks.length && text[0] === marks[0] && text === marks[0].repeat(text.length);
    if (!isClosed) code.push(lines[end].startsWith(indent) ? lines[end].slice(indent.length) : lines[end]);
  }
  return [{ type: "code", language, text: code.join("\n"), isClosed }, end];
}

function readList(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > first[1].length + 1 || /\d/.test(item[2]) !== isOrdered || RULE.test(lines[end])) break;
    const inner = [item[3] ?? ""];
    const width = item[1].length + item[2].length + 1;
    end += 1;
    while (end < lines.length && belongs(lines, end, item[1].length)) {
      const text = lines[end];
      inner.push(text.slice(Math.min(width, text.length - text.trimStart().length)));
      end += 1;
    }
    while (inner.length > 1 && !inner[inner.length - 1].trim()) inner.pop();
    const task = /^\[([ xX])\] /.exec(inner[0]);
    if (task) inner[0] = inner[0].slice(4);
    items.push({ blocks: parseBlocks(inner, depth + 1), task: task ? task[1] !== " " : null });
  }
  return [{ type: "list", isOrdered, start: isOrdered ? parseInt(first[2], 10) : 1, items }, end];
}

/** Whether a line continues a list item with this indentation. */
function belongs(lines, at, indent) {
  const line = lines[at];
  if (!line.trim()) {
    const next = lines[at + 1];
    return next !== undefined && next.trim() !== "" && leading(next) > indent + 1;
  }
  if (leading(line) > indent + 1) return true;
  const isNew = ITEM.test(line) || HEADING.test(line) || fenceOf(line) || RULE.test(line) || QUOTE.test(line);
  return !isNew && lines[at - 1].trim() !== ""; // a lazy continuation line
}

const leading = (line) => line.length - line.trimStart().length;

function readTable(lines, at) {
  const cells = (line) =>
    line
      .trim()
      .replace(/^\||(?<!\\)\|$/g, "")
      .split(/(?<!\\)\|/)
      .map((cell) => cell.trim().replaceAll("\\|", "|"));
  const header = cells(lines[at]);
  const align = cells(lines[at + 1]).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left",
  );
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].trim() && lines[end].includes("|"); end++) rows.push(cells(lines[end]));
  return [{ type: "table", header, align, rows }, end];
}

function paragraphEnd(lines, at, depth) {
  let end = at + 1;
  for (; end < lines.length && lines[end].trim(); end++) {
    const line = lines[end];
    if (fenceOf(line) || HEADING.test(line) || RULE.test(line) || readMathBlock(lines, end)) break;
    if (line.includes("|") && end + 1 < lines.length && isTableRule(lines[end + 1])) break;
    if (depth < MOST_DEPTH && (QUOTE.test(line) || ITEM.test(line))) break;
  }
  return end;
}

/** Spans of a paragraph: strings, and {type, children | text | address}. */
export function parseInline(text, depth = 0) {
  const spans = [];
  const missing = new Set(); // marks without a closing one in the rest of the text
  let plain = "";
  let at = 0;
  const push = (span) => {
    if (plain) spans.push(plain);
    plain = "";
    spans.push(span);
  };
  while (at < text.length) {
    const found = "\\`*_~[!<h\n$".includes(text[at]) ? readSpan(text, at, depth, missing) : null;
    if (found === null) {
      plain += text[at++];
    } else if (typeof found.span === "string") {
      plain += found.span;
      at = found.end;
    } else {
      push(found.span);
      at = found.end;
    }
  }
  if (plain) spans.push(plain);
  return spans;
}

function readSpan(text, at, depth, missing) {
  const mark = text[at];
  if (mark === "\n") return { span: { type: "break" }, end: at + 1 };
  if (mark === "$") return readMath(text, at, missing);
  if (mark === "\\") {
    const next = text[at + 1];
    const math = next === "(" || next === "[" ? readMath(text, at, missing) : null;
    if (math) return math;
    return next && /[!-/:-@[-`{-~]/.test(next) ? { span: next, end: at + 2 } : null;
  }
  if (mark === "`") return readCode(text, at, missing);
  if (mark === "h") {
    ADDRESS.lastIndex = at;
    const found = /\w/.test(text[at - 1] ?? "") ? null : ADDRESS.exec(text);
    return found ? linkTo(found[0], [found[0]], at + found[0].length) : null;
  }
  if (mark === "<") {
    if (/^<br\s*\/?>/i.test(text.slice(at, at + 6))) return { span: { type: "break" }, end: text.indexOf(">", at) + 1 };
    const end = text.slice(at, at + MARK_REACH).search(/[\s>]/) + at;
    const inner = text.slice(at + 1, end);
    return text[end] === ">" && safeAddress(inner) ? linkTo(inner, [inner], end + 1) : null;
  }
  if (depth >= MOST_DEPTH) return null;
  if (mark === "[" || (mark === "!" && text[at + 1] === "[")) return readLink(text, at, depth);
  return mark === "!" ? null : readEmphasis(text, at, depth, missing);
}

function linkTo(address, children, end) {
  const safe = safeAddress(address);
  return safe ? { span: { type: "link", address: safe, children }, end } : { span: children.join(""), end };
}

function readCode(text, at, missing) {
  let end = at;
  while (text[end] === "`") end++;
  const marks = text.slice(at, end);
  if (missing.has(marks)) return { span: marks, end };
  let close = text.indexOf(marks, end);
  while (close >= 0 && (text[close + marks.length] === "`" || text[close - 1] === "`")) {
    while (text[close] === "`") close++;
    close = text.indexOf(marks, close);
  }
  if (close < 0) {
    missing.add(marks);
    return { span: marks, end };
  }
  const code = text.slice(end, close).replaceAll("\n", " ");
  return { span: { type: "code", text: /^ .*[^ ].* $/.test(code) ? code.slice(1, -1) : code }, end: close + marks.length };
}

function readLink(text, at, depth) {
  const isImage = text[at] === "!";
  const from = at + (isImage ? 2 : 1);
  const window = text.slice(from, from + MARK_REACH);
  const middle = window.indexOf("](");
  if (middle < 0 || window.slice(0, middle).includes("\n\n")) return null;
  const begin = from + middle + 2;
  const inner = balanced(text.slice(begin, begin + MARK_REACH));
  const rest = /^<?([^\s<>]*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)$/.exec(inner);
  if (!rest) return null;
  const end = begin + inner.length;
  const label = window.slice(0, middle);
  const address = safeAddress(rest[1]);
  if (!address) return { span: text.slice(at, end), end };
  const children = isImage ? [`[image: ${label || rest[1]}]`] : parseInline(label, depth + 1);
  return { span: { type: "link", address, children }, end };
}

/** The text up to the bracket that closes one opened before it. */
function balanced(text) {
  let open = 1;
  for (let at = 0; at < text.length; at++) {
    if (text[at] === "(") open++;
    if (text[at] === ")" && --open === 0) return text.slice(0, at + 1);
  }
  return "";
}

const EMPHASIS = { "**": "strong", __: "strong", "~~": "strike", "*": "emphasis", _: "emphasis" };

function readEmphasis(text, at, depth, missing) {
  const two = text.slice(at, at + 2);
  const mark = EMPHASIS[two] ? two : text[at];
  if (!EMPHASIS[mark]) return null;
  const from = at + mark.length;
  const isInWord = mark[0] === "_" && /\w/.test(text[at - 1] ?? "");
  if (missing.has(mark) || isInWord || !text[from] || /\s/.test(text[from])) return { span: mark, end: from };
  const limit = Math.min(text.length, from + MARK_REACH);
  let close = text.indexOf(mark, from + 1);
  if (close < 0) missing.add(mark);
  for (; close >= 0 && close < limit; close = text.indexOf(mark, close + mark.length)) {
    const after = text[close + mark.length] ?? "";
    if (mark.length === 1 && after === mark) {
      close += 1; // a double mark within
      continue;
    }
    if (/\s/.test(text[close - 1]) || (mark[0] === "_" && /\w/.test(after))) continue;
    const children = parseInline(text.slice(from, close), depth + 1);
    return { span: { type: EMPHASIS[mark], children }, end: close + mark.length };
  }
  return { span: mark, end: from };
}
