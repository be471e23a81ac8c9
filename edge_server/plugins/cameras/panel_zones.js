// Editor of the zones and lines of a camera, over its large picture. Points are dragged, or moved with the arrow keys.

import { getJson, post } from "../api.js";
import { element, note, setAttributes, svg } from "../dom.js";

const LEAST_POINTS = { zone: 3, line: 2 };
const MOST_POINTS = 64;
const NEW_POINTS = { zone: [[0.3, 0.3], [0.7, 0.3], [0.7, 0.7], [0.3, 0.7]], line: [[0.2, 0.5], [0.8, 0.5]] };
const WHOLE_PICTURE = [[0, 0], [1, 0], [1, 1], [0, 1]];
const STEPS = { ArrowLeft: [-0.01, 0], ArrowRight: [0.01, 0], ArrowUp: [0, -0.01], ArrowDown: [0, 0.01] };
const STORED_IN = {
  sources_file: "Saved in the sources file.",
  state_folder: "Saved in the state folder, because the sources file cannot be changed. From now on this wins over the sources file.",
};
const inside = (value) => Math.round(1e4 * Math.min(1, Math.max(0, value))) / 1e4;

/**
 * Return {nodes, open()}: a form that is hidden until it is opened, and shows the points over `canvas` in `stage`.
 * `onState` gets whether it is open.
 */
