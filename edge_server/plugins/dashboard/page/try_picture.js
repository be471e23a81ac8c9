// "Try it" for a model that takes a picture: classes, boxes or the mask.

import { request } from "./api.js";
import { element, svg } from "./dom.js";
import { colored, drawBox } from "./draw.js";
import { run, showResult } from "./try_run.js";

export function pictureForm(name) {
  const input = element("input", { type: "file", accept: "image/*", id: "try-file", class: "hidden-text", tabindex: "-1",
                                   "aria-label": "Picture", change: () => input.files[0] && send(input.files[0]) });
  const drop = element(
    "div", { class: "drop", id: "try-drop" },
    element("p", {}, "Drop a picture here: JPEG, PNG, BMP or WebP"),
    element("button", { type: "button", class: "primary", click: () => input.click() }, "Choose a picture"), input,
  );
  const over = (isOver) => (event) => { event.preventDefault(); drop.classList.toggle("over", isOver); };
  drop.addEventListener("dragover", over(true));
  drop.addEventListener("dragleave", over(false));
  drop.addEventListener("drop", (event) => {
    over(false)(event);
    const file = event.dataTransfer.files[0];
    if (file) send(file);
  });
  const send = (file) => run(async (signal) => {
    const began = performance.now();
    const response = await request(`edge/v1/models/${encodeURIComponent(name)}/perception`, {
      method: "POST", headers: { "Content-Type": file.type || "application/octet-stream" }, body: file, signal,
    });
    const seen = await response.json();
    await showSeen(file, seen, performance.now() - began);
  });
  return [drop];
}

async function showSeen(file, seen, took) {
  const canvas = element("canvas", { role: "img", "aria-label": `The picture with ${seen.detections.length} boxes` });
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, 1200 / Math.max(bitmap.width, bitmap.height));
  canvas.width = Math.round(bitmap.width * scale);
  canvas.height = Math.round(bitmap.height * scale);
  const pen = canvas.getContext("2d");
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  if (seen.mask) pen.drawImage(await colored(seen.mask), 0, 0, canvas.width, canvas.height);
  pen.scale(canvas.width / seen.width, canvas.height / seen.height);
  const line = Math.max(seen.width, seen.height) / 350;
  for (const found of [...seen.detections].reverse()) drawBox(pen, found, line);
  const shares = seen.mask ? seen.mask.classes.map((item) => ({ ...item, score: item.share })) : [];
  const scores = [seen.classes, seen.detections, shares].find((items) => items.length) || [];
  const list = element("ol", { class: "scores" }, ...scores.slice(0, 12).map((item) => element(
    "li", {},
    element("div", { class: "head" }, element("span", {}, item.label || `class ${item.index ?? item.class_index}`),
            element("span", { class: "number" }, `${(item.score * 100).toFixed(1)} %`)),
    svg("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("rect", { width: Math.max(0, Math.min(100, item.score * 100)), height: 6 })),
  )));
  const text = `${scores.length ? "" : "Nothing found. "}Version ${seen.version}, answered in ${Math.round(took)} ms`;
  showResult(element("div", { class: "answer" }, canvas, element("div", {}, list, element("p", { class: "note" }, text))));
}
