// Answers: bars, "none of these", what was recalled, and why.

import { classAddress, imageUrl } from "./api.js";
import { dialog, fill, make, percent, plural, setFill } from "./dom.js";
import { classes, colorOf, coverage, state, tell } from "./state.js";

const MOST_BARS = 6;

export function thumbnail(path, label, classNames = "thumb") {
  const image = make("img", { class: classNames, alt: label, width: 48, height: 48, decoding: "async" });
  imageUrl(path).then(
    (address) => (image.src = address),
    () => image.replaceWith(letters(label)),
  );
  return image;
}

// A tile in place of an image that may not be shown, or that there is none of.
export function letters(name) {
  const [plain, turn] = name.split(/@(?=\d+$)/); // Omniglot's characters are also remembered turned
  const parts = plain.split(/[/_\s-]+/).filter(Boolean);
  const first = [...(parts[0] ?? "?")][0];
  const last = parts.length > 1 ? (/\d+/.exec(parts.at(-1))?.[0] ?? [...parts.at(-1)][0]) : "";
  const shown = make("span", { class: "letters", "aria-hidden": "true" }, `${first.toUpperCase()}${last}`);
  if (turn) shown.append(make("small", {}, `${turn}°`));
  return shown;
}

export function classImage(name) {
  const has = state.remembered.get(name)?.has_thumbnail;
  const image = has ? thumbnail(`${classAddress(name)}/thumbnail`, "") : letters(name);
  image.title = name;
  return image;
}

export function recalledTiles(list, recalled) {
  const most = Math.max(1e-9, ...recalled.map((one) => one.weight));
  list.replaceChildren(
    ...recalled.map(({ name, weight }) =>
      make(
        "li",
        { class: "tile" },
        classImage(name),
        ...nameLines(name),
        make("span", {}, `${(100 * weight).toFixed(1)}%`),
        make("div", { class: "weight" }, fill(weight / most)),
      ),
    ),
  );
  if (!recalled.length) list.append(make("li", { class: "blank" }, "Nothing yet."));
}

// A name as two lines: what comes after the last stroke, and what it is of.
export function nameLines(name) {
  const cut = name.lastIndexOf("/");
  const parts = cut > 0 && cut < name.length - 1 ? [name.slice(cut + 1), name.slice(0, cut)] : [name];
  const [first, of] = parts;
  const lines = [make("span", { class: "name", title: name }, first)];
  return of ? [...lines, make("span", { class: "of" }, of)] : lines;
}

const ranked = (answer) =>
  answer.label === null
    ? answer.alternatives
    : [{ label: answer.label, probability: answer.probability }, ...answer.alternatives];

// A chance as text. Rounding makes one of several 1 though something is left for the others.
const chanceText = (chance, all) => percent(all.filter((one) => one > 0).length > 1 ? Math.min(chance, 0.999) : chance);

// The answer as bars that keep their places while their lengths change.
export class AnswerView {
  constructor(place, { sorted = false, live = true } = {}) {
    this.sorted = sorted;
    this.strong = make("strong");
    this.chance = make("span");
    this.verdict = make("p", { class: "verdict", "aria-live": live ? "polite" : null }, this.strong, this.chance);
    this.bars = make("div", { class: "bars" });
    this.rows = new Map();
    this.alone = make("p", { class: "hint", hidden: true }, "One class alone always gets 100%. Add a second.");
    place.replaceChildren(this.verdict, this.bars, this.alone);
  }

  wait(text) {
    this.verdict.className = "verdict waiting";
    this.strong.textContent = text;
    this.chance.textContent = "";
    this.rows.clear();
    this.bars.replaceChildren();
    this.alone.hidden = true;
  }

  show(answer) {
    const none = answer.label === null;
    this.verdict.className = none ? "verdict none" : "verdict";
    this.strong.textContent = none ? "None of these" : answer.label;
    this.strong.title = this.strong.textContent;
    let chances = ranked(answer);
    const all = chances.map((one) => one.probability);
    this.chance.textContent = none ? "" : chanceText(answer.probability, all);
    this.alone.hidden = chances.length > 1;
    chances = chances.slice(0, MOST_BARS);
    if (!this.sorted) {
      const order = [...classes().keys()];
      chances = chances.toSorted((a, b) => order.indexOf(a.label) - order.indexOf(b.label));
    }
    this.bars.classList.toggle("rejected", none);
    const rows = chances.map((one) => this.#row(one, one.label === answer.label, all));
    if (coverage() !== null) rows.push(noneRow(none));
    const shown = new Set(chances.map((one) => one.label));
    for (const label of this.rows.keys()) if (!shown.has(label)) this.rows.delete(label);
    if (rows.length !== this.bars.children.length || rows.some((row, n) => row !== this.bars.children[n])) {
      this.bars.replaceChildren(...rows);
    }
  }

  #row({ label, probability }, best, all) {
    if (!this.rows.has(label)) {
      const bar = fill(0);
      const row = make("div", { class: "bar" }, make("span", { title: label }, label));
      row.append(make("div", { class: "track" }, bar), make("span"));
      this.rows.set(label, { row, bar });
      bar.getBoundingClientRect(); // so that it grows from nothing
    }
    const { row, bar } = this.rows.get(label);
    row.classList.toggle("best", best);
    row.style.setProperty("--own", colorOf(label));
    row.lastChild.textContent = chanceText(probability, all);
    requestAnimationFrame(() => setFill(bar, probability));
    return row;
  }
}

