// How hot experts are: computed from two answers of /v1/live, and drawn.

import { element } from "./dom.js";

const HOTTEST = 4;
const MOST_HEIGHT = 420; // CSS pixels

const sum = (values) => values.reduce((total, value) => total + value, 0);

/**
 * Heat by layer: rows of each expert since `before`; since the start where nothing has happened since.
 *
 * `isStale`: a count fell, so a process has restarted and `before` is invalid. Of a layer: `heat` per expert,
 * null where unknown; `cpuRows` and `elsewhere` (rows computed by CPU servers and not by them), null: unknown.
 */
export function heatOf(experts, before) {
  const changes = experts.layers.map((layer, index) => change(layer, before.layers[index]));
  const isStale = changes.some((one) => one.fell);
  const hasNew = !isStale && changes.some((one) => sum(one.chosen ?? one.cpu ?? []) > 0);
  const layers = experts.layers.map((layer, index) => {
    const { cpu, chosen } = hasNew ? changes[index] : { cpu: layer.cpu_rows, chosen: layer.chosen };
    const onGpu = new Set(layer.gpu_experts);
    const heat = Array.from({ length: experts.num_experts }, (_, expert) => {
      if (chosen) return chosen[expert];
      return cpu && !onGpu.has(expert) ? cpu[expert] : null;
    });
    const cpuRows = cpu ? sum(cpu) : null;
    const hottest = [...heat.entries()].filter(([, rows]) => rows > 0).sort((a, b) => b[1] - a[1]).slice(0, HOTTEST);
    return { heat, onGpu, cpuRows, elsewhere: chosen && cpu && hasNew ? Math.max(0, sum(chosen) - cpuRows) : null, hottest };
  });
  return { layers, isStale, hasNew };
}

function change(layer, before) {
  const difference = (now, then) => (now && then ? now.map((value, expert) => value - then[expert]) : null);
  const cpu = difference(layer.cpu_rows, before?.cpu_rows);
  const chosen = difference(layer.chosen, before?.chosen);
  return { cpu, chosen, fell: [...(cpu ?? []), ...(chosen ?? [])].some((value) => value < 0) };
}

/** A row per layer, a column per expert: the colour shows where an expert is, its strength how hot it is. */
export class HeatMap {
  constructor() {
    this.canvas = element("canvas", { role: "img" });
    this.label = element("p", { class: "muted", "aria-hidden": "true" });
    const texts = { gpu: "on the GPU", cpu: "on CPU servers", cold: "never chosen, or not measured" };
    this.keys = Object.entries(texts).map(([kind, text]) => element("span", { class: `key ${kind}` }, text));
    const legend = element("p", { class: "legend" }, this.keys);
    this.node = element("div", { class: "heat" }, legend, this.canvas, this.label);
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.shown = null;
  }

  show(experts, heat) {
    this.shown = { experts, heat };
    const { canvas } = this;
    const columns = experts.num_experts;
    const rows = experts.layers.length;
    const width = Math.max(columns, canvas.clientWidth || 600);
    const height = Math.min(MOST_HEIGHT, Math.max(rows * 4, Math.min(rows * 14, MOST_HEIGHT)));
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
    // The legend's own colours: a canvas cannot use those of a style sheet.
    const [gpu, cpu, cold] = this.keys.map((node) => getComputedStyle(node, "::before").backgroundColor);
    const colours = { gpu, cpu, cold };
    const context = canvas.getContext("2d");
    const [wide, high] = [canvas.width / columns, canvas.height / rows];
    const gap = wide > 4 ? 1 : 0;
    heat.layers.forEach((layer, row) => {
      const most = Math.max(1, ...layer.heat.map((value) => value ?? 0));
      layer.heat.forEach((value, expert) => {
        const place = layer.onGpu.has(expert) ? "gpu" : "cpu";
        context.globalAlpha = 1;
        context.fillStyle = colours.cold;
        context.fillRect(expert * wide, row * high, wide - gap, high - gap);
        // Experts of the GPU stay visible where they are not counted.
        const strength = value ? 0.15 + 0.85 * (value / most) : place === "gpu" ? 0.12 : 0;
        context.globalAlpha = strength;
        context.fillStyle = colours[place];
        context.fillRect(expert * wide, row * high, wide - gap, high - gap);
      });
    });
    const resident = sum(experts.layers.map((layer) => layer.gpu_experts.length));
    canvas.setAttribute("aria-label", `Heat of ${columns} experts in ${rows} layers, ${resident} of them on the GPU; the table below has the figures`);
  }

  /** Draws the same again, for example in other colours. */
  redraw() {
    if (this.shown) this.show(this.shown.experts, this.shown.heat);
  }

  #point(event) {
    if (!this.shown) return;
    const { experts, heat } = this.shown;
    const box = this.canvas.getBoundingClientRect();
    const expert = Math.floor(((event.clientX - box.left) / box.width) * experts.num_experts);
    const row = Math.floor(((event.clientY - box.top) / box.height) * experts.layers.length);
    const layer = heat.layers[row];
    if (!layer || layer.heat[expert] === undefined) return;
    const value = layer.heat[expert];
    const place = layer.onGpu.has(expert) ? "on the GPU" : "on CPU servers";
    this.label.textContent = `layer ${experts.layers[row].layer}, expert ${expert}, ${place}: ${value === null ? "not measured" : `${value} rows`}`;
  }
}
