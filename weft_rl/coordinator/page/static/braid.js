// The braid: time across, a row for each replica, colour is the version, a commit is a seam.

import { byId, chip, el, moment, orEmpty, show, svg, textWidth } from "./dom.js";
import { COLOURS, clock, colour, count, duration, full, several, versionName } from "./format.js";
import { SHOWN_SECONDS } from "./pool.js";
import { pauses, seams, strand, ticks, versionsOf } from "./tracks.js";

const MAX_ROWS = 100;
const AXIS = 26;
const TOP = 30;
const MIN_PAUSE = 4; // pixels: a pause of milliseconds is to be seen

const BOLD = "600";

/** A replica's state in words, as `weft status` says it. */
export const stateWord = (state) => state.replaceAll("_", " ");

export class Braid {
  constructor() {
    this.seconds = 300;
    this.policy = "base";
    this.filter = "";
    this.chosen = null; // the id of a commit
    this.root = byId("braid");
    this.root.addEventListener("keydown", (event) => this.onKey(event));
    this.root.addEventListener("click", (event) => this.onClick(event));
    this.pool = null;
    this.drawing = null;
    this.cost = 0;
    this.drawnAt = 0;
    this.key = "";
  }

  /** Draw, if there is something new to see, and never for more than a twentieth of the time. */
  update(pool, now, force = false) {
    this.pool = pool;
    const key = [pool.version, this.seconds, this.policy, this.filter, this.chosen, this.root.clientWidth].join();
    const due = Math.max(this.seconds / 600, (this.cost / 1000) * 20);
    if (!force && key === this.key && now - this.drawnAt < due) return;
    this.key = key;
    this.drawnAt = now;
    const began = performance.now();
    this.draw(now);
    this.cost = performance.now() - began;
  }

  draw(now) {
    const { pool } = this;
    const [from, to] = [now - this.seconds, now];
    const all = pool.rowNames(from).filter((name) => name.includes(this.filter));
    const names = all.slice(0, MAX_ROWS);
    const isEmpty = !all.length && !this.filter;
    orEmpty(this.root, byId("braid-empty"), isEmpty, () => noReplica(pool));
    byId("braid-help").hidden = isEmpty;
    byId("commits").hidden = isEmpty;
    if (isEmpty) {
      byId("legend").replaceChildren();
      return;
    }
    const commits = seams(pool, this.policy, from, to);
    const rows = names.map((name) => ({
      name,
      segments: strand(pool, name, this.policy, from, to),
      pauses: pauses(pool, name, from, to),
    }));
    this.drawing = { rows, commits, from, to };
    this.root.replaceChildren(this.picture(now));
    if (all.length > names.length) {
      this.root.append(el("p", { class: "hint" },
        `${count(names.length)} of ${several(all.length, "replica")}: give a part of a name above to see others.`));
    }
    this.drawLegend(rows);
    this.drawTable(pool, now);
    this.drawChosen(now);
  }

  /** The geometry of a width: where names would take too much of it they are above the rows. */
  layout(width, rows) {
    const longest = Math.max(40, ...rows.map(({ name }) => this.width(this.label(name), BOLD)));
    const isNarrow = width < 560 || longest > width / 3;
    const label = isNarrow ? 0 : longest + 16;
    const dense = rows.length > 24;
    const strandHeight = dense ? 8 : 16;
    const height = isNarrow && !dense ? strandHeight + 24 : strandHeight + (dense ? 4 : 14);
    return { width, isNarrow, label, dense, strandHeight, height, left: label, right: width - 1 };
  }

  picture(now) {
    const { rows, commits, from, to } = this.drawing;
    const at = this.layout(Math.max(280, this.root.clientWidth), rows);
    const x = (time) => at.left + ((time - from) / (to - from)) * (at.right - at.left);
    const total = TOP + rows.length * at.height + AXIS;
    const picture = svg("svg", { width: at.width, height: total, viewBox: `0 0 ${at.width} ${total}`,
      role: "img", "aria-label": this.summary(now) });
    for (const time of ticks(from, to, at.right - at.left)) {
      picture.append(svg("line", { class: "grid", x1: x(time), x2: x(time), y1: TOP, y2: total - AXIS }));
      const anchor = x(time) > at.width - 30 ? "end" : x(time) < at.left + 30 ? "start" : "middle";
      picture.append(svg("text", { class: "tick", x: x(time), y: total - 8, "text-anchor": anchor }, clock(time)));
    }
    if (this.pool.began > from) {
      const began = x(this.pool.began);
      picture.append(svg("rect", { class: "unknown", x: at.left, width: Math.max(0, began - at.left), y: TOP,
        height: total - TOP - AXIS }));
    }
    rows.forEach((row, i) => picture.append(this.row(row, i, at, x)));
    this.seamLabels(picture, commits, at, x);
    for (const commit of commits) picture.append(this.seam(commit, rows, at, x, total));
    if (!at.dense || !at.isNarrow) rows.forEach(({ name }, i) => picture.append(this.name(name, i, at)));
    return picture;
  }

