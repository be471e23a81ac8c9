// A place to drop a file on, with a button to choose one.

import { element } from "./dom.js";

/** Return the drop zone. `onFile(file)` is called with each file. */
export function dropZone(id, text, label, accept, onFile) {
  const input = element("input", { type: "file", accept, class: "hidden-text", tabindex: "-1", "aria-label": label, change: () => {
    if (input.files[0]) onFile(input.files[0]);
    // The same file may be chosen again.
    input.value = "";
  } });
  const drop = element(
    "div", { class: "drop", id }, element("p", {}, text),
    element("button", { class: "primary", click: () => input.click() }, label), input,
  );
  const over = (isOver) => (event) => {
    event.preventDefault();
    drop.classList.toggle("over", isOver);
  };
  drop.addEventListener("dragover", over(true));
  drop.addEventListener("dragleave", over(false));
  drop.addEventListener("drop", (event) => {
    over(false)(event);
    const file = event.dataTransfer.files[0];
    if (file) onFile(file);
  });
  return drop;
}
