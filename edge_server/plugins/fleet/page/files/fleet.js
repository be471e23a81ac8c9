// The page of a fleet: asks every two seconds, while it is visible, which boxes changed.

import { getJson, Refused, refreshAccess, setKey } from "../api.js";
import { byId, note, setBadge, setText } from "../dom.js";
import { followKey } from "../key.js";
import { showAges, showBoxes } from "./boxes.js";
import { showReleases } from "./releases.js";
import { isInTrouble } from "./troubles.js";
import { showWrong } from "./wrong.js";

const INTERVAL_MS = 2000;
const MAX_PARTS = 100;

const boxes = new Map();
let revision = 0;
let run = "";
let timer = 0;
let isRunning = false;
let answered = null;
let isLost = false;

// The address that the command prints may bring the key. It must not stay in the address bar.
const given = /^#key=(.+)$/.exec(location.hash);
if (given) {
  setKey(decodeURIComponent(given[1]));
  history.replaceState(null, "", location.pathname + location.search);
}

async function refresh() {
  clearTimeout(timer);
  if (isRunning) return;
  isRunning = true;
  try {
    await update();
    answered = new Date();
    isLost = false;
  } catch (error) {
    showLost(error);
  }
  document.body.classList.toggle("lost", isLost);
  isRunning = false;
  if (!document.hidden) timer = setTimeout(refresh, INTERVAL_MS);
}

function showLost(error) {
  isLost = true;
  setBadge(byId("fleet-state"), "no answer", "bad");
  const reason = error instanceof Refused ? `: ${error.message}` : "";
  const since = answered ? ` What is shown below is from ${answered.toLocaleTimeString()}.` : "";
  note(byId("problem"), `The page's own process does not answer${reason}.${since} The page asks again every two seconds.`);
}

async function update() {
  const access = await refreshAccess();
  const changed = new Set();
  let found = null;
  // The boxes of a large fleet come in parts. If they change faster, what is left comes with the next look.
  for (let part = 0; part < MAX_PARTS && !found?.is_complete; part++) {
    found = await getJson(`edge/v1/fleet?after=${revision}&run=${encodeURIComponent(run)}`);
    if (found.run !== run) boxes.clear();
    for (const box of found.boxes) {
      boxes.set(box.key, box);
      changed.add(box.key);
    }
    ({ revision, run } = found);
  }
  setText(byId("version"), access.version);
  byId("key").hidden = !access.takes_tokens;
  note(byId("problem"), found.problem);
  const all = [...boxes.values()];
  const asking = all.filter(({ state }) => state === "asking").length;
  const troubled = all.filter(isInTrouble).length;
  const unknown = all.filter(({ state }) => state === "unknown").length;
  setBadge(byId("fleet-state"), ...troubled ? [`${troubled} of ${all.length} in trouble`, "bad"] : asking ? [`asking ${asking} of ${all.length}`, "busy"]
    : unknown ? [`${unknown} of ${all.length} not known to be equal`, ""] : [`all ${all.length} well`, "ok"]);
  document.title = `${troubled ? `(${troubled}) ` : ""}Fleet - edge-server`;
  showWrong(all);
  showReleases(found.releases, access, refresh);
  showBoxes(all, changed);
}

followKey(refresh);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});
// "Since 5 minutes" grows also where nothing changes.
setInterval(() => !document.hidden && showAges(), 60000);
await refresh();
