// The OpenAPI document as a page: each operation, its fields and answers, and a request to copy.

import { byId, copyButton, element } from "./dom.js";

const METHODS = ["get", "post", "put", "delete"];
const MOST_DEPTH = 6;

class Document {
  constructor(content) {
    this.content = content;
  }

  /** A schema with its references resolved. */
  resolve(schema) {
    let found = schema ?? {};
    for (let steps = 0; found.$ref && steps < 20; steps++) {
      found = found.$ref.slice(2).split("/").reduce((node, name) => node?.[name], this.content) ?? {};
    }
    return found;
  }

  /** The type in words, such as "string or list of string". */
  typeOf(schema, depth = 0) {
    const found = this.resolve(schema);
    const parts = found.anyOf ?? found.oneOf;
    if (parts && depth < MOST_DEPTH) return [...new Set(parts.map((part) => this.typeOf(part, depth + 1)))].join(" or ");
    if (found.const !== undefined) return JSON.stringify(found.const);
    if (found.enum) return found.enum.map((value) => JSON.stringify(value)).join(" | ");
    if (found.type === "array") return `list of ${depth < MOST_DEPTH ? this.typeOf(found.items, depth + 1) : "…"}`;
    if (Array.isArray(found.type)) return found.type.join(" or ");
    return found.title && found.properties ? found.title : (found.type ?? "anything");
  }

  /** A field's bounds in words. */
  boundsOf(schema) {
    const found = this.resolve(schema);
    const all = [found, ...(found.anyOf ?? []).map((part) => this.resolve(part))];
    const named = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<", maxItems: "at most", maxLength: "characters ≤" };
    return all.flatMap((part) => Object.entries(named).filter(([name]) => part[name] !== undefined).map(([name, sign]) => `${sign} ${part[name]}`));
  }

  /** The object schemas within a schema. */
  objectsOf(schema, depth = 0) {
    const found = this.resolve(schema);
    if (depth > MOST_DEPTH) return [];
    if (found.properties) return [found];
    const parts = [...(found.anyOf ?? []), ...(found.oneOf ?? []), ...(found.items ? [found.items] : [])];
    return parts.flatMap((part) => this.objectsOf(part, depth + 1));
  }

  fields(schema, seen = []) {
    const found = this.resolve(schema);
    const items = Object.entries(found.properties ?? {}).map(([name, field]) => {
      const isNeeded = (found.required ?? []).includes(name);
      const words = [this.typeOf(field), ...this.boundsOf(field)];
      const fixed = this.resolve(field).default;
      if (fixed !== undefined && fixed !== null) words.push(`default ${JSON.stringify(fixed)}`);
      const inner = this.objectsOf(field).filter((one) => !seen.includes(one));
      const nested = inner.map((one) =>
        element("details", {}, element("summary", {}, one.title ?? "object"), this.fields(one, [...seen, one])),
      );
      const text = field.description ?? this.resolve(field).description;
      return element("li", {}, element("code", {}, name), isNeeded ? element("strong", {}, " required") : "", element("span", { class: "muted" }, ` ${words.join(", ")}`), text ? element("div", {}, text) : null, ...nested);
    });
    return element("ul", { class: "fields" }, items);
  }
}

function curl(path, method, hasBody) {
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const lines = [`curl ${base}${path}`];
  if (method !== "get") lines.push("-H 'Content-Type: application/json'");
  if (hasBody) lines.push(`-d '${JSON.stringify(example(path))}'`);
  return lines.join(" \\\n  ");
}

function example(path) {
  if (path.includes("chat") || path.includes("messages")) return { messages: [{ role: "user", content: "Hello" }], max_tokens: 64 };
  if (path.includes("detokenize")) return { tokens: [1, 2, 3] };
  if (path.includes("responses")) return { input: "Hello" };
  return { prompt: "Hello" };
}

function operationNode(found, path, method, operation) {
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  const text = curl(path, method, Boolean(body));
  const node = element(
    "details",
    { class: "operation" },
    element("summary", {}, element("span", { class: "method" }, method.toUpperCase()), element("code", {}, path), ` ${operation.summary ?? ""}`),
  );
  node.addEventListener(
    "toggle",
    () => {
      const parameters = (operation.parameters ?? []).map((one) => element("li", {}, element("code", {}, one.name), element("span", { class: "muted" }, ` in ${one.in}, ${found.typeOf(one.schema)}`)));
      const answers = Object.entries(operation.responses ?? {}).map(([status, one]) => element("li", {}, element("code", {}, status), ` ${one.description ?? ""}`));
      node.append(
        element(
          "div",
          {},
          operation.description ? element("p", {}, operation.description) : null,
          parameters.length ? [element("h3", {}, "Parameters"), element("ul", { class: "fields" }, parameters)] : null,
          body ? [element("h3", {}, "Fields of the body"), found.fields(body)] : null,
          element("h3", {}, "Answers"),
          element("ul", { class: "fields" }, answers),
          element("div", { class: "code" }, element("div", { class: "code-head" }, element("span", {}, "shell"), copyButton(() => text)), element("pre", { tabindex: "0" }, text)),
        ),
      );
    },
    { once: true },
  );
  return node;
}

async function show() {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`openapi.json: ${response.status}`);
  const found = new Document(await response.json());
  byId("model").textContent = `version ${found.content.info.version}`;
  const nodes = Object.entries(found.content.paths).flatMap(([path, operations]) =>
    METHODS.filter((method) => operations[method]).map((method) => operationNode(found, path, method, operations[method])),
  );
  byId("docs-view").append(
    element("p", { class: "muted" }, "Where this server wants a key, send it as ", element("code", {}, "Authorization: Bearer KEY"), "."),
    ...nodes,
  );
}

show().catch((error) => {
  byId("notice").hidden = false;
  byId("notice").textContent = `The description cannot be read: ${error.message}`;
});
