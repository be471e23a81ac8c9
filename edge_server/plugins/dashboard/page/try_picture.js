// "Try it" for a model whose configuration says how it takes a picture: classes, boxes or the mask.

import { Refused, request } from "./api.js";
import { element, svg } from "./dom.js";
import { colored, coloredMap, describeMap, drawBox } from "./draw.js";
import { dropZone } from "./drop_zone.js";
import { pictureSnippets, snippets } from "./snippets.js";
import { tensorTable } from "./tensor_table.js";
import { readOutputs } from "./tensors.js";
import { run, showResult } from "./try_run.js";

export function pictureForm(name) {
  return [dropZone("try-drop", "Drop a picture here: JPEG, PNG, BMP or WebP", "Choose a picture", "image/*", (file) => send(name, file))];
}

function send(name, file) {
  const model = encodeURIComponent(name);
  return run(async (signal) => {
    const began = performance.now();
    const post = (path) => request(path, {
      method: "POST", headers: { "Content-Type": file.type || "application/octet-stream" }, body: file, signal,
    });
    try {
      const seen = await (await post(`edge/v1/models/${model}/perception`)).json();
      await showSeen(file, seen, performance.now() - began);
    } catch (error) {
      if (!(error instanceof Refused) || error.status !== 400) throw error;
      // A model whose outputs nobody has declared still answers with tensors; a damaged picture is refused again.
      const { version, outputs } = await readOutputs(await post(`v2/models/${model}/infer`));
      showResult(element("p", { class: "note" }, error.message), tensorTable("Outputs", outputs),
                 element("p", { class: "note" }, `Version ${version}, answered in ${Math.round(performance.now() - began)} ms`),
                 snippets(() => pictureSnippets(`v2/models/${model}/infer`)));
    }
  });
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
  if (seen.map) pen.drawImage(await coloredMap(seen.map), 0, 0, canvas.width, canvas.height);
  pen.scale(canvas.width / seen.width, canvas.height / seen.height);
  const line = Math.max(seen.width, seen.height) / 350;
  for (const found of [...seen.detections].reverse()) drawBox(pen, found, line);
  const shares = seen.mask ? seen.mask.classes.map((item) => ({ ...item, score: item.share })) : [];
  const scores = [seen.classes, seen.detections, shares].find((items) => items.length) || [];
  const list = element("ol", { class: "scores" }, ...scores.slice(0, 12).map((item) => element(
    "li", {},
    element("div", { class: "head" }, element("span", {}, item.text || item.label || `class ${item.index ?? item.class_index}`),
            element("span", { class: "number" }, `${(item.score * 100).toFixed(1)} %`)),
    svg("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("rect", { width: Math.max(0, Math.min(100, item.score * 100)), height: 6 })),
  )));
  const found = seen.map ? `${describeMap(seen.map)}. ` : scores.length ? "" : "Nothing found. ";
  const text = `${found}Version ${seen.version}, answered in ${Math.round(took)} ms`;
  showResult(element("div", { class: "answer" }, canvas, element("div", {}, list, element("p", { class: "note" }, text))),
             snippets(() => pictureSnippets(`edge/v1/models/${encodeURIComponent(seen.model)}/perception`)));
}
