// Requests, queues, cache and tokens, as curves.

import { byId, note } from "./dom.js";
import { Charts, PERCENT, Rates } from "./charts.js";

const activity = new Charts(byId("activity-charts"));
const rates = new Rates();

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
    { key: "requests", title: "Requests", value: perSecond("requests", requests), unit: "/s", detail: `${requests} since the start` },
    { key: "failed", title: "Failed requests", value: perSecond("failed", sum("failed")), unit: "/s", detail: `${sum("failed")} since the start` },
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
