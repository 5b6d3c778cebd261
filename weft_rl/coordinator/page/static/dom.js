// Elements. Text of the pool comes in by text nodes and attributes alone, never as markup.

import { ago, full } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element; children are nodes or text. */
export const el = (name, attributes = {}, ...children) =>
  build(document.createElement(name), attributes, children);

/** An SVG element. */
export const svg = (name, attributes = {}, ...children) =>
  build(document.createElementNS(SVG, name), attributes, children);

export const byId = (id) => document.getElementById(id);

const shown = new WeakMap();

/** Replace what a node has, if `key` is not what it was shown for last. */
export function show(node, key, make) {
  if (shown.get(node) === key) return;
  shown.set(node, key);
  node.replaceChildren(...make());
}

/** Set a node's text, if it is another. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Show a hint in place of a section's content, or the content. */
export function orEmpty(content, empty, isEmpty, make) {
  content.hidden = isEmpty;
  empty.hidden = !isEmpty;
  if (isEmpty) show(empty, "empty", make);
}

/** Fill a select with names, and choose one of them; `all` is a first option without a value. */
export function choices(select, names, chosen, all) {
  show(select, names.join("\n"), () => [
    ...(all ? [el("option", { value: "" }, all)] : []),
    ...names.map((name) => el("option", { value: name }, name)),
  ]);
  select.value = chosen;
}

const canvas = document.createElement("canvas").getContext("2d");
const families = new Map();

/** The width of a text in pixels, in the font of a node; a little more than it takes. */
export function textWidth(text, node, size = "12.5px", weight = "400") {
  if (!families.has(node)) families.set(node, getComputedStyle(node).fontFamily);
  canvas.font = `${weight} ${size} ${families.get(node)}`;
  return Math.ceil(canvas.measureText(text).width * 1.04) + 2;
}

/** A moment, relative; the absolute one is on hover. `refreshMoments` keeps it true. */
export function moment(time, now) {
  return el("time", { datetime: new Date(time * 1000).toISOString(), title: full(time),
    "data-time": time }, ago(now - time));
}

export function refreshMoments(now) {
  for (const node of document.querySelectorAll("time[data-time]")) {
    setText(node, ago(now - Number(node.dataset.time)));
  }
}

/** A version with its colour, and by text too. */
export function chip(text, colourClass) {
  return el("span", { class: "chip" }, el("i", { class: `key ${colourClass}`, "aria-hidden": "true" }), text);
}
