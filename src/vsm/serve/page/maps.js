// Maps in SVG: a task whose points move to their new places, and the whole memory.

import { classAddress, exampleThumbnail, get, imageUrl } from "./api.js";
import { make, plural } from "./dom.js";
import { classes, colorOf, state } from "./state.js";

const SVG = "http://www.w3.org/2000/svg";
const TIGHT = { left: 15, right: 15, top: 15, bottom: 15 };
const MILLISECONDS = 700;
const LONGEST = 18; // characters of a name
const HALF = { drawing: 15, text: 48, height: 14 }; // pixels around the middle of what was recalled
const STRETCH = 2; // of the wider axis, at most

export function shape(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Returns a function from places to pixels; one axis may be stretched against the other.
function fitting(points, width, height, margin) {
  const range = (axis) => {
    const values = points.map((point) => point[axis]);
    return [Math.min(...values), Math.max(...values)];
  };
  const [left, right] = range("x");
  const [top, bottom] = range("y");
  const [inner, outer] = [width - margin.left - margin.right, height - margin.top - margin.bottom];
  const across = inner / Math.max(right - left, 1e-3);
  const down = outer / Math.max(bottom - top, 1e-3);
  const [scaleX, scaleY] = [Math.min(across, STRETCH * down), Math.min(down, STRETCH * across)];
  return ({ x, y }) => ({
    x: margin.left + inner / 2 + scaleX * (x - (left + right) / 2),
    y: margin.top + outer / 2 - scaleY * (y - (top + bottom) / 2),
  });
}

const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export class TaskMap {
  constructor(place) {
    this.place = place;
    this.svg = shape("svg", { role: "img" });
    this.ties = shape("g");
    this.far = shape("g");
    this.near = shape("g");
    this.svg.append(this.ties, this.far, this.near);
    this.nodes = new Map();
    this.latest = null;
    place.replaceChildren(this.svg);
    new ResizeObserver(() => this.latest && this.#lay(false)).observe(place);
  }

  async update() {
    const task = state.task;
    if (!task?.examples.length) {
      this.latest = null;
      this.#empty();
      return;
    }
    const places = await get(`/v1/tasks/${task.id}/map`);
    if (state.task?.id !== task.id) return;
    this.task = task;
    this.latest = places;
    this.#lay(true);
  }

  #empty() {
    this.nodes.clear();
    for (const layer of [this.ties, this.far, this.near]) layer.replaceChildren();
    const text = shape("text", { class: "far", x: "50%", y: "50%", "text-anchor": "middle" });
    text.textContent = "Add examples, and they appear here.";
    this.near.append(text);
    this.svg.setAttribute("aria-label", "An empty map.");
  }

  #lay(moves) {
    const { width, height } = this.svg.getBoundingClientRect();
    if (!width) return;
    if (!this.nodes.size) this.near.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const { prototypes, examples, recalled } = this.latest;
    const longest = Math.max(...prototypes.map((one) => Math.min(LONGEST, one.name.length)));
    const margin = { left: 30, right: Math.min(width / 2, 60 + 8 * longest), top: 32, bottom: 32 };
    const toPixels = fitting([...prototypes, ...examples, ...recalled], width, height, margin);
    const labels = new Map(this.task.examples.map((one) => [one.id, one.label]));
    const wanted = new Map();
    for (const one of recalled) wanted.set(`r ${one.name}`, { kind: "recalled", label: one.name, ...toPixels(one) });
    for (const one of examples) {
      const label = labels.get(one.name) ?? "";
      wanted.set(`e ${one.name}`, { kind: "example", label, ...toPixels(one) });
    }
    for (const one of prototypes) wanted.set(`p ${one.name}`, { kind: "prototype", label: one.name, ...toPixels(one) });
    this.#match(wanted);
    this.#makeRoom();
    const names = prototypes.map((one) => one.name).join(", ");
    this.svg.setAttribute(
      "aria-label",
      `Map with ${plural(prototypes.length, "prototype")} (${names}), ${plural(examples.length, "example")} ` +
        `and ${plural(recalled.length, "recalled class", "recalled classes")}.`,
    );
    this.#animate(moves && !still() ? MILLISECONDS : 0);
  }

  #match(wanted) {
    for (const [key, node] of this.nodes) {
      if (wanted.has(key)) continue;
      node.element.remove();
      node.tie?.remove();
      this.nodes.delete(key);
    }
    for (const [key, target] of wanted) {
      const node = this.nodes.get(key) ?? this.#create(target, wanted);
      node.from = { x: node.x, y: node.y };
      node.to = { x: target.x, y: target.y };
      node.element.style.setProperty("--own", colorOf(target.label));
      node.tie?.style.setProperty("--own", colorOf(target.label));
      this.nodes.set(key, node);
    }
  }

  // Where recalled classes crowd each other or a prototype's name, they become dots.
  #makeRoom() {
    const nodes = [...this.nodes.values()];
    const boxes = nodes
      .filter((node) => node.kind === "prototype")
      .map(({ label, to }) => ({ ...to, left: 12, right: 56 + 8 * Math.min(LONGEST, label.length) }));
    const { height } = HALF;
    for (const { kind, element, to } of nodes) {
      if (kind !== "recalled") continue;
      const half = element.querySelector("image") ? HALF.drawing : HALF.text;
      const box = { ...to, left: half, right: half };
      const crowded = boxes.some(
        (one) =>
          Math.abs(one.y - box.y) < 2 * height &&
          one.x - one.left < box.x + box.right &&
          box.x - box.left < one.x + one.right,
      );
      element.setAttribute("class", crowded ? "crowded" : "roomy");
      if (!crowded) boxes.push(box);
    }
  }

  // A new prototype starts where its first example is, so that one sees where the memory moves it.
  #create(target, wanted) {
    const element = shape("g");
    const node = { element, kind: target.kind, label: target.label, x: target.x, y: target.y };
    const title = shape("title");
    title.textContent = `${target.label} (${target.kind})`;
    element.append(title, ...drawn(target));
    (target.kind === "recalled" ? this.far : this.near).append(element);
    if (target.kind === "prototype") {
      const own = [...wanted.values()].find((one) => one.kind === "example" && one.label === target.label);
      if (own) Object.assign(node, { x: own.x, y: own.y });
    }
    if (target.kind === "example") {
      node.tie = shape("line", { class: "tie" });
      this.ties.append(node.tie);
    }
    return node;
  }

  #animate(duration) {
    cancelAnimationFrame(this.frame);
    const begin = performance.now();
    const step = (now) => {
      const share = duration ? Math.min(1, Math.max(0, (now - begin) / duration)) : 1;
      const eased = 1 - (1 - share) ** 3;
      for (const node of this.nodes.values()) {
        for (const axis of ["x", "y"]) node[axis] = node.from[axis] + eased * (node.to[axis] - node.from[axis]);
        node.element.setAttribute("transform", `translate(${node.x} ${node.y})`);
      }
      for (const node of this.nodes.values()) {
        const end = node.tie && this.nodes.get(`p ${node.label}`);
        if (!end) continue;
        for (const [name, value] of [["x1", node.x], ["y1", node.y], ["x2", end.x], ["y2", end.y]]) {
          node.tie.setAttribute(name, value);
        }
      }
      if (share < 1) this.frame = requestAnimationFrame(step);
    };
    step(begin);
  }
}