const noneRow = (none) =>
  make(
    "div",
    { class: none ? "bar nothing yes" : "bar nothing" },
    none ? null : make("span", {}, "none of these"),
    make("span", {}, none ? "too far from all classes" : "near enough"),
  );

// Whether and at what coverage "none of these" may be the answer; all such controls are alike.
export function coverageControls(place) {
  const id = `${place.id}-on`;
  const box = make("input", { type: "checkbox", id });
  const slider = make("input", { type: "range", min: 50, max: 99, step: 1 });
  const shown = make("span");
  const share = make("label", {}, slider, shown);
  const reason = make(
    "p",
    { class: "hint" },
    "Not possible with this memory: a class that the model was trained with was forgotten, or the model has no thresholds.",
  );
  const draw = () => {
    const can = state.model?.can_reject ?? false;
    box.checked = state.rejects && can;
    box.disabled = !can;
    slider.disabled = !box.checked;
    slider.value = Math.round(100 * state.reject);
    shown.textContent = box.checked ? `answer about ${slider.value}% of your classes’ images` : "off: answer every image";
    share.hidden = !can;
    reason.hidden = can;
  };
  const change = () => {
    state.rejects = box.checked;
    state.reject = slider.value / 100;
    tell("reject");
  };
  box.addEventListener("change", change);
  slider.addEventListener("input", change);
  place.replaceChildren(make("label", { for: id }, box, "“None of these”"), share, reason);
  return draw;
}

export function explainAnswer(answer) {
  const { explanation } = answer;
  const label = explanation.prediction;
  const title = answer.label === null ? `None of these; nearest is ${label}` : `Why ${label}?`;
  const tiles = make("ul", { class: "tiles" });
  recalledTiles(tiles, (explanation.recalled[label] ?? []).slice(0, 6));
  return dialog(title, () => [
    ...uncertaintyPart(explanation.uncertainty),
    ...movedPart(explanation, label),
    ...togetherPart(explanation),
    make("h3", {}, `What ${label} recalled from memory`),
    tiles,
    ...tablePart(explanation, label),
  ]);
}

function uncertaintyPart({ total, aleatoric, epistemic }) {
  const most = Math.log(Math.max(2, classes().size)); // entropy of knowing nothing
  const split = make("div", { class: "split", "aria-hidden": "true" });
  for (const [kind, value] of [["aleatoric", aleatoric], ["epistemic", epistemic]]) {
    const part = make("i", { class: kind });
    part.style.width = `${Math.min(100, (100 * (value ?? 0)) / most)}%`;
    split.append(part);
  }
  const nats = (value) => `${(value ?? 0).toFixed(2)} nats`;
  return [
    make("h3", {}, `Uncertainty: ${nats(total)} of at most ${most.toFixed(2)}`),
    split,
    make(
      "p",
      { class: "keys-row" },
      make("span", { class: "key aleatoric" }, `the image could be either: ${nats(aleatoric)}`),
      make("span", { class: "key epistemic" }, `more examples could remove: ${nats(epistemic)}`),
    ),
  ];
}

function movedPart({ moved, memory_strength: strength }, label) {
  const found = moved?.[label];
  if (!found || found.length === null) return [];
  const where = found.directions[0];
  const along = where?.share >= 0.2 ? `, most (${percent(where.share)}) along direction ${where.number}` : "";
  const counted = strength?.[label];
  const weight = counted ? ` The memory counted for ${counted.toFixed(1)} examples.` : "";
  return [
    make("h3", {}, "How far the prototype moved"),
    make(
      "p",
      {},
      `The memory moved ${label} by ${percent(found.length)} of the distance between its examples and ` +
        `the average class${along}.${weight}`,
    ),
  ];
}

// What the images that were used together were counted as.
function togetherPart({ unlabeled }) {
  if (!unlabeled) return [];
  const most = Object.entries(unlabeled).toSorted((a, b) => b[1].images - a[1].images);
  const counts = most.slice(0, MOST_BARS).map(([name, { images }]) => `${(images ?? 0).toFixed(1)} as ${name}`);
  const more = most.length > MOST_BARS ? ", …" : "";
  return [make("h3", {}, "Images used together"), make("p", {}, `Counted: ${counts.join(", ")}${more}.`)];
}

function tablePart({ probabilities, std, distances, shots, remembered }, label) {
  const number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));
  const all = Object.values(probabilities);
  const rows = Object.entries(probabilities)
    .toSorted((a, b) => b[1] - a[1])
    .slice(0, 20)
    .map(([name, probability]) =>
      make(
        "tr",
        { class: name === label ? "best" : null },
        make("td", { title: name }, name),
        make("td", {}, `${chanceText(probability, all)} ± ${percent(std[name] ?? 0)}`),
        make("td", {}, number(distances[name], 1)),
        make("td", {}, String(shots[name] ?? 0)),
        make("td", {}, String(remembered[name] ?? 0)),
      ),
    );
  const heads = ["class", "probability", "distance", "examples", "remembered"];
  const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
  return [
    make("h3", {}, `All ${plural(Object.keys(probabilities).length, "class", "classes")}`),
    make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))),
  ];
}
