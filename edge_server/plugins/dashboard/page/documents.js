// The documents of the project, which are Markdown. `#NAME.md` in the address chooses one.

import { request } from "./api.js";
import { byId, element, headOf } from "./dom.js";

async function show() {
  // #models.md, or #models.md/own-parameters for a place in it
  const [name, place] = decodeURIComponent(location.hash.slice(1) || "README.md").split("/");
  try {
    const text = await (await request(`docs/text/${encodeURIComponent(name)}`)).text();
    byId("content").replaceChildren(...blocksOf(text, name));
    document.title = `${byId("content").querySelector("h1")?.textContent ?? name} - edge-server`;
    if (place) byId(place)?.scrollIntoView();
    else window.scrollTo(0, 0);
  } catch (error) {
    byId("content").replaceChildren(element("p.error", error.message));
  }
}

function blocksOf(text, name) {
  const lines = text.replaceAll(/<!--[^]*?-->\n?/g, "").split("\n");
  const blocks = [];
  const inline = (content) => inlineOf(content, name);
  const take = (test) => {
    const taken = [];
    while (lines.length && test(lines[0])) taken.push(lines.shift());
    return taken;
  };
  while (lines.length) {
    const line = lines[0];
    const heading = /^(#{1,5}) (.*)/.exec(line);
    if (!line.trim()) {
      lines.shift();
    } else if (/^ *```/.test(line)) {
      lines.shift();
      blocks.push(element("pre.output", { tabindex: "0" }, take((next) => !/^ *```/.test(next)).join("\n")));
      lines.shift();
    } else if (heading) {
      lines.shift();
      blocks.push(element(`h${heading[1].length}`, { id: placeOf(heading[2]) }, ...inline(heading[2])));
    } else if (line.startsWith("|")) {
      blocks.push(tableOf(take((next) => next.startsWith("|")), inline));
    } else if (/^( *[-*]|\d+\.) /.test(line)) {
      const items = [];
      for (const next of take((next) => next.trim() && !/^(```|#|\|)/.test(next))) {
        const item = /^(?: *[-*]|\d+\.) (.*)/.exec(next);
        if (item) items.push(item[1]);
        else items.push(`${items.pop()} ${next.trim()}`);
      }
      blocks.push(element(/^\d/.test(line) ? "ol" : "ul", {}, ...items.map((item) => element("li", ...inline(item)))));
    } else {
      const paragraph = [lines.shift(), ...take((next) => next.trim() && !/^( *```|#|\||[-*] )/.test(next))];
      blocks.push(element("p", ...inline(paragraph.join(" "))));
    }
  }
  return blocks;
}

function tableOf(lines, inline) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const [head, , ...rows] = lines.map(cells);
  return element("div.scroll", { tabindex: "0", role: "region", "aria-label": "Table" }, element(
    "table", headOf(...head.map(inline)),
    element("tbody", ...rows.map((row) => element("tr", ...row.map((cell) => element("td", ...inline(cell)))))),
  ));
}

const placeOf = (heading) => heading.toLowerCase().replaceAll(/[^\w\- ]/g, "").replaceAll(" ", "-");

/** Return texts and elements of code, bold text, links and pictures (by their description). */
function inlineOf(content, name) {
  const nodes = [];
  let end = 0;
  for (const found of content.matchAll(/`([^`]+)`|\*\*(.+?)\*\*|!\[([^\]]*)\]\([^)]*\)|\[((?:`[^`]*`|[^\]])*)\]\(([^)\s]+)\)/g)) {
    nodes.push(content.slice(end, found.index));
    end = found.index + found[0].length;
    const [, code, bold, picture, label, target] = found;
    if (code !== undefined) nodes.push(element("code", code));
    else if (bold !== undefined) nodes.push(element("strong", ...inlineOf(bold, name)));
    else if (picture !== undefined) nodes.push(element("em.muted", picture));
    else nodes.push(linkOf(inlineOf(label, name), target, name));
  }
  nodes.push(content.slice(end));
  return nodes.filter(Boolean);
}

function linkOf(label, target, name) {
  if (/^https?:/.test(target)) return element("a", { href: target, rel: "noreferrer" }, ...label);
  const [file, place] = target.split("#");
  // Not every file of the project is a document.
  if (file && (!file.endsWith(".md") || /^\.\.\/(.*\/|[A-Z])/.test(file) || file.startsWith("examples/"))) return element("span", ...label);
  return element("a", { href: `#${file ? file.split("/").pop() : name}${place ? `/${place}` : ""}` }, ...label);
}

window.addEventListener("hashchange", show);
await show();
