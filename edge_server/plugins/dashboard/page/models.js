// The table of models: states, versions, how they run, latency, and why one failed.

import { access, postJson } from "./api.js";
import { byId, element, formatBytes, formatNumber, keepChildren, note, setBadge, setText } from "./dom.js";
import { Rates } from "./charts.js";

const KINDS = { READY: "ok", LOADING: "busy", UNLOADING: "busy", UNAVAILABLE: "bad" };
const rates = new Rates();
const rows = new Map();

/** Return the entries to show: those of the repository index, else the loaded versions. */
function entriesOf({ index, loaded, activity }) {
  const key = (item) => `${item.name}\n${item.version ?? ""}`;
  const reports = new Map((loaded ?? []).map((item) => [key(item), item]));
  const counts = new Map((activity?.models ?? []).map((item) => [key(item), item]));
  const entries = index ?? (loaded ?? []).map(({ name, version }) => ({ name, version, state: "READY" }));
  return entries.map((entry) => ({ ...entry, key: key(entry), report: reports.get(key(entry)), counts: counts.get(key(entry)) }));
}

export function updateModels(state, tryModel, changed) {
  const entries = entriesOf(state);
  const ready = new Set(entries.filter((entry) => entry.state === "READY").map((entry) => entry.name));
  const all = new Set(entries.map((entry) => entry.name));
  setText(byId("models-count"), all.size ? `${ready.size} of ${all.size} ready` : "");
  note(byId("models-empty"), entries.length ? "" : "There is no model. Copy a model's folder into the repository.");
  note(byId("models-note"), state.index || !access.allowed.metadata ? "" : "States of models that are not loaded need a key.");
  keepChildren(byId("models-rows"), rows, entries, (entry) => entry.key, (entry) => makeRow(entry, tryModel, changed));
}

/** Return a name with places where a narrow column may break it. */
const breakable = (name) => name.split(/(?<=[_.-])/).flatMap((part) => [part, element("wbr")]);

function makeRow(first, tryModel, changed) {
  const state = element("span");
  const reason = element("td", { colspan: "9", class: "reason" });
  const reasonRow = element("tr", {}, reason);
  const cells = ["wide", "wide", "number", "number mid", "number wide"].map((kind) => element("td", { class: kind }));
  const [runs, precision, latency, perSecond, memory] = cells;
  const button = (text, run, label) => element("button", { type: "button", click: run, "aria-label": `${label} ${first.name}` }, text);
  const order = (path, question) => async () => {
    if (!window.confirm(question)) return;
    try {
      await postJson(path, {});
      note(byId("problem"), "");
    } catch (error) {
      note(byId("problem"), `${first.name}: ${error.message}`);
    }
    changed();
  };
  const base = `v2/repository/models/${encodeURIComponent(first.name)}`;
  const buttons = {
    try: button("Try", () => tryModel(first.name), "Try"),
    load: button("Load", order(`${base}/load`, `Load ${first.name}?`), "Load"),
    unload: button("Unload", order(`${base}/unload`, `Unload ${first.name}?`), "Unload"),
    rollback: button(
      "Roll back",
      order(`edge/v1/models/${encodeURIComponent(first.name)}/rollback`, `Roll ${first.name} back to the version before?`),
      "Roll back",
    ),
    unpin: button(
      "Remove pin", order(`edge/v1/models/${encodeURIComponent(first.name)}/unpin`, `Serve the newest version of ${first.name} again?`),
      "Remove the pin of",
    ),
  };
  const row = element(
    "tr", {},
    element("td", { class: "name" }, ...breakable(first.name), element("span", { class: "phone muted" }, ` ${first.version ?? ""}`)),
    element("td", { class: "mid" }, first.version ?? ""), element("td", {}, state),
    ...cells, element("td", { class: "actions" }, ...Object.values(buttons)),
  );
  const node = element("tbody", { "data-model": first.name }, row, reasonRow);
  function update({ state: named, reason: why, report, counts }) {
    // Triton's index has one word for a version that failed and one that was unloaded.
    const isUnloaded = named === "UNAVAILABLE" && /^unloaded/.test(why ?? "");
    setBadge(state, isUnloaded ? "UNLOADED" : named ?? "NOT LOADED", isUnloaded ? "" : KINDS[named] ?? "");
    setText(reason, why ?? "");
    reasonRow.hidden = !why || why === "unloaded";
    reason.className = named === "UNAVAILABLE" && !isUnloaded ? "reason bad" : "reason";
    setText(runs, report ? (report.instance_count ? `${report.runtime} on ${report.device}` : report.runtime) : "");
    setText(precision, report?.precision ?? "");
    setText(memory, report ? formatBytes(report.load_rss_bytes) : "");
    updateCounts(counts);
    const isReady = named === "READY";
    const mayLoad = access.may_change_models && access.loads_on_request;
    buttons.try.hidden = !isReady || !access.allowed.inference;
    buttons.load.hidden = !mayLoad || isReady;
    buttons.unload.hidden = !mayLoad || !isReady;
    const isPinned = /pinned to version/.test(why ?? "");
    buttons.rollback.hidden = !access.may_change_models || !isReady || isPinned;
    buttons.unpin.hidden = !access.may_change_models || !isPinned;
  }
  function updateCounts(counts) {
    if (!counts) {
      setText(latency, "");
      setText(perSecond, "");
      return;
    }
    const name = `${first.name} ${first.version}`;
    const requests = rates.step(`${name} requests`, counts.succeeded + counts.failed);
    const computed = rates.step(`${name} computed`, counts.computed);
    const time = rates.step(`${name} time`, counts.compute_ns);
    // Of the last seconds if something ran then, else the mean since the load.
    const mean = computed?.count && time ? time.count / computed.count : counts.computed ? counts.compute_ns / counts.computed : null;
    if (computed === null || computed.count || !latency.textContent) setText(latency, mean === null ? "–" : `${formatNumber(mean / 1e6, 1)} ms`);
    setText(perSecond, requests ? formatNumber(requests.count / requests.seconds, 1) : "–");
  }
  return { node, update };
}
