// The table of boxes: filters, search, and what is wrong with each. Boxes in trouble are first and are never folded away.

import { byId, cellsOf, element, note, placeChildren, setBadge, setText, titleRow } from "../dom.js";
import { agoOf, badgeOf, compareBoxes, isInTrouble, timeOf, TROUBLES } from "./troubles.js";

const MAX_SHOWN = 100;
const MAX_PROBLEMS = 3;
const MAX_MODELS = 4;
const COLUMNS = [
  ["name", "Box"], ["state", "State"], ["since", "Since"], ["models", "Serves"], ["version", "Server"], ["heat", "Temperature"], ["groups", "Groups"],
  ["actions", "Actions"],
];
const rows = new Map();
const search = byId("search");
const group = byId("group");
const more = byId("boxes-more");
// The filters stand in the address: a reload keeps them, and a link to them can be sent.
const given = new URLSearchParams(location.search);
let kind = given.get("kind") ?? "";
let wantedGroup = given.get("group") ?? "";
search.value = given.get("search") ?? "";
let isOpen = false;
let all = [];

byId("boxes-rows").tHead.append(titleRow(COLUMNS));

const chips = new Map([["", "all"], ["trouble", "in trouble"], ...Object.entries(TROUBLES).map(([name, { text }]) => [name, text])].map(([name, text]) => {
  const count = element("span.number");
  const button = element("button", { "data-kind": name, click: () => {
    kind = name === kind ? "" : name;
    show(new Set());
  } }, `${text} `, count);
  byId("kinds").append(button);
  return [name, { button, count }];
}));
search.addEventListener("input", () => show(new Set()));
group.addEventListener("change", () => {
  wantedGroup = group.value;
  show(new Set());
});
more.addEventListener("click", () => {
  isOpen = !isOpen;
  show(new Set());
});

/** Show all boxes with a text, and no others. */
export function searchFor(text) {
  kind = group.value = wantedGroup = "";
  search.value = text;
  show(new Set());
}

function keepInAddress() {
  const filters = String(new URLSearchParams(Object.entries({ kind, group: wantedGroup, search: search.value }).filter(([, value]) => value)));
  const query = filters && `?${filters}`;
  if (query !== location.search) history.replaceState(null, "", location.pathname + query + location.hash);
}

/** Show boxes, of which those with a key in `changed` are others than before. */
export function showBoxes(boxes, changed) {
  all = boxes;
  show(changed);
}

/** Renew what says how long ago something was. The other rows are left as they are. */
export function showAges() {
  for (const row of rows.values()) row.showAge();
}

const isOfKind = (box, name) => !name || (name === "trouble" ? isInTrouble(box) : box.troubles.includes(name));

const textOf = (box) => [
  box.name, box.address, badgeOf(box.state).text, box.version, box.heat, ...box.groups, ...box.machines, ...box.problems,
  ...box.models.flatMap((model) => [model.name, model.serves, model.installed, model.wanted]),
].join("\n").toLowerCase();

function show(changed) {
  showGroups();
  keepInAddress();
  for (const [name, { button, count }] of chips) {
    const found = all.filter((box) => isOfKind(box, name)).length;
    setText(count, String(found));
    button.hidden = !found && name !== kind && name !== "";
    button.setAttribute("aria-pressed", String(name === kind));
  }
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = all.filter((box) => isOfKind(box, kind) && (!group.value || box.groups.includes(group.value)) && matches(box, words)).sort(compareBoxes);
  const troubled = found.filter(isInTrouble).length;
  const limit = isOpen ? found.length : Math.max(MAX_SHOWN, troubled);
  const folded = Math.max(0, found.length - limit);
  place(found.slice(0, limit), changed);
  setText(byId("boxes-count"), found.length === all.length ? String(all.length) : `${found.length} of ${all.length}`);
  more.hidden = !folded && !(isOpen && found.length > MAX_SHOWN);
  more.setAttribute("aria-expanded", String(isOpen));
  setText(more, isOpen ? "Show fewer" : `Show ${folded} more`);
  note(byId("boxes-empty"), found.length ? "" : all.length ? "No box is like this." : "There is no box yet.");
}

function matches(box, words) {
  if (!words.length) return true;
  const text = textOf(box);
  return words.every((word) => text.includes(word));
}

function showGroups() {
  const names = [...new Set(all.flatMap((box) => box.groups))].sort();
  if (names.join("\n") !== [...group.options].slice(1).map((option) => option.value).join("\n")) {
    group.replaceChildren(element("option", { value: "" }, "all"), ...names.map((name) => element("option", { value: name }, name)));
    if (names.includes(wantedGroup)) group.value = wantedGroup;
  }
  byId("group-field").hidden = !names.length;
}