export function makeZoneEditor(camera, stage, canvas, onState) {
  const path = `edge/v1/cameras/${encodeURIComponent(camera)}/zones`;
  const drop = () => { dragged = null; };
  const drawing = svg("svg.zones", { role: "group", "aria-label": "Points of zones and lines", pointermove: drag, pointerup: drop, pointercancel: drop });
  const rows = element("div.zone-rows");
  const hint = element(
    "p.note", "Drag points, zones and lines; Tab and the arrow keys move points too. A small point adds one, Delete or a double click " +
      "removes one. An object is where the middle of its box's lower edge is.",
  );
  const problem = element("p.error", { role: "alert", hidden: true });
  const saved = element("p.note", { role: "status", hidden: true });
  const form = element(
    "form.zone-form", { hidden: true, submit: (event) => { event.preventDefault(); save(); } },
    element("div.zone-list", hint, rows),
    problem,
    element(
      "div.row",
      element("button", { "data-add": "zone", click: () => add("zone") }, "Add a zone"),
      element("button", { "data-add": "line", click: () => add("line") }, "Add a line"),
      element("button.primary", { type: "submit" }, "Save"),
      element("button", { click: close }, "Cancel"),
    ),
  );
  let items = [];
  let classes = [];
  let dragged = null;
  let chosen = null;
  const shapes = svg("g");
  const points = svg("g");
  drawing.append(shapes, points);
  const size = new ResizeObserver(() => placeDrawing());

  async function open() {
    note(saved, "");
    note(problem, "");
    try {
      show(await getJson(path));
    } catch (error) {
      note(saved, error.message);
      return;
    }
    form.hidden = false;
    stage.append(drawing);
    size.observe(canvas);
    placeDrawing();
    onState(true);
  }

  function show(found) {
    classes = found.classes;
    items = [
      ...found.zones.map(({ points = WHOLE_PICTURE, ...rest }) => ({ kind: "zone", points: [...points], rest })),
      ...found.lines.map(({ points, ...rest }) => ({ kind: "line", points, rest })),
    ];
    build();
  }

  function close() {
    form.hidden = true;
    size.disconnect();
    drawing.remove();
    onState(false);
  }

  function add(kind) {
    const names = new Set(items.filter((item) => item.kind === kind).map((item) => item.rest.name));
    let number = 1;
    while (names.has(`${kind}_${number}`)) number += 1;
    items.push({ kind, points: NEW_POINTS[kind].map((point) => [...point]), rest: { name: `${kind}_${number}` } });
    build();
    rows.lastElementChild.querySelector("input").select();
  }

  async function save() {
    const of = (wanted) => items.filter(({ kind }) => kind === wanted).map(({ points, rest }) => ({ ...rest, points }));
    try {
      const response = await post(path, { zones: of("zone"), lines: of("line") }, { method: "PUT" });
      const unknown = items.map(problemOf).filter(Boolean);
      note(saved, [STORED_IN[(await response.json()).stored_in], ...unknown].join(" "));
      close();
    } catch (error) {
      note(problem, error.message);
    }
  }

  /** Make the rows and the drawing anew, after an item or a point came or went. */
  function build() {
    rows.replaceChildren(...items.map(makeRow));
    buildDrawing();
  }

  function makeRow(item) {
    const { kind, rest } = item;
    const field = (label, attributes, take) => element(
      "label", label, element("input", { ...attributes, input: ({ target }) => take(target.value.trim(), target) }),
    );
    const optional = (key, value) => {
      if (value) rest[key] = value;
      else delete rest[key];
    };
    const takeNumber = (key) => (text) => optional(key, Number(text));
    const unknown = element("p.warning", { role: "status", hidden: true });
    const choices = classes.map((name) => element("button", { click: () => {
      const chosen = rest.classes ?? [];
      chooseClasses(chosen.includes(name) ? chosen.filter((one) => one !== name) : [...chosen, name]);
      classField.querySelector("input").value = (rest.classes ?? []).join(", ");
    } }, name));
    const classField = field("Classes", { value: (rest.classes ?? []).join(", "), placeholder: "all" }, (text) => chooseClasses(text.split(",").map((part) => part.trim()).filter(Boolean)));
    function chooseClasses(chosen) {
      optional("classes", chosen.length && chosen);
      for (const choice of choices) choice.setAttribute("aria-pressed", chosen.includes(choice.textContent));
      note(unknown, problemOf(item));
    }
    chooseClasses(rest.classes ?? []);
    const numbers = kind === "line" ? [] : [
      field("Frames until it counts", { type: "number", min: 1, max: 255, value: rest.inertia ?? 3 }, takeNumber("inertia")),
      field("Loiters after seconds", { type: "number", min: 0, step: "any", value: rest.loitering_s ?? "", placeholder: "never" }, takeNumber("loitering_s")),
    ];
    return element(
      "fieldset.zone-row", { focusin: () => choose(item) },
      element("legend", kind === "zone" ? "Zone" : "Line"),
      field("Name", { value: rest.name, required: true, pattern: "[A-Za-z0-9_.\\-]{1,64}", title: "1 to 64 letters, digits, _ - ." }, (text) => { rest.name = text; }),
      classField,
      ...numbers, kind === "line" ? element("button", { click: () => { item.points.reverse(); buildDrawing(); } }, "Turn round") : null,
      element("button", { click: () => { items = items.filter((one) => one !== item); build(); } }, "Remove"),
      choices.length ? element(
        "details", element("summary", `Classes of the model (${choices.length})`),
        element("div.choices", { role: "group", "aria-label": "Classes of the model" }, ...choices),
      ) : null, unknown,
    );
  }

  /** Return what is wrong with the classes of a zone or line, "" if nothing is or the model has not said its classes. */
  function problemOf({ kind, rest }) {
    const unknown = classes.length ? (rest.classes ?? []).filter((name) => !classes.includes(name)) : [];
    return unknown.length ? `The model has no class “${unknown.join("”, “")}”: ${kind} ${rest.name} does not count it.` : "";
  }

  function buildDrawing() {
    items.forEach(drawItem);
    shapes.replaceChildren(...items.map((item) => item.shape));
    points.replaceChildren(...items.map((item) => item.handles));
    if (items.includes(chosen)) choose(chosen);
  }

  /** Mark a zone or line, and put its points above those of the others, which may be in the same place. */
  function choose(item) {
    chosen = item;
    for (const { shape, handles } of items) {
      for (const group of [shape, handles]) group.classList.toggle("chosen", shape === item.shape);
    }
    // The others move: a point that has the focus would lose it.
    points.prepend(...items.map(({ handles }) => handles).filter((handles) => handles !== item.handles));
  }

  /** Make `shape`, `handles` (the points) and `place()` of an item, which puts both where they belong. */
  function drawItem(item) {
    const isLine = item.kind === "line";
    const pointerdown = (event) => begin(event, item, null);
    const outline = svg(isLine ? "polyline" : "polygon", { pointerdown });
    // A line of two pixels is hard to hit.
    const grip = svg(`${outline.tagName}.grip`, { pointerdown });
    const arrow = svg("path.arrow");
    const insert = (index) => (event) => {
      item.points.splice(index + 1, 0, positionOf(event));
      buildDrawing();
      begin(event, item, index + 1);
    };
    const between = item.points.length < MOST_POINTS ? pairsOf(item).map((_, index) => svg("circle.between", { r: 5, pointerdown: insert(index) })) : [];
    const corners = item.points.map((_, index) => svg("circle.point", {
      r: 8, tabindex: 0, role: "button", "aria-label": `Point ${index + 1} of ${item.kind} ${item.rest.name}`,
      pointerdown: (event) => begin(event, item, index), dblclick: () => removePoint(item, index), keydown: (event) => press(event, item, index),
    }));
    item.place = () => {
      const { clientWidth: width, clientHeight: height } = canvas;
      const pixels = item.points.map(([x, y]) => [x * width, y * height]);
      for (const part of [outline, grip]) part.setAttribute("points", pixels.map((point) => point.join(",")).join(" "));
      corners.forEach((point, index) => moveTo(point, pixels[index]));
      between.forEach((point, index) => {
        const next = pixels[(index + 1) % pixels.length];
        moveTo(point, [(pixels[index][0] + next[0]) / 2, (pixels[index][1] + next[1]) / 2]);
      });
      if (isLine) arrow.setAttribute("d", arrowOf(pixels));
    };
    item.place();
    item.shape = svg("g", outline, arrow, grip);
    item.handles = svg("g", ...between, ...corners);
  }

  const pairsOf = ({ kind, points }) => (kind === "line" ? points.slice(1) : points);

  function positionOf(event) {
    const box = canvas.getBoundingClientRect();
    return [inside((event.clientX - box.left) / box.width), inside((event.clientY - box.top) / box.height)];
  }

  /** Drag a point, or the whole zone or line if `index` is null. */
  function begin(event, item, index) {
    dragged = { item, index, from: positionOf(event), points: item.points };
    choose(item);
    rows.children[items.indexOf(item)].scrollIntoView({ block: "nearest" });
    drawing.setPointerCapture(event.pointerId);
  }

  function drag(event) {
    if (!dragged) return;
    const { item, index, from, points: before } = dragged;
    const to = positionOf(event);
    if (index === null) item.points = moved(before, [to[0] - from[0], to[1] - from[1]]);
    else item.points[index] = to;
    item.place();
  }

  function press(event, item, index) {
    const step = STEPS[event.key];
    if (step) {
      item.points[index] = item.points[index].map((value, axis) => inside(value + step[axis]));
      item.place();
    } else if (event.key === "Delete" || event.key === "Backspace") {
      removePoint(item, index);
    } else {
      return;
    }
    event.preventDefault();
  }

  function removePoint(item, index) {
    if (item.points.length <= LEAST_POINTS[item.kind]) return;
    item.points.splice(index, 1);
    buildDrawing();
  }

  function placeDrawing() {
    Object.assign(drawing.style, {
      left: `${canvas.offsetLeft}px`, top: `${canvas.offsetTop}px`, width: `${canvas.clientWidth}px`, height: `${canvas.clientHeight}px`,
    });
    for (const item of items) item.place();
  }

  return { nodes: [form, saved], open };
}

