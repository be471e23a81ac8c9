// Section of the page: cameras of the server and other frame streams, each with a live picture with the results drawn in,
// rates, ages, drops by reason.

import { access, getJson, request } from "../api.js";
import { element, formatNumber, keepChildren, note, setBadge, setText } from "../dom.js";
import { openLarge } from "./panel_large.js";

export const id = "cameras";
export const title = "Cameras";
export const paths = ["edge/v1/streams", "edge/v1/cameras"];

const MAX_SHOWN = 6;
const REASONS = {
  NEWER: "replaced by a newer one", MAX_AGE: "too old", DEADLINE: "past the deadline", MAX_FPS: "above the frame rate",
  SLOW_READER: "because earlier results were not read yet", GOVERNOR: "held back by the governor", CLOSED: "stream closed",
};
const KINDS = { RUNNING: "ok", FAILED: "bad" };
const cards = new Map();
let questions = [];

/** Return how many cameras of the server have failed, in words. */
export function problemOf(found, own) {
  const lost = (own?.sources ?? []).filter(({ state }) => state === "FAILED").length;
  return lost ? `${lost} ${lost === 1 ? "camera" : "cameras"} failed` : "";
}

export function makePanel() {
  const count = element("span.muted", { id: "cameras-count" });
  const failed = element("span", { id: "cameras-failed" });
  const problem = element("p.banner", { id: "cameras-problem" });
  const container = element("div.grid.cameras", { id: "cameras-cards" });
  const command = element("code");
  const empty = element(
    "p.card.empty", { id: "cameras-empty" }, "No camera is connected. ", command, " sends one; a camera in the file of ",
    element("code", "--sources-file"), " is opened by the server.",
  );
  const hint = element("p.note", { id: "cameras-note" });
  function update(found, own, models) {
    setText(command, demoCommand(models ?? []));
    questions = own?.questions ?? [];
    const cameras = merged(found?.streams ?? [], own?.sources ?? []);
    const lost = cameras.filter((camera) => camera.source?.state === "FAILED").length;
    setText(count, cameras.length ? `${cameras.filter((camera) => camera.stream).length} of ${cameras.length} open` : "");
    setBadge(failed, lost ? `${lost} failed` : "", "bad");
    const sinks = (own?.sinks ?? []).filter((sink) => sink.reason)
        .map((sink) => `${sink.state === "FAILED" ? "Results do not reach sink" : "Sink"} ${sink.name}: ${sink.reason}`);
    note(problem, [own?.problem && `${own.problem[0].toUpperCase()}${own.problem.slice(1)}`, ...sinks].filter(Boolean).join("\n"));
    empty.hidden = Boolean(cameras.length) || !found;
    note(hint, !found ? "Cameras need a key." : access.allowed.view || !cameras.length ? "" :
      "Pictures are shown on the machine itself, or with a key for the category view.");
    keepChildren(container, cards, cameras, (camera) => camera.name, makeCard);
    return cameras.length > 0 || Boolean(own?.problem);
  }
  return { heading: element("span.row", count, failed), nodes: [problem, container, empty, hint], update };
}

/** Return the command that sends the demo pictures to a model that takes pictures, `MODEL` where the page knows none. */
function demoCommand(models) {
  const demo = models.find(({ name }) => name === "face_detection_yunet");
  const model = demo ?? models.find(({ recognised }) => Object.keys(recognised).some((key) => key.startsWith("image_")));
  const address = `${location.hostname}:${access.grpc_port}`;
  return `edge-server stream --model=${model?.name ?? "MODEL"} --source=demo${address === "127.0.0.1:8001" ? "" : ` --url=${address}`}`;
}

/**
 * Return {name, stream, source}: the cameras of the server, failed ones first, else in the order of their file, then other
 * frame streams.
 */
function merged(streams, sources) {
  const byName = new Map(streams.map((stream) => [stream.stream_id, stream]));
  // The frame stream of a camera stays open while the camera is lost.
  const streamOf = ({ name, state }) => (state === "FAILED" ? null : byName.get(name) ?? null);
  const isWorking = ({ state }) => state !== "FAILED";
  const own = sources.toSorted((a, b) => isWorking(a) - isWorking(b)).map((source) => ({ name: source.name, source, stream: streamOf(source) }));
  const names = new Set(sources.map((source) => source.name));
  return [...own, ...streams.filter((stream) => !names.has(stream.stream_id)).map((stream) => ({ name: stream.stream_id, source: null, stream }))];
}

document.addEventListener("visibilitychange", () => {
  for (const card of cards.values()) card.refresh();
});

