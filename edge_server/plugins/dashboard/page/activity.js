// Requests, queues, cache and tokens, as curves.

import { byId, note } from "./dom.js";
import { Charts, PERCENT, Rates } from "./charts.js";

const activity = new Charts(byId("activity-charts"));
const rates = new Rates();
/** name -> {counts by version, earlier}: `earlier` was counted before versions were loaded again or unloaded. */
const known = new Map();

/** Return the text of a count, which begins anew with each load of a model. What the page has seen before is not lost. */
function sinceLoads(name, models, countOf) {
  const counts = new Map(models.map((model) => [`${model.name}\n${model.version}`, countOf(model)]));
  let { earlier = 0, counts: before = [] } = known.get(name) ?? {};
  for (const [key, count] of before) if ((counts.get(key) ?? 0) < count) earlier += count;
  known.set(name, { counts, earlier });
  const sum = [...counts.values()].reduce((total, count) => total + count, 0);
  return `${sum} since each model was loaded${earlier ? `, ${earlier} before a reload` : ""}`;
}

export function updateActivity(now) {
  note(byId("activity-note"), now ? "" : "Counts need a key.");
  if (!now) {
    activity.update([]);
    return;
  }
  const sum = (name) => now.models.reduce((total, model) => total + model[name], 0);
  const perSecond = (name, count) => rates.perSecond(name, count, now.readAt);
  const requests = sum("succeeded") + sum("failed");
  const queued = rates.step("queued", sum("queue_ns"), now.readAt);
  const answered = rates.step("answered", requests, now.readAt);
  const items = [
    { key: "requests", title: "Requests", value: perSecond("requests", requests), unit: "/s", detail: sinceLoads("requests", now.models, ({ succeeded, failed }) => succeeded + failed) },
    { key: "failed", title: "Failed requests", value: perSecond("failed", sum("failed")), unit: "/s", detail: sinceLoads("failed", now.models, ({ failed }) => failed) },
    { key: "waiting", title: "Waiting requests", value: sum("waiting"), digits: 0, detail: "in queues now" },
    { key: "queue", title: "Time in queue", value: queued && answered ? (answered.count ? queued.count / answered.count / 1e6 : 0) : null, unit: "ms",
      detail: "mean of the last requests" },
  ];
  const cached = now.models.filter((model) => model.is_cached);
  if (cached.length) {
    const hits = sum("cache_hits");
    const lookups = hits + sum("cache_misses");
    items.push({ key: "cache", title: "Answered from the cache", value: lookups ? (100 * hits) / lookups : 0, ...PERCENT, detail: `${hits} of ${lookups} lookups` });
  }
  for (const [model, counts] of Object.entries(now.tokens)) {
    items.push({ key: `tokens ${model}`, title: `Tokens of ${model}`, value: perSecond(`tokens ${model}`, counts.generated), unit: "/s",
                 detail: `${counts.running} running, ${counts.waiting} waiting` });
  }
  activity.update(items);
}
