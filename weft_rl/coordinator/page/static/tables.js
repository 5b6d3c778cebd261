// Policies and replicas, as tables; and the figures over all.

import { address, noReplica, stateWord } from "./braid.js";
import { byId, chip, el, moment, orEmpty, show } from "./dom.js";
import { byName, colour, count, duration, rate, several, versionName } from "./format.js";

const SOME = 50;
const HOUR = 3600;
let showsAll = false;
byId("more-replicas").addEventListener("click", () => {
  showsAll = true;
  byId("more-replicas").hidden = true;
});

// -- figures -----------------------------------------------------------------

export function drawSummary(pool, now) {
  const counts = new Map((pool.facts.pool.replica_counts ?? []).map((entry) =>
    [entry.state, Number(entry.num_replicas)]));
  const total = pool.facts.num_replicas;
  const ready = counts.get("REPLICA_STATE_READY") ?? 0;
  const adapters = pool.policyNames().filter((name) => name !== "base");
  const recent = pool.transfers.filter((one) => one.purpose === "push" && one.end_time > now - HOUR);
  const failed = recent.filter((one) => one.failure).length;
  const last = [...pool.transfers].reverse().find((one) => one.purpose === "push" && !one.failure);
  const pauses = recent.filter((one) => one.pause);
  const longest = pauses.reduce((most, one) => (one.pause > (most?.pause ?? 0) ? one : most), null);
  const fastest = Object.entries(pool.facts.rates).sort((a, b) => b[1].bytes_per_second - a[1].bytes_per_second)[0];
  const base = Number(pool.base?.served_version ?? 0);
  const strangers = adapters.map((name) => pool.policies.get(name)).filter((policy) => policy.over_another_base);
  const tiles = [
    ["Replicas ready", `${count(ready)} of ${count(total)}`, ready < total ? `${several(total - ready, "replica")} not ready` : total ? "all of them" : "none yet",
      total && ready < total ? "warn" : ""],
    ["Served", total ? versionName("base", base) : "nothing", strangers.length ? overAnotherBase(pool, strangers)
      : adapters.length ? several(adapters.length, "adapter") : "no adapter yet", strangers.length ? "warn" : ""],
    ["Pushes, last hour", count(recent.length - failed), failed ? `${count(failed)} failed` : "none failed", failed ? "warn" : ""],
    ["Last push", last ? duration(last.total) : "–", last ? [versionName(last.policy, last.version), " · ", moment(last.end_time, now)] : "nothing pushed yet", ""],
    ["Longest pause", longest ? duration(longest.pause) : "–", longest ? `${versionName(longest.policy, longest.version)}, last hour` : "none in the last hour", ""],
    ["Fastest staging", fastest ? rate(fastest[1].bytes_per_second) : "–", fastest ? `${fastest[0]} · ${fastest[1].version}` : "nothing staged yet", ""],
  ];
  const key = JSON.stringify(tiles.map(([name, value, note]) => [name, value, Array.isArray(note) ? last.id : note]));
  show(byId("summary"), key, () => tiles.map(([name, value, note, tone]) =>
    el("div", { class: `tile ${tone}` }, el("dt", {}, name), el("dd", {}, value),
      el("dd", { class: "note" }, ...[note].flat()))));
}

/** Adapters answer worse over another base than they were trained on; said where it is seen first. */
function overAnotherBase(pool, [one, ...more]) {
  const rest = more.length ? `, and ${several(more.length, "adapter")} more` : "";
  return `${versionName(one.policy, one.served_version)} was trained on ${versionName("base", pool.trainedOn(one))}${rest}`;
}

// -- policies ----------------------------------------------------------------

export function drawPolicies(pool) {
  const names = pool.policyNames();
  orEmpty(byId("policies"), byId("policies-empty"), !names.length, () => [
    el("p", {}, "No policy yet: the first push makes one."),
    el("pre", { tabindex: 0 }, `weft push --coordinator ${address(pool)} --policy math ADAPTER_DIR`),
  ]);
  const policies = names.map((name) => pool.policies.get(name));
  show(byId("policy-rows"), JSON.stringify([policies, pool.base?.served_version]), () =>
    policies.map((policy) => policyRow(pool, policy)));
}

