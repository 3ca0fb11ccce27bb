// A sheet of paper for a pen: mouse, finger, stylus or keyboard. Points are in [0, 1].

const EXTENT = 0.7; // of the image's side that a drawing takes, as in the data
const PEN = 1.9 / 28; // of the side
const STEP = 1 / 28; // of the keyboard's pen
const FINE = 4; // pixels of the image for each that the model sees
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class Pad {
  constructor(canvas, changed) {
    this.canvas = canvas;
    this.changed = changed;
    this.strokes = [];
    this.pen = null; // of the keyboard: {x, y, down}
    canvas.addEventListener("pointerdown", (event) => this.#begin(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, (event) => this.#end(event));
    }
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("blur", () => this.#leave());
    new ResizeObserver(() => this.paint()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
  }

  get isEmpty() {
    return this.strokes.length === 0;
  }

  clear() {
    this.strokes = [];
    if (this.pen) this.pen.down = false;
    this.#altered();
  }

  undo() {
    this.strokes.pop();
    if (this.pen) this.pen.down = false;
    this.#altered();
  }

  #altered() {
    this.paint();
    this.changed();
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    const within = (value) => Math.min(1, Math.max(0, value));
    return [within((event.clientX - box.left) / box.width), within((event.clientY - box.top) / box.height)];
  }

  #begin(event) {
    if (this.drawing !== undefined || event.button > 0) return;
    event.preventDefault();
    this.canvas.focus({ preventScroll: true });
    this.pen = null;
    this.drawing = event.pointerId;
    this.canvas.setPointerCapture(event.pointerId);
    this.strokes.push([this.#point(event)]);
    this.paint();
  }

  #move(event) {
    if (event.pointerId !== this.drawing) return;
    const passed = event.getCoalescedEvents?.() ?? [];
    for (const one of passed.length ? passed : [event]) this.strokes.at(-1).push(this.#point(one));
    this.paint();
  }

  #end(event) {
    if (event.pointerId !== this.drawing) return;
    this.drawing = undefined;
    this.#altered();
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) {
      if (event.key === "z") this.undo();
      return;
    }
    this.pen ??= { x: 0.5, y: 0.5, down: false };
    const pen = this.pen;
    const arrow = ARROWS[event.key];
    if (arrow) {
      const step = event.shiftKey ? 4 * STEP : STEP;
      pen.x = Math.min(1, Math.max(0, pen.x + arrow[0] * step));
      pen.y = Math.min(1, Math.max(0, pen.y + arrow[1] * step));
      if (pen.down) this.strokes.at(-1).push([pen.x, pen.y]);
    } else if (event.key === " ") {
      pen.down = !pen.down;
      if (pen.down) this.strokes.push([[pen.x, pen.y]]);
    } else if (event.key === "Backspace") this.undo();
    else if (event.key === "Delete") this.clear();
    else return;
    event.preventDefault();
    this.paint();
    if (pen.down || event.key === " ") this.changed();
  }

  #leave() {
    this.pen = null;
    this.paint();
  }

  paint() {
    const side = Math.round(this.canvas.clientWidth * (window.devicePixelRatio || 1));
    if (!side) return;
    if (this.canvas.width !== side) this.canvas.width = this.canvas.height = side;
    const context = this.canvas.getContext("2d");
    const style = getComputedStyle(this.canvas);
    context.clearRect(0, 0, side, side);
    context.strokeStyle = style.getPropertyValue("--rule");
    context.lineWidth = side / 240;
    context.setLineDash([side / 40, side / 40]);
    context.beginPath();
    for (const part of [0.15, 0.85]) {
      context.moveTo(0.06 * side, part * side);
      context.lineTo(0.94 * side, part * side);
    }
    context.stroke();
    context.setLineDash([]);
    if (this.isEmpty && !this.pen) {
      context.fillStyle = style.getPropertyValue("--soft");
      context.font = `${side / 17}px ${style.fontFamily}`;
      context.textAlign = "center";
      context.fillText("Draw here", side / 2, 0.52 * side);
    }
    inkStrokes(context, this.strokes, style.getPropertyValue("--ink"), PEN * side, (p) => p.map((v) => v * side));
    if (this.pen) {
      context.strokeStyle = context.fillStyle = style.getPropertyValue("--accent");
      context.lineWidth = side / 110;
      context.beginPath();
      context.arc(this.pen.x * side, this.pen.y * side, side / 26, 0, 2 * Math.PI);
      if (this.pen.down) context.fill();
      else context.stroke();
    }
  }

  // The drawing as an image: dark on white, in the middle and of the size of those in the data,
  // wherever on the pad and however large it was drawn.
  file(name, modelSide) {
    const side = FINE * modelSide;
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = side;
    const context = canvas.getContext("2d");
    context.fillStyle = "#fff";
    context.fillRect(0, 0, side, side);
    const points = this.strokes.flat();
    const low = [0, 1].map((axis) => Math.min(...points.map((point) => point[axis])));
    const high = [0, 1].map((axis) => Math.max(...points.map((point) => point[axis])));
    const extent = Math.max(high[0] - low[0], high[1] - low[1], 0.25);
    const place = (point) =>
      point.map((value, axis) => side * (0.5 + (EXTENT / extent) * (value - (low[axis] + high[axis]) / 2)));
    inkStrokes(context, this.strokes, "#000", PEN * side, place);
    return new Promise((resolve) => {
      canvas.toBlob((blob) => resolve(new File([blob], `${name}.png`, { type: "image/png" })), "image/png");
    });
  }
}

function inkStrokes(context, strokes, color, width, place) {
  context.strokeStyle = context.fillStyle = color;
  context.lineWidth = width;
  context.lineCap = context.lineJoin = "round";
  for (const stroke of strokes) {
    const points = stroke.map(place);
    context.beginPath();
    context.moveTo(...points[0]);
    for (let n = 1; n < points.length - 1; n += 1) {
      const middle = points[n].map((value, axis) => (value + points[n + 1][axis]) / 2);
      context.quadraticCurveTo(...points[n], ...middle);
    }
    context.lineTo(...points.at(-1));
    if (points.length === 1) context.lineTo(points[0][0] + 0.01, points[0][1]);
    context.stroke();
  }
}
