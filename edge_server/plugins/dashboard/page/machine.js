// Heat, power and what the governor holds back; requests, queues, cache and tokens: as curves.

import { byId, note, setBadge } from "./dom.js";
import { Charts, Rates } from "./charts.js";

const STATES = { NORMAL: "ok", WARM: "busy", HOT: "busy", THROTTLED: "bad", CRITICAL: "bad" };
const machine = new Charts("machine-charts");
const activity = new Charts("activity-charts");
const rates = new Rates();

export function updateMachine(governor) {
  const badge = byId("machine-state");
  if (!governor?.enabled) {
    setBadge(badge, governor ? "no governor" : "needs a key", "");
    note(byId("machine-detail"), governor?.detail ?? "");
    machine.update([]);
    return;
  }
  setBadge(badge, governor.state, STATES[governor.state] ?? "");
  const shed = governor.shed.map((item) => `${item.count} ${item.class} (${item.reason})`).join(", ");
  const parts = [governor.detail, shed && `refused since the start: ${shed}`];
  const unknown = ["temperature", "power"].filter((name, place) => [governor.temperature_c, governor.power_w][place] === null);
  if (unknown.length) parts.push(`no sensor for ${unknown.join(" and ")}`);
  for (const [model, lighter] of Object.entries(governor.variants_in_force)) parts.push(`${lighter} answers for ${model}`);
  note(byId("machine-detail"), parts.filter(Boolean).join(" · "));
  const memory = governor.box.memory;
  const limitOf = (name, value, unit) => (value ? `${name} ${Math.round(value)} ${unit}` : "");
  const items = [
    {
      key: "heat", title: "Temperature", value: governor.temperature_c, unit: "°C", limit: governor.set_point_c,
      detail: limitOf("held below", governor.set_point_c, "°C"),
    },
    {
      key: "power", title: "Power", value: governor.power_w, unit: "W", limit: governor.power_budget_w,
      detail: limitOf("budget", governor.power_budget_w, "W"),
    },
    {
      key: "share", title: "Work allowed", value: governor.share * 100, unit: "%", top: 100, digits: 0,
      detail: governor.share < 1 ? `held back: ${governor.limited_by || governor.causes.join(", ") || "heat"}` : "nothing held back",
    },
    { key: "busy", title: "Instances that compute", value: governor.busy, unit: "", top: 1, digits: 1, detail: "at once, on average" },
  ];
  if (memory.total_bytes) {
    const used = (memory.total_bytes - memory.available_bytes) / 1e9;
    items.push({ key: "memory", title: "Memory in use", value: used, unit: "GB", top: memory.total_bytes / 1e9,
                 detail: `of ${(memory.total_bytes / 1e9).toFixed(1)} GB` });
  }
  for (const gpu of governor.box.gpus) {
    if (gpu.utilization !== null) {
      items.push({ key: `gpu ${gpu.uuid}`, title: gpu.name, value: gpu.utilization * 100, unit: "%", top: 100, digits: 0,
                   detail: gpu.held_back_by.join(", ") });
    }
  }
  machine.update(items.filter((item) => item.value !== null));
}

export function updateActivity(now) {
  note(byId("activity-note"), now ? "" : "Counts need a key.");
  if (!now) {
    activity.update([]);
    return;
  }
  const sum = (name) => now.models.reduce((total, model) => total + model[name], 0);
  const perSecond = (name, count) => {
    const step = rates.step(name, count);
    return step ? step.count / step.seconds : null;
  };
  const requests = sum("succeeded") + sum("failed");
  const queued = rates.step("queued", sum("queue_ns"));
  const answered = rates.step("answered", requests);
  const items = [
    { key: "requests", title: "Requests", value: perSecond("requests", requests), unit: "/s", detail: `${requests} in all` },
    { key: "failed", title: "Failed", value: perSecond("failed", sum("failed")), unit: "/s", detail: `${sum("failed")} in all` },
    { key: "waiting", title: "Waiting in queues", value: sum("waiting"), digits: 0 },
    { key: "queue", title: "Time in queue", value: queued && answered ? (answered.count ? queued.count / answered.count / 1e6 : 0) : null, unit: "ms" },
  ];
  const cached = now.models.filter((model) => model.is_cached);
  if (cached.length) {
    const hits = sum("cache_hits");
    const lookups = hits + sum("cache_misses");
    items.push({ key: "cache", title: "Answered from the cache", value: lookups ? (100 * hits) / lookups : 0, unit: "%", top: 100,
                 digits: 0, detail: `${hits} of ${lookups} lookups` });
  }
  for (const [model, counts] of Object.entries(now.tokens)) {
    items.push({ key: `tokens ${model}`, title: `Tokens of ${model}`, value: perSecond(`tokens ${model}`, counts.generated), unit: "/s",
                 detail: `${counts.running} running, ${counts.waiting} waiting` });
  }
  activity.update(items);
}
