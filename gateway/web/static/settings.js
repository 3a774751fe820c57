// The settings dialog: fields of requests, kept with each conversation; and the API key.

import { byId, element } from "./dom.js";
import { NUMBERS, requestFields } from "./fields.js";
import { Presets } from "./presets.js";
import { recall, remember } from "./store.js";

const TEXTS = ["system", "stop", "tools", "extra"];

export class Settings {
  /** `chat` has `settings` and `saveSettings`. */
  constructor(page, chat) {
    this.page = page;
    this.chat = chat;
    this.dialog = byId("settings");
    this.error = byId("settings-error");
    for (const [name, label, min, max, step] of NUMBERS) {
      const field = element("input", { type: "number", id: `set-${name}`, min, max, step: step < 1 ? "any" : step, inputmode: "decimal" });
      byId("numbers").append(element("div", {}, element("label", { for: `set-${name}` }, label), field));
    }
    this.presets = new Presets({ read: () => this.#read(), fill: (settings) => this.#fill(settings), fail: (text) => (this.error.textContent = text) });
    byId("cancel-settings").addEventListener("click", () => this.dialog.close());
    this.dialog.querySelector("form").addEventListener("submit", (event) => {
      if (!this.#save()) event.preventDefault();
    });
  }

  async open() {
    this.#fill(this.chat.settings);
    this.presets.show("");
    byId("draw-diagrams").checked = recall("diagrams", false);
    byId("set-key").value = this.page.api.key;
    this.error.textContent = "";
    this.dialog.showModal();
    this.#showTools(await this.page.mcp.tools());
  }

  /** Shows settings in the fields; those that are not given stay. */
  #fill(found) {
    for (const name of TEXTS.filter((one) => one in found)) byId(`set-${name}`).value = found[name];
    for (const [name] of NUMBERS) byId(`set-${name}`).value = found.numbers[name] ?? "";
  }

  /** Lists the tools of the operator's MCP servers; each is off until the user chooses it. */
  #showTools({ servers, problem }) {
    const chosen = this.chat.settings.mcp ?? [];
    const box = (tool) =>
      element("label", { class: "inline" }, element("input", { type: "checkbox", name: "mcp", value: tool.id, checked: chosen.includes(tool.id) }), element("span", {}, element("code", {}, tool.name), tool.description ? ` ${tool.description}` : ""));
    const group = (server) =>
      element("fieldset", {}, element("legend", {}, server.name), server.error ? element("p", { class: "warning" }, server.error) : null, server.tools.map(box));
    byId("mcp-tools").replaceChildren(...servers.map(group), problem ? element("p", { class: "warning" }, problem) : "");
    byId("mcp").hidden = !servers.length && !problem;
  }

  #read() {
    const made = { numbers: {}, mcp: this.chat.settings.mcp ?? [] };
    for (const name of TEXTS) made[name] = byId(`set-${name}`).value;
    for (const [name] of NUMBERS) {
      const text = byId(`set-${name}`).value;
      if (text !== "") made.numbers[name] = Number(text);
    }
    const boxes = [...this.dialog.querySelectorAll("[name=mcp]")];
    if (boxes.length) made.mcp = boxes.filter((one) => one.checked).map((one) => one.value);
    return made;
  }

  #save() {
    const made = this.#read();
    try {
      requestFields(made);
    } catch (error) {
      this.error.textContent = error.message;
      return false;
    }
    const key = byId("set-key").value.trim();
    if (key !== this.page.api.key) this.page.api.setKey(key, byId("keep-key").checked);
    remember("diagrams", byId("draw-diagrams").checked);
    this.chat.saveSettings(made);
    return true;
  }
}
