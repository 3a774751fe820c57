// The page's frame: which view is shown, the served model, the key, colours, settings. `chat.js` and `live.js` are
// the views.

import { Api, ApiFailure } from "./api.js";
import { Chat } from "./chat.js";
import { announce, byId, element } from "./dom.js";
import { LiveView } from "./live.js";
import { McpTools } from "./mcp.js";
import { Settings } from "./settings.js";
import { recall, remember } from "./store.js";

const THEMES = ["system", "light", "dark"];
const RETRY_MS = 3000;
const api = new Api();

/** A sentence above the page, with a button if `offer` has its text and action; empty: none. */
function notice(text, offer = null, isError = !offer) {
  const node = byId("notice");
  node.classList.toggle("error", isError);
  const button = offer && element("button", { type: "button", class: "quiet", onclick: offer.action }, offer.text);
  const close = element("button", { type: "button", class: "quiet", "aria-label": "Close this message", onclick: () => notice("") }, "✕");
  node.replaceChildren(...(text ? [element("span", {}, text), button, close].filter(Boolean) : []));
  node.hidden = !text;
}

/** Asks for a key; resolves when one was given. */
function askForKey() {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  byId("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
}

/** Shows an error; true: the user is asked for a key. */
function report(error) {
  if (error instanceof ApiFailure && error.status === 401) {
    askForKey();
    return true;
  }
  notice(error.message);
  return false;
}

const page = { api, notice, report, findModel, mcp: new McpTools(api), model: null, hasNoLive: false };
const chat = new Chat(page);
const live = new LiveView(page, byId("live-view"));
const settings = new Settings(page, chat);

let retry = null;

/** Asks for the served model until the server answers, which may be starting. */
async function findModel() {
  clearTimeout(retry);
  try {
    const { data } = await api.get("v1/models");
    page.model = data[0];
    byId("model").textContent = data[0].id;
    document.title = `${data[0].id} · Moebius`;
    byId("attach").hidden = !data[0].capabilities?.vision;
    notice("");
  } catch (error) {
    if (error instanceof ApiFailure && error.status === 401) return askForKey();
    notice(`${error.message.replace(/[.]?$/, ".")} This page tries again every ${RETRY_MS / 1000} seconds.`);
    retry = setTimeout(findModel, RETRY_MS);
  }
}

function showView() {
  const isLive = location.hash === "#live";
  byId("live-view").hidden = !isLive;
  byId("chat-view").hidden = isLive;
  byId("open-settings").hidden = isLive;
  byId("menu").hidden = isLive;
  for (const link of document.querySelectorAll("header nav a")) {
    const isHere = link.hash === (isLive ? "#live" : "#chat");
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  live.setShown(isLive);
  if (!isLive) chat.composer.focus();
}

function showTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = { system: "◐", light: "☀", dark: "☾" }[theme];
  byId("theme").title = `Colours: ${theme}`;
  live.heat.redraw();
}

let theme = recall("theme", "system");
showTheme(theme);
byId("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  remember("theme", theme);
  showTheme(theme);
  announce(`Colours: ${theme}`);
});

byId("key-dialog").addEventListener("close", () => {
  api.setKey(byId("key").value.trim(), byId("key-on-device").checked);
  if (api.key) {
    findModel();
    showView();
  }
});

function showMenu(isOpen) {
  document.body.classList.toggle("menu-open", isOpen);
  byId("menu").setAttribute("aria-expanded", String(isOpen));
}

byId("menu").addEventListener("click", () => showMenu(!document.body.classList.contains("menu-open")));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !document.body.classList.contains("menu-open")) return;
  showMenu(false);
  byId("menu").focus();
});

byId("open-settings").addEventListener("click", () => settings.open());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => live.heat.redraw());
window.addEventListener("hashchange", () => {
  notice(""); // it was about the other view
  showView();
});
showView();
findModel();
await chat.start();
