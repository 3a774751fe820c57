// The libraries in vendor/, each loaded when a message first needs it. None is given HTML or makes any.

const failed = () => null; // a message stays readable without: as its source

let katex = null;
let katexComing = null;

/** KaTeX if it is loaded, else null; `then` is called when it is. */
export function loadedKatex(then) {
  if (katex) return katex;
  katexComing ??= loadKatex();
  katexComing.then((found) => found && then(found));
  return null;
}

async function loadKatex() {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL("./vendor/katex/katex.min.css", import.meta.url).href;
  document.head.append(link);
  await import("./vendor/katex/katex.min.js").catch(failed);
  katex = globalThis.katex ?? null;
  return katex;
}

let highlighter = null;
let highlighterComing = null;

/** highlight.js if it is loaded, else null; `then` is called when it is. */
export function loadedHighlighter(then) {
  if (highlighter) return highlighter;
  highlighterComing ??= import("./vendor/highlight/highlight.min.js").then((found) => (highlighter = found.default), failed);
  highlighterComing.then((found) => found && then(found));
  return null;
}
