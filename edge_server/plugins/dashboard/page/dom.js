// Helpers for elements and numbers. Text is always set as text, never as HTML: names come from clients.

export const byId = (id) => document.getElementById(id);

/** Return an element with attributes or event listeners (functions) and children; strings become text. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  if (tag === "button") made.type = "button";
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Set text only if it changes, so that selections and screen readers are not disturbed. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Show text in an element, or hide the element if the text is empty. */
export function note(target, text) {
  setText(target, text);
  target.hidden = !text;
}

export function setBadge(target, text, kind) {
  setText(target, text);
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
  items.forEach((item, index) => {
    const place = offset + index;
    const key = keyOf(item);
    if (!known.has(key)) known.set(key, make(item));
    const child = known.get(key);
    child.update(item);
    if (parent.children[place] !== child.node) parent.insertBefore(child.node, parent.children[place] ?? null);
  });
}

export function formatNumber(value, digits = 1) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Math.abs(value) >= 100) digits = 0;
  return value.toFixed(digits);
}

export function formatBytes(bytes) {
  if (!bytes) return "–";
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : `${Math.max(1, Math.round(bytes / 1e6))} MB`;
}
