// Section of the page: processor, memory, heat, power and what the governor holds back, as curves.

import { access } from "../api.js";
import { element, note, setBadge } from "../dom.js";
import { Charts, PERCENT } from "../charts.js";

export const id = "machine";
export const title = "Machine";
export const paths = ["edge/v1/governor"];

const LIMITING = ["HOT", "THROTTLED", "CRITICAL"];
const STATES = { NORMAL: "ok", WARM: "busy", HOT: "busy", THROTTLED: "bad", CRITICAL: "bad" };

/** Return the state in a word while heat or power holds models back. */
export const problemOf = (governor) => (governor?.enabled && LIMITING.includes(governor.state) ? governor.state.toLowerCase() : "");

export function makePanel() {
  const badge = element("span", { id: "machine-state" });
  const text = element("p.note", { id: "machine-detail" });
  const container = element("div.grid.charts", { id: "machine-charts" });
  const charts = new Charts(container);
  function update(governor) {
    if (governor?.enabled) {
      setBadge(badge, saysSomething(governor) ? governor.state : "", STATES[governor.state] ?? "");
      note(text, detailOf(governor));
    } else {
      setBadge(badge, governor ? "no governor" : "needs a key", "");
      note(text, governor?.detail ?? "");
    }
    charts.update([...hostCharts(access.machine), ...(governor?.enabled ? governorCharts(governor) : [])]);
  }
  return { heading: badge, nodes: [text, container], update };
}

/**
 * Return whether the state says something: without a sensor it is NORMAL, but for a lack of memory or a sensor that was
 * lost.
 */
const saysSomething = ({ temperature_c: heat, power_w: power, state, share }) =>
  heat !== null || power !== null || state !== "NORMAL" || share < 1;

function detailOf(governor) {
  const shed = governor.shed.map((item) => `${item.count} ${item.class} (${item.reason})`).join(", ");
  const parts = [governor.detail, shed && `refused since the start: ${shed}`];
  const unknown = ["temperature", "power"].filter((name, place) => [governor.temperature_c, governor.power_w][place] === null);
  if (unknown.length) parts.push(`no sensor for ${unknown.join(" and ")}`);
  for (const [model, lighter] of Object.entries(governor.variants_in_force)) parts.push(`${lighter} answers for ${model}`);
  return parts.filter(Boolean).join(" · ");
}

function hostCharts(machine) {
  if (!machine) return [];
  const total = machine.memory_total_bytes / 1e9;
  return [
    { key: "cpu", title: "Processor", value: machine.cpu_utilization * 100, ...PERCENT, detail: "of all cores" },
    { key: "memory", title: "Memory", value: machine.memory_used_bytes / 1e9, scale: 1e9, unit: "GB", top: total, detail: `in use, of ${total.toFixed(1)} GB` },
  ];
}

function governorCharts(governor) {
  const limited = (key, title, value, unit, limit, name) => ({ key, title, value, unit, limit, detail: limit ? `${name} ${Math.round(limit)} ${unit}` : "" });
  const items = [
    limited("temperature", "Temperature", governor.temperature_c, "°C", governor.set_point_c, "held below"),
    limited("power", "Power", governor.power_w, "W", governor.power_budget_w, "budget"),
    {
      key: "load limit", title: "Load limit", value: saysSomething(governor) ? governor.share * 100 : null, ...PERCENT,
      detail: governor.share < 1 ? `held back: ${governor.limited_by || governor.causes.join(", ") || "heat"}` : "models may run at full speed",
    },
    { key: "busy instances", title: "Busy instances", value: governor.busy, top: 1, detail: "running at once, on average" },
  ];
  for (const gpu of governor.box.gpus) {
    if (gpu.utilization !== null) {
      items.push({ key: `gpu ${gpu.uuid}`, title: gpu.name, value: gpu.utilization * 100, ...PERCENT, detail: gpu.held_back_by.join(", ") });
    }
  }
  return items.filter((item) => item.value !== null);
}
