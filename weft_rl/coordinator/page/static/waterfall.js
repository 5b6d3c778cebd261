// The last pushes: how long each formed, staged, committed and paused, and how fast it staged.

import { address } from "./braid.js";
import { byId, chip, el, moment, orEmpty, show, svg } from "./dom.js";
import { bytes, colour, count, duration, rate, several, versionName } from "./format.js";

const FEW = 10;
const MANY = 200;
const SCALE = 1000; // units across the bar of the longest

export class Waterfall {
  constructor() {
    this.of = "";
    this.limit = FEW;
    byId("more-pushes").addEventListener("click", () => {
      this.limit = MANY;
      this.update(this.pool, this.now);
    });
  }

  update(pool, now) {
    this.pool = pool;
    this.now = now;
    const wanted = (transfer) => !this.of || transfer.policy === this.of;
    const underWay = pool.underWay.filter((one) => one.purpose === "push" && wanted(one));
    const ended = pool.transfers.filter(wanted);
    const shown = [...underWay.reverse(), ...ended.slice(-this.limit).reverse()];
    byId("pushes-legend").hidden = !shown.length;
    orEmpty(byId("pushes"), byId("pushes-empty"), !shown.length, () => noPush(pool));
    byId("more-pushes").hidden = ended.length <= this.limit || this.limit === MANY;
    const longest = Math.max(1e-6, ...shown.map((transfer) => transfer.total));
    const key = JSON.stringify([longest, shown.map((one) => [one.id, one.total, one.verified, one.hops]),
      pool.rates]);
    show(byId("push-rows"), key, () => shown.map((transfer) => this.row(transfer, longest, now)));
  }

  row(transfer, longest, now) {
    const isUnderWay = !transfer.end_time;
    const name = transfer.version ? versionName(transfer.policy, transfer.version) : transfer.policy;
    const purpose = transfer.purpose === "push" ? transfer.trainer : transfer.purpose;
    const when = isUnderWay ? el("span", {}, "under way") : moment(transfer.end_time, now);
    return el("tr", { "data-transfer": transfer.id, class: transfer.failure ? "failed" : "" },
      el("th", { scope: "row" },
        chip(name, transfer.failure || isUnderWay ? "none" : colour(transfer.version)),
        el("small", {}, purpose, " · ", when)),
      el("td", { class: "course" }, bar(transfer, longest), ...phases(transfer)),
      el("td", { class: "number" }, duration(transfer.total)),
      el("td", { class: "rate" }, ...this.speed(transfer)));
  }

  speed(transfer) {
    const sent = transfer.delta_of
      ? `delta ${bytes(transfer.bytes)} of ${bytes(transfer.delta_of)}` : bytes(transfer.bytes);
    const links = slowestLink(transfer.hops);
    if (!transfer.rate) return [transfer.bytes ? sent : "", ...links];
    const best = this.pool.rates[transfer.backend];
    const share = best ? Math.min(1, transfer.rate / best.rate) : 1;
    const text = `${Math.round(share * 100)} % of the highest seen over ${transfer.backend}`;
    return [
      el("span", {}, rate(transfer.rate)),
      svg("svg", { class: "meter", viewBox: `0 0 ${SCALE} 1`, preserveAspectRatio: "none", role: "img", "aria-label": text },
        svg("title", {}, `${text}: ${best ? rate(best.rate) : ""}, ${best ? best.version : ""}`),
        svg("rect", { class: "all", width: SCALE, height: 1 }),
        svg("rect", { class: "share", width: share * SCALE, height: 1, "data-share": share })),
      el("small", {}, `${Math.round(share * 100)} % of highest, ${sent}`),
      ...links,
    ];
  }
}

