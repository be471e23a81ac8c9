// Section of the page: robots that policies drive, and how old their observations are when the actions come.

import { element, formatNumber, keepChildren, setBadge, setText } from "../dom.js";

export const id = "robots";
export const title = "Robots";
export const paths = ["edge/v1/policies"];

const LATE = "came after the robot had used up the actions before";

export function makePanel() {
  const badge = element("span");
  const table = element("table.rows");
  const known = new Map();
  function update(found) {
    const policies = found?.policies ?? [];
    const robots = policies.reduce((sum, item) => sum + item.robots, 0);
    setBadge(badge, found ? `${robots} connected` : "needs a key", robots ? "ok" : "");
    keepChildren(table, known, policies, (item) => `${item.model} ${item.wire}`, makeRow);
    return robots > 0;
  }
  return { heading: badge, nodes: [element("div.card", table)], update };
}

/** Return a row whose cells say what they are: on a phone they stand below each other. */
function makeRow() {
  const cells = Array.from({ length: 7 }, (_, at) => element(at ? "td.number" : "td.name", at === 5 ? { title: LATE } : {}));
  const old = (seconds) => formatNumber(seconds === null ? null : seconds * 1000, 1, " ms");
  const update = (item) => [
    item.model, `${item.robots} over ${item.wire}`, `${item.answered} answers`, `newest after ${old(item.newest_age_s)}`,
    `mean ${old(item.mean_age_s)}`, `${item.late} late`, `${item.invalid + item.too_old + item.failed} refused`,
  ].forEach((value, at) => setText(cells[at], value));
  return { node: element("tbody", element("tr", ...cells)), update };
}
