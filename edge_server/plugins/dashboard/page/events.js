// Events as they come, from the stream /edge/v1/events.

import { access, request, serverEvents } from "./api.js";
import { byId, element, note, withoutName } from "./dom.js";

const MAX_SHOWN = 200;
const MAX_LOADS = 500;
const FIRST_WAIT_MS = 1000;
const MAX_WAIT_MS = 15000;

let stopped = new AbortController();

/** Follow the events for as long as the page is open. `onEvent` is called after each. */
export async function followEvents(onEvent) {
  let after = 0;
  let run = "";
  let wait = FIRST_WAIT_MS;
  for (;;) {
    stopped = new AbortController();
    note(byId("events-note"), access.allowed["model-repository"] ? "" : "Events need a key.");
    if (access.allowed["model-repository"]) {
      try {
        const response = await request(`edge/v1/events?after=${after}`, { signal: stopped.signal });
        if (response.headers.get("Edge-Server-Run") !== run) {
          run = response.headers.get("Edge-Server-Run");
          list.replaceChildren();
          loads.length = 0;
          newest = { key: "", count: 0 };
        }
        wait = FIRST_WAIT_MS;
        for await (const { data } of serverEvents(response)) {
          const event = JSON.parse(data);
          after = event.number;
          show(event);
          if (event.kind.startsWith("model.")) loads.push(event);
          if (loads.length > MAX_LOADS) loads.shift();
          onEvent(event);
        }
      } catch { /* The server is restarting: try again. */ }
    }
    if (stopped.signal.aborted) continue;
    await new Promise((resolve) => {
      setTimeout(resolve, wait);
      stopped.signal.addEventListener("abort", resolve);
    });
    wait = Math.min(wait * 2, MAX_WAIT_MS);
  }
}

/** Open the stream anew, with another key. */
export const reopenEvents = () => stopped.abort();

function kindOf({ kind }) {
  if (/failed|hung|lost|refused/.test(kind)) return "bad";
  if (/ready|back|resumed/.test(kind)) return "ok";
  if (/loading|draining|paused|started|progress|variant|state/.test(kind)) return "busy";
  return "";
}

/** Kind -> what happened, after the name of the model, camera or sink. */
const SENTENCES = {
  "model.loading": "is being loaded", "model.ready": "is ready", "model.failed": "has failed", "model.draining": "finishes its last requests",
  "model.unloaded": "is unloaded", "model.evicted": "is unloaded to free memory", "model.hung": "does not come back from a request",
  "model.pinned": "is pinned", "model.unpinned": "is not pinned any more", "model.canary_failed": "failed as a canary",
  "server.ready": "The server is ready", "server.stopping": "The server stops",
  "source.running": "sends pictures", "source.failed": "sends no pictures", "sink.running": "takes results", "sink.failed": "takes no results",
};

/** Field -> its words. */
const DETAILS = {
  reason: withoutName, detail: withoutName, failed_count: (count) => (count > 1 ? `${count} times in a row` : ""),
  retry_in_s: (seconds) => `it is tried again in ${+seconds.toFixed(1)} s`,
};

function subjectOf({ kind, name, model, version, source, sink }) {
  if (kind in SENTENCES && kind.startsWith("server.")) return "";
  const who = name ?? source ?? sink ?? model;
  return [who, version && `version ${version}`].filter(Boolean).join(" ");
}

/** Return the event as a sentence: who, what happened, and what else it says. */
function sentenceOf(event) {
  const { kind: what, source, label, track_id: track, zone, line, direction, seconds } = event;
  const who = `${source}: ${label} ${track}`;
  if (what === "line.crossed") return `${who} crosses ${line}, ${direction}`;
  if (what === "zone.entered") return `${who} enters ${zone}`;
  if (what === "zone.left") return `${who} leaves ${zone} after ${seconds} s`;
  if (what === "zone.loitering") return `${who} has been in ${zone} for ${seconds} s`;
  // The generation tells programs two loads of one version apart.
  const { kind, number, time_s, name, model, version, generation, ...others } = event;
  const subject = subjectOf(event);
  const rest = Object.entries(others)
    .filter(([field, value]) => value !== null && value !== "" && value !== subject)
    .map(([field, value]) => DETAILS[field]?.(value, model) ?? `${field.replaceAll("_", " ")} ${typeof value === "number" ? +value.toFixed(3) : value}`)
    .filter(Boolean);
  return `${[subject, SENTENCES[kind]].filter(Boolean).join(" ")}${rest.length ? `${subject || SENTENCES[kind] ? ": " : ""}${rest.join(", ")}` : ""}`;
}

const list = byId("events-list");
/** Events of models, the oldest first. */
const loads = [];
const filter = byId("events-kind");
/** What the newest entry repeats, and how often it came. */
let newest = { key: "", count: 0 };

filter.addEventListener("change", () => {
  for (const item of list.children) hideOthers(item);
});

/** Return the events of a model as {time, kind, text}, the newest first. */
export const eventsOf = (name) => loads.filter(({ model }) => model === name).reverse().map((event) => ({ time: new Date(event.time_s * 1000), kind: kindOf(event), text: sentenceOf(event) }));

const hideOthers = (item) => { item.hidden = Boolean(filter.value) && item.dataset.kind !== filter.value; };

function show(event) {
  const { kind, time_s: seconds } = event;
  if (![...filter.options].some(({ value }) => value === kind)) filter.append(element("option", kind));
  filter.hidden = filter.options.length < 3;
  // The same again, such as a line that is crossed all day, is counted in the entry that is there.
  const key = `${kind} ${subjectOf(event) || event.stream_id || ""} ${event.zone ?? event.line ?? ""}`;
  newest = { key, count: newest.key === key ? newest.count + 1 : 1 };
  if (newest.count > 1) list.firstElementChild?.remove();
  const time = new Date(seconds * 1000);
  const item = element(
    "li", { "data-kind": kind },
    element("time", { datetime: time.toISOString() }, time.toLocaleTimeString()),
    element("span", element(`span.badge.${kindOf(event)}`, newest.count > 1 ? `${kind} ${newest.count} times` : kind)),
    element("span", sentenceOf(event)),
  );
  hideOthers(item);
  list.prepend(item);
  while (list.children.length > MAX_SHOWN) list.lastElementChild.remove();
}