function policyRow(pool, policy) {
  const name = policy.policy;
  const served = Number(policy.served_version ?? 0);
  const isBase = name === "base";
  const pinned = new Set((policy.pinned_versions ?? []).map(Number));
  const versions = [...new Set([...(policy.versions ?? []).map(Number), ...pinned])].sort((a, b) => b - a);
  const notes = [];
  if (policy.lost) notes.push(`lost: no replica holds it, and nobody owns it. Push it again, or ${isBase ? "weft rollback base --to 0" : `weft forget ${name}`}`);
  else if (policy.publish_again_version) notes.push(`its owner is asked to publish ${versionName(name, policy.publish_again_version)} again`);
  for (const conflict of policy.conflicts ?? []) notes.push(`replicas hold unlike bytes under ${versionName(name, conflict.version)}`);
  return el("tr", { "data-policy": name },
    el("th", { scope: "row" }, name),
    el("td", { "data-label": "Serves" }, served || isBase ? chip(versionName(name, served), colour(served)) : "nothing yet",
      ...notes.map((note) => el("small", { class: "bad" }, note))),
    el("td", { "data-label": "Keeps" }, el("ul", { class: "versions" }, ...versions.map((version) =>
      el("li", { class: pinned.has(version) ? "pinned" : "", title: pinned.has(version) ? "pinned: never retired" : undefined },
        String(version), pinned.has(version) ? " pinned" : ""))),
      versions.length ? null : el("span", { class: "muted" }, isBase ? "what replicas were started with" : "nothing"),
      policy.num_retained ? el("small", {}, `the newest ${policy.num_retained}${policy.has_own_retention ? "" : ", by default"}`) : null),
    el("td", { "data-label": "Owner" }, policy.lease ? policy.lease.trainer_id : el("span", { class: "muted" }, "nobody")),
    el("td", { "data-label": "Trained on" }, ...trainedOn(pool, policy, isBase, served)));
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

const order = ["quarantined", "lost", "suspect", "pending_weights", "draining", "cordoned", "asleep", "ready"];

export function drawReplicas(pool, now, filter) {
  const all = [...pool.replicas.values()].filter((one) => one.replica_id.includes(filter));
  orEmpty(byId("replicas"), byId("replicas-empty"), !pool.replicas.size, () => noReplica(pool));
  const place = (one) => order.indexOf(pool.stateOf(one.replica_id));
  all.sort((a, b) => place(a) - place(b) || byName(a.replica_id, b.replica_id));
  const some = showsAll ? all : all.slice(0, SOME);
  const more = byId("more-replicas");
  more.hidden = some.length === all.length;
  more.textContent = `Show all ${count(all.length)}`;
  const rows = some.map((replica) => ({ replica, differs: pool.differences(replica), mark: lastMark(pool, replica) }));
  show(byId("replica-rows"), JSON.stringify(rows), () => rows.map((row) => replicaRow(row, now)));
}

function lastMark(pool, replica) {
  const marks = pool.marks.get(replica.replica_id) ?? [];
  const state = pool.stateOf(replica.replica_id);
  let since = null;
  for (let i = marks.length - 1; i >= 0 && marks[i].state === state; i -= 1) since = marks[i].time;
  return since;
}

function replicaRow({ replica, differs, mark }, now) {
  const state = replica.state.slice("REPLICA_STATE_".length).toLowerCase();
  const serves = differs.length
    ? differs.slice(0, 4).map(({ policy, version, wanted }) =>
      el("small", { class: "bad" }, `${version || policy === "base" ? versionName(policy, version) : `no ${policy}`}, not ${versionName(policy, wanted)}`))
    : [el("span", {}, "as the pool")];
  return el("tr", { "data-replica": replica.replica_id },
    el("th", { scope: "row" }, replica.replica_id),
    el("td", { "data-label": "State" }, el("span", { class: `state ${state}` }, stateWord(state)),
      replica.state_reason ? el("small", {}, replica.state_reason) : null),
    el("td", { "data-label": "Serves" }, ...serves),
    el("td", { "data-label": "OpenAI API" }, replica.http_url ? el("code", {}, replica.http_url) : el("span", { class: "muted" }, "none")),
    el("td", { "data-label": "Since" }, mark ? moment(mark, now) : el("span", { class: "muted" }, "before the history")));
}
