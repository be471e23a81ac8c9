// The form of one model: a picture, a prompt, or tensors as JSON. It is inference, and follows its access rule.

import { access, getJson, postJson, request, serverEvents } from "./api.js";
import { byId, element, formatNumber, setText, svg } from "./dom.js";

const MAX_VALUES = 4096;
const MAX_SHOWN = 20000;
const COLORS = ["#3cdc50", "#ff901e", "#286eff", "#e63ce6", "#14d7fa", "#e63c5a"];

let shown = "";
let running = null;

const select = byId("try-model");
select.addEventListener("change", () => open(select.value));

/** Show the models that serve; the form of the chosen one stays as it is. */
export function updateTry(names) {
  const usable = access.allowed.inference ? names : [];
  if (usable.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
    const chosen = select.value;
    select.replaceChildren(...usable.map((name) => element("option", { value: name }, name)));
    if (usable.includes(chosen)) select.value = chosen;
  }
  if (select.value !== shown) open(select.value);
}

export function tryModel(name) {
  select.value = name;
  if (select.value !== shown) open(name);
  byId("try").scrollIntoView();
  select.focus({ preventScroll: true });
}

async function open(name) {
  shown = name;
  running?.abort();
  const form = byId("try-form");
  byId("try-result").replaceChildren();
  if (!name) {
    form.replaceChildren(element("p", { class: "note" }, access.allowed.inference ? "No model is ready." : "Inference needs a key."));
    return;
  }
  form.replaceChildren();
  let made;
  try {
    const path = `v2/models/${encodeURIComponent(name)}`;
    const metadata = access.allowed.metadata ? await getJson(path) : { inputs: [], outputs: [] };
    const config = access.allowed["model-config"] ? await getJson(`${path}/config`) : {};
    const loaded = access.allowed.metadata ? (await getJson("edge/v1/models")).models : [];
    const recognised = loaded.find((model) => model.name === name)?.recognised;
    made = formOf(name, metadata, { ...config, parameters: { ...config.parameters, ...recognised } });
  } catch (error) {
    made = [element("p", { class: "error" }, error.message)];
  }
  if (shown === name) form.replaceChildren(...made);
}

function formOf(name, metadata, config) {
  const inputs = new Set(metadata.inputs.map((input) => input.name));
  const parameters = Object.keys(config.parameters ?? {});
  if (parameters.some((key) => /^(network_)?image_/.test(key))) return imageForm(name);
  if (inputs.has("text_input") && metadata.outputs.some((output) => output.name === "text_output")) {
    return textForm(name, inputs.has("messages"), Boolean(config.model_transaction_policy?.decoupled));
  }
  return tensorForm(name, metadata);
}

/** Run `work(signal)` and show what it throws. Starting again stops the run before. */
async function run(work) {
  running?.abort();
  const mine = running = new AbortController();
  try {
    await work(mine.signal);
  } catch (error) {
    if (!mine.signal.aborted) showResult(element("p", { class: "error" }, error.message));
  }
  if (running === mine) running = null;
}

const showResult = (...nodes) => byId("try-result").replaceChildren(...nodes);

// -- pictures

function imageForm(name) {
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

// Class 0 is the background and stays as it is.
async function colored(mask) {
  const bytes = Uint8Array.from(atob(mask.png), (letter) => letter.charCodeAt(0));
  const classes = await createImageBitmap(new Blob([bytes], { type: "image/png" }), { colorSpaceConversion: "none" });
  const canvas = element("canvas", { width: classes.width, height: classes.height });
  const pen = canvas.getContext("2d");
  pen.drawImage(classes, 0, 0);
  const image = pen.getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < image.data.length; at += 4) {
    const index = image.data[at];
    const color = parseInt(COLORS[index % COLORS.length].slice(1), 16);
    image.data.set([color >> 16, (color >> 8) & 255, color & 255, index ? 128 : 0], at);
  }
  pen.putImageData(image, 0, 0);
  return canvas;
}

function drawBox(pen, found, line) {
  const color = COLORS[found.class_index % COLORS.length];
  const { x_min: x, y_min: y, x_max: right, y_max: bottom } = found;
  pen.lineWidth = line;
  pen.strokeStyle = pen.fillStyle = color;
  pen.strokeRect(x, y, right - x, bottom - y);
  for (const [left, top] of found.keypoints) {
    pen.beginPath();
    pen.arc(left, top, line * 1.6, 0, 7);
    pen.fill();
  }
  const text = `${found.label || `class ${found.class_index}`} ${found.score.toFixed(2)}`;
  const size = line * 6;
  pen.font = `600 ${size}px sans-serif`;
  const top = y > size * 1.4 ? y - size * 1.4 : y;
  pen.fillRect(x - line / 2, top, pen.measureText(text).width + size * 0.6, size * 1.4);
  pen.fillStyle = "#000";
  pen.fillText(text, x + size * 0.3 - line / 2, top + size);
}

