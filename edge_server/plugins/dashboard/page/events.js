// Events as they come, from the stream /edge/v1/events.

import { access, request, serverEvents } from "./api.js";
import { byId, element, note } from "./dom.js";

const MAX_SHOWN = 200;
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
          byId("events-list").replaceChildren();
        }
        wait = FIRST_WAIT_MS;
        for await (const { data } of serverEvents(response)) {
          const event = JSON.parse(data);
          after = event.number;
          show(event);
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

function show(event) {
  const { kind, number, time_s: seconds, ...fields } = event;
  const time = new Date(seconds * 1000);
  const { name, model, version, ...others } = fields;
  const subject = [name ?? model, version && `version ${version}`].filter(Boolean).join(" ");
  const rest = Object.entries(others)
    .filter(([, value]) => value !== null && value !== "")
    .map(([field, value]) => (field === "reason" || field === "detail" ? value : `${field.replaceAll("_", " ")} ${typeof value === "number" ? +value.toFixed(3) : value}`));
  const list = byId("events-list");
  list.prepend(element(
    "li", { "data-kind": kind },
    element("time", { datetime: time.toISOString() }, time.toLocaleTimeString()),
    element("span", element(`span.badge.${kindOf(event)}`, kind)),
    element("span", [subject, ...rest].filter(Boolean).join(" · ")),
  ));
  while (list.children.length > MAX_SHOWN) list.lastElementChild.remove();
}
