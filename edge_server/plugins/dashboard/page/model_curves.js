// Curves of each model: requests, latency and queue, from the counts that the page reads while it is open.

import { Charts, Rates, SPAN_MS } from "./charts.js";
import { byId, note } from "./dom.js";

const charts = new Charts(byId("model-charts"));
const rates = new Rates();
/** name -> {curves by their key, of points [time in ms, number or null]}. A model that was never asked has none. */
const known = new Map();
/** Key -> how it is shown. */
const CURVES = {
  requests: { title: "Requests", unit: "/s" },
  median: { title: "Latency, median", unit: "ms", detail: "of the last minute" },
  most: { title: "Latency, 99 %", unit: "ms", detail: "of the last minute" },
  mean: { title: "Latency, mean", unit: "ms", detail: "of the model, without the queue" },
  waiting: { title: "Waiting requests", digits: 0, detail: "in the queue now" },
  queue: { title: "Time in queue", unit: "ms", detail: "of the last requests" },
};

/** Add a point to the curves of each model that has been asked. */
export function readCurves(activity) {
  if (!activity) return;
  const models = new Map();
  for (const version of activity.models) models.set(version.name, [...models.get(version.name) ?? [], version]);
  for (const [name, versions] of models) {
    const now = pointsOf(name, versions, activity.readAt);
    if (!known.has(name) && !versions.some(({ succeeded, failed, waiting }) => succeeded + failed + waiting)) continue;
    if (!known.has(name)) known.set(name, Object.fromEntries(Object.keys(CURVES).map((key) => [key, []])));
    const time = Date.now();
    for (const [key, points] of Object.entries(known.get(name))) {
      points.push([time, now[key]]);
      while (points[0][0] < time - SPAN_MS) points.shift();
    }
  }
  for (const name of known.keys()) if (!models.has(name)) known.delete(name);
}

/** Return the number of each curve now, null where it is unknown. */
function pointsOf(name, versions, readAt) {
  const sum = (member) => versions.reduce((total, version) => total + version[member], 0);
  const meanMs = (time, count) => {
    const [spent, done] = [time, count].map((member) => rates.step(`${name} ${member}`, sum(member), readAt));
    return spent && done?.count ? spent.count / done.count / 1e6 : null;
  };
  const requests = rates.step(`${name} requests`, sum("succeeded") + sum("failed"), readAt);
  const queued = rates.step(`${name} queued`, sum("queue_ns"), readAt);
  // Of several versions, the newest that was asked.
  const quantiles = versions.findLast((version) => Object.keys(version.request_quantiles_ms).length)?.request_quantiles_ms ?? {};
  return {
    requests: requests && requests.count / requests.seconds,
    median: quantiles["0.5"] ?? null,
    most: quantiles["0.99"] ?? null,
    mean: meanMs("compute_ns", "computed"),
    waiting: sum("waiting"),
    queue: queued && requests ? (requests.count ? queued.count / requests.count / 1e6 : 0) : null,
  };
}

/** Show the curves of a model. */
export function showCurves(name) {
  const curves = known.get(name);
  const hasQuantiles = Boolean(curves?.median.some(([, value]) => value !== null));
  const shown = Object.entries(curves ?? {}).filter(([key]) => (hasQuantiles ? key !== "mean" : key !== "median" && key !== "most"));
  charts.update(shown.map(([key, points]) => ({ key: `model ${key}`, ...CURVES[key], value: points.at(-1)[1], points })));
  note(byId("model-curves-note"), !curves ? "No request yet: the curves begin with the first one." : hasQuantiles ? "" :
    "Median and 99 % need a server with --metrics-config=summary_latencies=true.");
}
