// Conversations: their display, and the requests that extend them.

import { Answer, ApiFailure, requestMessages } from "./api.js";
import { Composer } from "./composer.js";
import { announce, byId, element } from "./dom.js";
import { NO_SETTINGS, requestFields } from "./fields.js";
import { messageNode } from "./message.js";
import { Progress } from "./progress.js";
import { Sidebar } from "./sidebar.js";
import { Conversations, recall, remember } from "./store.js";

const SHOW_MS = 60; // between two redraws of an answer that grows
const KEEP_MS = 5000; // between two copies of it in the browser's database
const NOT_KEPT = "This browser's storage is full or closed: what is said now lasts as long as this page. Export it, or remove conversations.";
const CUT = "cut off: the page was closed";
const FROM_NEAR_END = 60; // pixels

const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;

export class Chat {
  /** `page` has `api`, `mcp`, `model`, `notice`, `report` and `findModel`. */
  constructor(page) {
    this.page = page;
    this.kept = new Conversations();
    this.list = [];
    this.running = null; // AbortController of the request under way
    this.current = this.#empty();
    this.log = byId("messages");
    this.composer = new Composer(page.notice, () => this.#send());
    this.sidebar = new Sidebar(page, this);
    this.isAtEnd = true;
    this.#listen();
  }

  #empty() {
    const settings = structuredClone(this.current?.settings ?? { ...NO_SETTINGS, ...recall("settings", {}) });
    return { id: newId(), title: "", updated: 0, settings, messages: [] };
  }

  get settings() {
    return this.current.settings;
  }

  saveSettings(settings) {
    this.current.settings = settings;
    remember("settings", settings);
    this.#showMessages();
    if (this.current.messages.length) this.#keep();
  }

  /** Reads stored conversations and shows the last one, unless the user has started one meanwhile. */
  async start() {
    this.#showAll();
    this.list = await this.kept.all();
    if (!(await this.kept.areKept())) this.page.notice(NOT_KEPT);
    const last = this.list.find((one) => one.id === recall("current", ""));
    if (last && !this.current.messages.length) {
      this.current = last;
      this.#showAll();
      this.#listTools();
    } else {
      this.sidebar.show();
    }
    this.composer.focus();
  }

