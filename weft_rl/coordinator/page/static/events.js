// Events as they come, newest first: one line for each push and each repair, which opens.

import { byId, el, moment, orEmpty } from "./dom.js";
import { duration } from "./format.js";

const MAX_LINES = 200; // beside those of failures, which stay

export class Events {
  constructor() {
    this.of = "";
    this.topic = "";
    this.newest = 0;
    this.nodes = new Map(); // by line
  }

  /** Forget lines of a coordinator that has ended: the next one numbers events anew. */
  clear() {
    this.newest = 0;
    this.nodes.clear();
  }

  update(pool, now) {
    const list = byId("events");
    const newest = pool.events[pool.events.length - 1]?.revision ?? 0;
    const lines = linesOf(pool.events).filter((line) => this.isWanted(line))
      .filter((line, place) => place < MAX_LINES || line.head.tone === "bad");
    orEmpty(list, byId("events-empty"), !lines.length, () => [
      el("p", {}, "Nothing of this kind has happened, as far as is remembered."),
    ]);
    const former = this.nodes;
    const took = new Map([...pool.transfers, ...pool.repairs].map((one) => [one.id, duration(one.total)]));
    this.nodes = new Map(lines.map((line) => {
      const key = line.events.map((event) => event.revision).join();
      const known = former.get(line.key);
      const isNew = this.newest > 0 && line.head.revision > this.newest;
      return [line.key, known?.key === key ? known : { key, node: node(line, took.get(line.head.subject), now, isNew, known?.node) }];
    }));
    const focused = document.activeElement.closest("#events > li")?.dataset.story;
    place(list, [...this.nodes.values()].map((one) => one.node));
    if (focused && !list.contains(document.activeElement)) {
      list.querySelector(`[data-story="${focused}"] summary`)?.focus(); // its line was made anew
    }
    this.newest = newest;
  }

  /** Failures stay, whatever the kind; those of another policy alone do not. */
  isWanted({ head }) {
    const isOf = !this.of || head.policy === this.of || (!head.policy && head.tone === "bad");
    return isOf && (!this.topic || head.tone === "bad" || head.topic === this.topic);
  }
}

/** Events that tell one story together, by the newest that is no detail; newest first. */
function linesOf(events) {
  const lines = new Map();
  for (const event of events) {
    const key = event.story || event.revision;
    const line = lines.get(key) ?? { key, events: [], head: event };
    line.events.push(event);
    if (!event.detail || line.head.detail) line.head = event;
    lines.set(key, line);
  }
  return [...lines.values()].sort((a, b) => b.head.revision - a.head.revision);
}

/** Put nodes into a list in order; those that are in place stay, and keep the focus. */
function place(list, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...list.children]) if (!wanted.has(child)) child.remove();
  nodes.forEach((one, i) => {
    if (list.children[i] !== one) list.insertBefore(one, list.children[i] ?? null);
  });
}

function node(line, took, now, isNew, former) {
  const { head, events } = line;
  const item = el("li", { class: `${head.tone}${isNew ? " new" : ""}`, "data-revision": head.revision,
    "data-story": head.story || undefined });
  if (events.length === 1) {
    item.append(...heading(head, now, ""), ...message(head));
    return item;
  }
  const isOpen = former?.querySelector("details")?.open ?? false;
  item.append(el("details", { open: isOpen },
    el("summary", {}, el("span", { class: "line" }, ...heading(head, now, took)), ...(head.tone === "bad" ? message(head) : [])),
    el("ol", {}, ...events.map((event) => el("li", { "data-revision": event.revision },
      ...heading(event, now, ""), ...message(event))))));
  return item;
}

/** What happened to whom: a version by its name, not by the id of what moved it. */
function heading(event, now, took) {
  const words = event.kind.toLowerCase().replaceAll("_", " ");
  const whom = Number(event.version) && event.story ? `${event.policy}@${event.version}` : event.subject;
  return [el("span", { class: "what" }, el("b", {}, words), " ", whom ?? "", took ? el("span", { class: "took" }, ` in ${took}`) : null),
    moment(event.time, now)];
}

const message = (event) => (event.message ? [el("span", { class: "message" }, event.message)] : []);
