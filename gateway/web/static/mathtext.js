// Where TeX stands in Markdown: $x$, \(x\), $$x$$, \[x\] and environments. Pure text; `math.js` draws it.
// Within these marks nothing is Markdown, so that backslashes, underscores and asterisks stay as the model wrote them.

const REACH = 2000; // characters between the marks of a span
const MOST_LINES = 200; // of a block
const DISPLAY = [
  ["$$", "$$"],
  ["\\[", "\\]"],
];
const ENVIRONMENT = /^\\begin\{((?:align|alignat|aligned|cases|CD|equation|gather|matrix|[bBpvV]matrix|split)\*?)\}/;

/** The span of math that starts at `at`, as {span, end}, or null. `missing` has marks that the rest of the text lacks. */
export function readMath(text, at, missing) {
  for (const [open, close] of [...DISPLAY, ["\\(", "\\)"]]) {
    if (text.startsWith(open, at)) return between(text, at, open, close, missing);
  }
  return text[at] === "$" ? readDollars(text, at) : null;
}

function between(text, at, open, close, missing) {
  const from = at + open.length;
  if (missing.has(close)) return null;
  const length = text.slice(from, from + REACH).indexOf(close);
  if (length < 0 && from + REACH >= text.length) missing.add(close);
  const tex = text.slice(from, from + Math.max(0, length)).trim();
  return tex ? { span: { type: "math", tex, isDisplay: open !== "\\(" }, end: from + length + close.length } : null;
}

/** $x$, by pandoc's rules, which leave prices alone: no space inside of the marks, no digit after them. */
function readDollars(text, at) {
  if (/[\w$]/.test(text[at - 1] ?? "") || !/[^\s$]/.test(text[at + 1] ?? "")) return null;
  let end = at + 1;
  while (end < text.length && text[end] !== "$" && end - at <= REACH) end += text[end] === "\\" ? 2 : 1;
  if (text[end] !== "$" || /\s/.test(text[end - 1]) || /[\d$]/.test(text[end + 1] ?? "")) return null;
  return { span: { type: "math", tex: text.slice(at + 1, end), isDisplay: false }, end: end + 1 };
}

/**
 * The block of math that starts in this line, as [block, line after it], or null. Without its closing mark it is a
 * block only at the end of the text, which may go on; TeX allows no blank line in it.
 */
export function readMathBlock(lines, at) {
  const first = lines[at].trim();
  const environment = ENVIRONMENT.exec(first);
  const marks = environment ? ["", `\\end{${environment[1]}}`] : DISPLAY.find(([open]) => first.startsWith(open));
  if (!marks) return null;
  const [open, close] = marks;
  const begin = first.slice(open.length);
  const end = begin.includes(close) ? at : lastLine(lines, at, close);
  if (end === lines.length) return [{ type: "math", tex: lines.slice(at).join("\n"), isClosed: false }, end];
  const text = end === at ? begin : lines[end];
  const place = text.indexOf(close);
  if (place < 0) return null;
  const kept = text.slice(0, environment ? place + close.length : place);
  const tex = (end === at ? [kept] : [begin, ...lines.slice(at + 1, end), kept]).join("\n").trim();
  return tex && !text.slice(place + close.length).trim() ? [{ type: "math", tex, isClosed: true }, end + 1] : null;
}

// Of a text's lines, by closing mark: those from `from` to before `to` lack it, and none of them is blank.
const searched = new WeakMap();

/** The first line after `at` that has the mark, is blank, or is too far away; lines that were searched are skipped. */
function lastLine(lines, at, close) {
  const limit = Math.min(lines.length, at + MOST_LINES);
  if (!searched.has(lines)) searched.set(lines, new Map());
  const known = searched.get(lines).get(close);
  const goesOn = known !== undefined && known.from <= at + 1 && at + 1 <= known.to && known.to <= limit;
  let end = goesOn ? known.to : at + 1;
  while (end < limit && lines[end].trim() && !lines[end].includes(close)) end++;
  searched.get(lines).set(close, { from: goesOn ? known.from : at + 1, to: end });
  return end;
}
