// TeX as KaTeX draws it: MathML for screen readers beside what is seen. Without KaTeX, or where the TeX is wrong, its source.

import { element } from "./dom.js";
import { loadedKatex } from "./libraries.js";

const LIMITS = {
  throwOnError: true,
  strict: "ignore", // models write characters that LaTeX itself would refuse
  trust: false, // no links, no images, no classes or styles of the model's
  maxSize: 20, // em
  maxExpand: 500, // macros
};

/** The node of a formula; `isDisplay`: on a line of its own, where a wide one scrolls, by keyboard as well. */
export function mathNode(tex, isDisplay) {
  const attributes = isDisplay ? { class: "math display", tabindex: "0", role: "group", "aria-label": "formula" } : { class: "math" };
  const node = element("span", attributes, tex);
  const draw = (katex) => {
    try {
      // Its nodes are made by calls, never from HTML, so that the policy allows their styles.
      katex.render(tex, node, { ...LIMITS, displayMode: isDisplay });
    } catch (error) {
      node.replaceChildren(element("code", { class: "wrong", title: error.message }, tex));
    }
  };
  const katex = loadedKatex(draw);
  if (katex) draw(katex);
  return node;
}
