// Section of the page: heat, power and what the governor holds back, as curves.

import { element, note, setBadge } from "../dom.js";
import { Charts } from "../charts.js";

export const id = "machine";
export const title = "Machine";
export const paths = ["edge/v1/governor"];

const STATES = { NORMAL: "ok", WARM: "busy", HOT: "busy", THROTTLED: "bad", CRITICAL: "bad" };

export function makePanel() {
  const badge = element("span", { id: "machine-state" });
  const text = element("p", { id: "machine-detail", class: "note", hidden: true });
  const container = element("div", { id: "machine-charts", class: "grid charts" });
  const charts = new Charts(container);
  return { heading: badge, nodes: [text, container], update: (governor) => { update(governor, badge, text, charts); } };
}

function update(governor, badge, text, charts) {
  if (!governor?.enabled) {
    setBadge(badge, governor ? "no governor" : "needs a key", "");
    note(text, governor?.detail ?? "");
    charts.update([]);
    return;
  }
  setBadge(badge, governor.state, STATES[governor.state] ?? "");
  const shed = governor.shed.map((item) => `${item.count} ${item.class} (${item.reason})`).join(", ");
  const parts = [governor.detail, shed && `refused since the start: ${shed}`];
  const unknown = ["temperature", "power"].filter((name, place) => [governor.temperature_c, governor.power_w][place] === null);
  if (unknown.length) parts.push(`no sensor for ${unknown.join(" and ")}`);
  for (const [model, lighter] of Object.entries(governor.variants_in_force)) parts.push(`${lighter} answers for ${model}`);
  note(text, parts.filter(Boolean).join(" · "));
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
  charts.update(items.filter((item) => item.value !== null));
}
