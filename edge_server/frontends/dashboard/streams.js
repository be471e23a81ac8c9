// Frame streams: a live picture with the results drawn in, rates, drops by reason, ages.

import { access, request } from "./api.js";
import { byId, element, formatNumber, keepChildren, note, setText } from "./dom.js";

// A browser opens six connections to a server; each picture takes one.
const MOST_LIVE = 3;
const REASONS = {
  NEWER: "replaced by a newer one", MAX_AGE: "too old", DEADLINE: "past the deadline", MAX_FPS: "above the frame rate",
  SLOW_READER: "results not read", GOVERNOR: "held back by the governor", CLOSED: "stream closed",
};
const cards = new Map();

export function updateStreams(streams) {
  setText(byId("cameras-count"), streams?.length ? `${streams.length} open` : "");
  byId("cameras-empty").hidden = Boolean(streams?.length);
  note(byId("cameras-note"), access.allowed.view || !streams?.length ? "" :
    "Pictures are shown on the machine itself, or with a key for the category view.");
  keepChildren(byId("cameras-cards"), cards, streams ?? [], (stream) => stream.stream_id, makeCard);
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
  let isWanted = [...cards.values()].filter((card) => card.isLive()).length < MOST_LIVE;
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
    try {
      const path = `edge/v1/streams/${encodeURIComponent(first.stream_id)}/view`;
      const response = await request(path, { signal: mine.signal });
      problem = "";
      for await (const jpeg of pictures(response.body.getReader())) show(jpeg);
    } catch (error) {
      if (mine.signal.aborted) return;
      problem = error.message;
    }
    // The next update starts again, if the stream is still open.
    if (running === mine) running = null;
  }

  function show(jpeg) {
    const before = shownUrl;
    shownUrl = URL.createObjectURL(new Blob([jpeg], { type: "image/jpeg" }));
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

/** Yield the pictures of a Motion JPEG response as bytes. */
async function* pictures(reader) {
  const decoder = new TextDecoder("latin1");
  let held = new Uint8Array(0);
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const joined = new Uint8Array(held.length + value.length);
    joined.set(held);
    joined.set(value, held.length);
    held = joined;
    for (;;) {
      // The head of a part is short.
      const head = decoder.decode(held.subarray(0, 512));
      const end = head.indexOf("\r\n\r\n");
      const size = Number(/content-length: (\d+)/i.exec(head)?.[1]);
      if (end < 0 || !size || held.length < end + 4 + size + 2) break;
      yield held.slice(end + 4, end + 4 + size);
      held = held.slice(end + 4 + size + 2);
    }
  }
}