/** Have a row for each of these boxes, in order. Only new rows and those of changed boxes are filled. */
function place(boxes, changed) {
  const wanted = new Set(boxes.map((box) => box.key));
  for (const [key, { node }] of rows) {
    if (wanted.has(key)) continue;
    node.remove();
    rows.delete(key);
  }
  placeChildren(byId("boxes-rows"), boxes.map((box) => {
    const isNew = !rows.has(box.key);
    if (isNew) rows.set(box.key, makeRow());
    const row = rows.get(box.key);
    if (isNew || changed.has(box.key)) row.update(box);
    return row.node;
  }), 1);
}

function makeRow() {
  const cells = cellsOf(COLUMNS, "name", "state", "models", "actions");
  const [name, stateCell, since, models, version, heat, groups, actions] = cells;
  const state = element("span");
  const reason = element("td", { colspan: COLUMNS.length, role: "cell" });
  const reasonRow = element("tr", { role: "row", hidden: true }, reason);
  const details = element("td.details", { colspan: COLUMNS.length, role: "cell" });
  const detailsRow = element("tr", { role: "row", hidden: true }, details);
  const link = element("a", { target: "_blank", rel: "noreferrer" });
  const title = element("span");
  const address = element("span.address.muted");
  const toggle = element("button", { "aria-expanded": "false", click: () => {
    detailsRow.hidden = !detailsRow.hidden;
    toggle.setAttribute("aria-expanded", String(!detailsRow.hidden));
    fill();
  } }, "Details");
  let now = null;
  name.append(link, title, address);
  stateCell.append(state);
  actions.append(toggle);
  const node = element("tbody", { role: "rowgroup" }, element("tr", { role: "row" }, ...cells), reasonRow, detailsRow);

  function update(box) {
    now = box;
    const { text, kind: badge } = badgeOf(box.state);
    node.dataset.box = box.name;
    note(link, box.page ? box.name : "");
    if (box.page) link.href = box.page;
    note(title, box.page ? "" : box.name);
    note(address, box.address === box.name ? "" : box.address);
    toggle.setAttribute("aria-label", `Details of ${box.name}`);
    setBadge(state, text, badge);
    // Since when a first answer was true is not known: at least since the page asks.
    const isShown = box.troubles.length && (box.is_since_known || Date.now() / 1000 - box.since_s > 60);
    setText(since, isShown ? `${box.is_since_known ? "" : "over "}${agoOf(box.since_s)}` : "");
    since.title = box.troubles.length ? timeOf(box.since_s) : "";
    const served = box.models.map(servedText).filter(Boolean);
    setText(models, [...served.slice(0, MAX_MODELS), ...(served.length > MAX_MODELS ? [`${served.length - MAX_MODELS} more`] : [])].join(" · "));
    setText(version, box.version);
    setText(heat, heatOf(box));
    heat.classList.toggle("hot", box.troubles.includes("hot"));
    setText(groups, box.groups.join(", "));
    reasonRow.hidden = !box.problems.length;
    const left = box.problems.length - MAX_PROBLEMS;
    reason.className = `reason ${badge}`;
    reason.replaceChildren(
      [...box.problems.slice(0, MAX_PROBLEMS), ...(left > 0 ? [`${left} more: see its details`] : [])].join("\n"),
      ...(box.advice ? [element("span.next", `\n${box.advice}`)] : []),
    );
    fill();
  }

  function fill() {
    if (detailsRow.hidden || !now) return;
    const facts = [
      ["Address", now.address], ["Last answer", now.seen_s && `${timeOf(now.seen_s)}, ${agoOf(now.seen_s)} ago`], ["Machine", now.machines.join(", ")],
      ["Governor", now.heat && `${now.heat}${now.load_limit_percent === null ? "" : `, models run at ${now.load_limit_percent} % of their speed`}`],
      ["Releases", now.follows ? "" : now.version && "does not follow a signed repository"],
      ...now.models.map((model) => [model.name, modelText(model)]),
      ...now.problems.slice(MAX_PROBLEMS).map((problem) => ["Problem", problem]),
    ];
    details.replaceChildren(element("dl", ...facts.filter(([, text]) => text).flatMap(([term, text]) => [element("dt", term), element("dd", text)])));
  }

  function showAge() {
    if (now.troubles.length || !detailsRow.hidden) update(now);
  }
  return { node, update, showAge };
}

const servedText = ({ name, serves, installed }) => installed || (serves && `${name} ${serves.replaceAll("version ", "").replaceAll(/ \([0-9a-f]+\)/g, "")}`);

function modelText({ serves, installed, wanted, state }) {
  const release = wanted ? `, release ${installed || "none"}${wanted === installed ? "" : `, ${wanted} is ${state}`}` : "";
  return `${serves || "not served"}${release}`;
}

const heatOf = ({ temperature_c: temperature, heat }) => [temperature === null ? "" : `${temperature} °C`, heat && heat !== "NORMAL" ? heat : ""].filter(Boolean).join(" ");
