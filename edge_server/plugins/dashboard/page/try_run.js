// One run of the form at a time, and its result.

import { byId, element, setText } from "./dom.js";

let running = null;

/** Return a function that says how long a version took. */
export function stopwatch() {
  const began = performance.now();
  return (version) => `Version ${version ?? ""}, answered in ${Math.round(performance.now() - began)} ms`;
}

export const stopRun = () => running?.abort();

/** Run `work(signal)`, say that it runs, and show what it throws. Starting again stops the run before. */
export async function run(work, message = "Waiting for the model") {
  stopRun();
  const mine = running = new AbortController();
  const busy = byId("try-busy");
  const began = performance.now();
  const tick = () => {
    const seconds = Math.round((performance.now() - began) / 1000);
    setText(busy, `${message}${seconds > 1 ? `, ${seconds} s` : ""} …`);
  };
  busy.hidden = false;
  tick();
  const clock = setInterval(tick, 1000);
  try {
    await work(mine.signal);
  } catch (error) {
    if (!mine.signal.aborted) showResult(element("p.error", error.message));
  }
  clearInterval(clock);
  if (running === mine) {
    running = null;
    busy.hidden = true;
  }
}

export function showResult(...nodes) {
  byId("try-result").replaceChildren(...nodes);
  // It is below the form, often outside the window.
  byId("try-result").scrollIntoView({ block: "nearest" });
}
