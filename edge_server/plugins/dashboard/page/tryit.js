// The form of the chosen model: a picture, a prompt, or tensors as JSON. It is inference, and follows its access rule.

import { access } from "./api.js";
import { byId, element } from "./dom.js";
import { pictureForm } from "./try_picture.js";
import { stopRun } from "./try_run.js";
import { tensorForm } from "./try_tensors.js";
import { textForm } from "./try_text.js";

let shown = "";

// What is offered to copy is the request that the form would send now.
byId("try-form").addEventListener("input", () => byId("try-form").querySelector(".copy")?.dispatchEvent(new Event("toggle")));

/**
 * Show the form of a model. `details` are its {metadata, config, recognised}, without them if it is not ready, or
 * {problem}; null: not known yet. The form that is there stays if it is of the same details.
 */
export function showForm(name, details) {
  const { metadata, config, recognised, problem } = details ?? {};
  const text = JSON.stringify([name, details && [metadata, config, recognised, problem], access.allowed.inference]);
  if (shown === text) return;
  shown = text;
  stopRun();
  byId("try-result").replaceChildren();
  byId("try-form").replaceChildren(...nodesOf());

  function nodesOf() {
    if (!access.allowed.inference) return [element("p.note", "Inference needs a key.")];
    if (!details) return [];
    if (problem) return [element("p.error", problem)];
    if (!metadata) return [element("p.note", "The model is not ready.")];
    return formOf(name, metadata, { ...config, parameters: { ...config.parameters, ...recognised } });
  }
}

function formOf(name, metadata, config) {
  const inputs = new Set(metadata.inputs.map((input) => input.name));
  const parameters = Object.keys(config.parameters ?? {});
  if (parameters.some((key) => /^(network_)?image_/.test(key))) return pictureForm(name);
  if (inputs.has("text_input") && metadata.outputs.some((output) => output.name === "text_output")) {
    return textForm(name, inputs.has("messages"), Boolean(config.model_transaction_policy?.decoupled));
  }
  return tensorForm(name, metadata, Boolean(config.sequence_batching));
}
