// Presets: names for a system prompt with sampling fields, kept in this browser, chosen for a conversation in its settings.

import { announce, byId, element } from "./dom.js";
import { recall, remember } from "./store.js";

const KEPT = ["system", "numbers", "stop"]; // not tools, which are of a server

export class Presets {
  /** `read()` returns the dialog's settings, `fill(settings)` shows some there, `fail(text)` an error. */
  constructor({ read, fill, fail }) {
    this.choice = byId("preset");
    this.name = byId("preset-name");
    this.choice.addEventListener("change", () => {
      const found = this.#all()[this.choice.value];
      byId("remove-preset").disabled = !found;
      if (!found) return;
      fill(found);
      this.name.value = this.choice.value;
      announce(`Preset ${this.choice.value} filled in`);
    });
    byId("save-preset").addEventListener("click", () => {
      const name = this.name.value.trim();
      if (!name) return fail("A preset needs a name.");
      const settings = read();
      const isKept = remember("presets", { ...this.#all(), [name]: Object.fromEntries(KEPT.map((field) => [field, settings[field]])) });
      if (!isKept) return fail("This browser's storage is full or closed: the preset is not kept.");
      this.show(name);
      return announce(`Preset ${name} saved`);
    });
    byId("remove-preset").addEventListener("click", () => {
      const { [this.choice.value]: _, ...others } = this.#all();
      remember("presets", others);
      announce(`Preset ${this.choice.value} removed`);
      this.show("");
    });
  }

  #all() {
    return recall("presets", {});
  }

  /** Lists the names, and chooses one; empty: none. */
  show(chosen) {
    const names = Object.keys(this.#all()).sort((a, b) => a.localeCompare(b));
    this.choice.replaceChildren(element("option", { value: "" }, names.length ? "Choose…" : "None saved yet"), ...names.map((name) => element("option", { value: name }, name)));
    this.choice.value = chosen;
    this.name.value = chosen;
    byId("remove-preset").disabled = !chosen;
  }
}
