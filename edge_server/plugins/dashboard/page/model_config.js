// The configuration of a model as it is used, as text.

/** Return a configuration without what says nothing: empty and false values, and names of wrappers. */
function trimmed(value) {
  if (Array.isArray(value)) return value.map(trimmed).filter(saysSomething);
  if (value?.constructor !== Object) return value;
  const { string_value: text, ...others } = value;
  if (text !== undefined && !Object.keys(others).length) return text;
  return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, trimmed(part)]).filter(([, part]) => saysSomething(part)));
}

const saysSomething = (value) => value !== "" && value !== false && value !== null && value !== "FORMAT_NONE" && !(typeof value === "object" && !Object.keys(value).length);

const isFlat = (value) => typeof value !== "object" || (Array.isArray(value) && value.every((part) => typeof part !== "object"));
const flat = (value) => (Array.isArray(value) ? `[${value.join(", ")}]` : String(value));
const inLine = (value) => Object.entries(value).map(([key, part]) => (isFlat(part) ? `${key}: ${flat(part)}` : `${key}: { ${inLine(part)} }`)).join(", ");

/** Return lines such as "name: net", what is inside a member indented below it, each of several on a line. */
function linesOf(value, indent = "") {
  return Object.entries(value).flatMap(([key, part]) => {
    if (isFlat(part)) return [`${indent}${key}: ${flat(part)}`];
    const inner = Array.isArray(part) ? part.map((one) => `${indent}  ${inLine(one)}`) : linesOf(part, `${indent}  `);
    return [`${indent}${key}:`, ...inner];
  });
}

/** Return the text of a configuration of the v2 API. `recognised` are parameters that the model's file states. */
export function configText(config, recognised) {
  const found = Object.keys(recognised ?? {}).length ? { "read from the model's file": recognised } : {};
  return linesOf(trimmed({ ...config, ...found })).join("\n");
}
