// The page: views, the open task, and what all of them share.

import { Problem, request } from "./api.js";
import { ask, byId, confirm, make, plural, say, telling, toast } from "./dom.js";
import { startDraw } from "./draw.js";
import { forgetNow, startMemory } from "./memory.js";
import { startPhotos } from "./photos.js";
import * as store from "./state.js";

const { state } = store;
const VIEWS = ["draw", "photos", "memory"];
const TASK_NAME = "My first task";
const notice = byId("page-notice");
let view = "draw";

// The address holds view and task, as #draw/ID, so that reloading shows the same.
function readAddress() {
  const [name, id] = location.hash.slice(1).split("/");
  return { name: VIEWS.includes(name) ? name : null, id };
}

function writeAddress() {
  const address = `#${view}${state.task ? `/${state.task.id}` : ""}`;
  if (location.hash !== address) history.replaceState(null, "", address);
}

const usable = () => VIEWS.filter((name) => name !== "draw" || state.model.ink);

function show(name) {
  view = usable().includes(name) ? name : usable()[0];
  for (const one of VIEWS) {
    const tab = byId(`tab-${one}`);
    byId(one).hidden = one !== view;
    tab.hidden = !usable().includes(one);
    tab.setAttribute("aria-selected", String(one === view));
    tab.tabIndex = one === view ? 0 : -1;
  }
  writeAddress();
  store.tell("view");
}

function startTabs() {
  for (const name of VIEWS) byId(`tab-${name}`).addEventListener("click", () => show(name));
  document.querySelector(".tabs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const names = usable();
    show(names[(names.indexOf(view) + step + names.length) % names.length]);
    byId(`tab-${view}`).focus();
  });
}

function drawModel() {
  const remembered = state.model.remembers ? `${plural(state.total, "class", "classes")} remembered` : "no memory";
  byId("model").replaceChildren(make("b", {}, state.model.name), " ", make("span", {}, remembered));
  document.body.classList.toggle("is-ink", state.model.ink);
}

function drawTasks() {
  const picker = byId("task");
  picker.replaceChildren(
    ...state.tasks.map((task) => {
      const text = `${task.name} (${plural(Object.keys(task.classes).length, "class", "classes")})`;
      return make("option", { value: task.id }, text);
    }),
  );
  if (!state.tasks.length) picker.append(make("option", { value: "" }, "No task yet"));
  picker.value = state.task?.id ?? "";
  picker.disabled = !state.tasks.length;
  const examples = state.task?.examples ?? [];
  const fresh = examples.filter((one) => !one.remembered).length;
  byId("task-remember").disabled = !fresh || !state.model.remembers;
  byId("task-remember").textContent = examples.length && !fresh ? "Remembered" : "Remember this task";
  byId("task-export").disabled = !examples.length;
  byId("task-delete").disabled = !state.task;
  writeAddress();
}

async function opening(work) {
  store.tell("opened");
  await telling(notice, work);
}

async function remember() {
  await telling(notice, async () => {
    const { added, updated } = await store.rememberTask();
    const parts = [];
    if (added.length) parts.push(`${plural(added.length, "class", "classes")} added to the memory`);
    if (updated.length) parts.push(`${plural(updated.length, "known class", "known classes")} updated, which cannot be undone`);
    const undo = added.length ? { action: updated.length ? "Undo added" : "Undo", act: () => forgetNow(added) } : {};
    const them = added.length + updated.length === 1 ? "it" : "them";
    const told = parts.length ? `${parts.join(", ")}. Other tasks recall ${them} now.` : "Nothing new.";
    toast(told, { seconds: 10, ...undo });
  });
}

async function download() {
  await telling(notice, async () => {
    const answer = await request("GET", `/v1/tasks/${state.task.id}/export`);
    const href = URL.createObjectURL(await answer.blob());
    make("a", { href, download: `${state.task.name.replace(/[^\p{L}\p{N} _-]/gu, "_")}.vsm` }).click();
    setTimeout(() => URL.revokeObjectURL(href), 10_000);
  });
}

function startTasks() {
  byId("task").addEventListener("change", (event) => opening(() => store.openTask(event.target.value)));
  byId("task-new").addEventListener("click", async () => {
    const name = await ask("New task", { text: "A task is a few classes of your own.", label: "Name", action: "Create" });
    if (name) await opening(() => store.createTask(name));
  });
  byId("task-delete").addEventListener("click", async () => {
    const count = plural(state.task.examples.length, "example");
    const text = `Its ${count} will be gone, which cannot be undone. What was remembered stays.`;
    if (await confirm(`Delete ${state.task.name}?`, text, "Delete")) await opening(store.deleteTask);
  });
  byId("task-remember").addEventListener("click", remember);
  byId("task-export").addEventListener("click", download);
}

async function start() {
  startTabs();
  startTasks();
  const { name, id } = readAddress();
  await telling(notice, async () => {
    await store.loadModel();
    await Promise.all([store.loadTasks(), state.model.remembers ? store.loadMemory() : null]);
    if (!state.model.remembers) byId("recalled-title").hidden = byId("recalled").hidden = true;
    drawModel();
    store.listen("model", drawModel);
    store.listen("memory", drawModel);
    store.listen("task", drawTasks);
    startDraw(TASK_NAME);
    startPhotos(TASK_NAME);
    startMemory();
    show(name);
    const known = state.tasks.find((one) => one.id === id) ?? state.tasks.at(-1);
    await store.openTask(known?.id);
    document.body.dataset.ready = "yes";
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && state.model) store.catchUp().catch(() => {});
  });
  window.addEventListener("hashchange", async () => {
    const { name: wanted, id: other } = readAddress();
    if (!wanted) return; // an anchor of the page itself
    show(wanted);
    if (other && other !== state.task?.id) await opening(() => store.openTask(other));
  });
  window.addEventListener("unhandledrejection", ({ reason }) => {
    if (reason instanceof Problem) say(notice, reason);
  });
}

start();
