// What the braid draws, before anything is drawn: pure functions of the pool and a time.

/** Commits of a policy in a time, oldest first: each is a seam through what switched. */
export function seams(pool, policy, from, to) {
  return pool.transfers.filter((transfer) => isSeam(transfer, policy) &&
    transfer.commit_time >= from && transfer.commit_time <= to);
}

const isSeam = (transfer, policy) =>
  transfer.policy === policy && transfer.commit_time > 0 && transfer.served.size > 0;

/**
 * What a replica has served of a policy: segments {from, to, version, state, reason}, without
 * gaps from when it was first known. `version` is null where it served none, or nobody knows:
 * it is what it switched to, or the pool's when it was ready, until it is lost or gone.
 */
export function strand(pool, name, policy, start, to) {
  const from = Math.max(start, pool.began);
  const points = [...pool.transfers, ...pool.repairs]
    .filter((one) => one.policy === policy && one.commit_time > 0 && one.served.has(name))
    .map((transfer) => ({ time: transfer.replica ? transfer.end_time : transfer.commit_time, transfer }));
  for (const mark of pool.marks.get(name) ?? []) points.push({ time: mark.time, mark });
  points.sort((a, b) => a.time - b.time);
  const segments = [];
  let now = { version: null, state: "", reason: "" };
  let since = null;
  const first = points[0];
  if (first?.transfer && !first.transfer.replica) {
    const before = first.transfer.replaced_version;
    now = { version: before || policy === "base" ? before : null, state: "ready", reason: "" };
    since = from;
  }
  for (const { time, mark, transfer } of points) {
    if (time > to) break;
    const next = transfer ? { ...now, version: transfer.version } : marked(pool, now, mark, policy);
    if (since !== null && same(now, next)) continue;
    add(segments, since, time, now, from);
    now = next;
    since = time;
  }
  const told = pool.servesNow(name, policy);
  if (now.version === null && !["", "ready"].includes(now.state)) now.version = told ?? null;
  add(segments, since, to, now, from);
  return segments;
}

function marked(pool, now, { time, state, reason }, policy) {
  const isBack = state !== "lost" && ["lost", "gone"].includes(now.state);
  const version = state === "ready" ? pool.servedAt(policy, time) : isBack || state === "gone" ? null : now.version;
  return { version, state, reason };
}

const same = (a, b) => a.version === b.version && a.state === b.state && a.reason === b.reason;

function add(segments, since, until, what, from) {
  if (since === null || until <= from || until <= since) return;
  segments.push({ ...what, from: Math.max(since, from), to: until });
}

/**
 * Pauses of generation at a replica, whichever policy is shown: {from, to, transfer}. Where a
 * large pool's are not known one by one, the longest is drawn for each that switched.
 */
export function pauses(pool, name, from, to) {
  const found = [];
  for (const transfer of pool.transfers) {
    if (!transfer.pause || !transfer.commit_time || !transfer.served.has(name)) continue;
    const [resumed, seconds] = Object.hasOwn(transfer.pauses, name) ? transfer.pauses[name] : [transfer.pause, transfer.pause];
    const end = transfer.commit_time + resumed;
    if (end >= from && end - seconds <= to) {
      found.push({ from: Math.max(from, end - seconds), to: Math.min(to, end), seconds, transfer });
    }
  }
  return found;
}

/** Versions that segments show, ascending. */
export function versionsOf(strands) {
  const found = new Set();
  for (const segments of strands) {
    for (const { version } of segments) if (version !== null) found.add(version);
  }
  return [...found].sort((a, b) => a - b);
}

/** Moments for an axis: round ones, about every `pixels`. */
export function ticks(from, to, width, pixels = 110) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800];
  const wanted = ((to - from) * pixels) / Math.max(width, 1);
  const step = steps.find((one) => one >= wanted) ?? 3600;
  const offset = new Date(to * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let time = Math.ceil((from - offset) / step) * step + offset; time <= to; time += step) {
    found.push(time);
  }
  return found;
}
