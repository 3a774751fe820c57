// What is known of an answer while it is awaited: how long, what else the server does, how fast tokens come.

import { announce } from "./dom.js";

const TICK_MS = 500;
const ASK_AFTER_S = 2; // of waiting; then the server's load is shown
const ASK_EVERY_S = 3;
const STALL_S = 5; // without a token
const ANNOUNCE_EVERY_S = 30;

const counted = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

/** The sentence for people; `load` is `requests` of /v1/live, or null. */
export function progressText({ waited, stalled, usage, rate, load }) {
  const others = load ? `; this server has ${counted(load.running, "request")} running and ${load.waiting} queued` : "";
  if (waited !== null) return `Waiting for the first token: ${Math.floor(waited)} s${others}`;
  if (stalled >= STALL_S) return `No new token for ${Math.floor(stalled)} s${others}`;
  if (!usage?.completion_tokens) return "";
  return `${counted(usage.completion_tokens, "token")}${rate ? `, ${rate.toFixed(1)} tokens/s` : ""}`;
}

export class Progress {
  /** `show(text)` is called when the text may have changed. `answer` is an `Answer`. */
  constructor(page, answer, show) {
    this.page = page;
    this.answer = answer;
    this.show = show;
    this.latest = performance.now(); // token
    this.load = null;
    this.asked = -Infinity;
    this.announced = 0;
    this.timer = setInterval(() => this.#tick(), TICK_MS);
    this.#tick();
  }

  /** Called with each chunk. */
  arrived() {
    this.latest = performance.now();
    this.load = null;
  }

  end() {
    clearInterval(this.timer);
  }

  #tick() {
    const { first, started, message } = this.answer;
    const now = performance.now();
    const idle = (now - this.latest) / 1000;
    if (idle > ASK_AFTER_S && (now - this.asked) / 1000 > ASK_EVERY_S) this.#ask(now);
    const tokens = message.usage?.completion_tokens ?? 0;
    const rate = first !== null && tokens > 1 && now - first > 1000 ? (tokens - 1) / ((now - first) / 1000) : null;
    const waited = first === null ? (now - started) / 1000 : null;
    const text = progressText({ waited, stalled: idle, usage: message.usage, rate, load: this.load });
    this.show(text);
    if (idle >= (this.announced + 1) * ANNOUNCE_EVERY_S) {
      this.announced += 1;
      announce(text);
    }
  }

  /** The live view may be switched off: then the seconds alone are shown. */
  async #ask(now) {
    this.asked = now;
    if (this.page.hasNoLive) return;
    try {
      const found = await this.page.api.get("v1/live?layers=false");
      if (performance.now() - this.latest > ASK_AFTER_S * 1000) this.load = found.requests;
    } catch (error) {
      this.page.hasNoLive = error.status === 404;
    }
  }
}
