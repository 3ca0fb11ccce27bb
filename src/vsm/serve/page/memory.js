// Memory: what is remembered, and how to forget it.

import { call, classAddress, drop, get } from "./api.js";
import { classImage, nameLines } from "./answers.js";
import { byId, confirm, dialog, make, plural, telling, toast } from "./dom.js";
import { MemoryMap } from "./maps.js";
import { listen, loadMemory, loadModel, openTask, state } from "./state.js";

const PAGE = 60; // tiles at once
const UNDO_SECONDS = 7;

let shown = PAGE;
let found = null; // names that match the search, as the server has them; null: all
let chosen = null;
let map = null;
const going = new Set(); // classes that are forgotten unless that is undone

export function startMemory() {
  map = new MemoryMap(byId("memory-map"), (name) => choose(name));
  let timer = null;
  byId("memory-search").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(search, 150);
  });
  byId("memory-more").addEventListener("click", () => {
    shown += 2 * PAGE;
    drawList();
  });
  let stale = true; // images are fetched only if somebody looks
  const drawAll = () => {
    if (byId("memory").hidden || !stale) return;
    stale = false;
    if (chosen !== null && !state.remembered.has(chosen)) choose(null);
    search();
    map.update();
  };
  listen("view", drawAll);
  listen("memory", () => {
    stale = true;
    drawAll();
  });
}

async function search() {
  const text = byId("memory-search").value.trim();
  await telling(byId("memory-notice"), async () => {
    const answer = text ? await get(`/v1/memory?limit=10000&search=${encodeURIComponent(text)}`) : null;
    if (text !== byId("memory-search").value.trim()) return; // typed on meanwhile
    found = answer && { total: answer.total, names: answer.classes.map((one) => one.name) };
    shown = PAGE;
    if (found?.total === 0) choose(null);
    drawList();
  });
}

// Newest first: what people added is what they look for.
const names = () =>
  (found?.names ?? [...state.remembered.keys()]).toSorted(
    (a, b) => (state.remembered.get(b)?.added ?? 0) - (state.remembered.get(a)?.added ?? 0),
  );

function drawList() {
  const all = names();
  const total = found?.total ?? state.total;
  byId("memory-count").textContent = found
    ? `${total.toLocaleString("en")} of ${plural(state.total, "class", "classes")}`
    : plural(total, "class", "classes");
  byId("memory-list").replaceChildren(...all.slice(0, shown).map((name) => tile(name)));
  if (!all.length) {
    const text = state.total ? "No remembered class has this in its name." : "Nothing is remembered yet.";
    byId("memory-list").append(make("li", { class: "blank" }, text));
  }
  byId("memory-more").hidden = all.length <= shown;
  byId("memory-more").textContent = `Show more of ${plural(all.length, "class", "classes")}`;
  map.mark(new Set(found?.names ?? []), chosen);
}

function tile(name, counted = true) {
  const one = state.remembered.get(name);
  const button = make(
    "button",
    { type: "button", class: "pick", "aria-pressed": String(name === chosen), onclick: () => choose(name) },
    classImage(name),
    ...nameLines(name),
    counted && one?.added ? make("span", { class: "tag" }, "added") : null,
    counted && !one?.added ? make("span", {}, plural(one?.count ?? 0, "image")) : null,
  );
  return make("li", { class: going.has(name) ? "tile going" : "tile" }, button);
}

function choose(name) {
  chosen = name;
  for (const button of byId("memory-list").querySelectorAll(".pick")) {
    button.setAttribute("aria-pressed", String(button.querySelector(".name").title === name));
  }
  map.mark(new Set(found?.names ?? []), chosen);
  const detail = byId("memory-detail");
  const isSmall = matchMedia("(max-width: 62rem)").matches; // there, it would be far below
  detail.hidden = name === null || isSmall;
  document.querySelector("dialog.detail")?.close();
  if (name === null) return;
  if (isSmall) dialog(name, () => details(name), "detail");
  else detail.replaceChildren(make("h2", {}, name), ...details(name));
}

function details(name) {
  const one = state.remembered.get(name);
  const fact = (term, text) => [make("dt", {}, term), make("dd", {}, text)];
  const near = make("ul", { class: "tiles nearest", "aria-label": `Nearest to ${name}` });
  telling(byId("memory-notice"), async () => {
    const { classes } = await get(`/v1/memory?limit=5&near=${encodeURIComponent(name)}`);
    const others = classes.filter((other) => other.name !== name).slice(0, 4);
    near.replaceChildren(...others.map((other) => tile(other.name, false)));
  });
  return [
    make(
      "dl",
      { class: "facts" },
      ...fact("Made of", plural(one?.count ?? 0, "image")),
      ...fact("Came from", one?.added ? "a task here" : "what the model learned"),
    ),
    make("h3", {}, "Nearest in memory"),
    near,
    make(
      "div",
      { class: "ends" },
      make("button", { type: "button", class: "danger", disabled: going.has(name), onclick: () => forget(name) }, "Forget"),
    ),
  ];
}

// The server cannot give back what it forgot, so it is told only when nobody can undo any more.
async function forget(name) {
  const one = state.remembered.get(name);
  if (!one?.added && state.model.can_reject) {
    const text =
      "The model learned this class in training. Without it, “none of these” can no longer be told, " +
      "and some of what the model learned from it stays.";
    if (!(await confirm(`Forget ${name}?`, text, "Forget"))) return;
  }
  going.add(name);
  drawList();
  showGoing(name);
  toast(`${name} will be forgotten in ${UNDO_SECONDS} seconds.`, {
    seconds: UNDO_SECONDS,
    action: "Undo",
    act: () => {
      going.delete(name);
      drawList();
      showGoing(name);
      toast(`${name} is kept.`, { seconds: 3 });
    },
    ended: () => forgetNow([name]),
  });
}

function showGoing(name) {
  document.querySelector("dialog.detail")?.close();
  if (chosen === name && !byId("memory-detail").hidden) choose(name);
}

export async function forgetNow(gone) {
  const inexact = [];
  await telling(byId("memory-notice"), async () => {
    try {
      for (const name of gone) {
        const { exact } = await call("DELETE", classAddress(name));
        if (!exact) inexact.push(name);
        drop(`${classAddress(name)}/thumbnail`);
      }
    } finally {
      gone.forEach((name) => going.delete(name));
      await Promise.all([loadMemory(), loadModel(), state.task && openTask(state.task.id)]);
    }
    const which = gone.length === 1 ? gone[0] : plural(gone.length, "class", "classes");
    const it = gone.length === 1 ? "it" : "them";
    const rest = inexact.length ? `Some of what the model learned from ${it} stays.` : `Nothing of ${it} is left.`;
    toast(`${which} forgotten. ${rest}`);
  });
}
