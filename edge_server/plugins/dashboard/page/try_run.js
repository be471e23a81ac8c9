// One run of the form at a time, and its result.

import { byId, element } from "./dom.js";

let running = null;

export const stopRun = () => running?.abort();

/** Run `work(signal)` and show what it throws. Starting again stops the run before. */
export async function run(work) {
  stopRun();
  const mine = running = new AbortController();
  try {
    await work(mine.signal);
  } catch (error) {
    if (!mine.signal.aborted) showResult(element("p", { class: "error" }, error.message));
  }
  if (running === mine) running = null;
}

export const showResult = (...nodes) => byId("try-result").replaceChildren(...nodes);
