// Helpers for elements and numbers. Text is always set as text, never as HTML: names come from clients.

export const byId = (id) => document.getElementById(id);

/**
 * Return an element. `kind` is its tag, and its classes: "p.note". `first` may be its attributes, with functions as event
 * listeners; all others are children, of which strings become text.
 */
export const element = (kind, first, ...children) => create(null, kind, first, children);

export const svg = (kind, first, ...children) => create("http://www.w3.org/2000/svg", kind, first, children);

function create(namespace, kind, first, children) {
  const [tag, ...classes] = kind.split(".");
  const made = namespace ? document.createElementNS(namespace, tag) : document.createElement(tag);
  if (tag === "button") made.type = "button";
  if (classes.length) made.setAttribute("class", classes.join(" "));
  const hasAttributes = first?.constructor === Object;
  setAttributes(made, hasAttributes ? first : {});
  made.append(...(hasAttributes ? children : [first, ...children]).filter((child) => child != null));
  return made;
}

export function setAttributes(target, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") target.addEventListener(name, value);
    else if (value === true) target.setAttribute(name, "");
    else if (value !== false && value !== null) target.setAttribute(name, value);
  }
}

/** Return the head of a table: a column for each list of texts and elements. */
export const headOf = (...titles) => element("thead", element("tr", ...titles.map((title) => element("th", { scope: "col" }, ...title))));

/** Return the row of titles of a table of class "rows". `columns` are classes and titles. */
export const titleRow = (columns) => element("tr", { role: "row" }, ...columns.map(([kind, title]) => element(
  "th", { role: "columnheader", class: kind === "number" ? kind : null }, kind === "actions" ? element("span.hidden-text", title) : title,
)));

/** Return the cells of a row of such a table. In a narrow window they show their titles, but those of the classes in `plain`. */
export const cellsOf = (columns, ...plain) => columns.map(([kind, title]) => element(
  `td.${kind}`, { role: "cell", "data-label": plain.includes(kind) ? null : title },
));

/** Set text only if it changes, so that selections and screen readers are not disturbed. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Show text in an element, or hide the element if the text is empty. */
export function note(target, text) {
  setText(target, text);
  target.hidden = !text;
}

/** Show text as a badge; without text, hide it. */
export function setBadge(target, text, kind) {
  note(target, text);
  target.className = `badge ${kind}`;
}

/**
 * Keep one child of `parent` for each item, in order, after its other children. Children with the same key stay, with
 * focus and state.
 * `make(item)` returns {node, update(item)} and may return `remove()`.
 */
export function keepChildren(parent, known, items, keyOf, make) {
  const wanted = new Set(items.map(keyOf));
  for (const [key, child] of known) {
    if (!wanted.has(key)) {
      child.remove?.();
      child.node.remove();
      known.delete(key);
    }
  }
  // The head of a table stays before them.
  const offset = parent.children.length - known.size;
  placeChildren(parent, items.map((item) => {
    const key = keyOf(item);
    if (!known.has(key)) known.set(key, make(item));
    const child = known.get(key);
    child.update(item);
    return child.node;
  }), offset);
}

/** Make `nodes` the children from `offset` on, and move only those that are elsewhere: a moved one loses its focus. */
export function placeChildren(parent, nodes, offset = 0) {
  nodes.forEach((node, index) => {
    const before = parent.children[offset + index] ?? null;
    if (before !== node) parent.insertBefore(node, before);
  });
  while (parent.children.length > offset + nodes.length) parent.lastElementChild.remove();
}

/** Return the reason of a model's state without the name and version that stand beside it already. */
export function withoutName(reason, name) {
  const found = /^(?:model )?'?(.+?)'?(?: version \d+)?[:,] /.exec(reason);
  return found?.[1] === name ? reason.slice(found[0].length) : reason;
}

/** Return a number with its unit, "–" if it is unknown. */
export function formatNumber(value, digits = 1, unit = "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Math.abs(value) >= 100) digits = 0;
  return value.toFixed(digits) + unit;
}

export function formatBytes(bytes) {
  if (!bytes) return "–";
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : `${Math.max(1, Math.round(bytes / 1e6))} MB`;
}
