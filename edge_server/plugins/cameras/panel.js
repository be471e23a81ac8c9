// Section of the page: frame streams, each with a live picture with the results drawn in, rates, drops by reason, ages.

import { access, request } from "../api.js";
import { element, formatNumber, keepChildren, note, setText } from "../dom.js";

export const id = "cameras";
export const title = "Cameras";
export const paths = ["edge/v1/streams"];

const MAX_SHOWN = 6;
const REASONS = {
  NEWER: "replaced by a newer one", MAX_AGE: "too old", DEADLINE: "past the deadline", MAX_FPS: "above the frame rate",
  SLOW_READER: "results not read", GOVERNOR: "held back by the governor", CLOSED: "stream closed",
};
const cards = new Map();

export function makePanel() {
  const count = element("span", { id: "cameras-count", class: "muted" });
  const container = element("div", { id: "cameras-cards", class: "grid cameras" });
  const empty = element(
    "p", { id: "cameras-empty", class: "card empty" }, "No frame stream is open. ",
    element("code", {}, "edge-server stream --source=demo"), " opens one.",
  );
  const hint = element("p", { id: "cameras-note", class: "note", hidden: true });
  function update(found) {
    const streams = found?.streams ?? [];
    setText(count, streams.length ? `${streams.length} open` : "");
    empty.hidden = Boolean(streams.length);
    note(hint, access.allowed.view || !streams.length ? "" :
      "Pictures are shown on the machine itself, or with a key for the category view.");
    keepChildren(container, cards, streams, (stream) => stream.stream_id, makeCard);
  }
  return { heading: count, nodes: [container, empty, hint], update };
}

document.addEventListener("visibilitychange", () => {
  for (const card of cards.values()) card.refresh();
});

function makeCard(first) {
  const image = element("img", { alt: `Live picture of ${first.stream_id}`, hidden: true });
  const text = element("p", {});
  const toggle = element("button", { type: "button", click: () => { isWanted = !isWanted; refresh(); } });
  const model = element("span", { class: "muted" });
  const facts = ["Frames in", "Frames out", "Age p50", "Age p99"].map((name) => [element("dt", {}, name), element("dd", {})]);
  const drops = element("p", { class: "chips" });
  const node = element(
    "article", { class: "card camera", "data-stream": first.stream_id },
    element("div", { class: "head" }, element("div", {}, element("h3", {}, first.stream_id), model), toggle),
    element("div", { class: "picture" }, text, image),
    element("dl", { class: "facts" }, ...facts.map((pair) => element("div", {}, ...pair))),
    drops,
  );
  let isWanted = [...cards.values()].filter((card) => card.isLive()).length < MAX_SHOWN;
  let problem = "";
  let running = null;
  let shownUrl = "";

  function update(stream) {
    setText(model, `${stream.model}${stream.client ? ` · ${stream.client}` : ""}`);
    const values = [
      `${formatNumber(stream.fps_in)}/s`, `${formatNumber(stream.fps_out)}/s`,
      `${formatNumber(stream.age_p50_ms)} ms`, `${formatNumber(stream.age_p99_ms)} ms`,
    ];
    facts.forEach(([, value], place) => setText(value, values[place]));
    const dropped = Object.entries(stream.dropped).filter(([, count]) => count);
    setText(drops, dropped.length ? `Dropped: ${dropped.map(([reason, count]) => `${count} ${REASONS[reason] ?? reason}`).join(", ")}` : "No frame dropped");
    refresh();
  }

  function refresh() {
    const isLive = isWanted && access.allowed.view && !document.hidden;
    setText(toggle, isWanted ? "Hide" : "Show");
    toggle.setAttribute("aria-label", `${toggle.textContent} the picture of ${first.stream_id}`);
    toggle.hidden = !access.allowed.view;
    if (isLive && running === null) start();
    if (!isLive && running !== null) stop();
    setText(text, !access.allowed.view ? "The picture needs a key" : isWanted ? problem || "Waiting for a picture" : "Picture hidden");
    if (!isWanted) image.hidden = true;
  }

  async function start() {
    const mine = running = new AbortController();
    const path = `edge/v1/streams/${encodeURIComponent(first.stream_id)}/picture`;
    try {
      for (;;) {
        const response = await request(path, { signal: mine.signal });
        problem = "";
        // The camera is silent, or has ended.
        if (response.status !== 200) break;
        show(await response.blob());
      }
    } catch (error) {
      problem = mine.signal.aborted ? "" : error.message;
    }
    // The next update starts again, if the stream is still open.
    if (running === mine) running = null;
  }

  function show(jpeg) {
    const before = shownUrl;
    shownUrl = URL.createObjectURL(jpeg);
    image.src = shownUrl;
    image.hidden = false;
    if (before) URL.revokeObjectURL(before);
  }

  function stop() {
    running?.abort();
    running = null;
  }

  function remove() {
    stop();
    if (shownUrl) URL.revokeObjectURL(shownUrl);
  }

  return { node, update, refresh, remove, isLive: () => running !== null };
}
