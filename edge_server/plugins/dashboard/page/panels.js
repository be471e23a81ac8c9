// Sections that plugins bring. A plugin's module exports `id`, `title`, the `path` of its JSON, and
// `makePanel()`, which returns {heading, nodes, update(json)}. `json` is null if the caller may not read it.

import { byId, element, keepChildren } from "./dom.js";

const modules = new Map();
const sections = new Map();
const links = new Map();

/** Return the modules of the panels of these plugins, by title. */
export async function loadPanels(plugins) {
  await Promise.all(plugins.filter((plugin) => !modules.has(plugin)).map(async (plugin) => {
    modules.set(plugin, await import(`./panel-${plugin}.js`));
  }));
  return plugins.map((plugin) => modules.get(plugin)).sort((a, b) => a.title.localeCompare(b.title));
}

/** Show these panels, and no others. `reports` has the JSON of each. */
export function updatePanels(panels, reports) {
  const items = panels.map((panel, index) => ({ panel, report: reports[index] }));
  const idOf = ({ panel }) => panel.id;
  keepChildren(byId("panels"), sections, items, idOf, makeSection);
  keepChildren(byId("panel-links"), links, items, idOf, ({ panel }) => (
    { node: element("a", { href: `#${panel.id}` }, panel.title), update: () => {} }
  ));
}

function makeSection({ panel }) {
  const { heading, nodes, update } = panel.makePanel();
  const name = `${panel.id}-title`;
  const node = element(
    "section", { id: panel.id, "aria-labelledby": name }, element("h2", { id: name }, `${panel.title} `, heading), ...nodes,
  );
  return { node, update: ({ report }) => update(report) };
}
