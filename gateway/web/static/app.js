// The page's frame: which view is shown, the served model, the key, colours, settings. `chat.js` and `live.js` are
// the views.

import { Api, ApiFailure } from "./api.js";
import { Chat } from "./chat.js";
import { announce, byId } from "./dom.js";
import { LiveView } from "./live.js";
import { Settings } from "./settings.js";
import { recall, remember } from "./store.js";

const THEMES = ["system", "light", "dark"];
const RETRY_MS = 3000;
const api = new Api();

/** A sentence above the page; empty: none. */
function notice(text) {
  const node = byId("notice");
  node.textContent = text;
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

const page = { api, notice, report, model: null };
const chat = new Chat(page);
const live = new LiveView(page, byId("live-view"));
const settings = new Settings(api, chat);

async function findModel() {
  try {
    const { data } = await api.get("v1/models");
    page.model = data[0];
    byId("model").textContent = data[0].id;
    document.title = `${data[0].id} · Moebius`;
    byId("attach").hidden = !data[0].capabilities?.vision;
    notice("");
  } catch (error) {
    const isAsked = report(error);
    if (!isAsked) setTimeout(findModel, RETRY_MS); // it may be starting
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

byId("menu").addEventListener("click", () => {
  const isOpen = document.body.classList.toggle("menu-open");
  byId("menu").setAttribute("aria-expanded", String(isOpen));
});

byId("open-settings").addEventListener("click", () => settings.open());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => live.heat.redraw());
window.addEventListener("hashchange", showView);
showView();
findModel();
await chat.start();
