// Policies and replicas, as tables; and the figures over all.

import { address, noReplica, stateWord } from "./braid.js";
import { byId, chip, el, moment, orEmpty, show } from "./dom.js";
import { byName, clock, colour, count, duration, rate, several, versionName } from "./format.js";
import { isMixed } from "./pool.js";

const FEW = 6; // rows of the first screen
const NAMED = 3;
const HOUR = 3600;
const showsAll = { policies: false, replicas: false };
for (const what of Object.keys(showsAll)) {
  byId(`more-${what}`).addEventListener("click", (event) => {
    showsAll[what] = true;
    event.target.hidden = true;
    limits[what]?.();
  });
}
const limits = {}; // draws a table again

/** The first rows of a table, or all of them where that was asked for. */
function some(what, rows, again) {
  const shown = showsAll[what] ? rows : rows.slice(0, FEW);
  const more = byId(`more-${what}`);
  more.hidden = shown.length === rows.length;
  more.textContent = `Show all ${count(rows.length)} ${what}`;
  limits[what] = again;
  return shown;
}

// -- figures -----------------------------------------------------------------

export function drawSummary(pool, now) {
  const recent = pool.transfers.filter((one) => one.purpose === "push" && one.end_time > now - HOUR);
  const failed = recent.filter((one) => one.failure).length;
  const last = [...pool.transfers].reverse().find((one) => one.purpose === "push" && !one.failure);
  const pauses = recent.filter((one) => one.pause);
  const longest = pauses.reduce((most, one) => (one.pause > (most?.pause ?? 0) ? one : most), null);
  const fastest = Object.entries(pool.rates).sort((a, b) => b[1].rate - a[1].rate)[0];
  const { began } = pool;
  const span = began > now - HOUR ? `since ${clock(began)}` : "in the last hour";
  const tiles = [
    [`Pushes ${span}`, count(recent.length - failed), failed ? `${count(failed)} failed` : "none failed", failed ? "warn" : ""],
    ["Last push", last ? duration(last.total) : "–", last ? [versionName(last.policy, last.version), " · ", moment(last.end_time, now)] : "nothing pushed yet", ""],
    ["Longest pause", longest ? duration(longest.pause) : "–", longest ? `${versionName(longest.policy, longest.version)}, ${span}` : `none ${span}`, ""],
    ["Fastest staging", fastest ? rate(fastest[1].rate) : "–", fastest ? `${fastest[0]} · ${fastest[1].version}` : "nothing staged yet", ""],
  ];
  const key = JSON.stringify(tiles.map(([name, value, note]) => [name, value, Array.isArray(note) ? last.id : note]));
  show(byId("summary"), key, () => tiles.map(([name, value, note, tone]) =>
    el("div", { class: `tile ${tone}` }, el("dt", {}, name), el("dd", {}, value),
      el("dd", { class: "note" }, ...[note].flat()))));
}

// -- policies ----------------------------------------------------------------

export function drawPolicies(pool) {
  const names = pool.policyNames();
  orEmpty(byId("policies"), byId("policies-empty"), !names.length, () => [
    el("p", {}, "No policy yet: the first push makes one."),
    el("pre", { tabindex: 0 }, `weft push --coordinator ${address(pool)} --policy math ADAPTER_DIR`),
  ]);
  const behind = pool.behind();
  const all = names.map((name) => ({ policy: pool.policies.get(name), behind: behind.get(name) ?? [], notTold: pool.notTold(name) }));
  all.sort((a, b) => isWrong(b) - isWrong(a)); // the others stay in order, the base first
  const rows = some("policies", all, () => drawPolicies(pool));
  show(byId("policy-rows"), JSON.stringify([rows, pool.base?.served_version]), () =>
    rows.map((row) => policyRow(pool, row)));
}

// A replica that is ready is about to switch, as in every push.
const isWrong = ({ policy, behind }) => behind.some((one) => !one.isReady) || notes(policy).length > 0 || Boolean(policy.over_another_base);

/** What is wrong with a policy, in a word: the sentences are above. */
const notes = ({ policy: name, lost, publish_again_version: again, conflicts = [] }) => [
  ...(lost ? ["lost"] : again ? [`wanted again: ${versionName(name, again)}`] : []),
  ...conflicts.map(({ version }) => `unlike bytes: ${versionName(name, version)}`),
];

