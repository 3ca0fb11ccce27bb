// Elements, notices and dialogs. Text is only ever set as text: names come from people and files.

export const byId = (id) => document.getElementById(id);

// make("li", {class: "tile", onclick: f, "aria-label": "…"}, "text", child, …)
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const cross = (label, onclick) =>
  make("button", { type: "button", class: "cross", "aria-label": label, title: label, onclick }, "×");

export function say(place, error) {
  place.textContent = error ? (error.message ?? String(error)) : "";
  place.hidden = !error;
}

// Runs a piece of work; what goes wrong is told in `place`, and null comes back.
export async function telling(place, work) {
  say(place, null);
  try {
    return await work();
  } catch (error) {
    if (error.name !== "AbortError") say(place, error);
    return null;
  }
}

export const percent = (value) =>
  value > 0 && value < 0.005 ? "<1%" : value >= 0.995 && value < 1 ? ">99%" : `${Math.round(100 * value)}%`;

export const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

export function fill(share, classes = "fill") {
  const bar = make("div", { class: classes });
  setFill(bar, share);
  return bar;
}

export function setFill(bar, share) {
  bar.style.transform = `translateX(${100 * Math.min(1, Math.max(0, share)) - 100}%)`;
}

export function toast(text, { action = null, act = null, seconds = 6, ended = null } = {}) {
  const shown = make("div", { class: "toast" }, make("span", {}, text));
  const close = () => {
    clearTimeout(timer);
    shown.remove();
  };
  const timer = setTimeout(() => {
    close();
    ended?.();
  }, 1000 * seconds);
  if (action) {
    const onclick = () => {
      close();
      act();
    };
    shown.append(make("button", { type: "button", onclick }, action));
  }
  byId("toasts").append(shown);
  return close;
}

// A dialog that resolves with what `close` was called with; null if it was left.
export function dialog(title, build, kind = null) {
  return new Promise((resolve) => {
    const before = document.activeElement;
    const box = make("dialog", { "aria-label": title, class: kind });
    let result = null;
    const close = (value = null) => {
      result = value;
      box.close();
    };
    box.append(cross("Close", () => close()), make("h2", {}, title), ...build(close));
    box.addEventListener("click", (event) => event.target === box && close());
    box.addEventListener("close", () => {
      box.remove();
      before?.focus?.();
      resolve(result);
    });
    document.body.append(box);
    box.showModal();
    box.querySelector("input, .primary")?.focus();
  });
}

export function ask(title, { text = "", label, type = "text", action = "OK", value = "" }) {
  return dialog(title, (close) => {
    const input = make("input", { id: "asked", type, maxlength: 200, autocomplete: "off", value });
    const onsubmit = (event) => {
      event.preventDefault();
      if (input.value.trim()) close(input.value.trim());
    };
    const form = make("form", { onsubmit }, make("label", { for: "asked" }, label), input);
    form.append(make("div", { class: "ends" }, make("button", { class: "primary" }, action)));
    return [make("p", { class: "hint" }, text), form];
  });
}

export function confirm(title, text, action) {
  return dialog(title, (close) => [
    make("p", { class: "hint" }, text),
    make(
      "div",
      { class: "ends" },
      make("button", { type: "button", onclick: () => close() }, "Cancel"),
      make("button", { type: "button", class: "primary", onclick: () => close(true) }, action),
    ),
  ]);
}
