// Section of the page: a drop zone for model files, which `edge-server add` puts into the repository one after the other.

import { access, post, Refused } from "../api.js";
import { element, note, setBadge, setText } from "../dom.js";
import { chooser, dropZone } from "../drop_zone.js";
import { keyNotice } from "../key.js";

export const id = "add-model";
export const title = "Add a model";
export const paths = [];

const ACCEPTED = ".onnx,.tflite,.gguf,.ubj";
const MAX_REPORTS = 20;

export function makePanel() {
  const badge = element("span", { id: "add-state", hidden: true });
  const refusal = keyNotice(
    "add-refusal", "On this page only with a key that may change models.", "On the machine: ", element("code", "edge-server add FILE"),
  );
  const report = element("pre.output", { id: "add-report", role: "status", tabindex: "0", hidden: true });
  const again = element("button", { id: "add-again", hidden: true, click: () => addNext() }, "Try again");
  const [chooseFile, fileInput] = chooser("button", "Choose a model file", { accept: ACCEPTED, id: "add-file", multiple: true }, take);
  const [choosePicture, pictureInput] = chooser("button", "Try it on a picture of yours", { accept: "image/*", id: "add-picture" }, take);
  const pictureText = element("p.note", { id: "add-picture-text" }, "It is tried on a portrait, or on drawn lines of text.");
  const drop = dropZone(
    "add-drop", take, element("p", "Drop a model file here: ONNX, TensorFlow Lite, GGUF, XGBoost"), chooseFile, fileInput, pictureText, choosePicture, pictureInput,
  );
  // The newest first.
  const reports = [];
  const waiting = [];
  let picture = null;
  let isAdding = false;
  // Of the files that came together, or while others waited.
  let total = 0;
  let added = 0;

  /** Add the model files after those that wait. A picture is what they are tried on. */
  function take(files) {
    picture = files.findLast(({ type }) => type.startsWith("image/")) ?? picture;
    if (picture) setText(pictureText, `It is tried on the picture ${picture.name}.`);
    const models = files.filter(({ type }) => !type.startsWith("image/"));
    if (!isAdding && !waiting.length) total = added = 0;
    total += models.length;
    waiting.push(...models);
    if (waiting.length) addNext();
  }

  async function addNext() {
    show();
    if (isAdding) return;
    isAdding = true;
    again.hidden = true;
    while (waiting.length) {
      const file = waiting.shift();
      setBadge(badge, "trying it", "busy");
      reports.unshift(`${file.name}: it is copied, tried on a picture, and measured with each runtime ...`);
      show();
      try {
        const path = `edge/v1/new-models/${encodeURIComponent(file.name)}?picture_bytes=${picture?.size ?? 0}`;
        const response = await post(path, picture ? new Blob([picture, file]) : file, { type: "application/octet-stream" });
        reports[0] = (await response.json()).report;
        added += 1;
      } catch (error) {
        reports[0] = error.message.includes(file.name) ? error.message : `${file.name}: ${error.message}`;
        if (error instanceof Refused && error.status === 503) {
          // Another client adds a model just now.
          waiting.unshift(file);
          again.hidden = false;
          break;
        }
      }
    }
    setBadge(badge, !added ? "not added" : added < total ? `${added} of ${total} added` : "added", added < total ? "bad" : "ok");
    isAdding = false;
    show();
  }

  function show() {
    reports.splice(MAX_REPORTS);
    const names = waiting.map(({ name }) => `${name}: waits`);
    note(report, [...names, ...reports].join("\n\n"));
  }

  function update() {
    drop.hidden = !access.may_change_models;
    refusal.update();
  }
  return { heading: badge, nodes: [refusal.node, drop, again, report], update };
}
