// Events as they come, newest first.

import { byId, el, moment, orEmpty } from "./dom.js";

const MAX_SHOWN = 200;

const good = /_(READY|COMMITTED|ENDED|ANSWERS|ADOPTED)$/;
const bad = /_(LOST|QUARANTINED|SUSPECT|FAILED|ABORTED|CONFLICT|NOT_ADOPTED|WANTED|BEHIND)$/;

export class Events {
  constructor() {
    this.newest = 0;
  }

  clear() {
    this.newest = 0;
    byId("events").replaceChildren();
  }

  update(pool, now) {
    const list = byId("events");
    orEmpty(list, byId("events-empty"), !pool.events.length, () => [
      el("p", {}, "Nothing has happened since the coordinator started."),
    ]);
    const fresh = pool.events.filter((event) => event.revision > this.newest).slice(-MAX_SHOWN);
    if (!fresh.length) return;
    const isFirst = this.newest === 0;
    this.newest = fresh[fresh.length - 1].revision;
    for (const event of fresh) list.prepend(this.item(event, now, !isFirst));
    while (list.childElementCount > MAX_SHOWN) list.lastElementChild.remove();
  }

  item(event, now, isNew) {
    const tone = good.test(event.kind) ? "good" : bad.test(event.kind) ? "bad" : "plain";
    const words = event.kind.toLowerCase().replaceAll("_", " ");
    return el("li", { class: isNew ? `${tone} new` : tone, "data-revision": event.revision },
      el("span", { class: "what" }, el("b", {}, words), " ", event.subject ?? ""),
      moment(event.time, now),
      event.message ? el("span", { class: "message" }, event.message) : null);
  }
}
