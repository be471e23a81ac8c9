// "Try it" for a model whose configuration says how it takes a picture: classes, boxes or the mask.

import { modelPath, post, Refused } from "./api.js";
import { element, svg } from "./dom.js";
import { colored, coloredMap, describeMap, drawBox } from "./draw.js";
import { pictureZone } from "./drop_zone.js";
import { pictureSnippets, snippets } from "./snippets.js";
import { tensorTable } from "./tensor_table.js";
import { readOutputs } from "./tensors.js";
import { run, showResult, stopwatch } from "./try_run.js";

export function pictureForm(name) {
  return [
    pictureZone("Drop a picture here: JPEG, PNG, BMP or WebP", (file) => send(name, file)),
    snippets(() => pictureSnippets(perceptionPath(name))),
  ];
}

function send(name, file) {
  return run(async (signal) => {
    const took = stopwatch();
    // The browser's type, which a file may not have, must not make the server read anything but a picture.
    const ask = (path) => post(path, file, { type: "image/*", signal });
    try {
      const seen = await (await ask(perceptionPath(name))).json();
      await showSeen(file, seen, took(seen.version));
    } catch (error) {
      if (!(error instanceof Refused) || error.status !== 400) throw error;
      // A model whose outputs nobody has declared still answers with tensors; a damaged picture is refused again.
      const { version, outputs } = await readOutputs(await ask(modelPath(name, "infer")));
      showResult(element("p.note", error.message), tensorTable("Outputs", outputs),
                 element("p.note", took(version)), snippets(() => pictureSnippets(modelPath(name, "infer"))));
    }
  });
}

const perceptionPath = (name) => modelPath(name, "perception", "edge/v1");

async function showSeen(file, seen, took) {
  const canvas = element("canvas", { role: "img", "aria-label": `The picture with ${seen.detections.length} boxes` });
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, 1200 / Math.max(bitmap.width, bitmap.height));
  canvas.width = Math.round(bitmap.width * scale);
  canvas.height = Math.round(bitmap.height * scale);
  const pen = canvas.getContext("2d");
  const layers = [bitmap, seen.mask && await colored(seen.mask), seen.map && await coloredMap(seen.map)];
  for (const layer of layers.filter(Boolean)) pen.drawImage(layer, 0, 0, canvas.width, canvas.height);
  pen.scale(canvas.width / seen.width, canvas.height / seen.height);
  const line = Math.max(seen.width, seen.height) / 350;
  for (const found of [...seen.detections].reverse()) drawBox(pen, found, line);
  const shares = seen.mask ? seen.mask.classes.map((item) => ({ ...item, score: item.share })) : [];
  const scores = [seen.classes, seen.detections, shares].find((items) => items.length) || [];
  const list = element("ol.scores", ...scores.slice(0, 12).map((item) => element(
    "li",
    element("div.head", element("span", item.text || item.label || `class ${item.index ?? item.class_index}`),
            element("span.number", `${(item.score * 100).toFixed(1)} %`)),
    svg("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("rect", { width: Math.max(0, Math.min(100, item.score * 100)), height: 6 })),
  )));
  const found = seen.map ? `${describeMap(seen.map)}. ` : scores.length ? "" : "Nothing found. ";
  showResult(element("div.answer", canvas, element("div", list, element("p.note", found + took))));
}
