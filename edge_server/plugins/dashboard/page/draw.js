// Results drawn over a picture: masks, boxes, keypoints, labels.

import { element } from "./dom.js";

// Those of the pictures that the server draws.
const COLORS = [
  "#3cdc50", "#1e90ff", "#ff6e28", "#e63ce6", "#fad714", "#e63c5a", "#00c8c8", "#ffa500", "#9678d2", "#bef078", "#82beff", "#ff6e96",
];

/** Return a canvas with the colours of a mask's classes. Class 0 is the background and stays as it is. */
export const colored = (mask) => recolored(mask.png, (index) => {
  const color = parseInt(COLORS[(index + COLORS.length - 1) % COLORS.length].slice(1), 16);
  return [color >> 16, (color >> 8) & 255, color & 255, index ? 128 : 0];
});

/** Return a canvas with a gray PNG (base64), each pixel in the colour `rgba(value)`. */
async function recolored(png, rgba) {
  const bytes = Uint8Array.from(atob(png), (letter) => letter.charCodeAt(0));
  const bitmap = await createImageBitmap(new Blob([bytes], { type: "image/png" }), { colorSpaceConversion: "none" });
  const canvas = element("canvas", { width: bitmap.width, height: bitmap.height });
  const pen = canvas.getContext("2d");
  pen.drawImage(bitmap, 0, 0);
  const image = pen.getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < image.data.length; at += 4) image.data.set(rgba(image.data[at]), at);
  pen.putImageData(image, 0, 0);
  return canvas;
}

const GRADIENT = ["#30123b", "#4686fb", "#1ae4b6", "#a4fc3c", "#faba39", "#e4460a", "#7a0403"].map((color) => parseInt(color.slice(1), 16));

/** Return a canvas with the colours of a map: red is near or anomalous. */
export function coloredMap(map) {
  const [low, high] = map.kind === "anomaly" ? [Math.min(map.minimum, 0), Math.max(map.maximum, 1)] : [map.minimum, map.maximum];
  const isFar = map.kind === "metric_depth" || map.kind === "relative_depth";
  return recolored(map.png, (level) => {
    const value = map.minimum + (map.maximum - map.minimum) * level / 255;
    const share = high > low ? (value - low) / (high - low) : 0;
    const step = (isFar ? 1 - share : share) * (GRADIENT.length - 1);
    const before = Math.floor(step), after = Math.min(before + 1, GRADIENT.length - 1);
    const mix = (shift) => ((GRADIENT[before] >> shift) & 255) * (1 - step + before) + ((GRADIENT[after] >> shift) & 255) * (step - before);
    return [mix(16), mix(8), mix(0), 153];
  });
}

export function describeMap(map) {
  if (map.kind === "anomaly") return `Anomaly of the picture: ${map.score.toFixed(2)}`;
  const unit = map.kind === "metric_depth" ? " m" : "";
  const name = { metric_depth: "Depth", relative_depth: "Relative depth", inverse_depth: "Inverse depth (greater is nearer)" }[map.kind];
  return `${name}: ${map.minimum.toPrecision(3)} to ${map.maximum.toPrecision(3)}${unit}`;
}

/** Return the corners of an oriented box, clockwise from the one that is upper left at angle 0. */
function cornersOf({ x, y, width, height, angle }) {
  const cosine = Math.cos(angle), sine = Math.sin(angle);
  return [[-1, -1], [1, -1], [1, 1], [-1, 1]].map(([right, down]) => [
    x + (right * width * cosine - down * height * sine) / 2,
    y + (right * width * sine + down * height * cosine) / 2,
  ]);
}

function fillPolygons(pen, polygons) {
  pen.beginPath();
  for (const points of polygons) {
    points.forEach(([x, y], index) => (index ? pen.lineTo(x, y) : pen.moveTo(x, y)));
    pen.closePath();
  }
  pen.globalAlpha = 0.45;
  pen.fill();
  pen.globalAlpha = 1;
  pen.stroke();
}

/** Draw one detection. The width of lines and the height of text are in the picture's pixels. */
export function drawBox(pen, found, line, size = line * 6) {
  const color = COLORS[found.class_index % COLORS.length];
  const { x_min: x, y_min: y, x_max: right, y_max: bottom } = found;
  pen.lineWidth = line;
  pen.strokeStyle = pen.fillStyle = color;
  let labelX = x;
  if (found.rotated) {
    const corners = cornersOf(found.rotated);
    pen.beginPath();
    for (const [cornerX, cornerY] of corners) pen.lineTo(cornerX, cornerY);
    pen.closePath();
    pen.stroke();
    labelX = Math.max(0, corners.reduce((highest, corner) => (corner[1] < highest[1] ? corner : highest))[0]);
  } else {
    pen.strokeRect(x, y, right - x, bottom - y);
  }
  if (found.polygons) fillPolygons(pen, found.polygons);
  for (const [left, top] of found.keypoints) {
    pen.beginPath();
    pen.arc(left, top, line * 1.6, 0, 7);
    pen.fill();
  }
  const track = found.track_id ? ` #${found.track_id}` : "";
  const text = `${found.text || found.label || `class ${found.class_index}`} ${found.score.toFixed(2)}${track}`;
  pen.font = `600 ${size}px sans-serif`;
  const top = y > size * 1.4 ? y - size * 1.4 : y;
  pen.fillRect(labelX - line / 2, top, pen.measureText(text).width + size * 0.6, size * 1.4);
  pen.fillStyle = "#000";
  pen.fillText(text, labelX + size * 0.3 - line / 2, top + size);
}
