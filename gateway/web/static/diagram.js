// Mermaid's diagrams, drawn when the user asks for it. The library works in a frame without network, storage or access to
// this page, and what comes back is shown as an image, in which no script runs and nothing is loaded.

import { element, isDark } from "./dom.js";
import { recall } from "./store.js";

const LONGEST_WAIT_MS = 60_000;
let frame = null; // the promise of its window
const waiting = new Map(); // id -> resolve

/** The frame's window, when it has loaded the library. */
function loadedFrame() {
  frame ??= new Promise((resolve) => {
    const address = new URL("./diagram.html", import.meta.url).href;
    const node = element("iframe", { class: "hidden drawing", sandbox: "allow-scripts", src: address, title: "Draws diagrams", tabindex: "-1", "aria-hidden": "true" });
    window.addEventListener("message", ({ source, data }) => {
      if (source !== node.contentWindow) return;
      if (data.isReady) resolve(node.contentWindow);
      waiting.get(data.id)?.(data);
      waiting.delete(data.id);
    });
    document.body.append(node);
  });
  return frame;
}

/** Returns {svg} or {error}. */
async function drawn(text, isDark) {
  const id = Math.random().toString(36).slice(2);
  const answer = new Promise((resolve) => {
    waiting.set(id, resolve);
    setTimeout(() => waiting.delete(id) && resolve({ error: "It took too long." }), LONGEST_WAIT_MS);
  });
  loadedFrame().then((target) => target.postMessage({ id, text, isDark }, "*")); // its origin has no name
  return answer;
}

/** Whether diagrams are drawn without asking. */
export const areDrawn = () => recall("diagrams", false);

/** A button that draws a diagram into `place`, or removes it. */
export function diagramButton(text, place) {
  const button = element("button", { type: "button", class: "quiet copy", "aria-pressed": "false" }, "Draw");
  const show = async () => {
    button.disabled = true;
    button.textContent = "Drawing…";
    const hasDarkColours = isDark();
    const { svg, error } = await drawn(text, hasDarkColours);
    button.disabled = false;
    button.setAttribute("aria-pressed", String(!error));
    button.textContent = error ? "Draw" : "Remove drawing";
    place.replaceChildren(error ? element("p", { class: "error" }, `Not drawn: ${error}`) : picture(svg, text, hasDarkColours));
  };
  button.addEventListener("click", () => {
    if (button.getAttribute("aria-pressed") === "false") return show();
    place.replaceChildren();
    button.setAttribute("aria-pressed", "false");
    button.textContent = "Draw";
    return null;
  });
  if (areDrawn()) show();
  return button;
}

/** The image of a drawing, which scrolls where it is wide. It keeps its colours, and so its background. */
function picture(svg, text, hasDarkColours) {
  const address = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  const image = element("img", { src: address, alt: `Diagram: ${text.slice(0, 300)}`, onload: () => URL.revokeObjectURL(address) });
  return element("div", { class: hasDarkColours ? "diagram dark" : "diagram", tabindex: "0", role: "group", "aria-label": "diagram" }, image);
}