/** Return points moved by a distance, or by as much of it as keeps all of them in the picture. */
function moved(points, distance) {
  const possible = distance.map((wanted, axis) => {
    const values = points.map((point) => point[axis]);
    return Math.min(1 - Math.max(...values), Math.max(-Math.min(...values), wanted));
  });
  return points.map((point) => point.map((value, axis) => inside(value + possible[axis])));
}

const moveTo = (circle, [cx, cy]) => setAttributes(circle, { cx, cy });

/** Return the path of an arrow from the middle of the longest part of a line to its right, the direction "in". */
export function arrowOf(points, line = 2) {
  const parts = points.slice(1).map(([x, y], index) => [points[index], [x - points[index][0], y - points[index][1]]]);
  const [[x, y], [wide, tall]] = parts.reduce((longest, part) => (Math.hypot(...part[1]) > Math.hypot(...longest[1]) ? part : longest));
  const length = Math.hypot(wide, tall) || 1;
  const at = (along, right) => [x + wide / 2 + (along * wide - right * tall) / length, y + tall / 2 + (along * tall + right * wide) / length].join(" ");
  return `M ${at(0, 0)} L ${at(0, 13 * line)} M ${at(-4 * line, 9 * line)} L ${at(0, 13 * line)} L ${at(4 * line, 9 * line)}`;
}
