// The live view: figures of /v1/live, current and over time. Unknown figures are "not measured".

import { element, svg } from "./dom.js";
import { HeatMap, heatOf } from "./heat.js";

const EVERY_MS = 1000;
const LAYERS_EVERY = 3; // calls
const MOST_POINTS = 120;
const UNKNOWN = "not measured";

const giga = (bytes) => (bytes / 1e9).toFixed(bytes < 1e10 ? 2 : 1);
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`);
const whole = (value) => Math.round(value).toLocaleString("en");

/** The servers' work between two answers; null: unknown, or a server has restarted. */
export function serverRates(before, now) {
  const elapsed = now.time - before.time;
  const old = new Map((before.experts?.servers ?? []).map((server) => [server.index, server]));
  return (now.experts?.servers ?? []).map((server) => {
    const then = old.get(server.index);
    if (!server.is_up || !then?.is_up || then.instance !== server.instance || elapsed <= 0) return null;
    const bytes = server.weight_bytes - then.weight_bytes;
    const busy = server.busy_seconds - then.busy_seconds;
    const whileBusy = busy > 0 ? bytes / busy : null;
    const limit = server.calibrated_bytes_per_second;
    return {
      perSecond: bytes / elapsed,
      busyShare: Math.min(1, busy / elapsed),
      whileBusy,
      ofLimit: whileBusy !== null && limit ? whileBusy / limit : null,
    };
  });
}

/** What the view says while nothing runs; `steps` of /v1/live may be missing. */
export function idleText(steps, seconds) {
  const passes = steps ? ` ${steps.count ? whole(steps.count) : "No"} forward passes since the engine started.` : "";
  const since = seconds < 1 ? "" : ` for at least ${whole(seconds)} s`;
  return `Idle${since}: no request is running or queued.${passes} Send a message in Chat, and these figures move.`;
}

class Figure {
  constructor(title, hasLine) {
    this.value = element("dd", {}, "…");
    this.detail = element("dd", { class: "muted" });
    this.points = [];
    this.line = hasLine ? svg("polyline", { fill: "none", stroke: "currentColor", "stroke-width": "1.5", "vector-effect": "non-scaling-stroke" }) : null;
    const chart = hasLine ? svg("svg", { viewBox: `0 0 ${MOST_POINTS} 30`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.line) : null;
    this.node = element("div", { class: "figure" }, element("dl", {}, element("dt", {}, title), this.value, this.detail), chart);
  }

  show(text, detail = "", point = null) {
    this.value.textContent = text;
    this.detail.textContent = detail;
    if (!this.line) return;
    this.points.push(point ?? 0);
    if (this.points.length > MOST_POINTS) this.points.shift();
    const most = Math.max(...this.points, 1e-9);
    const first = MOST_POINTS - this.points.length;
    this.line.setAttribute("points", this.points.map((value, index) => `${first + index},${29 - (28 * value) / most}`).join(" "));
  }
}

function cells(tag, ...texts) {
  return element("tr", {}, texts.map((text) => element(tag, { scope: tag === "th" ? "col" : null }, text)));
}

/** A table that scrolls by itself if it is too wide. */
function table(title, columns, body) {
  const node = element("table", {}, element("thead", {}, cells("th", ...columns)), body);
  return element("div", { class: "table", tabindex: "0", role: "region", "aria-label": title }, node);
}

export class LiveView {
  constructor(page, node) {
    this.page = page;
    this.node = node;
    this.timer = null;
    this.calls = 0;
    this.last = null; // the answer before
    this.baseline = null; // counts by layer when the view was opened
    this.replica = 0; // of several engines behind one gateway
    this.#build();
  }

  #build() {
    this.figures = {
      tokens: new Figure("Output tokens/s", true),
      prompts: new Figure("Prompt tokens/s", true),
      first: new Figure("Time to first token", false),
      queue: new Figure("Requests", true),
      kv: new Figure("KV cache", true),
      bandwidth: new Figure("Expert weights read by CPUs", true),
    };
    this.servers = element("tbody");
    this.layers = element("tbody");
    this.heat = new HeatMap();
    this.note = element("p", { class: "muted" });
    this.streamed = element("p", { class: "muted" });
    this.idle = element("p", { class: "idle", hidden: true });
    this.idleSince = null; // seconds of the server's clock, as far as this view knows
    this.problem = element("p", { class: "notice", role: "alert", hidden: true });
    this.expertsPart = element(
      "section",
      { hidden: true, "aria-label": "Experts" },
      element("h2", {}, "Expert servers"),
      table("Expert servers", ["Server", "Where", "Format", "Busy", "Weights read", "While computing", "Measured at load", "Of that"], this.servers),
      element("h2", {}, "Experts by layer"),
      this.note,
      this.heat.node,
      this.streamed,
      table("Experts by layer", ["Layer", "On the GPU", "On CPU servers", "Chosen: GPU or streamed", "Computed by CPUs", "Hottest experts"], this.layers),
    );
    const figures = element("div", { class: "figures" }, Object.values(this.figures).map((figure) => figure.node));
    this.choice = element("select", { id: "replica", onchange: () => this.#choose(Number(this.choice.value)) });
    this.replicas = element("p", { hidden: true }, element("label", { for: "replica" }, "Engine "), this.choice);
    this.node.append(element("h2", { class: "hidden" }, "Load"), this.problem, this.replicas, this.idle, figures, this.expertsPart);
  }

  #choose(replica) {
    this.replica = replica;
    this.last = this.baseline = this.idleSince = null; // another engine's counters
    this.calls = 0;
    for (const figure of Object.values(this.figures)) figure.points = [];
  }

  #showReplicas(count) {
    this.replicas.hidden = count < 2;
    if (this.choice.length === count) return;
    const options = Array.from({ length: count }, (_, number) => element("option", { value: String(number) }, `${number + 1} of ${count}`));
    this.choice.replaceChildren(...options);
    this.choice.value = String(this.replica);
  }

  /** Polls while it is shown, and only then. */
  setShown(isShown) {
    clearTimeout(this.timer);
    this.timer = null;
    if (!isShown) {
      this.idleSince = null;
      this.last = this.baseline = null;
      return;
    }
    this.calls = 0;
    this.#ask();
  }

  async #ask() {
    let wait = EVERY_MS;
    if (document.visibilityState === "visible") wait = await this.#askNow();
    if (!this.node.hidden && wait !== null) this.timer = setTimeout(() => this.#ask(), wait);
  }

  /** Milliseconds to the next call; null: none. */
  async #askNow() {
    const withLayers = this.calls++ % LAYERS_EVERY === 0;
    try {
      const { replica } = this;
      const found = await this.page.api.get(`v1/live?layers=${withLayers}&replica=${replica}`);
      if (replica === this.replica) this.#show(found);
      this.problem.hidden = true;
      return EVERY_MS;
    } catch (error) {
      this.problem.hidden = false;
      this.problem.textContent = error.status === 404 ? "This server's live view is switched off (--no-live-view)." : error.message;
      if (error.status === 404) return null;
      return this.page.report(error) ? null : 3 * EVERY_MS;
    }
  }

  #show(now) {
    const { figures, last } = this;
    this.#showReplicas(now.replicas ?? 1);
    const { requests, kv_cache: kv, time_to_first_token: first } = now;
    figures.tokens.show(now.tokens_per_second.toFixed(1), "over the last 10 s", now.tokens_per_second);
    figures.prompts.show(now.prompt_tokens_per_second.toFixed(1), "over the last 10 s, cached ones included", now.prompt_tokens_per_second);
    figures.first.show(first ? `${seconds(first.p50_s)} median` : UNKNOWN, first ? `${seconds(first.p95_s)} at most for 95 % of ${first.count} outputs of the last minute, in the engine` : "no output started in the last minute");
    figures.queue.show(`${requests.running} running, ${requests.waiting} queued`, `of at most ${requests.max_running} at once; ${requests.preemptions} preemptions`, requests.running + requests.waiting);
    const used = kv.used_tokens / Math.max(1, kv.total_tokens);
    figures.kv.show(percent(used), `${whole(kv.used_tokens)} of ${whole(kv.total_tokens)} tokens; ${whole(kv.cached_tokens)} kept for reuse; ${percent(kv.prefix_hit_rate)} of prompt tokens found there`, used);
    this.#showIdle(now);
    this.expertsPart.hidden = now.experts === null;
    if (now.experts) {
      this.#showServers(now, last ? serverRates(last, now) : []);
      if (now.experts.layers) this.#showLayers(now.experts);
    } else {
      figures.bandwidth.show("no experts", "the model has no routed experts");
    }
    this.last = now;
  }

  #showIdle({ requests, steps, time }) {
    const isIdle = requests.running + requests.waiting === 0;
    this.idleSince = isIdle ? (this.idleSince ?? time) : null;
    this.idle.hidden = !isIdle;
    if (isIdle) this.idle.textContent = idleText(steps, time - this.idleSince);
  }

  #showServers({ experts: { servers } }, rates) {
    const known = rates.filter(Boolean);
    const total = known.reduce((sum, rate) => sum + rate.perSecond, 0);
    const limit = servers.every((server) => server.calibrated_bytes_per_second) ? servers.reduce((sum, server) => sum + server.calibrated_bytes_per_second, 0) : null;
    const roof = limit ? `kernels reached ${giga(limit)} GB/s when they were measured at load` : `roofline: ${UNKNOWN}`;
    if (!servers.length) this.figures.bandwidth.show("no servers", "no expert server computes here");
    else this.figures.bandwidth.show(known.length === servers.length ? `${giga(total)} GB/s` : UNKNOWN, roof, total);
    const rows = servers.map((server, index) => {
      if (!server.is_up) return cells("td", String(server.index), "does not answer", "", "", "", "", "", "");
      const rate = rates[index];
      const node = server.numa_node === null ? "" : `node ${server.numa_node}, `;
      return cells(
        "td",
        String(server.index),
        `${node}${server.num_threads} ${server.num_threads === 1 ? "thread" : "threads"}, ${server.isa}`,
        server.weight_format,
        rate ? percent(rate.busyShare) : "…",
        rate ? `${giga(rate.perSecond)} GB/s` : "…",
        rate ? (rate.whileBusy === null ? "idle" : `${giga(rate.whileBusy)} GB/s`) : "…",
        server.calibrated_bytes_per_second ? `${giga(server.calibrated_bytes_per_second)} GB/s` : UNKNOWN,
        rate && rate.ofLimit !== null ? percent(rate.ofLimit) : server.calibrated_bytes_per_second ? "idle" : UNKNOWN,
      );
    });
    this.servers.replaceChildren(...rows);
  }

  #showLayers(experts) {
    this.baseline ??= experts;
    const heat = heatOf(experts, this.baseline);
    if (heat.isStale) this.baseline = experts; // a server or the recorder has restarted
    const since = heat.hasNew ? "since this view was opened" : "since the servers started";
    const what = experts.recorder_is_on
      ? "Every choice is counted, wherever it is computed."
      : "Counted by the CPU servers; how hot experts on the GPU are is not measured (--expert-recorder stat counts them).";
    this.note.textContent = `${experts.num_experts} experts a layer, ${experts.top_k} for each token. Heat: rows ${since}. ${what}`;
    const { streamed } = experts;
    this.streamed.textContent = streamed
      ? `Streamed to the GPU: ${whole(streamed.steps)} steps of long prompts, ${giga(streamed.bytes)} GB of weights copied since the start.`
      : "No step streams experts to a GPU.";
    this.heat.show(experts, heat);
    this.layers.replaceChildren(
      ...experts.layers.map((layer, index) => {
        const { cpuRows, elsewhere, hottest } = heat.layers[index];
        return cells(
          "td",
          String(layer.layer),
          String(layer.gpu_experts.length),
          String(experts.servers.length ? experts.num_experts - layer.gpu_experts.length : 0),
          elsewhere === null ? UNKNOWN : whole(elsewhere),
          cpuRows === null ? UNKNOWN : whole(cpuRows),
          hottest.length ? hottest.map(([expert, rows]) => `${expert} (${whole(rows)})`).join(", ") : "none yet",
        );
      }),
    );
  }
}
