// A picture as the values of an input, and the lines of config.pbtxt that let the server do the same.

import { element } from "./dom.js";
import { isFloat } from "./tensors.js";

const DEFAULT_SIDE = 640;
const MAX_SIDE = 4096;

/** value of 0..255 -> (value * scale - mean) / stddev, as the server's image_scale, image_mean and image_stddev. */
const VALUES = {
  "0 to 1": { scale: 1 / 255 },
  "0 to 255": { scale: 1 },
  "-1 to 1": { scale: 1 / 255, mean: [0.5], stddev: [0.5] },
  "ImageNet's mean": { scale: 1 / 255, mean: [0.485, 0.456, 0.406], stddev: [0.229, 0.224, 0.225], channels: 3 },
};

/** Return {channels, isPlanar, height, width} of an input that may take a picture, open sides as -1; else null. */
export function pictureLayout({ datatype, shape }) {
  if (datatype === "BYTES" || datatype === "BOOL" || /64$/.test(datatype)) return null;
  if (shape.length !== 4 && shape.length !== 3) return null;
  const [first, , last] = shape.slice(-3);
  const hasChannels = (size) => size === 1 || size === 3;
  const planar = (channels) => ({ channels, isPlanar: true, height: shape.at(-2), width: shape.at(-1) });
  if (hasChannels(first)) return planar(first);
  if (hasChannels(last)) return { channels: last, isPlanar: false, height: shape.at(-3), width: shape.at(-2) };
  // Four dimensions with open channels, or as many as a picture never has.
  if (shape.length === 4 && first === -1) return planar(3);
  return null;
}

/** Return whether outputs are those of a classifier: one row of scores, and nothing else. */
export function isClassifier(outputs) {
  if (outputs.length !== 1) return false;
  const [{ datatype, shape }] = outputs;
  return isFloat(datatype) && shape.length === 2 && Math.abs(shape[0]) === 1 && shape[1] > 1;
}

/** Return the settings of a picture as form fields: {nodes, read()}, which returns {color, fit, values, height, width}. */
export function pictureSettings(id, layout, datatype, takesClasses) {
  const field = (name, label, input) => {
    input.id = `${id}-${name}`;
    return { input, node: element("span.field", element("label", { for: input.id }, label), input) };
  };
  const choice = (name, label, options) => field(name, label, element("select", ...options.map((option) => element("option", { value: option }, option))));
  const side = (name, label, size) => field(name, label, element("input", { type: "number", min: 1, max: MAX_SIDE, value: size > 0 ? size : DEFAULT_SIDE }));
  const color = choice("color", "Colours", layout.channels === 1 ? ["gray"] : ["rgb", "bgr"]);
  const fit = choice("fit", "Fit", ["letterbox", "stretch", "crop"]);
  const names = Object.keys(VALUES).filter((name) => (VALUES[name].channels ?? layout.channels) === layout.channels);
  const values = choice("values", "Values", isFloat(datatype) ? names : ["0 to 255"]);
  // As the first candidate of `edge-server add`. The last values are ImageNet's, if the input takes them.
  if (takesClasses && layout.channels === 3) {
    fit.input.value = "stretch";
    values.input.selectedIndex = values.input.length - 1;
  }
  const height = side("height", "Height", layout.height);
  const width = side("width", "Width", layout.width);
  const nodes = [color.node, fit.node, values.node];
  if (layout.height < 0) nodes.push(height.node);
  if (layout.width < 0) nodes.push(width.node);
  const sized = ({ input }) => Math.min(MAX_SIDE, Math.max(1, Math.round(Number(input.value)) || DEFAULT_SIDE));
  const read = () => ({
    color: color.input.value, fit: fit.input.value, values: values.input.value, height: sized(height), width: sized(width),
  });
  return { nodes, read };
}

/** Return {canvas, numbers}: a picture as the network gets it, and the numbers of the input. */
export async function pictureNumbers(file, layout, { color, fit, values, height, width }) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error(`This browser cannot read '${file.name || "the file"}' as a picture.`);
  });
  const canvas = element("canvas", { width, height, role: "img", "aria-label": "The picture as the model gets it" });
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, width, height);
  pen.imageSmoothingQuality = "high";
  const ratios = [width / bitmap.width, height / bitmap.height];
  const scale = fit === "crop" ? Math.max(...ratios) : Math.min(...ratios);
  const [wide, high] = fit === "stretch" ? [width, height] : [Math.round(bitmap.width * scale), Math.round(bitmap.height * scale)];
  pen.drawImage(bitmap, Math.floor((width - wide) / 2), Math.floor((height - high) / 2), wide, high);
  bitmap.close();
  const { data } = pen.getImageData(0, 0, width, height);
  const { scale: factor, mean = [0], stddev = [1] } = VALUES[values];
  const { channels, isPlanar } = layout;
  const numbers = new Float32Array(channels * width * height);
  for (let pixel = 0; pixel < width * height; pixel += 1) {
    const at = 4 * pixel;
    for (let channel = 0; channel < channels; channel += 1) {
      const byte = channels === 1
        ? 0.299 * data[at] + 0.587 * data[at + 1] + 0.114 * data[at + 2]
        : data[at + (color === "bgr" ? 2 - channel : channel)];
      const number = (byte * factor - mean[channel % mean.length]) / stddev[channel % stddev.length];
      numbers[isPlanar ? channel * width * height + pixel : channels * pixel + channel] = number;
    }
  }
  return { canvas, numbers };
}

/** Return the conversion in numbers. */
export function conversionOf(layout, settings) {
  const { scale, mean = [0], stddev = [1] } = VALUES[settings.values];
  return { ...settings, scale, mean, stddev, isPlanar: layout.isPlanar };
}

/** Return the lines of config.pbtxt with which the server makes the same input of a picture. */
export function configLines(name, isOnlyInput, layout, settings) {
  const { scale, mean, stddev } = VALUES[settings.values];
  const lines = { image_color: settings.color, image_fit: settings.fit, image_scale: scale === 1 ? "1" : "1/255" };
  if (mean) Object.assign(lines, { image_mean: mean.join(), image_stddev: stddev.join() });
  if (!isOnlyInput) lines.image_input = name;
  if (layout.height < 0) lines.network_image_height = String(settings.height);
  if (layout.width < 0) lines.network_image_width = String(settings.width);
  return linesOf(lines);
}

/** Return the lines of config.pbtxt that make scores classes. */
export function classLines({ name, values }) {
  const scores = Array.from(values);
  const areProbabilities = scores.every((score) => score >= 0) && Math.abs(scores.reduce((sum, score) => sum + score, 0) - 1) < 0.02;
  return linesOf({ class_output: name, ...(areProbabilities ? {} : { class_activation: "softmax" }) });
}

const linesOf = (parameters) => Object.entries(parameters)
    .map(([key, value]) => `parameters { key: "${key}" value { string_value: ${JSON.stringify(value)} } }`).join("\n");
