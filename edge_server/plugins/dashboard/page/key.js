// The key or token that the user enters: its dialog, and the notice where one is missing.

import { access, key, refreshAccess, setKey } from "./api.js";
import { byId, element, setText } from "./dom.js";

const FLAG = "--http-restricted-api=model-repository:admin-key=SECRET";

const value = element("input", { id: "key-value", type: "password", autocomplete: "off", spellcheck: "false" });
const result = element("p.note", { id: "key-result", role: "status" });
const dialog = element("dialog", { id: "key-dialog", "aria-labelledby": "key-title" }, element(
  "form", { method: "dialog" }, element("h2", { id: "key-title" }, "Key or token"),
  element("p.note", "It is kept until this tab is closed and sent only to this server."),
  element("label", { for: "key-value" }, "Key"), value, result,
  // Enter presses the first one.
  element("div.row.end", element("button.primary", { value: "save", type: "submit" }, "Use the key"), element("button", { value: "forget", type: "submit" }, "Forget the key"), element("button", { value: "", type: "submit" }, "Cancel")),
));
document.body.append(dialog);

function openDialog() {
  value.value = key();
  setText(result, "");
  result.className = "note";
  // Escape leaves it as it is.
  dialog.returnValue = "";
  dialog.showModal();
}

byId("key").addEventListener("click", openDialog);

/** Call `onChange` after each change of the key, when the server has said what it allows with it. */
export function followKey(onChange) {
  dialog.addEventListener("close", async () => {
    if (!["save", "forget"].includes(dialog.returnValue)) return;
    setKey(dialog.returnValue === "save" ? value.value.trim() : "");
    let isWrong = false;
    try {
      isWrong = !(await refreshAccess()).is_key_accepted && Boolean(key());
    } catch { /* The page says that the server does not answer. */ }
    onChange();
    if (isWrong) {
      setText(result, "The server does not accept this key.");
      result.className = "note error";
      dialog.showModal();
    }
  });
}

/**
 * Return {node, update()}: a notice in place of something that only a key allows which may change models. It is hidden
 * when the caller may. `what` is its first sentence, `instead` says what works without a key.
 */
export function keyNotice(id, what, ...instead) {
  const advice = element(
    "span", "No such key is set, so this page changes nothing. Start the server with ", element("code", FLAG), ", then enter ", element("code", "SECRET"), " here (",
    element("a", { href: "docs#operations.md/a-key-for-the-page" }, "more"), "). ",
  );
  const enter = element("button", { click: openDialog }, "Enter a key");
  const node = element("p.note", { id, hidden: true }, what, " ", advice, enter, " ", ...instead);
  function update() {
    node.hidden = access.may_change_models;
    // What is open to everyone takes no key. The server's keys, if any, are for other things.
    const isOpen = access.allowed["model-repository"];
    advice.hidden = !isOpen;
    enter.hidden = isOpen;
  }
  return { node, update };
}
