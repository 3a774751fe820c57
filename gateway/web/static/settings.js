// The settings dialog: fields of requests, kept with each conversation; and the API key.

import { byId, element } from "./dom.js";

// name, label, lowest, highest, step
const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.05],
  ["top_p", "Top p", 0, 1, 0.01],
  ["top_k", "Top k", 0, null, 1],
  ["min_p", "Min p", 0, 1, 0.01],
  ["max_tokens", "Most tokens", 1, null, 1],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1],
  ["repetition_penalty", "Repetition penalty", 0, null, 0.05],
  ["seed", "Seed", 0, null, 1],
];

export const NO_SETTINGS = { system: "", numbers: {}, stop: "", tools: "", extra: "" };

/** The request fields of the settings. Raises Error naming the field that is no JSON. */
export function requestFields({ numbers, stop, tools, extra }) {
  const fields = { ...numbers };
  const stops = stop.split("\n").filter(Boolean);
  if (stops.length) fields.stop = stops;
  if (tools.trim()) fields.tools = parsed(tools, "Tools", Array.isArray, "a list");
  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
  if (extra.trim()) Object.assign(fields, parsed(extra, "Further fields", isObject, "an object"));
  return fields;
}

function parsed(text, name, isRight, what) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
  if (!isRight(value)) throw new Error(`${name}: JSON, but not ${what}`);
  return value;
}

export class Settings {
  /** `chat` has `settings` and `saveSettings`. */
  constructor(api, chat) {
    this.api = api;
    this.chat = chat;
    this.dialog = byId("settings");
    for (const [name, label, min, max, step] of NUMBERS) {
      const field = element("input", { type: "number", id: `set-${name}`, min, max, step: step < 1 ? "any" : step, inputmode: "decimal" });
      byId("numbers").append(element("div", {}, element("label", { for: `set-${name}` }, label), field));
    }
    byId("cancel-settings").addEventListener("click", () => this.dialog.close());
    this.dialog.querySelector("form").addEventListener("submit", (event) => {
      if (!this.#save()) event.preventDefault();
    });
  }

  open() {
    const found = this.chat.settings;
    for (const name of ["system", "stop", "tools", "extra"]) byId(`set-${name}`).value = found[name];
    for (const [name] of NUMBERS) byId(`set-${name}`).value = found.numbers[name] ?? "";
    byId("set-key").value = this.api.key;
    byId("settings-error").textContent = "";
    this.dialog.showModal();
  }

  #save() {
    const made = { numbers: {} };
    for (const name of ["system", "stop", "tools", "extra"]) made[name] = byId(`set-${name}`).value;
    for (const [name] of NUMBERS) {
      const text = byId(`set-${name}`).value;
      if (text !== "") made.numbers[name] = Number(text);
    }
    try {
      requestFields(made);
    } catch (error) {
      byId("settings-error").textContent = error.message;
      return false;
    }
    const key = byId("set-key").value.trim();
    if (key !== this.api.key) this.api.setKey(key, byId("keep-key").checked);
    this.chat.saveSettings(made);
    return true;
  }
}
