// One camera in a dialog that fills the window. Its results are drawn here and not by the server: in the resolution of the
// screen, with labels of the size of text.

import { access, multipartParts, request } from "../api.js";
import { element, note, setText } from "../dom.js";
import { drawBox } from "../draw.js";
import { keyNotice } from "../key.js";
import { arrowOf, makeZoneEditor } from "./panel_zones.js";

const LABEL_PX = 15;
const OVERLAY = "#78ebff";
const OVERLAY_FILL = "rgb(120 235 255 / 20%)";
const RETRY_MS = 2000;
/** Room around the picture, so that all of a point on its edge is seen and can be dragged. */
const EDGE_PX = 10;

/** Show the live picture of a frame stream until the dialog is closed. `hasZones`: it may have zones. */
export function openLarge(name, { hasZones }) {
  const ended = new AbortController();
  const canvas = element("canvas", { role: "img", "aria-label": `Live picture of ${name}` });
  const stage = element("div.stage", canvas);
  const found = element("span.muted.found");
  const problem = element("p.error", { role: "status", hidden: true });
  let isEditing = false;
  const editor = makeZoneEditor(name, stage, canvas, (state) => { isEditing = edit.hidden = state; });
  const edit = element("button.edit-zones", { hidden: !hasZones, click: editZones }, "Zones");
  const refusal = keyNotice(
    "zones-refusal", "Zones and lines are changed on this page only with a key that may change models.", "Without one, edit the sources file.",
  );
  function editZones() {
    refusal.update();
    if (access.may_change_models) editor.open();
  }
  const dialog = element(
    "dialog.large", { "aria-label": `Camera ${name}`, close: () => { ended.abort(); dialog.remove(); } },
    element("div.head", element("h2", name), found, edit, element("button", { click: () => dialog.close() }, "Close")),
    stage, problem, refusal.node, ...editor.nodes,
  );
  document.body.append(dialog);
  dialog.showModal();
  follow(name, ended.signal, (seen, bitmap) => {
    note(problem, "");
    setText(found, summaryOf(seen));
    draw(canvas, stage, isEditing ? { ...seen, overlays: [] } : seen, bitmap);
  }, (error) => note(problem, error.message));
}

async function follow(name, signal, onFrame, onError) {
  while (!signal.aborted) {
    try {
      const response = await request(`edge/v1/streams/${encodeURIComponent(name)}/frames`, { signal });
      let seen = null;
      for await (const { type, data } of multipartParts(response)) {
        if (type === "application/json") seen = JSON.parse(new TextDecoder().decode(data));
        else onFrame(seen, await createImageBitmap(new Blob([data], { type })));
      }
    } catch (error) {
      if (!signal.aborted) onError(error);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function draw(canvas, stage, seen, bitmap) {
  // As large as fits, in pixels of the screen.
  const scale = Math.min((stage.clientWidth - 2 * EDGE_PX) / seen.width, (stage.clientHeight - 2 * EDGE_PX) / seen.height);
  const density = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(seen.width * scale * density));
  canvas.height = Math.max(1, Math.round(seen.height * scale * density));
  canvas.style.width = `${Math.round(seen.width * scale)}px`;
  const pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  pen.scale(scale * density, scale * density);
  const overlays = seen.overlays ?? [];
  for (const overlay of overlays) drawOverlay(pen, overlay, seen, 2 / scale);
  drawLabels(pen, overlays, seen, LABEL_PX / scale);
  for (const box of [...seen.detections].reverse()) drawBox(pen, box, 2 / scale, LABEL_PX / scale);
}

/** Draw a zone or line of the camera. Points are fractions of the picture; an arrow shows the direction "in". */
function drawOverlay(pen, { points, is_closed: isClosed, is_active: isActive }, { width, height }, line) {
  const path = new Path2D();
  const pixels = points.map(([x, y]) => [x * width, y * height]);
  for (const [x, y] of pixels) path.lineTo(x, y);
  if (isClosed) path.closePath();
  else path.addPath(new Path2D(arrowOf(pixels, line)));
  if (isActive) {
    pen.fillStyle = OVERLAY_FILL;
    pen.fill(path);
  }
  // A dark edge, so that it is seen on any ground.
  for (const [color, wide] of [["#000", 2 * line], [OVERLAY, line]]) {
    pen.strokeStyle = color;
    pen.lineWidth = wide;
    pen.stroke(path);
  }
}

/** Write the texts of zones and lines at their highest points, or lower if one would cover another. */
function drawLabels(pen, overlays, { width, height }, size) {
  const high = size * 1.5;
  const labels = [];
  pen.font = `600 ${size}px system-ui, sans-serif`;
  for (const { text, points } of overlays) {
    const [x, y] = points.reduce((highest, point) => (point[1] < highest[1] ? point : highest));
    const wide = pen.measureText(text).width + size * 0.6;
    const left = Math.max(0, Math.min(x * width, width - wide));
    let top = Math.max(0, Math.min(y * height, height - high));
    for (const other of labels.sort((a, b) => a.top - b.top)) {
      const isBeside = left >= other.left + other.wide || other.left >= left + wide;
      if (!isBeside && Math.abs(top - other.top) < high && other.top + 2 * high <= height) top = other.top + high;
    }
    labels.push({ left, top, wide });
    pen.fillStyle = "#202020";
    pen.fillRect(left, top, wide, high);
    pen.fillStyle = OVERLAY;
    pen.fillText(text, left + size * 0.3, top + size * 1.1);
  }
}

function summaryOf({ detections, classes }) {
  const counts = new Map();
  for (const { label, class_index: index } of detections) {
    const name = label || `class ${index}`;
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  const objects = [...counts].map(([name, count]) => `${count} ${name}`);
  const best = classes.slice(0, 3).map(({ label, index, score }) => `${label || `class ${index}`} ${(100 * score).toFixed(0)} %`);
  return [...objects, ...best].join(", ") || "nothing found";
}