function makeCard({ name }) {
  const image = element("img", { alt: `Live picture of ${name}`, hidden: true });
  const text = element("span.message");
  const picture = element("button.picture", { title: "Enlarge", click: () => openLarge(name, { hasZones: Boolean(now?.source) }) }, text, image);
  const toggle = element("button", { click: () => { isWanted = !isWanted; refresh(); } });
  const state = element("span");
  const model = element("span.muted.origin");
  const facts = ["In", "Out", "Age", "Dropped"].map((fact) => [element("dt", fact), element("dd")]);
  const warning = element("p.warning");
  const answers = element("p.answers", { hidden: true });
  const drops = element("p.chips");
  const node = element(
    "article.card.camera", { "data-stream": name },
    element("div.head", element("h3", name), state), element("div.head", model, toggle), picture,
    element("dl.facts", ...facts.map((pair) => element("div", ...pair))), warning, answers, drops,
  );
  let isWanted = [...cards.values()].filter((card) => card.isLive()).length < MAX_SHOWN;
  let now = null;
  let problem = "";
  let running = null;
  let shownUrl = "";
  let readCounts = "";

  function update(camera) {
    now = camera;
    const { stream, source } = camera;
    const isFailed = source?.state === "FAILED";
    node.classList.toggle("failed", isFailed);
    setBadge(state, source?.state ?? "OPEN", KINDS[source?.state ?? "RUNNING"] ?? "busy");
    setText(model, [stream?.model ?? source.model, source?.url ?? stream?.client].filter(Boolean).join(" · "));
    model.title = model.textContent;
    const dropped = stream && Object.values(stream.dropped).reduce((sum, count) => sum + count, 0);
    [
      formatNumber(stream?.fps_in, 1, "/s"), formatNumber(stream?.fps_out, 1, "/s"), formatNumber(stream?.age_p50_ms, 1, " ms"), formatNumber(dropped, 0),
    ].forEach((text, place) => setText(facts[place][1], text));
    // Of a camera without a stream the reason stands in place of the picture.
    const asked = questions.filter((question) => question.source === name);
    const problems = asked.filter(({ reason }) => reason).map((question) => `Question ${question.name}: ${question.reason}`);
    note(warning, [stream ? source?.reason : "", ...problems].filter(Boolean).join("\n"));
    readAnswers(asked.map(({ answered }) => answered).join());
    setText(drops, detailOf(camera));
    refresh();
  }

  /** Show the last answers about this camera, read again when their counts change. */
  async function readAnswers(counts) {
    if (counts === readCounts || !access.allowed.view) return;
    readCounts = counts;
    try {
      const found = await getJson(`edge/v1/cameras/${encodeURIComponent(name)}/answers`);
      note(answers, found.answers.map((answer) => `${new Date(answer.time_s * 1000).toLocaleTimeString()} ${answer.question}: ${answer.text}`).join("\n"));
    } catch {
      readCounts = ""; // The next update tries again.
    }
  }

  function refresh() {
    const isOpen = access.allowed.view && Boolean(now?.stream);
    const isLive = isOpen && isWanted && !document.hidden;
    setText(toggle, isWanted ? "Hide" : "Show");
    toggle.setAttribute("aria-label", `${toggle.textContent} the picture of ${name}`);
    toggle.hidden = picture.disabled = !isOpen;
    if (isLive && running === null) start();
    if (!isLive && running !== null) stop();
    if (!isWanted || !now?.stream) image.hidden = true;
    setText(text, messageOf());
    text.hidden = !image.hidden;
  }

  function messageOf() {
    if (!now?.stream) return now?.source?.reason || { CONNECTING: "Connecting", WAITING: "Waiting for the model" }[now?.source?.state] || "No picture";
    if (!access.allowed.view) return "The picture needs a key";
    return isWanted ? problem || "Waiting for a picture" : "Picture hidden";
  }

  async function start() {
    const mine = running = new AbortController();
    try {
      for (;;) {
        const response = await request(`edge/v1/streams/${encodeURIComponent(name)}/picture`, { signal: mine.signal });
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
    text.hidden = true;
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

function detailOf({ stream, source }) {
  const parts = [];
  if (stream) {
    parts.push(`Age: 99 % within ${formatNumber(stream.age_p99_ms, 1, " ms")}`);
    const dropped = Object.entries(stream.dropped).filter(([, count]) => count);
    if (dropped.length) parts.push(`Dropped: ${dropped.map(([reason, count]) => `${count} ${REASONS[reason] ?? reason}`).join(", ")}`);
  }
  if (source?.failures) parts.push(`${source.failures} failures, offline for ${formatNumber(source.offline_s, 0)} s in all`);
  return parts.join(" · ");
}
