// "Try it" for a model that takes text: a prompt, and the answer as it comes.

import { modelPath, post, postJson, serverEvents } from "./api.js";
import { byId, element, formatNumber, setText } from "./dom.js";
import { jsonSnippets, snippets } from "./snippets.js";
import { run, showResult, stopRun } from "./try_run.js";

export function textForm(name, isChat, isDecoupled) {
  const prompt = element("textarea", { id: "try-prompt", rows: "3", keydown: (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  } });
  const limit = element("input", { type: "number", id: "try-tokens", min: "1", max: "4096", value: "128" });
  const request = () => ({ text: prompt.value, limit: Number(limit.value) });
  const send = (event) => {
    event.preventDefault();
    if (!prompt.value.trim()) return;
    const asked = request();
    const output = element("pre.output.prose", { tabindex: "0", "aria-label": "Answer", hidden: true });
    const rate = element("p.note");
    showResult(output, rate);
    const began = performance.now();
    let first = 0;
    const add = (text) => {
      first ||= performance.now();
      output.hidden = false;
      byId("try-busy").hidden = true;
      output.textContent += text;
    };
    const end = (tokens) => {
      const seconds = (performance.now() - first) / 1000;
      setText(rate, `${tokens} tokens, ${formatNumber((tokens - 1) / seconds)} a second, the first after ${Math.round(first - began)} ms`);
    };
    run(async (signal) => {
      await (isChat ? chat(name, asked, add, end, signal) : generate(name, asked.text, isDecoupled, add, signal));
      if (!first) setText(rate, "The answer is empty.");
    }, "Thinking");
  };
  return [element(
    "form", { submit: send }, element("label", { for: "try-prompt" }, "Prompt"), prompt,
    element("p.note", "Enter sends, Shift+Enter begins a new line. Each prompt is a conversation of its own."),
    element("div.row",
            ...(isChat ? [element("label", { for: "try-tokens" }, "At most this many tokens"), limit] : []),
            element("button.primary", { type: "submit" }, "Send"),
            element("button", { click: stopRun }, "Stop")),
  ), snippets(() => snippetsOf(name, request(), isChat))];
}

const chatBody = (name, { text, limit }) => ({ model: name, messages: [{ role: "user", content: text }], max_tokens: limit });

function snippetsOf(name, asked, isChat) {
  return isChat ? jsonSnippets("v1/chat/completions", chatBody(name, asked))
    : jsonSnippets(modelPath(name, "generate"), { text_input: asked.text });
}

async function chat(name, asked, add, end, signal) {
  const body = { ...chatBody(name, asked), stream: true, stream_options: { include_usage: true } };
  for await (const part of partsOf("v1/chat/completions", body, signal)) {
    const text = part.choices?.[0]?.delta?.content;
    if (text) add(text);
    if (part.usage) end(part.usage.completion_tokens);
  }
}

async function generate(name, prompt, isDecoupled, add, signal) {
  const parts = isDecoupled ? partsOf(modelPath(name, "generate_stream"), { text_input: prompt }, signal)
    : [await postJson(modelPath(name, "generate"), { text_input: prompt })];
  for await (const part of parts) add(String(part.text_output));
}

/** Yield the objects of a stream of events until its end. Throws the error in one. */
async function* partsOf(path, body, signal) {
  for await (const { data } of serverEvents(await post(path, body, { signal }))) {
    if (data === "[DONE]") return;
    const part = JSON.parse(data);
    if (part.error) throw new Error(part.error.message ?? part.error);
    yield part;
  }
}
