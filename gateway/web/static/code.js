// A block of code: its language, a button that copies, and colours where the language is known.

import { diagramButton } from "./diagram.js";
import { copyButton, element } from "./dom.js";
import { loadedHighlighter } from "./libraries.js";

const MOST_CHARACTERS = 200_000; // of code with colours
const MOST_GROWING = 20_000; // of code that still grows, and is coloured again each time

/** highlight.js's tree of scopes as nodes: `title.function` is an element of the class `code-title`. */
function scoped({ scope, children }) {
  const nodes = children.map((child) => (typeof child === "string" ? document.createTextNode(child) : scoped(child)));
  if (!scope) return element("span", {}, nodes);
  return element("span", { class: `code-${scope.split(/[.:]/)[0]}` }, nodes);
}

/** Colours the code if the highlighter knows its language. The text stays the same. */
function colour(highlighter, node, language, text) {
  if (!highlighter.getLanguage(language)) return;
  const { _emitter: emitter } = highlighter.highlight(text, { language, ignoreIllegals: true });
  node.replaceChildren(...scoped(emitter.root).childNodes);
}

/** Returns the node of a block; one of Mermaid can be drawn. */
export function codeBlock({ language, text, isClosed }) {
  const drawing = element("div");
  const buttons = language === "mermaid" && isClosed ? [diagramButton(text, drawing)] : [];
  const code = element("code", {}, text);
  const head = element("div", { class: "code-head" }, element("span", {}, language || "text"), element("span", { class: "buttons" }, buttons, copyButton(() => text)));
  // Wide code scrolls, which by keyboard requires that it can have the focus.
  const pre = element("pre", { tabindex: "0", role: "group", "aria-label": `code${language ? `, ${language}` : ""}` }, code);
  if (language && text.length <= (isClosed ? MOST_CHARACTERS : MOST_GROWING)) {
    const draw = (highlighter) => colour(highlighter, code, language, text);
    const highlighter = loadedHighlighter(draw);
    if (highlighter) draw(highlighter);
  }
  return element("div", { class: "code" }, head, pre, drawing);
}
