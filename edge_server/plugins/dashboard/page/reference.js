// The API reference: the operations of openapi.json, by access category.

import { getJson, refreshAccess } from "./api.js";
import { byId, element, setText } from "./dom.js";

const KINDS = { get: "ok", post: "busy", delete: "bad" };

await refreshAccess("../"); // says which header takes the key that was entered on the page
const api = await getJson("../openapi.json").catch((error) => {
  setText(byId("about"), error.message);
  throw error;
});
setText(byId("about"), `${api.info.summary}. ${api.info.description}`);

function resolve(schema, depth = 0) {
  if (!schema || depth > 12) return schema;
  if (schema.$ref) return resolve(api.components.schemas[schema.$ref.split("/").pop()], depth + 1);
  if (schema.type === "array" && schema.items) return [resolve(schema.items, depth + 1)];
  if (schema.properties) {
    return Object.fromEntries(Object.entries(schema.properties).map(([name, value]) => [name, resolve(value, depth + 1)]));
  }
  return schema.enum ? schema.enum.join(" | ") : [schema.type ?? "any"].flat().join(" or ");
}

function bodyText(title, content) {
  if (!content) return [];
  return Object.entries(content).map(([type, { schema }]) => {
    const shape = type === "application/json" ? `\n${JSON.stringify(resolve(schema), null, 1)}` : "";
    return element("pre.output", { tabindex: "0" }, `${title}: ${type}${shape}`);
  });
}

function operationNode(path, method, operation) {
  const parameters = (operation.parameters ?? []).map((item) => `${item.name} (${item.in})`).join(", ");
  return element(
    "details.card.operation",
    element("summary", element(`span.badge.${KINDS[method] ?? ""}`, method.toUpperCase()),
            element("code", path), element("span.muted", operation.summary)),
    parameters ? element("p.note", `Parameters: ${parameters}`) : null,
    ...bodyText("Request", operation.requestBody?.content),
    ...bodyText("Response", operation.responses["200"].content),
  );
}

for (const tag of api.tags) {
  const found = Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).filter(([, operation]) => operation.tags.includes(tag.name)).map(([method, operation]) => operationNode(path, method, operation)));
  byId("operations").append(element(
    "section", { "aria-labelledby": `tag-${tag.name}` },
    element("h2", { id: `tag-${tag.name}` }, tag.name, element("span.muted", tag.description)), ...found,
  ));
}
