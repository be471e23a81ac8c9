// A place to drop files on, with buttons to choose them.

import { element } from "./dom.js";

/** Return a place to drop files on. `onFiles` gets them. */
export function dropZone(id, onFiles, ...children) {
  const over = (isOver) => (event) => {
    event.preventDefault();
    drop.classList.toggle("over", isOver);
    if (event.type === "drop") onFiles([...event.dataTransfer.files]);
  };
  const drop = element("div.drop", { id, dragover: over(true), dragleave: over(false), drop: over(false) }, ...children);
  return drop;
}

/** Return a button of a class, and the hidden input of files that it opens. `onFiles` gets the chosen ones. */
export function chooser(kind, label, attributes, onFiles) {
  const input = element("input.hidden-text", { type: "file", tabindex: "-1", "aria-label": label, ...attributes, change: () => {
    onFiles([...input.files]);
    // The same file may be chosen again.
    input.value = "";
  } });
  return [element(kind, { click: () => input.click() }, label), input];
}

/** Return a place for one picture. `onFile` gets it. */
export function pictureZone(text, onFile) {
  const take = ([file]) => file && onFile(file);
  return dropZone("try-drop", take, element("p", text), ...chooser("button.primary", "Choose a picture", { accept: "image/*" }, take));
}
