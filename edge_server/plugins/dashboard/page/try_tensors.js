// "Try it" for any model: each input is filled with a picture, values, zeros or random numbers.

import { element } from "./dom.js";
import { pictureZone } from "./drop_zone.js";
import { classLines, configLines, conversionOf, isClassifier, pictureLayout, pictureNumbers, pictureSettings } from "./picture_tensor.js";
import { pictureTensorSnippets, snippet, snippets, tensorSnippets } from "./snippets.js";
import { tensorTable } from "./tensor_table.js";
import { countOf, encode, infer, isFloat } from "./tensors.js";
import { run, showResult, stopwatch } from "./try_run.js";

const MAX_TYPED = 256;
const MAX_ELEMENTS = 64e6;

export function tensorForm(name, metadata, hasSequences) {
  // The first input that may be a picture takes one.
  const pictured = metadata.inputs.find(pictureLayout);
  const takesClasses = isClassifier(metadata.outputs);
  const fields = metadata.inputs.map((input, index) => inputField(`try-input-${index}`, input, input === pictured, metadata.inputs.length === 1, takesClasses, () => send()));
  const sequence = hasSequences ? sequenceFields() : null;
  const send = () => run(async (signal) => {
    const parameters = sequence?.read();
    const tensors = await Promise.all(fields.map((field) => field.read()));
    const took = stopwatch();
    const inputs = tensors.map((tensor) => ({ ...tensor, bytes: encode(tensor.datatype, tensor.values) }));
    const { version, outputs } = await infer(name, inputs, signal, parameters);
    sequence?.advance();
    copy.dispatchEvent(new Event("toggle"));
    showResult(
      ...tensors.flatMap(({ canvas }) => (canvas ? [element("figure", canvas, element("figcaption.note", "The picture as the model gets it"))] : [])),
      tensorTable("Inputs", withoutFilled(tensors)), tensorTable("Outputs", outputs), element("p.note", took(version)),
      ...tensors.flatMap(({ lines }) => (lines ? permanent(lines, takesClasses ? outputs[0] : null) : [])),
    );
  });
  const copy = snippets(async () => {
    const tensors = await Promise.all(fields.map((field) => field.read()));
    const parameters = sequence?.read();
    return tensors.length === 1 && tensors[0].conversion ? pictureTensorSnippets(name, tensors[0], parameters) : tensorSnippets(name, withoutFilled(tensors), parameters);
  });
  return [element(
    "form", { submit: (event) => { event.preventDefault(); send(); } }, ...fields.map(({ node }) => node),
    sequence?.node, element("div.row", element("button.primary", { type: "submit" }, "Send")),
  ), copy];
}

/** Return tensors of which only those that were typed have values. */
const withoutFilled = (tensors) => tensors.map((tensor) => (tensor.fill === "values" ? tensor : { ...tensor, values: null }));

/** Return the lines, with what they do. `scores`: the output of a classifier, or null. */
function permanent(lines, scores) {
  const text = scores ? ", here, over HTTP and from cameras, and answers with classes:"
    : " over HTTP. For results here and from cameras it also needs what its outputs mean, as detection_head or mask_output:";
  return [element("p.note", `With these lines in its config.pbtxt the model takes pictures as they are${text}`), snippet("config.pbtxt", scores ? `${lines}\n${classLines(scores)}` : lines)];
}

/** Return {node, read(), advance()} of the place of a request in its sequence. `advance` sets the boxes for the next request. */
function sequenceFields() {
  const id = element("input", { id: "try-sequence", value: "1", required: true, autocomplete: "off", size: "12" });
  const first = element("input", { type: "checkbox", id: "try-first", checked: true });
  const last = element("input", { type: "checkbox", id: "try-last" });
  const node = element(
    "fieldset", element("legend", "Sequence"),
    element("div.row", element("label", { for: "try-sequence" }, "Id"), id,
            element("label.field", first, "First request"), element("label.field", last, "Last request")),
  );
  const read = () => ({ sequence_id: /^\d{1,15}$/.test(id.value) ? Number(id.value) : id.value, sequence_start: first.checked, sequence_end: last.checked });
  const advance = () => {
    first.checked = last.checked;
    last.checked = false;
  };
  return { node, read, advance };
}

