// Section of the page: a drop zone for model files, which `edge-server add` puts into the repository one after the other.

import { access, post, Refused } from "../api.js";
import { element, formatNumber, headOf, setBadge, setText } from "../dom.js";
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
  const report = element("div", { id: "add-report", role: "status", hidden: true });
  const again = element("button", { id: "add-again", hidden: true, click: () => addNext() }, "Try again");
  const [chooseFile, fileInput] = chooser("button", "Choose a model file", { accept: ACCEPTED, id: "add-file", multiple: true }, take);
  const [choosePicture, pictureInput] = chooser("button", "Try it on a picture of yours", { accept: "image/*", id: "add-picture" }, take);
  const pictureText = element("p.note", { id: "add-picture-text" }, "It is tried on a portrait, or on drawn lines of text.");
  const drop = dropZone(
    "add-drop", take, element("p", "Drop a model file here: ONNX, TensorFlow Lite, GGUF, XGBoost"), chooseFile, fileInput, pictureText, choosePicture, pictureInput,
  );
  // Nodes of the page, the newest first.
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
    enqueue(files.filter(({ type }) => !type.startsWith("image/")).map((file) => ({ file })));
  }

  function enqueue(items) {
    if (!isAdding && !waiting.length) total = added = 0;
    total += items.length;
    waiting.push(...items);
    if (waiting.length) addNext();
  }

  async function addNext() {
    show();
    if (isAdding) return;
    isAdding = true;
    again.hidden = true;
    while (waiting.length) {
      const item = waiting.shift();
      reports.unshift(element("p.muted"));
      if (await isRefused({ picture, ...item })) {
        waiting.unshift(item);
        again.hidden = false;
        break;
      }
    }
    setBadge(badge, !added ? "not added" : added < total ? `${added} of ${total} added` : "added", added < total ? "bad" : "ok");
    isAdding = false;
    show();
  }

  /**
   * Add a file, with `number` by this layout of its report, and show in the first report what came of it. Return whether
   * the server refuses it because another client adds a model just now.
   */
  async function isRefused({ file, picture, number }) {
    setBadge(badge, "trying it", "busy");
    setText(reports[0], `${file.name}: it is copied, tried on a picture, and measured with each runtime ...`);
    show();
    try {
      const path = `edge/v1/new-models/${encodeURIComponent(file.name)}?picture_bytes=${picture?.size ?? 0}${number ? `&choose=${number}` : ""}`;
      const response = await post(path, picture ? new Blob([picture, file]) : file, { type: "application/octet-stream" });
      const node = reports[0] = reportNode(await response.json(), (number) => {
        // The next report takes the place of this one.
        reports.splice(reports.indexOf(node), 1);
        enqueue([{ file, picture, number }]);
      });
      added += 1;
    } catch (error) {
      reports[0] = element("p.error", error.message.includes(file.name) ? error.message : `${file.name}: ${error.message}`);
      return error instanceof Refused && error.status === 503;
    }
    return false;
  }

  function show() {
    reports.splice(MAX_REPORTS);
    const names = waiting.map(({ file: { name } }) => element("p.muted", `${name}: waits`));
    report.replaceChildren(...names, ...reports);
    report.hidden = !report.children.length;
  }

  function update() {
    drop.hidden = !access.may_change_models;
    refusal.update();
  }
  return { heading: badge, nodes: [refusal.node, drop, again, report], update };
}

/** Return the report about one file as tables. `choose` gets the number of a layout whose button is pressed. */
function reportNode({ model, report, reports }, choose) {
  const isOpen = reports.some((part) => part.chosen === null && part.rows.some(isCandidate));
  const advice = isOpen ? [element("p.note", "The file does not say what it is, and the trial did not decide. Choose one, or add the file again with a picture of something that it knows.")] : [];
  return element(
    "article.card", { "aria-label": `Report about ${model}` }, element("h3", model), ...advice,
    ...reports.flatMap((part) => [rowsTable(part, isOpen ? choose : null), part.runtimes.length ? runtimesTable(part.runtimes) : null]),
    element("details", element("summary", "As text"), element("pre.output", { tabindex: "0", "aria-label": `Report about ${model} as text` }, report)),
  );
}

const isCandidate = ({ title }) => /^\d+$/.test(title);

function rowsTable({ rows, chosen }, choose) {
  return element("table.tensors", { "aria-label": "What it is" }, element("tbody", ...rows.map((row) => {
    if (!isCandidate(row)) return element("tr", element("td.muted", row.title), element("td", { colspan: "2" }, row.text));
    const number = Number(row.title);
    const button = choose && element("button", { "aria-label": `Choose number ${number}, ${row.text}`, click: () => choose(number) }, "Choose");
    return element("tr.candidate", element("td", row.title), element("td.name", row.text), element("td", number === chosen ? element("span.badge.ok", "chosen") : button));
  })));
}

function runtimesTable(runtimes) {
  return element(
    "table.tensors", { "aria-label": "Runtimes" }, headOf(["Runtime"], ["Device"], ["Precision"], ["Load"], ["Run"]),
    element("tbody", ...runtimes.map(({ runtime, device, precision, load_ms: load, run_ms: run }) => element(
      "tr", element("td.name", runtime), element("td", device), element("td", precision), element("td", formatNumber(load, 0, " ms")), element("td", formatNumber(run, 2, " ms")),
    ))),
  );
}
