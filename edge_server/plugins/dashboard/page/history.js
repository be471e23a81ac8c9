// The gauges of the last half hour that the server has kept, for the curves.

import { access, getJson } from "./api.js";

let gauges = new Map();
let version = 0;

/** Read the history again: at the start, and after a time in which the page asked nothing. */
export async function loadHistory() {
  if (!access.allowed.statistics) return;
  const { ages_s: ages, gauges: values } = await getJson("edge/v1/history");
  const now = Date.now();
  const times = ages.map((age) => now - age * 1000);
  gauges = new Map(Object.entries(values).map(([name, numbers]) => [name, numbers.map((number, index) => [times[index], number])]));
  version += 1;
}

/** Return [time in ms, number or null] of a gauge, the oldest first. */
export const pastOf = (name) => gauges.get(name) ?? [];

/** Grows with each history that was read. */
export const pastVersion = () => version;
