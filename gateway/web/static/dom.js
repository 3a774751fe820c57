// Elements without HTML: every text becomes a text node.

/** An element; attributes named on… are listeners, those that are `null` or `false` are left out. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Whether the page is shown in dark colours. */
export function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme === "dark" || (theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
}

/** Copies text also on a page that came over plain HTTP, which has no clipboard interface. */
export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = element("textarea", { class: "hidden", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Gives the user a text as a file. */
export function saveFile(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000); // the download may start late
}

/** A button that copies the result of `read` and says so. */
export function copyButton(read, label = "Copy") {
  const button = element("button", { type: "button", class: "quiet copy" }, label);
  button.addEventListener("click", async () => {
    try {
      await copyText(read());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not copied";
    }
    announce(button.textContent);
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

/** Says a short sentence to screen readers. */
export function announce(text) {
  const status = byId("status");
  status.textContent = "";
  status.textContent = text;
}