function drawn({ kind, label }) {
  if (kind === "recalled") return recalledDrawing(label);
  if (kind === "example") return [shape("circle", { class: "ring", r: 5 })];
  const first = classes().get(label)?.[0];
  const parts = [shape("circle", { class: "halo", r: 19 }), shape("circle", { class: "prototype", r: 9 })];
  let x = 24;
  if (first) {
    const path = exampleThumbnail(state.task.id, first.id);
    parts.push(image(path, 22, -13, 26), shape("rect", { class: "frame", x: 22, y: -13, width: 26, height: 26, rx: 5 }));
    x = 54;
  }
  const text = shape("text", { x, y: 5 });
  text.textContent = label.length > LONGEST ? `${label.slice(0, LONGEST - 1)}…` : label;
  return [...parts, text];
}

function recalledDrawing(name) {
  const dot = shape("circle", { class: "dot", r: 3.5 });
  if (state.remembered.get(name)?.has_thumbnail) {
    const small = image(`${classAddress(name)}/thumbnail`, -12, -12, 24);
    small.classList.add("fades");
    return [shape("rect", { class: "tilted", x: -13, y: -13, width: 26, height: 26, rx: 5 }), small, dot];
  }
  const text = shape("text", { class: "far", x: 0, y: 4, "text-anchor": "middle" });
  const last = name.slice(name.lastIndexOf("/") + 1) || name;
  text.textContent = last.length > 15 ? `${last.slice(0, 14)}…` : last;
  return [text, dot];
}

function image(path, x, y, side) {
  const element = shape("image", { x, y, width: side, height: side });
  imageUrl(path).then((address) => element.setAttribute("href", address), () => {});
  return element;
}

export class MemoryMap {
  constructor(place, choose) {
    this.svg = shape("svg", { role: "img" });
    this.points = new Map();
    const key = (kind, text) => make("span", { class: `key ${kind}` }, text);
    const legend = make("p", { class: "legend" }, key("", "learned"), key("added", "added here"), key("match", "found"));
    place.replaceChildren(this.svg, legend);
    this.svg.addEventListener("click", (event) => {
      const name = this.#nearest(event);
      if (name !== null) choose(name);
    });
    new ResizeObserver(() => this.update()).observe(place);
  }

  update() {
    const { width, height } = this.svg.getBoundingClientRect();
    if (!width) return;
    const listed = [...state.remembered.values()].filter((one) => Number.isFinite(one.x));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("aria-label", `Map of ${plural(listed.length, "remembered class", "remembered classes")}.`);
    const toPixels = fitting(listed, width, height, TIGHT);
    this.points.clear();
    const radius = listed.length > 2000 ? 2.5 : 3.5;
    for (const one of listed.toSorted((a, b) => a.added - b.added)) {
      const { x, y } = toPixels(one);
      const point = shape("circle", { class: "point", cx: x, cy: y, r: one.added ? 5 : radius });
      point.classList.toggle("added", one.added);
      const title = shape("title");
      title.textContent = one.name;
      point.append(title);
      this.points.set(one.name, { point, x, y });
    }
    this.svg.replaceChildren(...[...this.points.values()].map((one) => one.point));
    this.mark(this.matches ?? new Set(), this.chosen ?? null);
  }

  mark(matches, chosen) {
    this.matches = matches;
    this.chosen = chosen;
    for (const [name, { point }] of this.points) {
      point.classList.toggle("match", matches.has(name));
      point.classList.toggle("chosen", name === chosen);
    }
    const top = this.points.get(chosen)?.point;
    if (top) this.svg.append(top);
  }

  #nearest(event) {
    const box = this.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = null;
    let least = 24 ** 2;
    for (const [name, one] of this.points) {
      const far = (one.x - x) ** 2 + (one.y - y) ** 2;
      if (far < least) [best, least] = [name, far];
    }
    return best;
  }
}
