// Section of the page: a drop zone for a model file, which `edge-server add` puts into the repository.

import { access, request } from "../api.js";
import { element, note, setBadge } from "../dom.js";
import { keyNotice } from "../key.js";

export const id = "add-model";
export const title = "Add a model";
export const paths = [];

const ACCEPTED = ".onnx,.tflite,.gguf,.ubj";

export function makePanel() {
  const badge = element("span", { id: "add-state", hidden: true });
  const refusal = keyNotice(
    "add-refusal", "On this page only with a key that may change models.", "On the machine: ", element("code", {}, "edge-server add FILE"),
  );
  const report = element("pre", { id: "add-report", class: "scroll", role: "status", hidden: true });
  const input = element("input", { type: "file", accept: ACCEPTED, id: "add-file", class: "hidden-text", tabindex: "-1",
                                   "aria-label": "Model file", change: () => input.files[0] && add(input.files[0]) });
  const button = element("button", { type: "button", click: () => input.click() }, "Choose a model file");
  const drop = element("div", { class: "drop", id: "add-drop" },
                       element("p", {}, "Drop a model file here: ONNX, TensorFlow Lite, GGUF, XGBoost"), button, input);
  const over = (isOver) => (event) => { event.preventDefault(); drop.classList.toggle("over", isOver); };
  drop.addEventListener("dragover", over(true));
  drop.addEventListener("dragleave", over(false));
  drop.addEventListener("drop", (event) => {
    over(false)(event);
    const file = event.dataTransfer.files[0];
    if (file && !button.disabled) add(file);
  });

  async function add(file) {
    button.disabled = true;
    show("trying it", "busy", `${file.name}: it is copied, tried on a picture, and measured with each runtime ...`);
    try {
      const path = `edge/v1/new-models/${encodeURIComponent(file.name)}`;
      const response = await request(path, { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: file });
      show("added", "ok", (await response.json()).report);
    } catch (error) {
      show("not added", "bad", error.message);
    }
    button.disabled = false;
    input.value = "";
  }

  function show(state, kind, text) {
    setBadge(badge, state, kind);
    badge.hidden = false;
    note(report, text);
  }

  function update() {
    drop.hidden = !access.may_change_models;
    refusal.update();
  }
  return { heading: badge, nodes: [refusal.node, drop, report], update };
}
