// The page: asks the server every two seconds while it is visible, and at once after an event.

import { getJson, key, postJson, Refused, refreshAccess } from "./api.js";
import { updateActivity } from "./activity.js";
import { byId, note, setBadge, setText } from "./dom.js";
import { followEvents, reopenEvents } from "./events.js";
import { loadHistory } from "./history.js";
import { followKey } from "./key.js";
import { updateCard } from "./model_card.js";
import { readCurves } from "./model_curves.js";
import { entriesOf, updateModels } from "./models.js";
import { loadPanels, updatePanels } from "./panels.js";

const INTERVAL_MS = 2000;
const EVENT_WAIT_MS = 80;

let timer = 0;
let isRunning = false;
let isWanted = false;
let hasPast = false;
let isLost = false;
let answered = null;

async function refresh() {
  clearTimeout(timer);
  if (isRunning) {
    isWanted = true;
    return;
  }
  isRunning = true;
  isWanted = false;
  try {
    await update();
    if (isLost) note(byId("problem"), "");
    isLost = false;
    answered = new Date();
  } catch (error) {
    showLost(error);
  }
  document.body.classList.toggle("lost", isLost);
  isRunning = false;
  if (!document.hidden) timer = setTimeout(refresh, isWanted ? EVENT_WAIT_MS : INTERVAL_MS);
}

function showLost(error) {
  isLost = true;
  // The server may have started anew.
  hasPast = false;
  showHealth("no answer", "bad", "problem");
  const reason = error instanceof Refused ? `: ${error.message}` : "";
  const since = answered ? ` What is shown below is from ${answered.toLocaleTimeString()}.` : "";
  note(byId("problem"), `The server does not answer${reason}.${since} The page asks again every two seconds.`);
}

async function update() {
  const now = await refreshAccess();
  const judged = key();
  const allowed = (category, work) => (now.allowed[category] ? work() : null);
  const panels = await loadPanels(now.panels);
  if (!hasPast) {
    await loadHistory();
    hasPast = true;
  }
  // Another key was entered meanwhile: it may have other rights, and has the page ask again.
  if (key() !== judged) return;
  const [index, loaded, activity, ...reports] = await Promise.all([
    allowed("model-repository", () => postJson("v2/repository/index", {})),
    allowed("metadata", () => getJson("edge/v1/models")),
    allowed("statistics", readActivity),
    ...panels.map((panel) => Promise.all(panel.paths.map((path) => allowed("statistics", () => getJson(path))))),
  ]);
  setText(byId("version"), now.version);
  byId("key").hidden = !now.takes_tokens && !now.key_headers.length;
  showMetricsLink(now.metrics_port);
  byId("documents-link").hidden = !now.has_documents;
  byId("documents-place").hidden = now.has_documents;
  const entries = entriesOf({ index, loaded: loaded?.models, activity });
  readCurves(activity);
  updateCard(entries, refresh);
  const failed = updateModels(entries, Boolean(index));
  updatePanels(panels, reports.map((report) => [...report, loaded?.models]));
  updateActivity(activity);
  const problems = panels.map((panel, place) => [panel.problemOf?.(...reports[place]), panel.id]);
  const [what, where] = [[failed && `${failed} failed`, "models"], ...problems].find(([text]) => text) ?? [];
  if (what) showHealth(what, "bad", where);
  else if (now.is_ready === null) showHealth("needs a key", "busy", "models");
  else showHealth(now.is_ready ? "ready" : "not ready", now.is_ready ? "ok" : "busy", "models");
}

/** Say in the header how the server is, with a link to the section that says more. */
function showHealth(text, kind, section) {
  setBadge(byId("ready"), text, kind);
  byId("ready").setAttribute("href", `#${section}`);
}

/** Return the counts, and when they came: the other reports may take longer. */
async function readActivity() {
  const found = await getJson("edge/v1/activity");
  return { ...found, readAt: performance.now() };
}

function showMetricsLink(port) {
  const link = byId("metrics-link");
  link.hidden = !port;
  if (port) link.href = `${location.protocol}//${location.hostname}:${port}/metrics`;
}

followKey(() => {
  hasPast = false;
  refresh();
  reopenEvents();
});

// A file that is dropped beside a drop zone must not replace the page.
for (const kind of ["dragover", "drop"]) {
  window.addEventListener(kind, (event) => {
    if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
  });
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  hasPast = false;
  refresh();
});

await refresh();
followEvents((event) => {
  if (/^(model|server|engine)\./.test(event.kind) && event.kind !== "engine.build_progress") setTimeout(refresh, EVENT_WAIT_MS);
});
