// Conversations: their display, and the requests that extend them.

import { Answer, ApiFailure, requestMessages } from "./api.js";
import { announce, byId, element } from "./dom.js";
import { messageNode } from "./message.js";
import { NO_SETTINGS, requestFields } from "./settings.js";
import { Conversations, recall, remember } from "./store.js";

const MOST_IMAGE_BYTES = 20 * 2 ** 20;
const SHOW_MS = 60; // between two redraws of an answer that grows

const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;

export class Chat {
  constructor(page) {
    this.page = page;
    this.kept = new Conversations();
    this.list = [];
    this.images = []; // data URLs of what is attached to the next message
    this.running = null; // AbortController of the request under way
    this.current = this.#empty();
    this.log = byId("messages");
    this.composer = byId("composer");
    this.#listen();
  }

  #empty() {
    return { id: newId(), title: "", updated: 0, settings: structuredClone(this.current?.settings ?? recall("settings", NO_SETTINGS)), messages: [] };
  }

  get settings() {
    return this.current.settings;
  }

  saveSettings(settings) {
    this.current.settings = settings;
    remember("settings", settings);
    if (this.current.messages.length) this.#keep();
  }

  /** Reads stored conversations and shows the last one, unless the user has started one meanwhile. */
  async start() {
    this.#showAll();
    this.list = await this.kept.all();
    if (!(await this.kept.areKept())) this.page.notice("This browser keeps no conversations: they last as long as this page.");
    const last = this.list.find((one) => one.id === recall("current", ""));
    if (last && !this.current.messages.length) {
      this.current = last;
      this.#showAll();
    } else {
      this.#showList();
    }
  }

  #listen() {
    byId("new-chat").addEventListener("click", () => this.#open(this.#empty()));
    byId("stop").addEventListener("click", () => this.stop());
    byId("composer-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.composer.addEventListener("keydown", (event) => {
      const isTouch = matchMedia("(pointer: coarse)").matches;
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouch) {
        event.preventDefault();
        this.#send();
      }
    });
    this.composer.addEventListener("input", () => this.#fitComposer());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running && !document.querySelector("dialog[open]")) this.stop();
    });
    byId("attach").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", (event) => this.#attach([...event.target.files]));
    this.composer.addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      if (files.length) this.#take(files);
    });
    this.#takeDropped();
    this.log.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.log;
      this.isAtEnd = scrollHeight - scrollTop - clientHeight < 60;
    });
    this.isAtEnd = true;
  }

  /** Sets the height to that of its text, which may wrap; the style sheet bounds it. */
  #fitComposer() {
    const { style } = this.composer;
    style.height = "auto";
    if (this.composer.value) style.height = `${this.composer.scrollHeight + 2}px`; // its borders
  }

  /** Attaches images that are dropped anywhere on the conversation; other files would replace the page. */
  #takeDropped() {
    const view = byId("chat-view");
    const hasFiles = (event) => event.dataTransfer.types.includes("Files");
    view.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      event.dataTransfer.dropEffect = byId("attach").hidden ? "none" : "copy";
    });
    view.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.#take([...event.dataTransfer.files]);
    });
  }

  /** Attaches images among dropped or pasted files, and says why others are not attached. */
  #take(files) {
    const images = files.filter((file) => byId("file").accept.split(",").includes(file.type));
    if (byId("attach").hidden) this.page.notice("This model takes no images.");
    else if (images.length < files.length) this.page.notice("Only images can be attached: PNG, JPEG or WebP.");
    if (images.length && !byId("attach").hidden) this.#attach(images);
  }

  async #attach(files) {
    for (const file of files) {
      if (file.size > MOST_IMAGE_BYTES) {
        this.page.notice(`${file.name} is larger than 20 MiB.`);
        continue;
      }
      const reader = new FileReader();
      reader.readAsDataURL(file);
      await new Promise((resolve) => (reader.onloadend = resolve));
      if (reader.result) this.images.push(reader.result);
    }
    byId("file").value = "";
    this.#showImages();
  }

  #showImages() {
    const remove = (index) => {
      this.images.splice(index, 1);
      this.#showImages();
    };
    byId("attachments").replaceChildren(
      ...this.images.map((url, index) =>
        element("button", { type: "button", class: "thumbnail", "aria-label": `Remove image ${index + 1}`, onclick: () => remove(index) }, element("img", { src: url, alt: "" })),
      ),
    );
  }

  #open(conversation) {
    if (this.running) this.stop();
    this.current = conversation;
    remember("current", conversation.id);
    document.body.classList.remove("menu-open");
    byId("menu").setAttribute("aria-expanded", "false");
    this.#showAll();
    this.composer.focus();
  }

  async #remove(conversation) {
    await this.kept.remove(conversation.id);
    this.list = await this.kept.all();
    if (conversation.id === this.current.id) this.#open(this.#empty());
    else this.#showList();
    announce("Conversation removed");
  }

  async #keep() {
    const { current } = this;
    current.updated = Date.now();
    const first = current.messages.find((message) => message.role === "user");
    current.title = (first?.content || "Image").replace(/\s+/g, " ").slice(0, 60);
    await this.kept.put(current);
    remember("current", current.id);
    this.list = await this.kept.all();
    this.#showList();
  }

  #showList() {
    const items = this.list.map((one) => {
      const isCurrent = one.id === this.current.id;
      const open = element("button", { type: "button", class: "quiet title", "aria-current": isCurrent ? "true" : null, onclick: () => this.#open(one) }, one.title || "New conversation");
      const remove = element("button", { type: "button", class: "quiet", "aria-label": `Remove ${one.title}`, onclick: () => this.#remove(one) }, "✕");
      return element("li", {}, open, remove);
    });
    byId("conversations").replaceChildren(...items);
  }

  #showAll() {
    this.#showList();
    this.#showMessages();
    this.#showRunning();
  }

  #showMessages() {
    const nodes = this.current.messages.map((message, index) => this.#node(message, index));
    if (!nodes.length) nodes.push(element("p", { class: "empty muted" }, "What is said here goes to this server only and is kept in this browser."));
    this.log.replaceChildren(...nodes);
    this.#scroll(true);
  }

  #node(message, index) {
    return messageNode(message, {
      edit: (text) => this.#edit(index, text),
      again: () => this.#again(index),
      results: (texts) => this.#giveResults(index, texts),
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
    const content = this.composer.value.trim();
    if (this.running || (!content && !this.images.length)) return;
    this.current.messages.push({ role: "user", content, images: this.images });
    this.composer.value = "";
    this.images = [];
    this.#fitComposer();
    this.#showImages();
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
  }

  async #answer() {
    const { current } = this;
    const message = { role: "assistant", content: "", reasoning: "", toolCalls: [] };
    let body;
    try {
      body = {
        model: this.page.model?.id,
        messages: requestMessages(current.settings.system, current.messages),
        stream: true,
        stream_options: { include_usage: true },
        ...requestFields(current.settings),
      };
    } catch (error) {
      this.page.notice(error.message);
      return;
    }
    const running = new AbortController();
    this.running = running;
    current.messages.push(message);
    this.page.notice("");
    this.#showAll();
    announce("Answering");
    const answer = new Answer(message);
    try {
      await this.#stream(body, answer, running, current);
    } catch (error) {
      if (running.signal.aborted) message.stopped = true;
      else if (error instanceof ApiFailure || error instanceof SyntaxError) {
        message.error = error.message;
        if (error.status === 401) this.page.report(error);
      } else throw error;
    } finally {
      answer.end();
      if (this.running === running) this.running = null;
    }
    await this.#ended(current, message);
  }

  async #stream(body, answer, running, current) {
    let timer = null;
    let due = 0;
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
        timer ??= setTimeout(draw, Math.max(0, due - performance.now()));
      }
    } finally {
      clearTimeout(timer);
    }
  }

  async #ended(current, message) {
    if (this.current === current) {
      await this.#keep();
      this.#showMessagesEnd(current, message);
    } else {
      await this.kept.put(current);
    }
    announce(message.error ? `Failed: ${message.error}` : message.stopped ? "Stopped" : "Answer finished");
  }

  /** Only the last node changes: focus and unfolded parts elsewhere stay. */
  #showMessagesEnd(current, message) {
    this.#showRunning();
    const nodes = current.messages.map((one, index) => (one === message ? this.#node(one, index) : null));
    this.log.lastElementChild?.replaceWith(nodes[current.messages.indexOf(message)]);
    for (const node of this.log.children) node.setRunning?.(false);
    this.#scroll();
  }
}