// -- text

function textForm(name, isChat, isDecoupled) {
  const prompt = element("textarea", { id: "try-prompt", rows: "4" });
  const limit = element("input", { type: "number", id: "try-tokens", min: "1", max: "4096", value: "128" });
  const send = (event) => {
    event.preventDefault();
    const output = element("pre", { class: "output prose", tabindex: "0", "aria-label": "Answer" });
    const rate = element("p", { class: "note" });
    showResult(output, rate);
    const began = performance.now();
    let first = 0;
    const add = (text) => {
      first ||= performance.now();
      output.textContent += text;
    };
    const end = (tokens) => {
      const seconds = (performance.now() - first) / 1000;
      setText(rate, `${tokens} tokens, ${formatNumber((tokens - 1) / seconds)} a second, the first after ${Math.round(first - began)} ms`);
    };
    run((signal) => (isChat ? chat(name, prompt.value, Number(limit.value), add, end, signal) : generate(name, prompt.value, isDecoupled, add, signal)));
  };
  return [element(
    "form", { submit: send }, element("label", { for: "try-prompt" }, "Prompt"), prompt,
    element("div", { class: "row" },
            ...(isChat ? [element("label", { for: "try-tokens" }, "Most tokens"), limit] : []),
            element("button", { type: "submit", class: "primary" }, "Send"),
            element("button", { type: "button", click: () => running?.abort() }, "Stop")),
  )];
}

async function chat(name, prompt, limit, add, end, signal) {
  const body = {
    model: name, messages: [{ role: "user", content: prompt }], max_tokens: limit, stream: true,
    stream_options: { include_usage: true },
  };
  const response = await request("v1/chat/completions", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  });
  for await (const { data } of serverEvents(response)) {
    if (data === "[DONE]") return;
    const part = JSON.parse(data);
    if (part.error) throw new Error(part.error.message);
    const text = part.choices?.[0]?.delta?.content;
    if (text) add(text);
    if (part.usage) end(part.usage.completion_tokens);
  }
}

async function generate(name, prompt, isDecoupled, add, signal) {
  const path = `v2/models/${encodeURIComponent(name)}/generate`;
  if (!isDecoupled) {
    add(String((await postJson(path, { text_input: prompt })).text_output));
    return;
  }
  const response = await request(`${path}_stream`, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ text_input: prompt }), signal,
  });
  for await (const { data } of serverEvents(response)) {
    const part = JSON.parse(data);
    if (part.error) throw new Error(part.error);
    add(String(part.text_output));
  }
}

// -- tensors

function tensorForm(name, metadata) {
  const body = element("textarea", { id: "try-json", rows: "10", class: "mono", spellcheck: "false" });
  body.value = exampleOf(metadata);
  const send = (event) => {
    event.preventDefault();
    run(async () => {
      const answer = JSON.stringify(await postJson(`v2/models/${encodeURIComponent(name)}/infer`, JSON.parse(body.value)), null, 1);
      const text = answer.length > MAX_SHOWN ? `${answer.slice(0, MAX_SHOWN)}\n… ${answer.length - MAX_SHOWN} more characters` : answer;
      showResult(element("pre", { class: "output", tabindex: "0", "aria-label": "Answer" }, text));
    });
  };
  return [element("form", { submit: send }, element("label", { for: "try-json" }, "Request as JSON"), body,
                  element("div", { class: "row" }, element("button", { type: "submit", class: "primary" }, "Send")))];
}

/** Return a request with zeros, or without data for inputs that are too large to type. */
function exampleOf({ inputs }) {
  const tensors = inputs.map(({ name, datatype, shape }) => {
    const dims = shape.map((size) => (size < 0 ? 1 : size));
    const count = dims.reduce((product, size) => product * size, 1);
    const zero = datatype === "BYTES" ? "" : datatype === "BOOL" ? false : 0;
    return { name, datatype, shape: dims, data: count <= MAX_VALUES ? Array(count).fill(zero) : [] };
  });
  return JSON.stringify({ inputs: tensors }, (key, value) => value, 1).replace(/\[\s+([^[\]{}]*?)\s+\]/g, (_, values) => `[${values.replace(/\s+/g, " ")}]`);
}
