// Asks the coordinator every second what has changed, and has it drawn.

import { Braid } from "./braid.js";
import { byId, choices, el, refreshMoments, setText, show } from "./dom.js";
import { Events } from "./events.js";
import { clock, full } from "./format.js";
import { Pool } from "./pool.js";
import { drawPolicies, drawReplicas, drawSummary } from "./tables.js";
import { drawVerdict, wrongs } from "./verdict.js";
import { Waterfall } from "./waterfall.js";

const POLL = 1000; // milliseconds
const HIDDEN_POLL = 10_000;
const SOON = 50; // where there is more to fetch
const GIVE_UP = 8000; // of one request
const OLD = 5; // seconds without an answer
const MANY_REPLICAS = 12;

const pool = new Pool();
const braid = new Braid();
const waterfall = new Waterfall();
const events = new Events();
const contact = { answeredAt: 0, drawnAt: 0, failure: "", ahead: 0 };

/** The coordinator's clock now: what is drawn does not depend on this machine's. */
const now = () => Date.now() / 1000 + contact.ahead;

async function poll() {
  let wait = document.hidden ? HIDDEN_POLL : POLL;
  try {
    const answer = await fetch(`v1/pool.json?since=${encodeURIComponent(pool.cursor)}`,
      { signal: AbortSignal.timeout(GIVE_UP), cache: "no-store" });
    if (!answer.ok) throw new Error(refusals[answer.status] ?? `the coordinator answered ${answer.status}`);
    const told = await answer.json();
    if (told.is_new) events.clear();
    pool.apply(told);
    contact.answeredAt = Date.now() / 1000;
    contact.ahead = pool.now - contact.answeredAt;
    contact.failure = "";
    if (told.is_more) wait = SOON;
    if (!told.is_more || performance.now() - contact.drawnAt > POLL) {
      contact.drawnAt = performance.now();
      draw();
    }
  } catch (error) {
    contact.failure = error.name === "TimeoutError" ? "it does not answer"
      : error instanceof TypeError ? "it cannot be reached" : error.message;
  }
  drawContact();
  setTimeout(poll, wait);
}

const refusals = {
  400: "the page is older than the coordinator: load it again",
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
  show(byId("history"), `${facts.history.began}.${facts.pool.coordinator_generation}`, () => [
    "History since ", el("time", { datetime: new Date(facts.history.began * 1000).toISOString(), title: full(facts.history.began) },
      clock(facts.history.began)),
    `, when this coordinator started: its last ${facts.history.num_transfers} pushes and one hour of replicas. ` +
    `Events outlive a restart, but for steps of pushes: of each kind the last ${facts.history.num_events} failures, and as many others. ` +
    `Weft ${facts.pool.weft_version}, generation ${facts.pool.coordinator_generation ?? 0}.`,
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
  const wrong = pool.facts ? wrongs(pool.facts.pool) : 0;
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
