// Photographs: columns of classes that take images, and images to classify.

import { AnswerView, coverageControls, explainAnswer, letters } from "./answers.js";
import { byId, cross, make, plural, say, telling } from "./dom.js";
import { exampleList } from "./draw.js";
import { addExamples, classes, classify, colorOf, dealt, eachBatch, inTurn, listen, state, tell } from "./state.js";

const ENOUGH = 20; // images to classify, from which on they are used together
const PAUSE = 150; // milliseconds after a change

let pasting = null; // the place that was used last takes what is pasted
const fresh = new Set(); // classes without images yet
const problems = new Map(); // label → what went wrong there
const queries = []; // {file, element, view, stale, answered, group}, the last one first
let byHand = null; // whether they are used together, once the user has said so
let waiting = null; // for more changes, before asking again
let under = null; // the requests under way

export function startPhotos(taskName) {
  const drawCoverage = coverageControls(byId("photos-coverage"));
  const add = (label, files) => addTo(label, files, taskName);
  const drawColumns = () => showColumns(add);
  const queryDrop = byId("query-drop");
  takeFiles(queryDrop, queryDrop, "Drop or paste images here, or", "images to classify", addQueries);
  document.addEventListener("paste", (event) => {
    const files = filesOf(event.clipboardData);
    if (!files.length || byId("photos").hidden) return;
    event.preventDefault();
    (pasting?.isConnected ? pasting : queryDrop).take(files);
  });
  // A file that misses its place would be opened in place of the page.
  for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => event.preventDefault());

  const drawTogether = togetherControl(byId("photos-together"));
  listen("task", () => {
    drawColumns();
    askAgain();
  });
  listen("memory", askAgain);
  listen("model", drawCoverage);
  listen("reject", () => {
    drawCoverage();
    askAgain();
  });
  listen("queries", drawTogether);
  listen("opened", () => {
    fresh.clear();
    problems.clear();
  });
  drawCoverage();
  drawTogether();
  drawColumns();
}

const filesOf = (data) => [...(data?.files ?? [])];

// Lets a place take dropped, pasted and chosen files.
function takeFiles(place, box, text, what, take) {
  const input = make("input", { type: "file", multiple: true, accept: "image/*,.ppm,.pgm,.tif,.tiff", "aria-label": `Choose ${what}` });
  input.addEventListener("change", () => {
    place.take([...input.files]);
    input.value = "";
  });
  box.replaceChildren(make("span", {}, text), make("label", { class: "choose" }, "Choose files", input));
  place.take = async (files) => {
    if (!files.length) return;
    pasting = place;
    box.classList.add("busy");
    await take(files);
    box.classList.remove("busy");
  };
  place.addEventListener("dragover", (event) => {
    event.preventDefault();
    place.classList.add("over");
  });
  place.addEventListener("dragleave", (event) => {
    if (!place.contains(event.relatedTarget)) place.classList.remove("over");
  });
  place.addEventListener("drop", (event) => {
    event.preventDefault();
    place.classList.remove("over");
    place.take(filesOf(event.dataTransfer));
  });
  for (const kind of ["focusin", "pointerdown"]) place.addEventListener(kind, () => (pasting = place));
}

async function addTo(label, files, taskName) {
  problems.delete(label);
  fresh.add(label);
  try {
    await addExamples(label, files, taskName);
  } catch (error) {
    problems.set(label, error.message);
  }
  if (classes().has(label)) fresh.delete(label);
  showColumns((other, more) => addTo(other, more, taskName));
}

function showColumns(add) {
  const box = byId("columns");
  const active = document.activeElement?.closest?.(".column")?.dataset.label;
  const found = classes();
  for (const label of fresh) if (!found.has(label)) found.set(label, []);
  const columns = [...found].map(([label, examples]) => column(label, examples, add));
  if (!box.lastChild) box.append(newColumn(box, add));
  while (box.children.length > 1) box.firstChild.remove(); // the last stays, with what is being typed
  box.lastChild.before(...columns);
  const again = columns.find((one) => one.dataset.label === active);
  again?.querySelector("input")?.focus();
}

function column(label, examples, add) {
  const notice = make("div", { class: "notice", role: "alert", hidden: true });
  const drop = make("div", { class: "drop" });
  const count = make("span", {}, examples.length ? plural(examples.length, "image") : "empty");
  const place = make(
    "section",
    { class: "column", "data-label": label, "aria-label": `Class ${label}` },
    make("header", {}, make("span", { class: "name", title: label }, label), count),
    exampleList(label, examples, notice),
    drop,
    notice,
  );
  place.style.setProperty("--own", colorOf(label));
  takeFiles(place, drop, "Drop or paste, or", `images of ${label}`, (files) => add(label, files));
  say(notice, problems.get(label));
  return place;
}

