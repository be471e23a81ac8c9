// Curves of the last minutes. The browser keeps the values; the server keeps none.

import { element, formatNumber, keepChildren, setText, svg } from "./dom.js";

const MAX_POINTS = 300;
const WIDTH = 300;
const HEIGHT = 76;

/** Charts in one container. Each item is {key, title, value, unit, limit, top, detail}; value null means unknown. */
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
  const points = [];
  const value = element("span", { class: "value" });
  const area = svg("polygon", { class: "area" });
  const line = svg("polyline", { class: "line" });
  const limit = svg("line", { class: "limit", x1: 0, x2: WIDTH });
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  picture.append(area, limit, line);
  const detail = element("span");
  const span = element("span");
  const node = element(
    "article", { class: "card chart" },
    element("div", { class: "head" }, element("h3", {}, first.title), value),
    picture,
    element("div", { class: "foot" }, detail, span),
  );
  function update(item) {
    const now = Date.now();
    points.push([now, item.value]);
    if (points.length > MAX_POINTS) points.shift();
    const text = item.value === null ? "–" : `${formatNumber(item.value, item.digits)}${item.unit ? ` ${item.unit}` : ""}`;
    setText(value, text);
    setText(detail, item.detail ?? "");
    const known = points.filter(([, number]) => number !== null);
    const seconds = Math.round((now - points[0][0]) / 1000);
    setText(span, seconds < 90 ? `${seconds} s` : `${Math.round(seconds / 60)} min`);
    picture.setAttribute("aria-label", `${item.title}: ${text}`);
    const values = known.map(([, number]) => number);
    const top = Math.max(item.top ?? 0, (item.limit ?? 0) * 1.08, Math.max(0, ...values) * 1.15, 1e-9);
    const y = (number) => (HEIGHT - 2 - (number / top) * (HEIGHT - 4)).toFixed(1);
    const width = Math.max(now - points[0][0], 1);
    const x = (time) => ((1 - (now - time) / width) * WIDTH).toFixed(1);
    const shape = known.map(([time, number]) => `${x(time)},${y(number)}`);
    line.setAttribute("points", shape.join(" "));
    area.setAttribute("points", shape.length > 1
      ? `${x(known[0][0])},${HEIGHT} ${shape.join(" ")} ${x(known[known.length - 1][0])},${HEIGHT}` : "");
    limit.setAttribute("visibility", item.limit ? "visible" : "hidden");
    if (item.limit) {
      limit.setAttribute("y1", y(item.limit));
      limit.setAttribute("y2", y(item.limit));
    }
  }
  return { node, update };
}

/** Differences of counters between two calls, a second. */
export class Rates {
  constructor() {
    this.before = new Map();
  }

  /** Return the growth of a counter since the last call, and the seconds between; null at the first call. */
  step(name, count) {
    const now = performance.now();
    const before = this.before.get(name);
    this.before.set(name, [now, count]);
    // A reloaded model counts from zero again.
    if (!before || count < before[1]) return null;
    return { count: count - before[1], seconds: (now - before[0]) / 1000 };
  }
}
