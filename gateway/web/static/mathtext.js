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
  const tex = [];
  for (let end = at; end < lines.length && end - at < MOST_LINES; end++) {
    const text = end === at ? first.slice(open.length) : lines[end];
    if (!text.trim() && end > at) return null;
    const place = text.indexOf(close);
    if (place >= 0) {
      const kept = environment ? place + close.length : place;
      tex.push(text.slice(0, kept));
      const isAll = !text.slice(place + close.length).trim() && tex.join("").trim();
      return isAll ? [{ type: "math", tex: tex.join("\n").trim(), isClosed: true }, end + 1] : null;
    }
    tex.push(text);
  }
  if (at + tex.length < lines.length) return null;
  return [{ type: "math", tex: lines.slice(at).join("\n"), isClosed: false }, lines.length];
}