function newColumn(box, add) {
  const input = make("input", { id: "new-class", maxlength: 200, autocomplete: "off", placeholder: "Its name" });
  const notice = make("div", { class: "notice", role: "alert", hidden: true });
  const onsubmit = (event) => {
    event.preventDefault();
    const label = input.value.trim();
    if (!label) {
      say(notice, "Name the class first.");
      return;
    }
    fresh.add(label);
    input.value = "";
    say(notice, null);
    showColumns(add);
    const made = [...box.children].find((one) => one.dataset.label === label);
    made?.querySelector("input")?.focus();
  };
  const form = make("form", { onsubmit }, make("label", { for: "new-class" }, "New class"), input);
  form.append(make("button", { type: "submit", class: "primary" }, "Add class"), notice);
  return make("section", { class: "column fresh", "aria-label": "New class" }, form);
}

async function addQueries(files) {
  await telling(byId("query-notice"), async () => {
    if (!classes().size) throw new Error("There are no classes yet: add images of some above.");
    queries.unshift(...files.map(queryOf));
    await askNow();
  });
}

function queryOf(file) {
  const address = URL.createObjectURL(file);
  const image = make("img", { class: "image", alt: "", src: address });
  image.addEventListener("error", () => image.replaceWith(letters(file.name))); // a format that browsers do not show
  const place = make("div");
  const notice = make("div", { class: "notice", role: "alert", hidden: true });
  const view = new AnswerView(place, { sorted: true });
  const query = { file, view, stale: true, answered: false, group: null };
  const explain = () =>
    telling(notice, async () => {
      const asked = query.group ?? [query];
      const found = await classify(filesIn(asked), { explain: true, together: query.group !== null });
      await explainAnswer(found[asked.indexOf(query)]);
    });
  query.remove = () => {
    queries.splice(queries.indexOf(query), 1);
    query.element.remove();
    URL.revokeObjectURL(address);
  };
  const remove = () => {
    query.remove();
    askSoon();
  };
  // A group is of all queries that were answered together.
  query.show = (answer, group) => {
    Object.assign(query, { stale: false, answered: true, group });
    view.verdict.setAttribute("aria-live", group ? "off" : "polite"); // not all of them aloud
    view.show(answer);
  };
  const foot = make("div", { class: "file" }, make("span", { title: file.name }, file.name));
  foot.append(make("button", { type: "button", class: "quiet", "aria-label": `Explain ${file.name}`, onclick: explain }, "Explain"));
  query.element = make("li", { class: "query" }, image, place, foot, notice, cross(`Remove ${file.name}`, remove));
  return query;
}

const filesIn = (asked) => asked.map((one) => one.file);
const isTogether = () => state.model.can_use_together && (byHand ?? queries.length >= ENOUGH);

// Whether all images are used together: their number decides, until the user does.
function togetherControl(place) {
  const id = `${place.id}-on`;
  const box = make("input", { type: "checkbox", id, "aria-describedby": `${id}-groups` });
  const groups = make("p", { class: "hint", id: `${id}-groups`, role: "status" });
  box.addEventListener("change", () => {
    byHand = box.checked;
    askSoon();
  });
  place.replaceChildren(make("label", { for: id }, box, "Use all images together"), groups);
  return () => {
    place.hidden = !state.model.can_use_together;
    box.checked = isTogether();
    const sizes = box.checked ? dealt(queries).map((batch) => batch.length) : [];
    groups.textContent = sizes.length > 1 ? `in groups of ${[...new Set(sizes)].reverse().join(" or ")}` : "";
  };
}

// Asks about images without an answer to what is asked now; if they are used together, about all.
async function askNow() {
  stopAsking();
  tell("queries");
  if (!classes().size) {
    for (const query of queries) query.view.wait("No classes.");
    return;
  }
  const { signal } = (under = new AbortController());
  const together = isTogether();
  const asked = together ? [...queries] : queries.filter((one) => one.stale || one.group);
  try {
    const refused = await eachBatch(together ? dealt(asked) : inTurn(asked), async (batch) => {
      const answers = await classify(filesIn(batch), { together, signal });
      batch.forEach((one, place) => one.show(answers[place], together ? batch : null));
    });
    if (refused.length) throw new Error(refused.join("\n"));
  } finally {
    if (!signal.aborted) {
      for (const query of queries.filter((one) => !one.answered)) query.remove();
      byId("queries").prepend(...queries.map((one) => one.element).filter((one) => !one.isConnected));
      tell("queries");
      if (isTogether() !== together) askSoon(); // as some were refused
    }
  }
}

function stopAsking() {
  clearTimeout(waiting);
  under?.abort();
}

function askSoon() {
  stopAsking();
  tell("queries");
  const failed = (error) => error.name === "AbortError" || say(byId("query-notice"), error);
  waiting = setTimeout(() => askNow().catch(failed), PAUSE);
}

// Classes, the memory or the coverage have changed.
function askAgain() {
  for (const query of queries) query.stale = true;
  askSoon();
}
