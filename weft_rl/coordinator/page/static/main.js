// Asks the coordinator every second for its lists, and has them drawn.

import { Braid } from "./braid.js";
import { byId, choices, el, refreshMoments, setText, show } from "./dom.js";
import { Events } from "./events.js";
import { clock, count, full } from "./format.js";
import { MAX_EVENTS, MAX_LISTED, MAX_TRANSFERS, Pool } from "./pool.js";
import { drawPolicies, drawReplicas, drawSummary } from "./tables.js";
import { drawVerdict, wrongs } from "./verdict.js";
import { Waterfall } from "./waterfall.js";

const POLL = 1000; // milliseconds
const HIDDEN_POLL = 10_000;
const SHARE = 4; // a round of long lists takes a fifth of the time
const GIVE_UP = 8000; // of one request
const OLD = 5; // seconds without an answer
const MANY_REPLICAS = 12;

const pool = new Pool();
const braid = new Braid();
const waterfall = new Waterfall();
const events = new Events();
const contact = { coordinator: "", answeredAt: 0, failure: "", ahead: 0 };

/** The coordinator's clock now: what is drawn does not depend on this machine's. */
const now = () => Date.now() / 1000 + contact.ahead;

/** Ask for a page of a list. */
async function ask(list, query = {}) {
  const answer = await fetch(`v1/${list}.json?${new URLSearchParams(query)}`,
    { signal: AbortSignal.timeout(GIVE_UP), cache: "no-store" });
  if (!answer.ok) throw new Error(refusals[answer.status] ?? `the coordinator answered ${answer.status}`);
  return answer.json();
}

async function poll() {
  const began = performance.now();
  let isLong = false;
  try {
    await pool.follow(ask, () => {
      if (pool.coordinator !== contact.coordinator) events.clear();
      contact.coordinator = pool.coordinator;
      contact.answeredAt = Date.now() / 1000;
      contact.ahead = pool.now - contact.answeredAt;
      contact.failure = "";
      draw();
    });
    isLong = Boolean(pool.facts.next_replica_page_token || pool.facts.next_policy_page_token);
    if (isLong) draw();
  } catch (error) {
    contact.failure = error.name === "TimeoutError" ? "it does not answer"
      : error instanceof TypeError ? "it cannot be reached" : error.message;
  }
  drawContact();
  const took = performance.now() - began;
  setTimeout(poll, Math.max(document.hidden ? HIDDEN_POLL : POLL, isLong ? SHARE * took : 0));
}

const refusals = {
  400: "it has begun anew, or the page is older than it: load it again",
  401: "who are you? Load the page again to give the password",
  403: "you may not look at this pool",
};

function draw() {
  const time = now();
  drawChoices();
  drawHead();
  drawVerdict(pool);
  drawPolicies(pool);
  drawReplicas(pool, time, braid.filter);
  drawSummary(pool, time);
  braid.update(pool, time);
  waterfall.update(pool, time);
  events.update(pool, time);
}

function drawHead() {
  const { facts } = pool;
  const model = [...pool.replicas.values()].find((replica) => replica.model_name)?.model_name;
  byId("model").dataset.model = model ?? "";
  setText(byId("model"), model ? `pool of ${model}` : "an empty pool");
  const { began, startedAt } = pool;
  show(byId("history"), `${began}.${facts.coordinator_generation}`, () => [
    "History since ", el("time", { datetime: new Date(began * 1000).toISOString(), title: full(began) }, clock(began)),
    began > startedAt ? ", of which the first transfer is known. " : ", when this coordinator started. ",
    `It tells the last ${MAX_LISTED} transfers; this page keeps ${count(MAX_TRANSFERS)}, and one hour of replicas. ` +
    `Events outlive a restart, but for steps of pushes: of each kind the last ${MAX_EVENTS} failures, and as many others. ` +
    `Weft ${facts.weft_version}, generation ${facts.coordinator_generation ?? 0}.`,
  ]);
}

/** Policies to choose from; a choice that is gone goes back to the first. */
function drawChoices() {
  const names = pool.policyNames();
  const known = names.includes("base") ? names : ["base", ...names];
  if (!known.includes(braid.policy)) braid.policy = "base";
  if (!known.includes(waterfall.of)) waterfall.of = "";
  if (!known.includes(events.of)) events.of = "";
  choices(byId("policy"), known, braid.policy);
  choices(byId("pushes-of"), known, waterfall.of, "all policies");
  choices(byId("events-of"), known, events.of, "all policies");
  byId("filter-label").hidden = pool.replicas.size <= MANY_REPLICAS && !braid.filter;
}

/** Whether what is shown is what is so: said where it changes, and how old it is meanwhile. */
function drawContact() {
  const age = Date.now() / 1000 - contact.answeredAt;
  const isOld = contact.answeredAt > 0 && age > OLD;
  const isLost = contact.failure !== "" || isOld;
  document.body.classList.toggle("stale", isLost && contact.answeredAt > 0);
  byId("contact").classList.toggle("lost", isLost);
  setText(byId("contact-text"), isLost ? "Page has no contact" : contact.answeredAt ? "Page connected" : "Page connecting");
  drawTab(isLost);
  const notice = byId("notice");
  notice.hidden = !isLost;
  if (!isLost) return;
  const why = contact.failure || "it does not answer";
  setText(notice, contact.answeredAt
    ? `This page has no contact with the coordinator: ${why}. What you see is from ${clock(contact.answeredAt + contact.ahead)}; trying again.`
    : `This page has no contact with the coordinator: ${why}. Trying again.`);
}

/** The title and the icon of the browser's tab say how many things are wrong. */
function drawTab(isLost) {
  const wrong = pool.facts ? wrongs(pool.facts) : 0;
  const model = byId("model").dataset.model;
  const parts = [isLost ? "⚠ no contact" : wrong ? `⚠ ${wrong} wrong` : "", model, "Weft"];
  const title = parts.filter(Boolean).join(" · ");
  if (document.title !== title) document.title = title;
  const icon = `page/${isLost || wrong ? "icon-wrong" : "icon"}.svg`;
  if (byId("icon").getAttribute("href") !== icon) byId("icon").setAttribute("href", icon);
}

const settings = {
  policy: (value) => { braid.policy = value; braid.chosen = null; },
  "pushes-of": (value) => { waterfall.of = value; },
  "events-of": (value) => { events.of = value; },
  topic: (value) => { events.topic = value; },
  window: (value) => { braid.seconds = Number(value); },
};
for (const [id, set] of Object.entries(settings)) {
  byId(id).addEventListener("change", (event) => {
    set(event.target.value);
    if (pool.facts) draw();
  });
}
byId("filter").addEventListener("input", (event) => {
  braid.filter = event.target.value;
  if (pool.facts) draw();
});
new ResizeObserver(() => pool.facts && braid.update(pool, now())).observe(byId("braid"));
document.addEventListener("visibilitychange", () => pool.facts && drawContact());
setInterval(() => {
  drawContact();
  if (pool.facts && !document.body.classList.contains("stale")) refreshMoments(now());
}, 1000);

poll();