function policyRow(pool, { policy, behind, notTold }) {
  const name = policy.policy;
  const served = Number(policy.served_version ?? 0);
  const isBase = name === "base";
  const pinned = new Set((policy.pinned ?? []).map(Number));
  const versions = [...new Set([...(policy.versions ?? []).map(Number), ...pinned])].sort((a, b) => b - a);
  const none = (text) => el("span", { class: "muted" }, text);
  return el("tr", { "data-policy": name },
    el("th", { scope: "row" }, name),
    el("td", { "data-label": "Serves" }, served || (isBase && pool.facts.base_fingerprint) ? chip(versionName(name, served), colour(served)) : none("nothing yet"),
      ...notes(policy).map((note) => el("small", { class: "bad" }, note))),
    el("td", { "data-label": "Trained on" }, ...trainedOn(pool, policy, isBase, served)),
    el("td", { "data-label": "Replicas behind" }, ...behind.slice(0, NAMED).map((one) => el("span", { class: one.isReady ? "block" : "bad block" }, `${one.name}: ${stale(one)}`)),
      behind.length > NAMED ? el("small", { class: "bad" }, `and ${several(behind.length - NAMED, "replica")} more`) : null,
      notTold ? el("small", { class: "bad" }, `not told of ${several(notTold, "replica")}`) : null,
      behind.length || notTold ? null : none("none")),
    el("td", { "data-label": "Keeps" }, el("ul", { class: "versions" }, ...versions.map((version) =>
      el("li", { class: pinned.has(version) ? "pinned" : "", title: pinned.has(version) ? "pinned: never retired" : undefined },
        String(version), pinned.has(version) ? " pinned" : ""))),
      versions.length ? null : none(isBase ? "what replicas were started with" : "nothing"),
      policy.num_retained ? el("small", {}, `the newest ${policy.num_retained}${policy.has_own_retention ? "" : ", by default"}`) : null,
      ...rollbacks(policy)),
    el("td", { "data-label": "Owner" }, policy.lease ? policy.lease.trainer_id : none("nobody")));
}

/** The versions that the base can go back to: by copies, and by undo in place. */
function rollbacks({ rollback_versions: ways = [] }) {
  const undo = ways.filter((way) => way.num_undo), copies = ways.filter((way) => !way.num_undo);
  const line = (text, some) => el("small", { class: "rollback" }, `${text}: ${some.slice(0, NAMED).map((way) => way.version).join(", ")}`,
    some.length > NAMED ? ` and ${count(some.length - NAMED)} more` : "");
  return [copies.length ? line("rollback to a copy", copies) : null, undo.length ? line("undo in place", undo) : null];
}

/** What a replica serves of a policy, and how far that is behind. */
function stale({ policy, version = 0, pool_version: wanted, num_behind: behind, num_behind_is_minimum: least, isMixed }) {
  if (isMixed && policy === "base") return "mixed weights";
  if (!Number(version) && policy !== "base") return `no ${policy}`;
  const name = versionName(policy, Number(version));
  return `${name}, ${behind ? `${least ? "at least " : ""}${count(Number(behind))} behind` : `not ${versionName(policy, wanted ?? 0)}`}`;
}

function trainedOn(pool, policy, isBase, served) {
  if (isBase || !served) return [el("span", { class: "muted" }, "–")];
  const on = pool.trainedOn(policy);
  if (on === undefined) return [el("span", { class: "muted" }, "not told")];
  const base = Number(pool.base?.served_version ?? 0);
  const over = policy.over_another_base
    ? el("small", { class: "bad" }, `served over ${versionName("base", base)}`) : null;
  return [chip(versionName("base", on), colour(on)), over];
}

// -- replicas ----------------------------------------------------------------

const order = ["quarantined", "lost", "suspect", "pending_weights", "draining", "out_of_service", "asleep", "ready"];

export function drawReplicas(pool, now, filter) {
  const all = [...pool.replicas.values()].filter((one) => one.replica_id.includes(filter));
  orEmpty(byId("replicas"), byId("replicas-empty"), !pool.replicas.size, () => noReplica(pool));
  const place = (one) => order.indexOf(pool.stateOf(one.replica_id));
  all.sort((a, b) => place(a) - place(b) || byName(a.replica_id, b.replica_id));
  const rows = some("replicas", all, () => drawReplicas(pool, now, filter))
    .map((replica) => ({ replica, mark: lastMark(pool, replica) }));
  show(byId("replica-rows"), JSON.stringify(rows), () => rows.map((row) => replicaRow(pool, row, now)));
}

function lastMark(pool, replica) {
  const marks = pool.marks.get(replica.replica_id) ?? [];
  const state = pool.stateOf(replica.replica_id);
  let since = null;
  for (let i = marks.length - 1; i >= 0 && marks[i].state === state; i -= 1) since = marks[i].time;
  return since;
}

function replicaRow(pool, { replica, mark }, now) {
  const state = pool.stateOf(replica.replica_id);
  const { differences = [], num_more_differences: more = 0 } = replica;
  const others = differences.length - NAMED + more;
  const serves = differences.length
    ? [...differences.slice(0, NAMED).map((one) => el("span", { class: "bad block" }, stale({ ...one, isMixed: isMixed(replica) }))),
      others > 0 ? el("small", { class: "bad" }, `and ${count(others)} more`) : null]
    : [el("span", {}, "as the pool")];
  return el("tr", { "data-replica": replica.replica_id, class: state },
    el("th", { scope: "row" }, replica.replica_id),
    el("td", { "data-label": "State" }, el("span", { class: `state ${state}` }, stateWord(state)),
      replica.state_reason ? el("small", {}, replica.state_reason) : null),
    el("td", { "data-label": "Serves" }, state === "lost" ? el("small", {}, "heard last:") : null, ...serves),
    el("td", { "data-label": "OpenAI API" }, replica.http_url ? el("code", {}, replica.http_url) : el("span", { class: "muted" }, "none")),
    el("td", { "data-label": "Since" }, mark ? moment(mark, now) : el("span", { class: "muted" }, "before the history")));
}
