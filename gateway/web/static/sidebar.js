// The list of conversations: search, removal, export and import.

import { asMarkdown, exported, imported } from "./archive.js";
import { announce, byId, element, saveFile } from "./dom.js";
import { searchConversations } from "./search.js";

const MOST_FILE_BYTES = 200 * 2 ** 20;

export class Sidebar {
  /** `chat` has `list`, `current`, `open(conversation, index)`, `remove(conversation)` and `take(conversations)`. */
  constructor(page, chat) {
    this.page = page;
    this.chat = chat;
    this.field = byId("search");
    this.field.addEventListener("input", () => {
      const count = this.show();
      if (this.field.value.trim()) announce(`${count} ${count === 1 ? "conversation" : "conversations"} found`);
    });
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      byId("conversations").querySelector(".title")?.click();
    });
    byId("export").addEventListener("click", () => this.#export());
    byId("export-text").addEventListener("click", () => this.#exportText());
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.#import(event.target.files[0]));
  }

  /** Shows the conversations that the search finds; without a search all. Returns how many. */
  show() {
    const query = this.field.value;
    const found = query.trim() ? searchConversations(this.chat.list, query) : this.chat.list.map((conversation) => ({ conversation, index: -1, excerpt: "" }));
    byId("conversations").replaceChildren(...found.map((one) => this.#item(one)));
    byId("none-found").hidden = found.length > 0 || !query.trim();
    byId("export").disabled = !this.chat.list.length;
    byId("export-text").disabled = !this.chat.current.messages.length;
    return found.length;
  }

  #item({ conversation, index, excerpt }) {
    const isCurrent = conversation.id === this.chat.current.id;
    const title = element(
      "button",
      { type: "button", class: "quiet title", "aria-current": isCurrent ? "true" : null, onclick: () => this.chat.open(conversation, index) },
      element("span", {}, conversation.title || "New conversation"),
      excerpt ? element("small", { class: "muted" }, excerpt) : null,
    );
    const remove = element("button", { type: "button", class: "quiet", "aria-label": `Remove ${conversation.title}`, onclick: () => this.#remove(conversation) }, "✕");
    return element("li", {}, title, remove);
  }

  async #remove(conversation) {
    await this.chat.remove(conversation);
    announce("Conversation removed");
    const undo = async () => {
      await this.chat.take([conversation]);
      this.page.notice("");
      announce("Conversation restored");
    };
    this.page.notice(`Removed “${conversation.title}”.`, { text: "Undo", action: undo });
  }

  #export() {
    const day = new Date().toISOString().slice(0, 10);
    saveFile(`moebius-conversations-${day}.json`, "application/json", exported(this.chat.list));
  }

  #exportText() {
    const { current } = this.chat;
    const name = current.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40).replace(/^-|-$/g, "");
    saveFile(`${name || "conversation"}.md`, "text/markdown", asMarkdown(current));
  }

  async #import(file) {
    byId("import-file").value = "";
    if (!file) return;
    if (file.size > MOST_FILE_BYTES) {
      this.page.notice(`${file.name} is larger than 200 MiB.`);
      return;
    }
    try {
      const found = imported(await file.text());
      const numTaken = await this.chat.take(found);
      const known = found.length - numTaken;
      this.page.notice(`Imported ${numTaken} of ${found.length} conversations${known ? `; ${known} were here already` : ""}.`, null, false);
    } catch (error) {
      this.page.notice(`${file.name}: ${error.message}`);
    }
  }
}
