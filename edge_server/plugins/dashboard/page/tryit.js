// The form of one model: a picture, a prompt, or tensors as JSON. It is inference, and follows its access rule.

import { access, getJson, modelPath } from "./api.js";
import { byId, element } from "./dom.js";
import { pictureForm } from "./try_picture.js";
import { stopRun } from "./try_run.js";
import { tensorForm } from "./try_tensors.js";
import { textForm } from "./try_text.js";

let shown = null;

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
  byId("try-row").hidden = !usable.length;
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
  stopRun();
  const form = byId("try-form");
  byId("try-result").replaceChildren();
  if (!name) {
    form.replaceChildren(element("p.note", access.allowed.inference ? "No model is ready." : "Inference needs a key."));
    return;
  }
  form.replaceChildren();
  let made;
  try {
    const metadata = access.allowed.metadata ? await getJson(modelPath(name)) : { inputs: [], outputs: [] };
    const config = access.allowed["model-config"] ? await getJson(modelPath(name, "config")) : {};
    const loaded = access.allowed.metadata ? (await getJson("edge/v1/models")).models : [];
    const recognised = loaded.find((model) => model.name === name)?.recognised;
    made = formOf(name, metadata, { ...config, parameters: { ...config.parameters, ...recognised } });
  } catch (error) {
    made = [element("p.error", error.message)];
  }
  if (shown === name) form.replaceChildren(...made);
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
