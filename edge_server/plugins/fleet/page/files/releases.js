// The table of releases: how far each has come, why it failed, and the buttons that lead its rollout.

import { postJson } from "../api.js";
import { byId, cellsOf, element, keepChildren, note, setAttributes, setBadge, setText, svg, titleRow } from "../dom.js";
import { agoOf, timeOf } from "./troubles.js";

const MAX_SHOWN = 5;
const MAX_NAMES = 5;
const MAX_REASONS = 5;
const COLUMNS = [["name", "Release"], ["state", "Rollout"], ["wave", "Wave"], ["since", "Since"], ["progress-cell", "Boxes"], ["actions", "Actions"]];
const rows = new Map();
let access = {};
let changed = () => {};
let again = () => {};
let isOpen = false;
const more = byId("releases-more");
more.addEventListener("click", () => {
  isOpen = !isOpen;
  again();
});

byId("releases-rows").tHead.append(titleRow(COLUMNS));

export function showReleases(releases, allowed, onChange) {
  access = allowed;
  changed = onChange;
  const isComplete = (item) => !item.failed_count && !item.waiting_count && !item.is_stopped && item.wave >= item.waves.length - 1;
  const shown = releases.toSorted((a, b) => isComplete(a) - isComplete(b) || Boolean(b.failed_count) - Boolean(a.failed_count));
  const limit = isOpen ? shown.length : Math.max(MAX_SHOWN, shown.filter((item) => !isComplete(item)).length);
  keepChildren(byId("releases-rows"), rows, shown.slice(0, limit), ({ model }) => model, makeRow);
  more.hidden = shown.length <= limit && !(isOpen && shown.length > MAX_SHOWN);
  more.setAttribute("aria-expanded", String(isOpen));
  setText(more, isOpen ? "Show fewer" : `Show ${shown.length - limit} more, which are complete`);
  again = () => showReleases(releases, allowed, onChange);
  byId("releases-rows").tHead.hidden = !releases.length;
  note(byId("releases-empty"), releases.length ? "" : "No box that answers follows a signed repository.");
  note(byId("releases-note"), access.has_rollouts || !releases.length ? "" :
    "What the boxes say. With --repository the page shows the waves, and with --keys it leads them.");
}

function makeRow() {
  const cells = cellsOf(COLUMNS, "name", "state", "progress-cell", "actions");
  const [name, stateCell, wave, since, boxes, actions] = cells;
  const title = element("span");
  const digest = element("span.address.muted.mono");
  const state = element("span");
  const bars = ["installed", "failed", "waiting"].map((kind) => svg(`rect.${kind}`, { height: 8 }));
  const bar = svg("svg.progress", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" }, ...bars);
  const counts = element("span.counts");
  const reason = element("td.reason", { colspan: COLUMNS.length, role: "cell" });
  const reasonRow = element("tr", { role: "row", hidden: true }, reason);
  let now = null;
  const order = (action, text, question) => element("button", { "data-action": action, click: async () => {
    const { model, release, wave: place } = now;
    if (!window.confirm(question(now))) return;
    try {
      const { changes } = await postJson(`edge/v1/rollouts/${encodeURIComponent(model)}/${action}`, { release, wave: place });
      note(byId("releases-note"), changes.join("\n"));
      note(byId("problem"), "");
    } catch (error) {
      note(byId("problem"), error.message);
    }
    changed();
  } }, text);
  const buttons = {
    continue: order("continue", "Continue", ({ release, waves, wave: place }) => `Give ${release} to its next wave, ${waves[place + 1]}?`),
    stop: order("stop", "Stop", ({ release }) => `Let no further box have ${release}?`),
    rollback: order("rollback", "Roll back", ({ release }) => `Withdraw ${release}? Its boxes go back to the release before, or remove the model.`),
  };
  name.append(title, digest);
  stateCell.append(state);
  boxes.append(bar, counts);
  actions.append(...Object.values(buttons));
  const node = element("tbody", { role: "rowgroup" }, element("tr", { role: "row" }, ...cells), reasonRow);

  function update(item) {
    now = item;
    node.dataset.release = item.release;
    setText(title, item.release);
    note(digest, item.digest.slice(0, 12));
    digest.title = item.digest;
    const [text, kind] = stateOf(item);
    setBadge(state, text, kind);
    setText(wave, item.waves.length ? `${item.wave + 1} of ${item.waves.length}: ${item.waves[item.wave] ?? ""}` : "");
    setText(since, item.since_s ? agoOf(item.since_s) : "");
    since.title = item.since_s ? timeOf(item.since_s) : "";
    const numbers = [item.installed_count, item.failed_count, item.waiting_count];
    const total = Math.max(1, numbers[0] + numbers[1] + numbers[2]);
    let left = 0;
    numbers.forEach((number, place) => {
      setAttributes(bars[place], { x: left, width: (100 * number) / total });
      left += (100 * number) / total;
    });
    setText(counts, ["installed", "failed", "waiting"].map((word, place) => numbers[place] || !place ? `${numbers[place]} ${word}` : "").filter(Boolean).join(", "));
    const lines = [...reasonsOf(item.failed, "failed on"), ...reasonsOf(item.waiting, "waits on")];
    setText(reason, lines.join("\n"));
    reason.className = `reason ${item.failed_count ? "bad" : ""}`;
    reasonRow.hidden = !lines.length;
    for (const button of Object.values(buttons)) {
      button.hidden = !access.may_change_models;
      button.setAttribute("aria-label", `${button.textContent} the rollout of ${item.release}`);
    }
    buttons.continue.hidden ||= !item.is_led || item.is_stopped || item.wave >= item.waves.length - 1;
    buttons.continue.disabled = !item.can_continue;
    buttons.continue.title = item.can_continue ? "" : "All boxes of this wave that answer must have it";
    buttons.stop.hidden ||= item.is_stopped;
  }
  return { node, update };
}

function stateOf({ is_stopped: isStopped, failed_count: failed, waiting_count: waiting, is_led: isLed, wave, waves }) {
  if (failed) return [isStopped ? "stopped, failed" : "failed", "bad"];
  if (isStopped) return ["stopped", "busy"];
  if (waiting) return ["under way", "busy"];
  return isLed && wave < waves.length - 1 ? ["wave complete", "ok"] : ["complete", "ok"];
}

/** Return a line for each reason, with the boxes that give it. */
function reasonsOf(items, verb) {
  const groups = new Map();
  for (const [box, reason] of items) if (reason) groups.set(reason, [...(groups.get(reason) ?? []), box]);
  const lines = [...groups].map(([reason, names]) => {
    const more = names.length > MAX_NAMES ? ` and ${names.length - MAX_NAMES} more` : "";
    return `${verb} ${names.slice(0, MAX_NAMES).join(", ")}${more}: ${reason}`;
  });
  return lines.length > MAX_REASONS ? [...lines.slice(0, MAX_REASONS), `${lines.length - MAX_REASONS} more reasons: see the boxes`] : lines;
}
