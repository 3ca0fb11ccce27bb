// What the page knows of the server: model, tasks, the open task, names in the memory.
// All of it is on the server; this is a copy that views are drawn from.

import { call, drop, exampleThumbnail, formOf, get, Problem } from "./api.js";

const LISTED = 10000;
const COLORS = 10;
const FRAME = 1000; // bytes of a form for each file, and of its other fields, at most
const FILE = /^files\[(\d+)\]$/;

export const state = {
  model: null,
  tasks: [],
  task: null, // with its examples
  remembered: new Map(), // name → class as listed
  total: 0, // classes in the memory
  reject: 0.9,
  rejects: true,
};

const listeners = [];
const originals = new Map(); // example → {label, file}, of what was added since the page was opened

export const listen = (event, call) => listeners.push([event, call]);
export function tell(event) {
  for (const [name, call] of listeners) if (name === event) call();
}

export const coverage = () => (state.rejects && state.model?.can_reject ? state.reject : null);

// Labels of the open task in the order in which they came, with their examples.
export function classes() {
  const found = new Map();
  for (const example of state.task?.examples ?? []) {
    if (!found.has(example.label)) found.set(example.label, []);
    found.get(example.label).push(example);
  }
  return found;
}

export function colorOf(label) {
  const place = [...classes().keys()].indexOf(label);
  return place < 0 ? "var(--strong-line)" : `var(--c${place % COLORS})`;
}

export async function loadModel() {
  state.model = await get("/v1/model");
  tell("model");
}

export async function loadMemory() {
  const { total, classes } = await get(`/v1/memory?map=true&limit=${LISTED}`);
  state.total = total;
  state.remembered = new Map(classes.map((one) => [one.name, one]));
  tell("memory");
}

export async function loadTasks() {
  state.tasks = (await get("/v1/tasks")).tasks;
}

export async function openTask(id) {
  state.task = id ? await get(`/v1/tasks/${id}`) : null;
  tell("task");
}

export async function createTask(name) {
  const { id } = await call("POST", "/v1/tasks", { json: { name } });
  await loadTasks();
  await openTask(id);
}

export async function deleteTask() {
  await call("DELETE", `/v1/tasks/${state.task.id}`);
  await loadTasks();
  await openTask(state.tasks.at(-1)?.id);
}

async function refresh() {
  await loadTasks();
  await openTask(state.task.id);
}

// Another window or machine may have changed something meanwhile.
export async function catchUp() {
  await loadTasks();
  const same = state.tasks.find((one) => one.id === state.task?.id);
  if (state.task && !same) await openTask(state.tasks.at(-1)?.id);
  else if (same && same.version !== state.task.version) await openTask(same.id);
}

// Adds examples. Files that are refused are left out and told of; the others are added.
export async function addExamples(label, files, name) {
  if (!state.task) await createTask(name);
  const problems = await eachBatch(inTurn(files), async (batch) => {
    const form = formOf({ label }, batch);
    const { examples } = await call("POST", `/v1/tasks/${state.task.id}/examples`, { form });
    examples.forEach((id, place) => originals.set(id, { label, file: batch[place] }));
  });
  await refresh();
  if (problems.length) throw new Problem(422, problems.join("\n"));
}

// Batches of as many as a request may have, in their order.
export function inTurn(all) {
  const most = state.model.limits.files;
  return Array.from({ length: Math.ceil(all.length / most) }, (_, n) => all.slice(n * most, (n + 1) * most));
}

// As few batches as requests may have, dealt evenly, so that each is like the whole: for `{file}`.
export function dealt(all) {
  const { files, request_bytes: most } = state.model.limits;
  const bytes = (batch) => batch.reduce((sum, { file }) => sum + file.size + FRAME, FRAME);
  for (let count = Math.ceil(all.length / files); ; count += 1) {
    const batches = Array.from({ length: count }, (_, n) => all.filter((_, place) => place % count === n));
    if (batches.every((batch) => batch.length === 1 || bytes(batch) <= most)) return batches;
  }
}

// Calls `work` with each batch of files, once more without a file that is refused; tells which were.
export async function eachBatch(batches, work) {
  const problems = [];
  for (let batch of batches) {
    while (batch.length) {
      try {
        await work(batch);
        break;
      } catch (error) {
        const place = FILE.exec(error.field ?? "")?.[1];
        if (place === undefined || batch.length <= Number(place)) throw error;
        problems.push(error.message.replace(/^files\[\d+\]: /, ""));
        batch = batch.filter((_, number) => number !== Number(place));
      }
    }
  }
  return problems;
}

export async function removeExample(id) {
  await call("DELETE", `/v1/tasks/${state.task.id}/examples/${id}`);
  drop(exampleThumbnail(state.task.id, id));
  await refresh();
  return originals.get(id) ?? null;
}

export async function rememberTask() {
  const changes = await call("POST", `/v1/tasks/${state.task.id}/remember`);
  await Promise.all([loadMemory(), refresh(), loadModel()]);
  return changes;
}

export async function classify(files, { explain = false, together = false, signal } = {}) {
  const form = formOf({ reject: coverage(), explain: explain || null, transductive: together || null }, files);
  return (await call("POST", `/v1/tasks/${state.task.id}/classify`, { form, signal })).answers;
}
