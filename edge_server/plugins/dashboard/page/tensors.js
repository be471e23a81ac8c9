// Tensors over the v2 API as bytes (Triton's binary tensor data extension), and their numbers.

import { modelPath, post } from "./api.js";

const ARRAYS = {
  BOOL: Uint8Array, UINT8: Uint8Array, UINT16: Uint16Array, UINT32: Uint32Array, UINT64: BigUint64Array, INT8: Int8Array,
  INT16: Int16Array, INT32: Int32Array, INT64: BigInt64Array, FP16: Uint16Array, BF16: Uint16Array, FP32: Float32Array, FP64: Float64Array,
};

export const countOf = (shape) => shape.reduce((product, size) => product * size, 1);

export const isFloat = (datatype) => /^(FP|BF)/.test(datatype);

/** Return the bytes of numbers or texts. Integers take the nearest value in their range. */
export function encode(datatype, values) {
  if (datatype === "BYTES") {
    const texts = values.map((text) => new TextEncoder().encode(String(text)));
    const bytes = new Uint8Array(texts.reduce((sum, text) => sum + 4 + text.length, 0));
    let at = 0;
    for (const text of texts) {
      new DataView(bytes.buffer).setUint32(at, text.length, true);
      bytes.set(text, at + 4);
      at += 4 + text.length;
    }
    return bytes;
  }
  const array = new ARRAYS[datatype](values.length);
  for (let index = 0; index < values.length; index += 1) array[index] = stored(datatype, Number(values[index]), array);
  return new Uint8Array(array.buffer);
}

function stored(datatype, value, array) {
  if (datatype === "FP16") return toHalf(value);
  if (datatype === "BF16") return new Uint32Array(new Float32Array([value]).buffer)[0] >>> 16;
  if (/INT64$/.test(datatype)) return BigInt(Math.round(value));
  if (isFloat(datatype)) return value;
  const bits = 8 * array.BYTES_PER_ELEMENT;
  const low = /^U|BOOL/.test(datatype) ? 0 : -(2 ** (bits - 1));
  return Math.min(low + 2 ** bits - 1, Math.max(low, Math.round(value)));
}

/** Return the IEEE half nearest to a number; numbers too large become infinite. */
function toHalf(value) {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (Number.isNaN(value)) return 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  if (size < 2 ** -14) return sign | Math.round(size * 2 ** 24);
  const exponent = Math.floor(Math.log2(size));
  // A fraction that rounds up to 1024 carries into the exponent, as it should.
  return sign | (((exponent + 15) << 10) + Math.round((size / 2 ** exponent - 1) * 1024));
}

function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * fraction * 2 ** -24;
}

/** Return the numbers or texts of a tensor's bytes. */
function decode(datatype, bytes) {
  if (datatype === "BYTES") {
    const texts = [];
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
    for (let at = 0; at + 4 <= bytes.length;) {
      const length = view.getUint32(at, true);
      texts.push(new TextDecoder().decode(bytes.subarray(at + 4, at + 4 + length)));
      at += 4 + length;
    }
    return texts;
  }
  if (!ARRAYS[datatype]) return [];
  const array = new ARRAYS[datatype](bytes.slice().buffer);
  if (datatype === "FP16") return Float32Array.from(array, fromHalf);
  if (datatype === "BF16") return new Float32Array(Uint32Array.from(array, (bits) => bits << 16).buffer);
  return /INT64$/.test(datatype) ? Array.from(array, Number) : array;
}

/** Run a model. `inputs` are {name, datatype, shape, bytes}, `parameters` those of the request; returns {version, outputs: [{name, datatype, shape, values}]}. */
export async function infer(model, inputs, signal, parameters = {}) {
  const head = new TextEncoder().encode(JSON.stringify({
    inputs: inputs.map(({ name, datatype, shape, bytes }) => ({ name, datatype, shape, parameters: { binary_data_size: bytes.length } })),
    parameters: { binary_data_output: true, ...parameters },
  }));
  return readOutputs(await post(modelPath(model, "infer"), new Blob([head, ...inputs.map(({ bytes }) => bytes)]), {
    type: "application/octet-stream", headers: { "Inference-Header-Content-Length": String(head.length) }, signal,
  }));
}

/** Return version and outputs of a v2 response, whose outputs may be bytes or JSON. */
export async function readOutputs(response) {
  const body = new Uint8Array(await response.arrayBuffer());
  const headLength = Number(response.headers.get("Inference-Header-Content-Length") ?? body.length);
  const head = JSON.parse(new TextDecoder().decode(body.subarray(0, headLength)));
  let at = headLength;
  const outputs = head.outputs.map(({ name, datatype, shape, data, parameters }) => {
    const size = parameters?.binary_data_size;
    if (size === undefined) return { name, datatype, shape, values: (data ?? []).flat(Infinity) };
    at += size;
    return { name, datatype, shape, values: decode(datatype, body.subarray(at - size, at)) };
  });
  return { version: head.model_version, outputs };
}
