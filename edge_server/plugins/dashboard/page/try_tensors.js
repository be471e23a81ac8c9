// "Try it" for tensors as JSON.

import { postJson } from "./api.js";
import { element } from "./dom.js";
import { run, showResult } from "./try_run.js";

const MAX_VALUES = 4096;
const MAX_SHOWN = 20000;

export function tensorForm(name, metadata) {
  const body = element("textarea", { id: "try-json", rows: "10", class: "mono", spellcheck: "false" });
  body.value = exampleOf(metadata);
  const send = (event) => {
    event.preventDefault();
    run(async () => {
      const answer = JSON.stringify(await postJson(`v2/models/${encodeURIComponent(name)}/infer`, JSON.parse(body.value)), null, 1);
      const text = answer.length > MAX_SHOWN ? `${answer.slice(0, MAX_SHOWN)}\n… ${answer.length - MAX_SHOWN} more characters` : answer;
      showResult(element("pre", { class: "output", tabindex: "0", "aria-label": "Answer" }, text));
    });
  };
  return [element("form", { submit: send }, element("label", { for: "try-json" }, "Request as JSON"), body,
                  element("div", { class: "row" }, element("button", { type: "submit", class: "primary" }, "Send")))];
}

/** Return a request with zeros, or without data for inputs that are too large to type. */
function exampleOf({ inputs }) {
  const tensors = inputs.map(({ name, datatype, shape }) => {
    const dims = shape.map((size) => (size < 0 ? 1 : size));
    const count = dims.reduce((product, size) => product * size, 1);
    const zero = datatype === "BYTES" ? "" : datatype === "BOOL" ? false : 0;
    return { name, datatype, shape: dims, data: count <= MAX_VALUES ? Array(count).fill(zero) : [] };
  });
  return JSON.stringify({ inputs: tensors }, (key, value) => value, 1).replace(/\[\s+([^[\]{}]*?)\s+\]/g, (_, values) => `[${values.replace(/\s+/g, " ")}]`);
}
