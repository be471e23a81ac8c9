// What is wrong, each sentence once with the number of boxes that say it.

import { byId, element, setText } from "../dom.js";
import { searchFor } from "./boxes.js";
import { badgeOf, isInTrouble, TROUBLES } from "./troubles.js";

const MAX_SHOWN = 5;
const KINDS = Object.keys(TROUBLES);
let isOpen = false;
let shown = "";
let boxes = [];

byId("wrong-more").addEventListener("click", () => {
  isOpen = !isOpen;
  showWrong(boxes);
});

export function showWrong(all) {
  boxes = all;
  const groups = new Map();
  for (const box of all) {
    for (const problem of isInTrouble(box) ? box.problems : []) {
      if (!groups.has(problem)) groups.set(problem, { problem, state: box.state, names: [] });
      const found = groups.get(problem);
      found.names.push(box.name);
      if (KINDS.indexOf(box.state) < KINDS.indexOf(found.state)) found.state = box.state;
    }
  }
  // What one box alone says stands in its row.
  const found = [...groups.values()].filter(({ names }) => names.length > 1).sort((a, b) => b.names.length - a.names.length);
  byId("wrong").hidden = !found.length;
  byId("wrong-more").hidden = found.length <= MAX_SHOWN;
  byId("wrong-more").setAttribute("aria-expanded", String(isOpen));
  setText(byId("wrong-more"), isOpen ? "Show fewer" : `Show ${found.length - MAX_SHOWN} more`);
  const listed = isOpen ? found : found.slice(0, MAX_SHOWN);
  const text = JSON.stringify(listed);
  if (text === shown) return;
  shown = text;
  byId("wrong-list").replaceChildren(...listed.map(({ problem, state, names }) => element(
    "li", element("span", element(`span.badge.${badgeOf(state).kind}`, `${names.length} boxes`)), element("span", problem),
    element("button", { "aria-label": `Show the ${names.length} boxes that say: ${problem}`, click: () => {
      searchFor(problem);
      byId("boxes").scrollIntoView();
      byId("search").focus({ preventScroll: true });
    } }, "Show"),
  )));
}
