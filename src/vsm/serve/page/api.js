// Requests to the server this page came from, and to no other.

import { ask } from "./dom.js";

const KEY = "vsm-token"; // in sessionStorage alone: it is gone with the tab
const KEPT = 1500; // images

export class Problem extends Error {
  constructor(status, detail, field = null) {
    super(detail);
    this.name = "Problem";
    this.status = status;
    this.field = field;
  }
}

let asking = null;

function askForToken(wasWrong) {
  asking ??= ask("This server asks for a token", {
    text: wasWrong ? "That was not it. Whoever started the server knows it." : "Whoever started the server knows it.",
    label: "Token",
    type: "password",
    action: "Continue",
  }).finally(() => (asking = null));
  return asking;
}

async function send(method, path, { json, form, signal } = {}) {
  const headers = { "x-vsm-page": "1" }; // then the browser leaves asking for a token to us
  const token = sessionStorage.getItem(KEY);
  if (token) headers.authorization = `Bearer ${token}`;
  if (json !== undefined) headers["content-type"] = "application/json";
  const body = form ?? (json === undefined ? undefined : JSON.stringify(json));
  let answer;
  try {
    answer = await fetch(location.origin + path, { method, headers, body, signal, redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The server does not answer. Is it still running?");
  }
  if (answer.status !== 401) return answer;
  const given = await askForToken(token !== null);
  if (!given) throw new Problem(401, "The server asks for a token. Reload the page to be asked again.");
  sessionStorage.setItem(KEY, given.replace(/[^\x21-\x7e]/g, ""));
  return send(method, path, { json, form, signal });
}

async function problemOf(answer) {
  try {
    const { detail, field } = await answer.json();
    return new Problem(answer.status, detail ?? answer.statusText, field);
  } catch {
    return new Problem(answer.status, `The server answered ${answer.status}.`);
  }
}

export async function request(method, path, given) {
  const answer = await send(method, path, given);
  if (!answer.ok) throw await problemOf(answer);
  return answer;
}

export async function call(method, path, given) {
  const answer = await request(method, path, given);
  return answer.status === 204 ? null : answer.json();
}

export const get = (path, signal) => call("GET", path, { signal });

export function formOf(fields, files) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) {
    if (value !== null && value !== undefined) form.append(name, value);
  }
  for (const file of files) form.append("files", file, file.name);
  return form;
}

const imageUrls = new Map();

// The address of an image in this page; it is fetched once, with the token.
export function imageUrl(path) {
  if (!imageUrls.has(path)) {
    const coming = request("GET", path).then(async (answer) => URL.createObjectURL(await answer.blob()));
    coming.catch(() => imageUrls.delete(path));
    imageUrls.set(path, coming);
    if (imageUrls.size > KEPT) {
      drop(imageUrls.keys().next().value);
    }
  }
  return imageUrls.get(path);
}

// Frees an image once nothing shows it any more.
export function drop(path) {
  const address = imageUrls.get(path);
  imageUrls.delete(path);
  address?.then((found) => setTimeout(() => URL.revokeObjectURL(found), 10_000), () => {});
}

export const exampleThumbnail = (task, example) => `/v1/tasks/${task}/examples/${example}/thumbnail`;
export const classAddress = (name) => `/v1/memory/${encodeURIComponent(name)}`;
