// Inputs and outputs of a request as a table: names, types, shapes, and the values in short.

import { element, headOf } from "./dom.js";
import { isFloat } from "./tensors.js";

const MAX_LISTED = 32;
const MAX_RANKED = 5;
const MAX_CLASSES = 100000;

/** Return a table of tensors {name, datatype, shape, values}; without values, `fill` says what they are. */
export function tensorTable(title, tensors) {
  return element(
    "table.tensors", { "aria-label": title },
    headOf([title], ["Type"], ["Shape"], ["Values"]),
    element("tbody", ...tensors.map(({ name, datatype, shape, fill, values }) => element(
      "tr", element("td.name", name), element("td", datatype), element("td", `[${shape.join(", ")}]`),
      element("td.values", ...(values ? valueNodes(values, shape, datatype) : [fill])),
    ))),
  );
}

function valueNodes(values, shape, datatype) {
  if (!values.length) return ["no elements"];
  if (datatype === "BYTES" || datatype === "BOOL") return [element("code", listed(values, datatype))];
  const nodes = [element("div", summaryOf(values))];
  // A vector of scores: which are the largest?
  if (isFloat(datatype) && shape.filter((size) => size !== 1).length === 1 && values.length > MAX_RANKED && values.length <= MAX_CLASSES) {
    const best = Array.from(values.keys()).sort((a, b) => values[b] - values[a]).slice(0, MAX_RANKED);
    nodes.push(element("div.muted", `largest: ${best.map((index) => `[${index}] ${short(values[index])}`).join(", ")}`));
  }
  nodes.push(element("code", listed(values, datatype)));
  return nodes;
}

function listed(values, datatype) {
  const first = Array.from(values.slice(0, MAX_LISTED), (value) => (datatype === "BYTES" ? JSON.stringify(value) : datatype === "BOOL" ? String(Boolean(value)) : short(value)));
  return `[${first.join(", ")}${values.length > MAX_LISTED ? `, … ${values.length - MAX_LISTED} more` : ""}]`;
}

function summaryOf(values) {
  let [least, most, sum, count] = [Infinity, -Infinity, 0, 0];
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    least = Math.min(least, value);
    most = Math.max(most, value);
    sum += value;
    count += 1;
  }
  const strange = values.length - count;
  const range = count ? `${short(least)} to ${short(most)}, mean ${short(sum / count)}` : "no finite value";
  return strange ? `${range}; ${strange} not finite` : range;
}

function short(value) {
  if (Number.isInteger(value) || !Number.isFinite(value)) return String(value);
  return Math.abs(value) < 1e-4 ? value.toExponential(2) : String(Number(value.toPrecision(5)));
}