  /** Where the strand of a row begins, from above. */
  static top(i, at) {
    return TOP + i * at.height + (at.height - at.strandHeight) / 2 + (at.isNarrow && !at.dense ? 9 : 0);
  }

  width(text, weight) {
    return textWidth(text, this.root, "12.5px", weight);
  }

  /** A replica's name, and what it is where it is not ready. */
  label(name) {
    const state = this.pool.stateOf(name);
    return state === "ready" ? name : `${name} (${stateWord(state)})`;
  }

  name(name, i, at) {
    const y = Braid.top(i, at);
    const state = this.pool.stateOf(name);
    const baseline = at.isNarrow ? y - 6 : y + at.strandHeight - (at.dense ? 0 : 4);
    return svg("text", { class: `name ${state}${at.dense ? " small" : ""}`, x: 0, y: baseline },
      svg("title", {}, `${name}: ${stateWord(state)}`), this.fitting(this.label(name), at.isNarrow ? at.width : at.label));
  }

  /** A name, or its beginning and its end where it does not fit: it is bold where something is wrong. */
  fitting(text, room) {
    let length = text.length;
    let shown = text;
    while (this.width(shown, BOLD) > room && length > 8) {
      length -= 1;
      const end = Math.floor(length / 2);
      shown = `${text.slice(0, length - end)}…${text.slice(text.length - end)}`;
    }
    return shown;
  }

  row({ name, segments, pauses: stops }, i, at, x) {
    const y = Braid.top(i, at);
    const group = svg("g", { class: "row", "data-replica": name });
    group.append(svg("line", { class: "thread", x1: at.left, x2: at.right, y1: y + at.strandHeight / 2,
      y2: y + at.strandHeight / 2 }));
    let drawnTo = -1;
    for (const segment of segments) {
      const [left, right] = [x(segment.from), x(segment.to)];
      if (segment.version === null || segment.state === "lost" || right - drawnTo < 0.5) continue;
      drawnTo = right;
      const width = Math.max(1, right - left);
      const label = versionName(this.policy, segment.version);
      const rect = svg("rect", { class: `strand ${colour(segment.version)} ${segment.state}`, x: left, y, width,
        height: at.strandHeight, rx: Math.min(3, width / 2), "data-version": segment.version,
        "data-from": segment.from, "data-to": segment.to });
      rect.append(svg("title", {}, `${name}: ${label}, ${clock(segment.from)} to ${clock(segment.to)}` +
        (segment.state === "ready" ? "" : `, ${stateWord(segment.state)}: ${segment.reason}`)));
      group.append(rect);
      const short = segment.version < 0 ? "other" : `@${segment.version}`;
      const begins = free(left, right, stops, x);
      if (!at.dense && right - begins > this.width(short, BOLD) + 10) {
        group.append(svg("text", { class: `version ${colour(segment.version)}`, x: begins + 7,
          y: y + at.strandHeight - 4, "aria-hidden": "true" }, short));
      }
    }
    for (const stop of stops) {
      const width = Math.max(MIN_PAUSE, x(stop.to) - x(stop.from));
      group.append(svg("rect", { class: "pause", x: x(stop.from), y: y - 3, width, rx: 1.5,
        height: at.strandHeight + 6, "data-transfer": stop.transfer.id, "data-seconds": stop.seconds },
      svg("title", {}, `${name}: generation paused for ${duration(stop.seconds)} at ${clock(stop.from)}, ` +
        `for ${versionName(stop.transfer.policy, stop.transfer.version)}`)));
    }
    return group;
  }

  /** A line through the rows that switched, with something to click that is wide enough. */
  seam(commit, rows, at, x, total) {
    const place = x(commit.commit_time);
    const group = svg("g", { class: commit.id === this.chosen ? "seam chosen" : "seam", "data-transfer": commit.id,
      "data-version": commit.version, "data-time": commit.commit_time });
    let start = null;
    rows.forEach(({ name }, i) => {
      const isIn = commit.served.has(name);
      if (isIn && start === null) start = i;
      if (start !== null && (!isIn || i === rows.length - 1)) {
        const end = isIn ? i + 1 : i;
        group.append(svg("line", { x1: place, x2: place, y1: TOP + start * at.height, y2: TOP + end * at.height,
          "data-rows": end - start }));
        start = null;
      }
    });
    group.append(svg("rect", { class: "hit", x: place - 7, y: 0, width: 14, height: total - AXIS },
      svg("title", {}, told(commit))));
    return group;
  }

  /** Names over the newest seams first, where there is room. */
  seamLabels(picture, commits, at, x) {
    let free = at.width;
    for (const commit of [...commits].reverse()) {
      const text = versionName(commit.policy, commit.version);
      const half = this.width(text) / 2;
      const place = x(commit.commit_time);
      const isLast = place + half > at.width;
      const right = isLast ? at.width : Math.max(place, half) + half;
      if (right > free) continue;
      free = right - 2 * half - 8;
      const style = commit.id === this.chosen ? "seam-label chosen" : "seam-label";
      picture.append(svg("text", { class: style, x: isLast ? at.width - 1 : right - half, y: 18,
        "text-anchor": isLast ? "end" : "middle" }, text));
    }
  }

