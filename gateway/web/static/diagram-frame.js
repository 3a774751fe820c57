// Within the frame of diagram.html: turns Mermaid's text into SVG for the page around it. The frame's policy makes it an
// origin of its own without a network, so whatever a diagram's text does in here ends here.

/* global mermaid */

const OPTIONS = {
  startOnLoad: false,
  securityLevel: "strict",
  htmlLabels: false, // labels are SVG's own text, as the result is shown as an image
  flowchart: { htmlLabels: false, useMaxWidth: false },
  sequence: { useMaxWidth: false },
  suppressErrorRendering: true,
  fontFamily: "sans-serif",
};

let drawn = 0;

async function draw({ id, text, isDark }) {
  try {
    mermaid.initialize({ ...OPTIONS, theme: isDark ? "dark" : "default" });
    const { svg } = await mermaid.render(`diagram-${drawn++}`, text);
    return { id, svg: sized(svg) };
  } catch (error) {
    return { id, error: String(error.message ?? error).slice(0, 500) };
  }
}

/** Images need a size of their own: that of the drawing. */
function sized(text) {
  const parsed = new DOMParser().parseFromString(text, "text/html");
  const svg = parsed.querySelector("svg");
  const [, , width, height] = svg.getAttribute("viewBox").split(/\s+/);
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.style.removeProperty("max-width");
  return new XMLSerializer().serializeToString(svg);
}

// One after the other: Mermaid's settings are global.
let queue = Promise.resolve();
window.addEventListener("message", ({ source, data }) => {
  if (source !== window.parent) return;
  queue = queue.then(async () => window.parent.postMessage(await draw(data), "*"));
});
window.parent.postMessage({ isReady: true }, "*");