/** Return {node, read()} of one input. `read` returns its tensor, and what made it. */
function inputField(id, input, isPictured, isOnly, takesClasses, send) {
  const layout = pictureLayout(input);
  const open = input.shape.map((size, axis) => (size < 0 ? element("input", { type: "number", min: "0", value: "1", "aria-label": `Size of dimension ${axis} of ${input.name}` }) : null));
  const isText = input.datatype === "BYTES";
  const count = countOf(input.shape.map(Math.abs));
  const isSmall = count <= MAX_TYPED;
  const fills = [...(layout ? ["picture"] : []), ...(isSmall ? ["values"] : []), "zeros", ...(isText ? [] : ["random"])];
  const fill = element("select", { id, change: () => showFill() }, ...fills.map((option) => element("option", { value: option }, FILLS[option])));
  fill.value = isPictured ? "picture" : isSmall ? "values" : "zeros";
  const values = element("textarea", { id: `${id}-values`, rows: "2", class: "mono", spellcheck: "false", "aria-label": `Values of ${input.name} as JSON` });
  values.value = JSON.stringify(zerosOf(input.datatype, count));
  let file = null;
  const chosen = element("p.note", "");
  const settings = layout && pictureSettings(id, layout, input.datatype, takesClasses);
  const drop = layout && pictureZone("Drop a picture here", (given) => {
    file = given;
    chosen.textContent = `Picture: ${given.name || "without a name"}`;
    send();
  });
  const picture = layout && element("div.picture-input", drop, chosen, element("div.row", ...settings.nodes));
  const sizes = element("span.row", ...open.flatMap((field, axis) => (field ? [element("label.field", `Size of dimension ${axis}`, field)] : [])));
  const showFill = () => {
    values.hidden = fill.value !== "values";
    if (picture) picture.hidden = fill.value !== "picture";
    sizes.hidden = fill.value === "picture" || !open.some(Boolean);
  };
  showFill();
  const node = element(
    "fieldset", element("legend", input.name, element("span.muted", ` ${input.datatype} [${input.shape.join(", ")}]`)),
    element("div.row", element("label", { for: id }, "Fill with"), fill, sizes), values, picture,
  );

  async function read() {
    const { name, datatype } = input;
    if (fill.value === "picture") {
      if (!file) throw new Error(`Choose a picture for the input '${name}' first.`);
      const now = settings.read();
      const { canvas, numbers } = await pictureNumbers(file, layout, now);
      const sides = layout.isPlanar ? [layout.channels, now.height, now.width] : [now.height, now.width, layout.channels];
      const shape = input.shape.length === 4 ? [1, ...sides] : sides;
      return { name, datatype, shape, values: numbers, fill: "picture", canvas, conversion: conversionOf(layout, now), lines: configLines(name, isOnly, layout, now) };
    }
    const shape = input.shape.map((size, axis) => (open[axis] ? Math.max(0, Math.round(Number(open[axis].value)) || 0) : size));
    const count = countOf(shape);
    if (count > MAX_ELEMENTS) throw new Error(`The input '${name}' would have ${count} elements; this page sends at most ${MAX_ELEMENTS}.`);
    return { name, datatype, shape, values: filled(fill.value, values.value, name, datatype, count), fill: fill.value };
  }
  return { node, read };
}

const FILLS = { picture: "a picture", values: "values", zeros: "zeros", random: "random numbers" };

const zerosOf = (datatype, count) => Array(count).fill(datatype === "BYTES" ? "" : datatype === "BOOL" ? false : 0);

function filled(fill, text, name, datatype, count) {
  if (fill === "zeros") return zerosOf(datatype, count);
  if (fill === "random") return Array.from({ length: count }, () => (isFloat(datatype) ? Math.random() : Math.floor(Math.random() * 2)));
  let found;
  try {
    found = [JSON.parse(text)].flat(Infinity);
  } catch {
    throw new Error(`The values of '${name}' are not JSON: expected a list such as ${JSON.stringify(zerosOf(datatype, 2))}.`);
  }
  if (found.length !== count) throw new Error(`The input '${name}' has ${count} elements, given ${found.length} values.`);
  return found;
}
