// Curves of the last half hour: what the server has kept, then what the page reads.

import { element, formatNumber, keepChildren, setAttributes, setText, svg } from "./dom.js";
import { pastOf, pastVersion } from "./history.js";

export const SPAN_MS = 30 * 60 * 1000;
const GAP_MS = 20 * 1000;
const MIN_STEP_MS = 1000;
const WIDTH = 300;
const HEIGHT = 76;

/** Scale of an item in per cent. */
export const PERCENT = { unit: "%", top: 100, digits: 0 };

/**
 * Charts in one container. Each item is {key, title, value, scale, unit, limit, top, digits, detail, points}. `key` is the
 * name of its gauge in the server's history, whose numbers `scale` divides; value null means unknown. Of an item with
 * `points`, [time in ms, number or null] each, these are the curve.
 */
export class Charts {
  constructor(container) {
    this.container = container;
    this.known = new Map();
  }

  update(items) {
    keepChildren(this.container, this.known, items, (item) => item.key, makeChart);
  }
}

function makeChart(first) {
  let points = [];
  let version = -1;
  const value = element("span.value");
  const area = svg("path.area");
  const line = svg("path.line");
  const limit = svg("line.limit", { x1: 0, x2: WIDTH });
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, area, limit, line);
  const detail = element("span");
  const span = element("span");
  const node = element(
    "article.card.chart", { "data-chart": first.key },
    element("div.head", element("h3", { title: first.title }, first.title), value),
    picture,
    element("div.foot", detail, span),
  );

  function update(item) {
    const now = Date.now();
    if (item.points) {
      points = item.points;
    } else {
      if (version !== pastVersion()) {
        version = pastVersion();
        points = pastOf(item.key).map(([time, number]) => [time, number === null ? null : number / (item.scale ?? 1)]);
      }
      points.push([now, item.value]);
      while (points[0][0] < now - SPAN_MS) points.shift();
    }
    const text = formatNumber(item.value, item.digits, item.unit && ` ${item.unit}`);
    setText(value, text);
    setText(detail, item.detail ?? "");
    setText(span, spanText(now - points[0][0]));
    picture.setAttribute("aria-label", `${item.title}: ${text}`);
    draw(item, now);
  }

  function draw(item, now) {
    const values = points.map(([, number]) => number).filter((number) => number !== null);
    const top = Math.max(item.top ?? 0, (item.limit ?? 0) * 1.08, Math.max(0, ...values) * 1.15, 1e-9);
    const width = Math.max(now - points[0][0], 1);
    const x = (time) => ((1 - (now - time) / width) * WIDTH).toFixed(1);
    const y = (number) => (HEIGHT - 2 - (number / top) * (HEIGHT - 4)).toFixed(1);
    const parts = connected(points);
    const pathOf = (part) => `M${part.map(([time, number]) => `${x(time)} ${y(number)}`).join("L")}`;
    line.setAttribute("d", parts.map(pathOf).join(""));
    area.setAttribute("d", parts.map((part) => `${pathOf(part)}L${x(part.at(-1)[0])} ${HEIGHT}L${x(part[0][0])} ${HEIGHT}Z`).join(""));
    const level = y(item.limit ?? 0);
    setAttributes(limit, { visibility: item.limit ? "visible" : "hidden", y1: level, y2: level });
  }
  return { node, update };
}

const spanText = (ms) => (ms < 90000 ? `${Math.round(ms / 1000)} s` : `${Math.round(ms / 60000)} min`);

/** Return the runs of points without unknown values and without gaps in time. */
function connected(points) {
  const parts = [];
  let before = -Infinity;
  for (const point of points) {
    if (point[1] === null) continue;
    if (point[0] - before > GAP_MS) parts.push([]);
    parts.at(-1).push(point);
    before = point[0];
  }
  return parts;
}

/** Growth of counters. Events make the page read twice within milliseconds: a rate of so short a time is noise. */
export class Rates {
  constructor() {
    this.known = new Map();
  }

  /**
   * Return the growth of a counter since the last call, and the seconds between. `time` in ms is when the counter was read.
   * Within a second of the last step that step is returned again. Null at first.
   */
  step(name, count, time) {
    const before = this.known.get(name);
    const isReset = before && count < before.count;
    if (before && !isReset && time - before.time < MIN_STEP_MS) return before.step;
    // A reloaded model counts from zero again.
    const step = before && !isReset ? { count: count - before.count, seconds: (time - before.time) / 1000 } : null;
    this.known.set(name, { count, time, step });
    return step;
  }

  /** Return the growth a second, as `step`. */
  perSecond(name, count, time) {
    const step = this.step(name, count, time);
    return step && step.count / step.seconds;
  }
}