  /** Calls that await their result get the buttons that run them. */
  async #listTools() {
    const { current, page } = this;
    if (!current.settings.mcp?.length || page.mcp.found.length) return;
    await page.mcp.tools();
    if (this.current === current && !this.running && current.messages.at(-1)?.toolCalls?.length) this.#showMessages();
  }

  #listen() {
    byId("new-chat").addEventListener("click", () => this.open(this.#empty()));
    byId("stop").addEventListener("click", () => this.stop());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running && !document.querySelector("dialog[open]")) this.stop();
    });
    this.log.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.log;
      this.isAtEnd = scrollHeight - scrollTop - clientHeight < FROM_NEAR_END;
    });
  }

  /** Shows a conversation; `index`: the message to scroll to, or -1. */
  open(conversation, index = -1) {
    if (this.running) this.stop();
    this.current = conversation;
    remember("current", conversation.id);
    document.body.classList.remove("menu-open");
    byId("menu").setAttribute("aria-expanded", "false");
    this.#showAll();
    this.#listTools();
    if (index >= 0) this.#showFound(index);
    this.composer.focus(true);
  }

  #showFound(index) {
    const node = this.log.querySelectorAll("article")[index];
    node?.classList.add("found");
    node?.scrollIntoView({ block: "start" });
  }

  async remove(conversation) {
    await this.kept.remove(conversation.id);
    this.list = await this.kept.all();
    if (conversation.id === this.current.id) this.open(this.#empty());
    else this.sidebar.show();
  }

  /** Adds conversations that are not here, or are older here. Returns how many were added. */
  async take(conversations) {
    const here = new Map(this.list.map((one) => [one.id, one.updated]));
    const added = conversations.filter((one) => !here.has(one.id) || here.get(one.id) < one.updated);
    const areKept = await Promise.all(added.map((one) => this.kept.put(one)));
    if (areKept.includes(false)) this.page.notice(NOT_KEPT);
    this.list = await this.kept.all();
    const shown = added.find((one) => one.id === this.current.id);
    if (shown) this.open(shown);
    else this.sidebar.show();
    return added.length;
  }

  async #keep(current = this.current) {
    current.updated = Date.now();
    const first = current.messages.find((message) => message.role === "user");
    current.title = (first?.content || "Image").replace(/\s+/g, " ").slice(0, 60);
    if (!(await this.kept.put(current))) this.page.notice(NOT_KEPT);
    if (current === this.current) remember("current", current.id);
    this.list = await this.kept.all();
    this.sidebar.show();
  }

  #showAll() {
    this.sidebar.show();
    this.#showMessages();
    this.#showRunning();
  }

  #showMessages() {
    const { settings, messages } = this.current;
    const nodes = messages.map((message, index) => this.#node(message, index));
    if (!nodes.length) nodes.push(element("p", { class: "empty muted" }, "What is said here goes to this server only and is kept in this browser."));
    if (settings.system) nodes.unshift(element("details", { class: "system muted" }, element("summary", {}, "System prompt"), element("p", {}, settings.system)));
    this.log.replaceChildren(...nodes);
    this.#scroll(true);
  }

  #node(message, index) {
    if (message.role === "assistant" && !message.times && !this.running) Object.assign(message, { times: { first: null, rest: null }, error: CUT });
    return messageNode(message, {
      edit: (text) => this.#edit(index, text),
      again: () => this.#again(index),
      goOn: () => this.#answer(message),
      results: (texts) => this.#giveResults(index, texts),
      mcp: this.page.mcp,
      isLast: index === this.current.messages.length - 1,
      isRunning: this.running !== null,
    });
  }

  #scroll(always = false) {
    if (always || this.isAtEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  #showRunning() {
    byId("stop").hidden = this.running === null;
    byId("send").hidden = this.running !== null;
    this.log.setAttribute("aria-busy", String(this.running !== null));
  }

  #send() {
    if (this.running || this.composer.isEmpty) return;
    this.current.messages.push(this.composer.take());
    this.#answer();
  }

  /** Replaces a user's message; what followed is dropped. */
  #edit(index, text) {
    const { messages } = this.current;
    messages.splice(index, Infinity, { ...messages[index], content: text });
    this.#answer();
  }

  /** Generates the answer at this place again. */
  #again(index) {
    this.current.messages.splice(index);
    this.#answer();
  }

  #giveResults(index, texts) {
    const calls = this.current.messages[index].toolCalls;
    calls.forEach(({ id }, number) => this.current.messages.push({ role: "tool", toolCallId: id, content: texts[number] }));
    this.#answer();
  }

  stop() {
    this.running?.abort();
    this.running = null;
  }

  /** The request for the next message; `begun`: the last message, which it continues, or null. Raises Error. */
  async #body({ settings, messages }, begun) {
    const { model, mcp } = this.page;
    if (model?.capabilities?.vision === false && messages.some((message) => message.images?.length)) {
      throw new Error("This model takes no images, and this conversation has some: begin a new one.");
    }
    const offered = settings.mcp?.length ? await mcp.chosen(settings.mcp) : [];
    return {
      model: model?.id,
      messages: requestMessages(settings.system, messages),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      ...(begun ? { continue_final_message: true, add_generation_prompt: false } : {}),
      ...requestFields(settings, offered),
    };
  }

  /** Requests the next message, or more of the last one. */
  async #answer(begun = null) {
    const { current } = this;
    const running = new AbortController();
    const message = begun ?? { role: "assistant", content: "", reasoning: "", toolCalls: [] };
    for (const name of ["times", "error", "stopped", "finish", "usage"]) delete message[name];
    if (!begun) current.messages.push(message);
    this.running = running;
    this.page.notice("");
    this.#showAll();
    this.composer.focus();
    announce("Answering");
    this.#keep(current); // the question outlives a page that is closed now
    let body;
    try {
      body = await this.#body(current, begun);
    } catch (error) {
      return this.#refuse(error, current, begun ? null : message);
    }
    await this.#receive(body, new Answer(message), running, current);
    return this.#ended(current, message);
  }

  /** Says why nothing is asked; the answer that was to come goes away. */
  #refuse(error, current, message) {
    if (message) current.messages = current.messages.filter((one) => one !== message);
    this.running = null;
    this.#keep(current);
    this.#showAll();
    this.page.notice(error.message);
  }

  /** Fills the answer from the server; what goes wrong stands in the message. */
  async #receive(body, answer, running, current) {
    const { message } = answer;
    const progress = new Progress(this.page, answer, (text) => this.current === current && this.log.lastElementChild.showProgress?.(text));
    try {
      await this.#stream(body, answer, running, current, progress);
    } catch (error) {
      if (running.signal.aborted) message.stopped = true;
      else if (error instanceof ApiFailure || error instanceof SyntaxError) {
        message.error = error.message;
        if (error.status === 401) this.page.report(error);
        if (error.status === 0) this.page.findModel(); // says when the server is back
      } else throw error;
    } finally {
      progress.end();
      answer.end();
      if (this.running === running) this.running = null;
    }
  }

  async #stream(body, answer, running, current, progress) {
    let timer = null;
    let due = 0;
    let keepAt = performance.now() + KEEP_MS;
    const draw = () => {
      timer = null;
      if (this.current !== current) return; // another conversation is shown
      const begin = performance.now();
      this.log.lastElementChild.update();
      this.#scroll();
      // Long answers take longer to draw; most of the time stays free for the user's actions.
      due = performance.now() + Math.max(SHOW_MS, 4 * (performance.now() - begin));
    };
    try {
      for await (const chunk of this.page.api.chat(body, running.signal)) {
        answer.add(chunk);
        progress.arrived();
        timer ??= setTimeout(draw, Math.max(0, due - performance.now()));
        if (performance.now() > keepAt) {
          keepAt = performance.now() + KEEP_MS;
          this.kept.put(current);
        }
      }
    } finally {
      clearTimeout(timer);
    }
  }

  async #ended(current, message) {
    await this.#keep(current);
    if (this.current === current) this.#showMessagesEnd(current, message);
    announce(message.error ? `Failed: ${message.error}` : message.stopped ? "Stopped" : "Answer finished");
  }

  /** Only the last node changes: focus and unfolded parts elsewhere stay. */
  #showMessagesEnd(current, message) {
    this.#showRunning();
    if (message !== current.messages.at(-1)) return; // the user has gone on
    this.log.lastElementChild?.replaceWith(this.#node(message, current.messages.length - 1));
    for (const node of this.log.children) node.setRunning?.(false);
    this.#scroll();
    this.composer.focus();
  }
}
