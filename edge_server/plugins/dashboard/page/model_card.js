// The card of the model that is chosen in the table: "Try it", curves, tensors, configuration, versions, history of loads.

import { access, getJson, modelPath, postJson } from "./api.js";
import { byId, element, formatBytes, formatNumber, headOf, note, setBadge, setText } from "./dom.js";
import { eventsOf } from "./events.js";
import { configText } from "./model_config.js";
import { showCurves } from "./model_curves.js";
import { snippet } from "./snippets.js";
import { showForm } from "./tryit.js";

export const KINDS = { READY: "ok", LOADING: "busy", UNLOADING: "busy", UNAVAILABLE: "bad" };
// Words of the server that say little to who does not know them.
const PRECISIONS = { "as the model says": "as in the file", int: "integers" };
const MAX_LOADS = 50;
/** Id of each part -> its title. */
const PARTS = {
  try: "Try it", "model-curves": "Curves", "model-tensors": "Inputs and outputs", "model-config": "Configuration",
  "model-versions": "Versions", "model-loads": "History",
};

let chosen = "";
let part = "try";
let changed = () => {};
let draw = () => {};
/** What the server says of the chosen model: {stamp, name, metadata, config, recognised, problem}. */
let details = {};

const buttons = Object.entries(PARTS).map(([id, title]) => element("button", { "data-part": id, "aria-controls": id, click: () => showPart(id) }, title));
byId("model-parts").append(...buttons);
byId("try-link").addEventListener("click", () => showPart("try"));

export const chosenModel = () => chosen;

export const runsOn = (report) => (report.instance_count ? `${report.runtime} on ${report.device}` : report.runtime);

/** Open the card of a model, and bring it into the window where it is below the table. */
export function chooseModel(name) {
  chosen = name;
  draw();
  byId("model").scrollIntoView({ block: "nearest" });
}

function showPart(id) {
  part = id;
  draw();
}

/** Show the card with these entries of the table. `onChange` is called after an order to the server. */
export function updateCard(entries, onChange) {
  changed = onChange;
  draw = () => show(entries);
  show(entries);
}

function show(entries) {
  if (!entries.some(({ name }) => name === chosen)) chosen = (entries.find(({ state }) => state === "READY") ?? entries[0])?.name ?? "";
  byId("model").hidden = byId("try-link").hidden = !chosen;
  byId("models-beside").classList.toggle("wide", Boolean(chosen));
  const own = entries.filter(({ name }) => name === chosen);
  const ready = own.findLast(({ state }) => state === "READY");
  const entry = ready ?? own[0];
  if (!entry) {
    return;
  }
  setText(byId("model-name"), chosen);
  setBadge(byId("model-state"), entry.state, KINDS[entry.state] ?? "");
  note(byId("model-reason"), own.filter(({ state, reason }) => state === "UNAVAILABLE" && reason).map(({ version, reason }) => `Version ${version}: ${reason}`).join("\n"));
  showFacts(entry);
  showActions(Boolean(ready));
  readDetails(own, Boolean(ready));
  for (const button of buttons) button.setAttribute("aria-pressed", button.dataset.part === part);
  for (const id of Object.keys(PARTS)) byId(id).hidden = id !== part;
  if (part === "model-curves") showCurves(chosen);
  if (part === "model-versions") showVersions(chosen);
  if (part === "model-loads") showLoads(chosen);
}

function showFacts({ version, report }) {
  // As `edge-server status -v` says it, where `add` or `optimize` compared others.
  const precisions = report?.notes.find((text) => text.startsWith("precision: "))?.slice(11);
  const facts = report ? [
    ["Version", version], ["Runs on", runsOn(report)], ["Precision", PRECISIONS[report.precision] ?? report.precision],
    ["Instances", report.instance_count || "–"], ["Loaded in", formatNumber(report.load_s, 1, " s")], ["Memory", formatBytes(report.load_rss_bytes)],
    ...(precisions ? [["Other precisions", precisions]] : []),
  ] : [];
  byId("model-facts").hidden = !facts.length;
  const text = JSON.stringify(facts);
  if (byId("model-facts").dataset.text === text) return;
  byId("model-facts").dataset.text = text;
  byId("model-facts").replaceChildren(...facts.map(([title, fact]) => element(fact === precisions ? "div.wide" : "div", element("dt", title), element("dd", fact))));
}

/** Return a button that asks, and then has the server do something to the chosen model. */
function orderButton(text, label, question, path, body = {}) {
  const model = chosen;
  return element("button", { "aria-label": label, click: async () => {
    if (!window.confirm(question)) return;
    try {
      await postJson(path, body);
      note(byId("problem"), "");
    } catch (error) {
      note(byId("problem"), `${model}: ${error.message}`);
    }
    changed();
  } }, text);
}

function showActions(isReady) {
  const mayLoad = access.may_change_models && access.loads_on_request;
  const key = `${chosen} ${mayLoad} ${isReady}`;
  if (byId("model-actions").dataset.key === key) return;
  byId("model-actions").dataset.key = key;
  const [text, action] = isReady ? ["Unload", "unload"] : ["Load", "load"];
  byId("model-actions").replaceChildren(...(mayLoad ? [orderButton(text, `${text} ${chosen}`, `${text} ${chosen}?`, modelPath(chosen, action, "v2/repository"))] : []));
}

