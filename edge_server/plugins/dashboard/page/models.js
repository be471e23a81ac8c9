// The table of models: states, versions, how they run, latency, and why one failed. Failed ones are first.

import { access, modelPath, postJson } from "./api.js";
import { byId, cellsOf, element, formatBytes, formatNumber, keepChildren, note, setBadge, setText, titleRow } from "./dom.js";
import { Rates } from "./charts.js";

const MAX_SHOWN = 20;
const MIN_FILTERED = 8;
/** Letters of a reason in one line; a click shows the rest. */
const MAX_REASON = 110;
const KINDS = { READY: "ok", LOADING: "busy", UNLOADING: "busy", UNAVAILABLE: "bad" };
const ORDER = { UNAVAILABLE: 0, LOADING: 1, UNLOADING: 1 };
// Words of the server that say little to who does not know them.
const PRECISIONS = { "as the model says": "as in the file", int: "integers" };
/** Classes and titles. */
const COLUMNS = [
  ["name", "Model"], ["version", "Version"], ["state", "State"], ["runs", "Runs on"], ["precision", "Precision"], ["number", "Latency"],
  ["number", "Requests/s"], ["number", "Memory"], ["actions", "Actions"],
];
const rates = new Rates();
const means = new Map();
const rows = new Map();
const filter = byId("models-filter");
const more = byId("models-more");
let isOpen = false;
let show = () => {};

byId("models-head").append(titleRow(COLUMNS));

filter.addEventListener("input", () => show());
more.addEventListener("click", () => {
  isOpen = !isOpen;
  show();
});

// Triton's index has one word for a version that failed and one that was unloaded.
const isUnloaded = ({ state, reason }) => state === "UNAVAILABLE" && /^unloaded/.test(reason ?? "");

/** Return whether a version may be rolled back to. */
const isGood = (item) => item.state !== "UNAVAILABLE" || isUnloaded(item);

