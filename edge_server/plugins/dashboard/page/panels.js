// Sections that plugins bring. A plugin's module exports `id`, `title`, `paths` of JSON, and `makePanel()`, which returns
// {heading, nodes, update(...reports, models)}: the JSON of each path, null if the caller may not read it, and the models of
// /edge/v1/models. A true result of `update` puts the section before the models. It may export `problemOf(...reports)`, a few
// words for the header, or "".

import { byId, element, placeChildren } from "./dom.js";

const modules = new Map();
const sections = new Map();

/** Return the modules of the panels of these plugins, by title. */
export async function loadPanels(plugins) {
  await Promise.all(plugins.filter((plugin) => !modules.has(plugin)).map(async (plugin) => {
    modules.set(plugin, await import(`./${plugin}/panel.js`));
  }));
  return plugins.map((plugin) => modules.get(plugin)).sort((a, b) => a.title.localeCompare(b.title));
}

/** Show these panels, and no others. `reports` has a list of JSON for each. */
export function updatePanels(panels, reports) {
  const before = [];
  const after = [];
  panels.forEach((panel, index) => {
    if (!sections.has(panel.id)) sections.set(panel.id, makeSection(panel));
    const section = sections.get(panel.id);
    (section.update(...reports[index]) ? before : after).push(section);
  });
  for (const [sections, place] of [[before, "-before"], [after, ""]]) {
    placeChildren(byId(`panels${place}`), sections.map(({ node }) => node));
    placeChildren(byId(`panel-links${place}`), sections.map(({ link }) => link));
  }
}

function makeSection(panel) {
  const { heading, nodes, update } = panel.makePanel();
  const name = `${panel.id}-title`;
  const node = element(
    "section", { id: panel.id, "aria-labelledby": name }, element("h2", { id: name }, `${panel.title} `, heading), ...nodes,
  );
  return { node, update, link: element("a", { href: `#${panel.id}` }, panel.title) };
}