  summary(now) {
    const { rows, commits } = this.drawing;
    const last = commits[commits.length - 1];
    const text = `${several(rows.length, "replica")}, the last ${duration(this.seconds)}, policy ${this.policy}: ` +
      several(commits.length, "commit");
    return last ? `${text}; the last is ${versionName(last.policy, last.version)}, ${full(last.commit_time)}` : text;
  }

  drawLegend(rows) {
    const versions = versionsOf(rows.map((row) => row.segments)).slice(-COLOURS);
    const states = new Set(rows.flatMap((row) => row.segments.map((segment) => segment.state)));
    const others = [...states].some((state) => state && state !== "ready");
    show(byId("legend"), JSON.stringify([this.policy, versions, others]), () => [
      ...versions.map((version) => el("li", {}, chip(versionName(this.policy, version), colour(version)))),
      el("li", {}, chip("generation paused", "pause")),
      ...(others ? [el("li", {}, chip("not ready", "unready"))] : []),
    ]);
  }

  drawTable(pool, now) {
    const rows = seams(pool, this.policy, now - SHOWN_SECONDS, now).slice(-100).reverse();
    show(byId("commit-rows"), JSON.stringify([this.policy, rows.map((row) => row.id)]), () =>
      rows.length ? rows.map((row) => el("tr", { "data-transfer": row.id },
        el("th", { scope: "row" }, chip(versionName(row.policy, row.version), colour(row.version))),
        el("td", {}, moment(row.commit_time, now)),
        el("td", {}, row.replaced_version || row.policy === "base" ? versionName(row.policy, row.replaced_version) : "nothing"),
        el("td", {}, `${count(row.served.size)} of ${several(row.targeted.size, "replica")}`),
        el("td", {}, row.pause ? duration(row.pause) : "none"),
      )) : [el("tr", {}, el("td", { colspan: 5 }, "No commit in the last hour."))]);
  }

  drawChosen(now) {
    const box = byId("chosen");
    const commit = this.pool.transfers.find(({ id }) => id === this.chosen);
    show(box, commit ? commit.id : "", () => commit ? [
      el("p", {}, el("b", {}, versionName(commit.policy, commit.version)), ` ${told(commit).slice(versionName(commit.policy, commit.version).length)}`, " (", moment(commit.commit_time, now), ")"),
      ...commit.refusals.map((refusal) => el("p", { class: "bad" },
        `${refusal.replica_id} did not switch: ${refusal.message ?? ""} (${refusal.reason ?? ""})`)),
    ] : []);
  }

  choose(commit) {
    this.chosen = commit ? commit.id : null;
    this.update(this.pool, this.drawnAt, true);
  }

  onClick(event) {
    const hit = event.target.closest(".seam");
    const commit = hit && this.drawing.commits.find(({ id }) => id === hit.dataset.transfer);
    if (commit) this.choose(commit.id === this.chosen ? null : commit);
  }

  onKey(event) {
    const { commits } = this.drawing ?? { commits: [] };
    const place = commits.findIndex(({ id }) => id === this.chosen);
    const wanted = {
      ArrowLeft: place < 0 ? commits.length - 1 : Math.max(0, place - 1),
      ArrowRight: place < 0 ? commits.length - 1 : Math.min(commits.length - 1, place + 1),
      Home: 0,
      End: commits.length - 1,
    }[event.key];
    if (event.key === "Escape") this.choose(null);
    else if (wanted !== undefined && commits.length) {
      event.preventDefault();
      this.choose(commits[wanted]);
    }
  }
}

/** Where a segment's label may begin: after a pause at its start. */
function free(left, right, stops, x) {
  const covering = stops.map((stop) => [x(stop.from), Math.max(x(stop.from) + MIN_PAUSE, x(stop.to))])
    .filter(([from, to]) => from < left + 40 && to > left && to < right);
  return Math.max(left, ...covering.map(([, to]) => to - 2));
}

/** A commit in a sentence. */
function told(commit) {
  const name = versionName(commit.policy, commit.version);
  const how = commit.purpose === "rollback" ? "rolled back to" : "committed";
  const who = `${count(commit.served.size)} of ${several(commit.targeted.size, "replica")} switched`;
  const pause = commit.pause ? `, longest pause ${duration(commit.pause)}` : "";
  return `${name} ${how} at ${clock(commit.commit_time)}: ${who}${pause}`;
}

/** What to do where there is nothing to see. */
export function noReplica(pool) {
  return [
    el("p", {}, "No replica has registered yet. Start one:"),
    el("pre", { tabindex: 0 }, `weft rollout --coordinator ${address(pool)} -- MODEL --enable-lora`),
  ];
}

/** Where the coordinator is dialled: by the name that this page was asked by, where it has none. */
export function address(pool) {
  const [, host, port] = (pool.facts.listen ?? "").match(/^(.*):(\d+)$/) ?? [null, "", "50051"];
  const isAnywhere = ["0.0.0.0", "[::]", ""].includes(host);
  return `${isAnywhere ? location.hostname : host}:${port}`;
}
