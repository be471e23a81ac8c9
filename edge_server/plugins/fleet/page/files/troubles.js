// Kinds of trouble of a box, the worst first, and how long ago something was.

export const TROUBLES = {
  silent: { text: "no answer", kind: "bad" },
  failed: { text: "failed", kind: "bad" },
  not_ready: { text: "not ready", kind: "bad" },
  behind: { text: "behind", kind: "busy" },
  hot: { text: "hot", kind: "busy" },
  unknown: { text: "unknown", kind: "" },
};

/** Return whether something is wrong: files that are not known yet may be right. */
export const isInTrouble = ({ troubles }) => troubles.some((kind) => kind !== "unknown");

const WELL = { ok: { text: "ok", kind: "ok" }, asking: { text: "asking", kind: "" } };

export const badgeOf = (state) => TROUBLES[state] ?? WELL[state] ?? { text: state, kind: "" };

const ORDER = new Map([...Object.keys(TROUBLES), "asking", "ok"].map((state, place) => [state, place]));

/** Compare two boxes: the worst first, of these the newest trouble, then by name as people count. */
export function compareBoxes(a, b) {
  return ORDER.get(a.state) - ORDER.get(b.state) || (a.troubles.length ? Math.round(b.since_s) - Math.round(a.since_s) : 0) || NAMES.compare(a.name, b.name);
}

const NAMES = new Intl.Collator(undefined, { numeric: true });

/** Return how long ago a time in seconds is: "4 min". */
export function agoOf(seconds) {
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  if (passed < 90) return `${Math.round(passed)} s`;
  if (passed < 90 * 60) return `${Math.round(passed / 60)} min`;
  return passed < 36 * 3600 ? `${Math.round(passed / 3600)} h` : `${Math.round(passed / 86400)} days`;
}

export const timeOf = (seconds) => new Date(seconds * 1000).toLocaleString();