/** Read what the server says of the model, again when one of its versions has changed. */
async function readDetails(own, isReady) {
  const { allowed } = access;
  const stamp = JSON.stringify([own.map(({ key, state, digest, report }) => [key, state, digest, report?.digest, report?.load_s]), allowed]);
  if (details.stamp === stamp) return;
  const name = chosen;
  if (details.name !== name) showForm(name, null);
  const mine = details = { stamp, name };
  try {
    if (isReady) {
      mine.metadata = allowed.metadata ? await getJson(modelPath(name)) : { inputs: [], outputs: [] };
      mine.config = allowed["model-config"] ? await getJson(modelPath(name, "config")) : {};
      mine.recognised = own.findLast(({ report }) => report)?.report.recognised ?? {};
    }
  } catch (error) {
    mine.problem = error.message;
  }
  if (details !== mine) return;
  showForm(name, mine);
  showTensors(mine);
  showConfig(mine);
}

const missing = ({ problem }, category) => element("p.note", problem ?? (access.allowed[category] ? "It is known when the model is ready." : "This needs a key."));

function showTensors(found) {
  const { metadata, config } = found;
  const isKnown = access.allowed.metadata && metadata;
  const more = new Map([...config?.input ?? [], ...config?.output ?? []].map((tensor) => [tensor.name, tensor.optional ? "optional" : tensor.label_filename]));
  const table = (title, tensors) => element(
    "table.tensors", { "aria-label": title }, headOf([title], ["Type"], ["Shape"], [""]),
    element("tbody", ...tensors.map(({ name, datatype, shape }) => element(
      "tr", element("td.name", name), element("td", datatype), element("td", `[${shape.join(", ")}]`), element("td.muted", more.get(name) ?? ""),
    ))),
  );
  byId("model-tensors").replaceChildren(...(isKnown ? [table("Input", metadata.inputs), table("Output", metadata.outputs)] : [missing(found, "metadata")]));
}

function showConfig(found) {
  const isKnown = access.allowed["model-config"] && found.config;
  byId("model-config").replaceChildren(isKnown ? snippet("Configuration in use", configText(found.config, found.recognised)) : missing(found, "model-config"));
}

async function showVersions(name) {
  let versions = [];
  let problem = access.allowed["model-repository"] ? "" : "Versions need a key.";
  try {
    if (!problem) ({ versions } = await getJson(`edge/v1/versions?model=${encodeURIComponent(name)}`));
  } catch (error) {
    problem = error.message;
  }
  const place = byId("model-versions");
  const text = JSON.stringify([name, versions, problem, access.may_change_models]);
  if (name !== chosen || place.dataset.text === text) return;
  place.dataset.text = text;
  place.replaceChildren(problem ? element("p.note", problem) : element(
    "table.tensors", { "aria-label": "Versions" }, headOf(["Version"], ["State"], ["Since"], ["Answered"], [element("span.hidden-text", "Actions")]),
    element("tbody", ...versions.toReversed().map((version) => versionRow(name, version, versions))),
  ));
}

function versionRow(name, { version, state, generation, since_s: since, served_count: served, share, is_pinned: isPinned, reason }, all) {
  const badge = element("span");
  setBadge(badge, reason === "unloaded" ? "UNLOADED" : state.replace("_", " "), reason === "unloaded" ? "" : KINDS[state] ?? "");
  const notes = [
    generation ? `load ${generation} of the model` : "never loaded", isPinned ? "pinned" : "",
    state === "READY" && share > 0 && share < 1 ? `${formatNumber(100 * share)} % of the requests` : "", reason === "unloaded" ? "" : reason,
  ];
  const isEarlier = state !== "READY" && all.some((other) => other.state === "READY" && other.version > version);
  const isGood = state !== "UNAVAILABLE" || /^unloaded/.test(reason);
  const root = "edge/v1";
  const actions = [];
  if (access.may_change_models && isEarlier && isGood) {
    actions.push(orderButton("Roll back", `Roll back ${name} to version ${version}`, `Roll ${name} back to version ${version}?`, modelPath(name, "rollback", root), { version }));
  }
  if (access.may_change_models && isPinned) {
    actions.push(orderButton("Remove pin", `Remove the pin of ${name}`, `Serve the newest version of ${name} again?`, modelPath(name, "unpin", root)));
  }
  return element(
    "tr", element("td.name", String(version)), element("td", badge, element("div.muted", notes.filter(Boolean).join(", "))),
    element("td", since ? new Date(since * 1000).toLocaleString() : "–"), element("td", `${served} requests`), element("td", ...actions),
  );
}

function showLoads(name) {
  const events = eventsOf(name).slice(0, MAX_LOADS);
  const place = byId("model-loads");
  const key = `${name} ${events.length} ${events[0]?.time.getTime()}`;
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  if (!events.length) {
    place.replaceChildren(element("p.note", access.allowed["model-repository"] ? "Nothing has happened to it since the server keeps events." : "The history needs a key."));
    return;
  }
  place.replaceChildren(element("ol.loads", ...events.map(({ time, kind, text }) => element(
    "li", element("time", { datetime: time.toISOString() }, time.toLocaleString()), element("span", { class: kind }, text),
  ))));
}
