// The table of models: states, how they run, latency, and why one failed. Failed ones are first, and a click opens a model's card.

import { access } from "./api.js";
import { byId, cellsOf, element, formatNumber, keepChildren, note, setBadge, setText, withoutName } from "./dom.js";
import { Rates } from "./charts.js";
import { chooseModel, chosenModel, KINDS, runsOn } from "./model_card.js";

const MAX_SHOWN = 20;
const MIN_FILTERED = 8;
/** Letters of a reason in one line; a click shows the rest. */
const MAX_REASON = 110;
const ORDER = { UNAVAILABLE: 0, LOADING: 1, UNLOADING: 1 };
/** Classes and titles, which stand before the values: the table is too narrow for columns. */
const COLUMNS = [["name", "Model"], ["state", "State"], ["runs", "Runs on"], ["number", "Latency"], ["number", "Requests/s"]];
const rates = new Rates();
const means = new Map();
const rows = new Map();
const filter = byId("models-filter");
const more = byId("models-more");
let isOpen = false;
let show = () => {};

filter.addEventListener("input", () => show());
more.addEventListener("click", () => {
  isOpen = !isOpen;
  show();
});

// Triton's index has one word for a version that failed and one that was unloaded.
const isUnloaded = ({ state, reason }) => state === "UNAVAILABLE" && /^unloaded/.test(reason ?? "");

/** Return the entries to show: those of the repository index, else the loaded versions. Failed ones are first. */
export function entriesOf({ index, loaded, activity }) {
  const key = (item) => `${item.name}\n${item.version ?? ""}`;
  const byKey = (items) => new Map((items ?? []).map((item) => [key(item), item]));
  const reports = byKey(loaded);
  const counts = byKey(activity?.models);
  const entries = index ?? (loaded ?? []).map(({ name, version }) => ({ name, version, state: "READY" }));
  const all = entries.map((entry) => {
    const counted = counts.get(key(entry));
    const state = isUnloaded(entry) ? "UNLOADED" : entry.state ?? "NOT LOADED";
    return {
      ...entry, state, key: key(entry), reason: withoutName(entry.reason ?? "", entry.name), report: reports.get(key(entry)),
      figures: counted && figuresOf(key(entry), counted, activity.readAt),
    };
  });
  return all.sort((a, b) => (ORDER[a.state] ?? 2) - (ORDER[b.state] ?? 2) || a.name.localeCompare(b.name) || Number(a.version) - Number(b.version));
}

/** Return the mean latency and the requests a second, null where unknown. Called once for each reading of the counts. */
function figuresOf(key, counts, readAt) {
  const computed = rates.step(`${key} computed`, counts.computed, readAt);
  const time = rates.step(`${key} time`, counts.compute_ns, readAt);
  // Of the last seconds in which something ran, else the mean since the load.
  if (computed?.count && time) means.set(key, time.count / computed.count / 1e6);
  else if (!means.has(key) && counts.computed) means.set(key, counts.compute_ns / counts.computed / 1e6);
  return { latencyMs: means.get(key) ?? null, perSecond: rates.perSecond(`${key} requests`, counts.succeeded + counts.failed, readAt) };
}

/** Show the entries. Return how many models have failed. `hasIndex`: they are all of the repository. */
export function updateModels(entries, hasIndex) {
  const names = (wanted) => new Set(entries.filter((entry) => !wanted || entry.state === wanted).map((entry) => entry.name)).size;
  const failed = names("UNAVAILABLE");
  setText(byId("models-count"), entries.length ? `${names("READY")} ${hasIndex ? `of ${names()} ` : ""}ready` : "");
  setBadge(byId("models-failed"), failed ? `${failed} failed` : "", "bad");
  filter.hidden = entries.length < MIN_FILTERED && !filter.value;
  note(byId("models-note"), hasIndex || !access.allowed.metadata ? "" : "States of models that are not loaded need a key.");
  show = () => showRows(entries);
  show();
  return failed;
}

function showRows(entries) {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = entries.filter((entry) => {
    const text = `${entry.name} ${entry.state} ${entry.report?.runtime ?? ""} ${entry.report?.device ?? ""}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  // Failed ones are never folded away.
  const limit = isOpen ? found.length : Math.max(MAX_SHOWN, found.filter((entry) => entry.state === "UNAVAILABLE").length);
  const folded = Math.max(0, found.length - limit);
  keepChildren(byId("models-rows"), rows, found.slice(0, limit), (entry) => entry.key, makeRow);
  more.hidden = !folded && !(isOpen && found.length > MAX_SHOWN);
  more.setAttribute("aria-expanded", String(isOpen));
  setText(more, isOpen ? "Show fewer" : `Show ${folded} more`);
  note(byId("models-empty"), found.length ? "" : entries.length ? `No model matches “${filter.value}”.`
    : `There is no model yet. Copy a model's folder into ${access.repositories?.join(" or ") || "the model repository"}: it appears here by itself. \
edge-server serve --demo shows two models and a camera.`);
}

/** Return a name with places where a narrow column may break it. */
const breakable = (name) => name.split(/(?<=[_.-])/).flatMap((part) => [part, element("wbr")]);

/** Return the first sentence, or so much of it as fits one line, and the rest, "" if there is none. */
function partsOf(text) {
  const end = text.slice(0, MAX_REASON).match(/^.*?[.;](?=\s)|^[^\n]*(?=\n)/)?.[0].length ?? (text.length > MAX_REASON ? text.lastIndexOf(" ", MAX_REASON) : text.length);
  return [end < text.length ? `${text.slice(0, end).replace(/[;.]$/, "")} …` : text, text.slice(end)];
}

function makeRow({ name }) {
  const state = element("span");
  const version = element("span.muted");
  const short = element("summary");
  const whole = element("p");
  const folded = element("details", short, whole);
  const reason = element("td.reason", { colspan: COLUMNS.length, role: "cell" }, folded);
  const reasonRow = element("tr", { role: "row" }, reason);
  const cells = cellsOf(COLUMNS, "name", "state");
  const [nameCell, stateCell, runs, latency, perSecond] = cells;
  const button = element("button.link", { "aria-controls": "model" }, ...breakable(name));
  nameCell.append(button, " ", version);
  stateCell.append(state);
  const node = element("tbody", { "data-model": name, role: "rowgroup", click: (event) => {
    if (event.target.closest("summary")) return;
    chooseModel(name);
    show();
  } }, element("tr", { role: "row" }, ...cells), reasonRow);
  function update({ state: named, version: number, reason: why, report, figures }) {
    const isChosen = name === chosenModel();
    node.classList.toggle("chosen", isChosen);
    button.setAttribute("aria-pressed", isChosen);
    setText(version, number ? `version ${number}` : "");
    setBadge(state, named, KINDS[named] ?? "");
    const [begin, rest] = partsOf(why);
    setText(short, begin);
    setText(whole, rest && why);
    folded.className = rest ? "" : "whole";
    reasonRow.hidden = !why || why === "unloaded";
    reason.className = named === "UNAVAILABLE" ? "reason bad" : "reason";
    setText(runs, report ? runsOn(report) : "");
    setText(latency, figures ? formatNumber(figures.latencyMs, 1, " ms") : "");
    setText(perSecond, figures ? formatNumber(figures.perSecond) : "");
  }
  return { node, update };
}
