// The request of the form as a command and as a program, to copy.

import { access, keyHeaders, modelPath } from "./api.js";
import { element, setText } from "./dom.js";
import { countOf, isFloat } from "./tensors.js";

const MAX_JSON = 2000;

const addressOf = (path) => new URL(path, document.baseURI).href;
const json = JSON.stringify;
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** Return the headers that the caller's key needs, with a variable in its place. */
const headersOf = (variable) => Object.entries(keyHeaders(access, variable));

const curlKey = () => headersOf("$EDGE_KEY").map(([name, value]) => ` \\\n  -H "${name}: ${value}"`).join("");

/**
 * Return a disclosure with texts to copy. `make` returns [title, text] of each, or throws what is missing; it is called when
 * the disclosure is opened, and again by each event "toggle" while it is open.
 */
export function snippets(make) {
  const body = element("div.snippets");
  const node = element("details.copy", { toggle: async () => {
    if (!node.open) return;
    try {
      body.replaceChildren(...(await make()).map(([title, text]) => snippet(title, text)));
    } catch (error) {
      body.replaceChildren(element("p.note", error.message));
    }
  } }, element("summary", "Copy as curl or Python"), body);
  return node;
}

export function snippet(title, text) {
  const copy = element("button", { "aria-label": `Copy ${title}`, click: async () => {
    // Browsers give no clipboard to pages of plain http from another machine: then the text is selected instead.
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else getSelection().selectAllChildren(code);
    setText(copy, navigator.clipboard ? "Copied" : "Selected: press Ctrl+C");
    setTimeout(() => setText(copy, "Copy"), 2000);
  } }, "Copy");
  const code = element("pre.output", { tabindex: "0", "aria-label": title }, text);
  return element("div.snippet", element("div.row", element("h3", title), copy), code);
}

/** Return curl and Python for a picture file as the body of a POST. */
export function pictureSnippets(path) {
  const url = addressOf(path);
  return [
    ["curl", `curl --data-binary @picture.jpg -H 'Content-Type: image/jpeg'${curlKey()} \\\n  ${quoted(url)}`],
    ["Python", python("image/jpeg", "open('picture.jpg', 'rb').read()", url)],
  ];
}

/** Return a program that makes an input of a picture as the form does, by the tensor's `conversion`. */
export function pictureTensorSnippets(model, tensor, parameters) {
  const { color, fit, width, height, scale, mean, stddev, isPlanar } = tensor.conversion;
  const fitted = { letterbox: `ImageOps.pad(picture, (${width}, ${height}))`, crop: `ImageOps.fit(picture, (${width}, ${height}))`,
                   stretch: `picture.resize((${width}, ${height}))` }[fit];
  const isGray = color === "gray";
  const steps = [color === "bgr" ? "[..., ::-1]" : "", isPlanar && !isGray ? ".transpose(2, 0, 1)" : ""].join("");
  const program = `import numpy as np
from PIL import Image, ImageOps  # pip install pillow

picture = ImageOps.exif_transpose(Image.open("picture.jpg")).convert("${isGray ? "L" : "RGB"}")
pixels = np.asarray(${fitted}, np.float32)
values = ((pixels * ${scale === 1 ? "1" : "(1 / 255)"} - ${json(mean)}) / ${json(stddev)})${steps}
inputs = [${inputText(tensor, "values.ravel().tolist()")}]
`;
  const path = modelPath(model, "infer");
  return [
    ["curl, with the lines above in config.pbtxt", pictureSnippets(path)[0][1]],
    ["Python", pythonJson(`{"inputs": inputs${restOf(parameters)}}`, addressOf(path)).replace("import urllib.request\n", `import urllib.request\n\n${program}`)],
  ];
}

/** Return curl and Python for a JSON body. */
export function jsonSnippets(path, value) {
  const url = addressOf(path);
  const body = json(value);
  return [
    ["curl", `curl -H 'Content-Type: application/json'${curlKey()} \\\n  -d ${quoted(body)} \\\n  ${quoted(url)}`],
    ["Python", pythonJson(pythonValue(value), url)],
  ];
}

function python(type, body, url) {
  const headers = headersOf("{os.environ['EDGE_KEY']}");
  const more = headers.map(([name, value]) => `, ${json(name)}: f${json(value)}`).join("");
  return `import json
${headers.length ? "import os\n" : ""}import urllib.request

request = urllib.request.Request(
    ${json(url)},
    ${body},
    {"Content-Type": "${type}"${more}},
)
with urllib.request.urlopen(request) as response:
    print(json.dumps(json.load(response), indent=1))
`;
}

const pythonJson = (value, url) => python("application/json", `json.dumps(${value}).encode()`, url);

const pythonValue = (value) => json(value).replace(/"(?:[^"\\]|\\.)*"|true|false|null/g, (part) => ({ true: "True", false: "False", null: "None" })[part] ?? part);

const inputText = ({ name, datatype, shape }, data) => `{"name": ${json(name)}, "datatype": "${datatype}", "shape": ${json(shape)}, "data": ${data}}`;

const restOf = (parameters) => (parameters ? `, "parameters": ${pythonValue(parameters)}` : "");

/**
 * Return curl and Python for tensors: {name, datatype, shape, fill ("zeros", "random" or "values"), values}. `parameters` are those
 * of the request, if it has any.
 */
export function tensorSnippets(model, tensors, parameters) {
  const path = modelPath(model, "infer");
  const data = json(tensors.map(({ values }) => Array.from(values ?? [])));
  if (tensors.every(({ values }) => values) && data.length <= MAX_JSON) {
    return jsonSnippets(path, { inputs: tensors.map(({ name, datatype, shape, values }) => ({ name, datatype, shape, data: Array.from(values) })), parameters });
  }
  const url = addressOf(path);
  const dataOf = ({ fill, values, shape, datatype }) => {
    if (values && json(Array.from(values)).length <= MAX_JSON) return pythonValue(Array.from(values));
    const count = countOf(shape);
    const zero = datatype === "BYTES" ? '""' : datatype === "BOOL" ? "False" : "0";
    return fill === "random" ? `[${isFloat(datatype) ? "random.random()" : "random.randrange(2)"} for _ in range(${count})]` : `[${zero}] * ${count}`;
  };
  const inputs = tensors.map((tensor) => `    ${inputText(tensor, dataOf(tensor))},`).join("\n");
  const rest = restOf(parameters);
  const program = pythonJson(`{"inputs": [\n${inputs}\n    ]${rest}}`, url).replace("import urllib", `${/random\./.test(inputs) ? "import random\n" : ""}import urllib`);
  const command = `python3 -c 'import json, random; print(json.dumps({"inputs": [\n${inputs}\n]${rest}}))' |\n  curl -H 'Content-Type: application/json'${curlKey()} -d @- ${quoted(url)}`;
  return [["curl", command], ["Python", program]];
}
