// Requests to the server, with the key that the user has entered.

const STORE = "edge-server-key";

/** What the page may do for this caller, from /edge/v1/page. */
export let access = { allowed: {}, key_headers: [] };

export const key = () => sessionStorage.getItem(STORE) ?? "";

export function setKey(value) {
  if (value) sessionStorage.setItem(STORE, value);
  else sessionStorage.removeItem(STORE);
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Return the headers that carry the key to a server that takes it so. `value` may stand for the key. */
export function keyHeaders({ takes_tokens: takesTokens, key_headers: names }, value = key()) {
  if (!key()) return {};
  return { ...(takesTokens && { Authorization: `Bearer ${value}` }), ...Object.fromEntries(names.map((name) => [name, value])) };
}

/** Return the response. Throws Refused for an error of the server, TypeError without a connection. */
export async function request(path, { headers = {}, ...options } = {}) {
  const response = await fetch(path, { cache: "no-store", ...options, headers: { ...headers, ...keyHeaders(access) } });
  if (response.ok) return response;
  const text = await response.text();
  let message = text;
  try {
    const { error } = JSON.parse(text);
    message = error?.message ?? error ?? text;
  } catch { /* The body is no JSON: show it as it is. */ }
  throw new Refused(response.status, String(message || `status ${response.status}`));
}

// A machine that is switched off does not even refuse.
const WAIT_MS = 10000;

export const getJson = async (path) => (await request(path, { signal: AbortSignal.timeout(WAIT_MS) })).json();

/** Send a body, which is JSON unless `type` says otherwise. Return the response. */
export function post(path, body, { type = "application/json", headers = {}, ...options } = {}) {
  const isJson = type === "application/json";
  return request(path, { method: "POST", headers: { "Content-Type": type, ...headers }, body: isJson ? JSON.stringify(body) : body, ...options });
}

export async function postJson(path, value) {
  const response = await post(path, value);
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

/** Return the path of a model, or of its `action`, in the v2 API or below another `root`. */
export const modelPath = (name, action = "", root = "v2") => `${root}/models/${encodeURIComponent(name)}${action && `/${action}`}`;

/** Return what the server allows with the key. `root` is the path from the page to the server's root. */
export async function refreshAccess(root = "") {
  for (;;) {
    const sent = JSON.stringify(keyHeaders(access));
    const found = await getJson(`${root}edge/v1/page`);
    if (sent === JSON.stringify(keyHeaders(found))) return access = found;
    // Another key was entered meanwhile, or the page did not know yet how this server takes it: the answer says nothing of it.
    access = { ...access, takes_tokens: found.takes_tokens, key_headers: found.key_headers };
  }
}

/** Yield {type, data} of each part of a multipart stream. Its parts say their length. */
export async function* multipartParts(response) {
  const reader = response.body.getReader();
  let bytes = new Uint8Array();
  const more = async () => {
    const { value, done } = await reader.read();
    if (done) return false;
    const joined = new Uint8Array(bytes.length + value.length);
    joined.set(bytes);
    joined.set(value, bytes.length);
    bytes = joined;
    return true;
  };
  for (;;) {
    let head;
    while (!(head = /^(?:\r\n)?--[^\r]+\r\n([^]*?)\r\n\r\n/.exec(new TextDecoder("latin1").decode(bytes.subarray(0, 1000))))) {
      if (!await more()) return;
    }
    const type = /^content-type: *([^\r;]+)/im.exec(head[1])?.[1];
    const length = Number(/^content-length: *(\d+)/im.exec(head[1])?.[1]);
    const begin = head[0].length;
    while (bytes.length < begin + length) {
      if (!await more()) return;
    }
    yield { type, data: bytes.slice(begin, begin + length) };
    bytes = bytes.slice(begin + length);
  }
}

/** Yield {event, data, id} of a stream of server-sent events. EventSource could send no key. */
export async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const fields = { event: "message", data: "", id: "" };
      for (const line of text.slice(0, end).split("\n")) {
        const found = /^(event|data|id): ?(.*)$/.exec(line);
        if (found) fields[found[1]] = found[2];
      }
      if (fields.data) yield fields;
    }
  }
}