/** The link that everybody waits for, the slowest; all of them as its title. */
function slowestLink(hops) {
  if (!hops.length || !hops[0].rate) return [];
  const inWords = ({ source, target, rate: carried, waiting, isEncrypted }) =>
    `${source} to ${target}: ${rate(carried)}${isEncrypted ? "" : " in plaintext"}${waiting ? `, ${bytes(waiting)} wait` : ""}`;
  return [el("small", { title: hops.map(inWords).join("\n"), "data-link": "slowest" },
    `slowest link ${inWords(hops[0])}`)];
}

/** Widths are in proportion to seconds, the longest push as wide as the bar. */
function bar(transfer, longest) {
  const scale = SCALE / longest;
  const picture = svg("svg", { class: "bar", viewBox: `0 0 ${SCALE} 20`, preserveAspectRatio: "none", role: "img",
    "aria-label": inWords(transfer) });
  let start = 0;
  for (const phase of ["forming", "staging", "committing"]) {
    const seconds = transfer[phase];
    if (seconds > 0) {
      picture.append(svg("rect", { class: phase, x: start * scale, width: seconds * scale, y: 3, height: 14,
        "data-phase": phase, "data-seconds": seconds },
      svg("title", {}, `${phase === "committing" ? "commit" : phase}: ${duration(seconds)}`)));
    }
    start += seconds;
  }
  if (transfer.pause && transfer.committing) {
    const commit = transfer.forming + transfer.staging;
    const resumed = Math.max(0, ...Object.values(transfer.pauses)
      .filter(([, seconds]) => seconds === transfer.pause).map(([end]) => end)) || transfer.pause;
    const end = Math.min(transfer.total, commit + resumed);
    picture.append(svg("rect", { class: "pause", x: Math.max(0, end - transfer.pause) * scale, y: 0, height: 20,
      width: transfer.pause * scale, "data-phase": "pause", "data-seconds": transfer.pause },
    svg("title", {}, `generation paused for ${duration(transfer.pause)}, the longest at any replica`)));
  }
  return picture;
}

const PHASES = [["forming", "forming"], ["staging", "staging"], ["committing", "commit"], ["pause", "pause"]];

/** The seconds of each phase in columns, under the bar, with the colours of the legend. */
function phases(transfer) {
  if (transfer.failure) return [el("small", {}, inWords(transfer))];
  const numbers = PHASES.map(([phase, word]) => el("li", { class: "number" }, transfer[phase] > 0
    ? [el("i", { class: `key ${phase}`, "aria-hidden": "true" }), el("span", { class: "hidden" }, `${word} `), duration(transfer[phase])] : []));
  const note = remarks(transfer).join(", ");
  return [el("ul", { class: "phases" }, ...numbers), note ? el("small", {}, note) : null];
}

/** What is beside its phases: that it waited, how far it is, who did not switch. */
function remarks(transfer) {
  const found = transfer.waiting > 0.05 ? [`waited ${duration(transfer.waiting)}`] : [];
  if (!transfer.end_time) {
    const done = `${count(transfer.verified)} of ${several(transfer.buckets, "bucket")}`;
    return transfer.waits_for ? [`waits for ${transfer.waits_for}`] : [...found, done];
  }
  if (transfer.served.size < transfer.targeted.size) {
    found.push(`${count(transfer.served.size)} of ${several(transfer.targeted.size, "replica")} switched`);
  }
  return found;
}

function inWords(transfer) {
  const { failure } = transfer;
  if (failure) return `${failure.reason}: ${failure.message ?? ""}`;
  const parts = PHASES.filter(([phase]) => transfer[phase] > 0).map(([phase, word]) => `${word} ${duration(transfer[phase])}`);
  return [...parts, ...remarks(transfer)].join(", ");
}

function noPush(pool) {
  return [
    el("p", {}, "Nothing was pushed since the coordinator started. From a trainer:"),
    el("pre", { tabindex: 0 }, `from trainer_side import Publisher\n\nwith Publisher("${address(pool)}", trainer_id="trainer-a") as publisher:\n    publisher.push_adapter(model, policy="math")`),
  ];
}