/** Return the entries to show: those of the repository index, else the loaded versions. */
function entriesOf({ index, versions, loaded, activity }) {
  const key = (item) => `${item.name}\n${item.version ?? ""}`;
  const byKey = (items) => new Map((items ?? []).map((item) => [key(item), item]));
  const reports = byKey(loaded);
  const counts = byKey(activity?.models);
  const entries = index ?? (loaded ?? []).map(({ name, version }) => ({ name, version, state: "READY" }));
  const all = entries.map((entry) => {
    const counted = counts.get(key(entry));
    const state = isUnloaded(entry) ? "UNLOADED" : entry.state ?? "NOT LOADED";
    const hasEarlier = versions?.some((item) => item.name === entry.name && item.version < entry.version && isGood(item));
    return { ...entry, state, hasEarlier, key: key(entry), report: reports.get(key(entry)), figures: counted && figuresOf(key(entry), counted, activity.readAt) };
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

/** Return how many models have failed. */
export function updateModels(state, tryModel, changed) {
  const entries = entriesOf(state);
  const names = (wanted) => new Set(entries.filter((entry) => !wanted || entry.state === wanted).map((entry) => entry.name)).size;
  const failed = names("UNAVAILABLE");
  setText(byId("models-count"), entries.length ? `${names("READY")} ${state.index ? `of ${names()} ` : ""}ready` : "");
  setBadge(byId("models-failed"), failed ? `${failed} failed` : "", "bad");
  byId("models-head").hidden = !entries.length;
  filter.hidden = entries.length < MIN_FILTERED && !filter.value;
  note(byId("models-note"), state.index || !access.allowed.metadata ? "" : "States of models that are not loaded need a key.");
  show = () => showRows(entries, tryModel, changed);
  show();
  return failed;
}

function showRows(entries, tryModel, changed) {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = entries.filter((entry) => {
    const text = `${entry.name} ${entry.state} ${entry.report?.runtime ?? ""} ${entry.report?.device ?? ""}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  // Failed ones are never folded away.
  const limit = isOpen ? found.length : Math.max(MAX_SHOWN, found.filter((entry) => entry.state === "UNAVAILABLE").length);
  const folded = Math.max(0, found.length - limit);
  keepChildren(byId("models-rows"), rows, found.slice(0, limit), (entry) => entry.key, (entry) => makeRow(entry, tryModel, changed));
  more.hidden = !folded && !(isOpen && found.length > MAX_SHOWN);
  more.setAttribute("aria-expanded", String(isOpen));
  setText(more, isOpen ? "Show fewer" : `Show ${folded} more`);
  note(byId("models-empty"), found.length ? "" : entries.length ? `No model matches “${filter.value}”.`
    : `There is no model yet. Copy a model's folder into ${access.repositories?.join(" or ") || "the model repository"}: it appears here by itself. \
edge-server serve --demo shows two models and a camera.`);
}

/** Return a name with places where a narrow column may break it. */
export const breakable = (name) => name.split(/(?<=[_.-])/).flatMap((part) => [part, element("wbr")]);

/** Return a reason without the name and version that the row shows already. */
function withoutName(reason, name) {
  const found = /^(?:model )?'?(.+?)'?(?: version \d+)?: /.exec(reason);
  return found?.[1] === name ? reason.slice(found[0].length) : reason;
}

/** Return the first sentence, or so much of it as fits one line, and the rest, "" if there is none. */
function partsOf(text) {
  const end = text.slice(0, MAX_REASON).match(/^.*?[.;](?=\s)|^[^\n]*(?=\n)/)?.[0].length ?? (text.length > MAX_REASON ? text.lastIndexOf(" ", MAX_REASON) : text.length);
  return [end < text.length ? `${text.slice(0, end).replace(/[;.]$/, "")} …` : text, text.slice(end)];
}

function makeRow(first, tryModel, changed) {
  const state = element("span");
  const short = element("summary");
  const whole = element("p");
  const folded = element("details", short, whole);
  const reason = element("td.reason", { colspan: "9", role: "cell" }, folded);
  const reasonRow = element("tr", { role: "row" }, reason);
  const cells = cellsOf(COLUMNS, "name", "state", "actions");
  const [name, version, stateCell, runs, precision, latency, perSecond, memory, actions] = cells;
  const button = (text, click, label = text) => element("button", { click, "aria-label": `${label} ${first.name}` }, text);
  const order = (root, action, question) => async () => {
    if (!window.confirm(question)) return;
    const path = modelPath(first.name, action, root);
    try {
      await postJson(path, {});
      note(byId("problem"), "");
    } catch (error) {
      note(byId("problem"), `${first.name}: ${error.message}`);
    }
    changed();
  };
  const buttons = {
    try: button("Try", () => tryModel(first.name)),
    load: button("Load", order("v2/repository", "load", `Load ${first.name}?`)),
    unload: button("Unload", order("v2/repository", "unload", `Unload ${first.name}?`)),
    rollback: button("Roll back", order("edge/v1", "rollback", `Roll ${first.name} back to the version before?`)),
    unpin: button("Remove pin", order("edge/v1", "unpin", `Serve the newest version of ${first.name} again?`), "Remove the pin of"),
  };
  name.append(...breakable(first.name));
  setText(version, first.version ?? "");
  stateCell.append(state);
  actions.append(...Object.values(buttons));
  const node = element("tbody", { "data-model": first.name, role: "rowgroup" }, element("tr", { role: "row" }, ...cells), reasonRow);
  function update({ state: named, reason: why, hasEarlier, report, figures }) {
    setBadge(state, named, KINDS[named] ?? "");
    const text = withoutName(why ?? "", first.name);
    const [begin, rest] = partsOf(text);
    setText(short, begin);
    setText(whole, rest && text);
    folded.className = rest ? "" : "whole";
    reasonRow.hidden = !why || why === "unloaded";
    reason.className = named === "UNAVAILABLE" ? "reason bad" : "reason";
    setText(runs, report ? (report.instance_count ? `${report.runtime} on ${report.device}` : report.runtime) : "");
    setText(precision, PRECISIONS[report?.precision] ?? report?.precision ?? "");
    setText(memory, report ? formatBytes(report.load_rss_bytes) : "");
    setText(latency, figures ? formatNumber(figures.latencyMs, 1, " ms") : "");
    setText(perSecond, figures ? formatNumber(figures.perSecond) : "");
    const isReady = named === "READY";
    const mayLoad = access.may_change_models && access.loads_on_request;
    buttons.try.hidden = !isReady || !access.allowed.inference;
    buttons.load.hidden = !mayLoad || isReady;
    buttons.unload.hidden = !mayLoad || !isReady;
    const isPinned = /pinned to version/.test(why ?? "");
    buttons.rollback.hidden = !access.may_change_models || !isReady || isPinned || !hasEarlier;
    buttons.unpin.hidden = !access.may_change_models || !isPinned;
  }
  return { node, update };
}
