// The pool as it is, and its history, put together from the lists of the coordinator.

import { byName, fromDuration, fromTimestamp } from "./format.js";

/** How far back replicas and pushes are shown. */
export const SHOWN_SECONDS = 3600;
/** Transfers that have ended, of which the coordinator lists the last. */
export const MAX_LISTED = 100;
/** Transfers that this page remembers, and events of a kind, as many as the coordinator does. */
export const MAX_TRANSFERS = 1000;
export const MAX_EVENTS = 500;
const FEW = 20; // of the newest entries, in which new ones are looked for

const TONES = { EVENT_OUTCOME_SUCCESS: "good", EVENT_OUTCOME_FAILURE: "bad" };
const STATES = {
  REPLICA_READY: "ready", REPLICA_PENDING_WEIGHTS: "pending_weights", REPLICA_LOST: "lost",
  REPLICA_QUARANTINED: "quarantined", REPLICA_DRAINING: "draining",
  REPLICA_OUT_OF_SERVICE: "out_of_service", REPLICA_ASLEEP: "asleep", REPLICA_SUSPECT: "suspect", REPLICA_LEFT: "gone",
};

/** Whether the weights of a replica may be mixed: they are no version's. */
export const isMixed = (replica) => Boolean(replica.report?.dirty_reason);

export class Pool {
  constructor() {
    this.coordinator = ""; // the start of it that all is of
    this.clear();
  }

  clear() {
    this.facts = null;
    this.replicas = new Map();
    this.vectors = new Map(); // what each replica serves
    this.policies = new Map();
    this.sets = new Map(); // of replicas: most transfers have the same
    this.transfers = []; // pushes and rollbacks that have ended, oldest first
    this.repairs = []; // clones and restores
    this.rates = {}; // the fastest staging, by backend
    this.marks = new Map(); // by replica, oldest first
    this.events = []; // oldest first
    this.underWay = [];
    this.numKept = 0; // events, when they were cut last
    this.startedAt = 0;
    this.began = 0; // since when transfers and replicas are known
    this.version = 0; // grows with each change of the history
  }

  /**
   * Ask for all that may have changed; `ask` returns a page of a list, and `drawn` is called
   * once there is something to draw, before the rest of a long list is asked for.
   */
  async follow(ask, drawn) {
    const facts = await ask("pool");
    const coordinator = `${facts.pool_id}.${facts.coordinator_generation}`;
    if (coordinator !== this.coordinator) this.clear();
    this.coordinator = coordinator;
    const newest = this.events.length ? this.events[this.events.length - 1].revision : 0;
    const events = await unknown(ask, "events", newest > 0, (event) => Number(event.revision) <= newest);
    const known = new Set([...this.transfers, ...this.repairs].map(({ id }) => id));
    const isNew = facts.last_transfer && !known.has(facts.last_transfer.transfer_id);
    const ended = isNew ? await unknown(ask, "transfers", known.size > 0, (one) => known.has(one.transfer_id), isEnded) : [];
    const isFirst = !this.facts;
    this.facts = facts;
    this.addEvents(events);
    this.addTransfers(ended, isFirst);
    this.underWay = (facts.active_transfers ?? []).map((one) => this.transfer(one));
    this.forget();
    const replicas = this.put("replicas", facts);
    const policies = this.put("policies", facts);
    drawn();
    await this.putRest(ask, "replicas", replicas, facts.next_replica_page_token);
    await this.putRest(ask, "policies", policies, facts.next_policy_page_token);
  }

  /** Take in a page of a list; returns the names on it. */
  put(list, page) {
    if (list === "policies") {
      return (page.policies ?? []).map((policy) => {
        // What changes with time alone is left out.
        this.policies.set(policy.policy, { ...policy, lease: policy.lease && { trainer_id: policy.lease.trainer_id } });
        return policy.policy;
      });
    }
    return (page.replicas ?? []).map((replica) => {
      const { replica_id: name, state, state_reason, http_url, model_name, differences, num_more_differences } = replica;
      const report = { dirty_reason: replica.report?.dirty_reason };
      this.replicas.set(name, { replica_id: name, state, state_reason, http_url, model_name, differences, num_more_differences, report });
      this.vectors.set(name, page.version_vectors?.[replica.version_vector_index ?? 0]);
      return name;
    });
  }

  async putRest(ask, list, first, token) {
    const names = new Set(first);
    while (token) {
      const page = await ask(list, { page_token: token });
      for (const name of this.put(list, page)) names.add(name);
      token = page.next_page_token;
    }
    for (const name of [...this[list].keys()]) if (!names.has(name)) this[list].delete(name);
    for (const name of [...this.vectors.keys()]) if (!this.replicas.has(name)) this.vectors.delete(name);
  }

  addEvents(events) {
    for (const told of events) {
      const event = {
        ...told, revision: Number(told.revision), time: fromTimestamp(told.time),
        kind: told.kind.slice("EVENT_KIND_".length), tone: TONES[told.outcome] ?? "plain",
      };
      this.events.push(event);
      const { kind, time, subject: name } = event;
      if (kind === "COORDINATOR_STARTED") {
        this.startedAt = this.began = time;
        this.marks.clear(); // they are told anew
      } else if (STATES[kind]) {
        if (!this.marks.has(name)) this.marks.set(name, []);
        this.marks.get(name).push({ time, state: STATES[kind], reason: event.message ?? "" });
      }
    }
    if (events.length) this.version += 1;
  }

  addTransfers(ended, isFirst) {
    for (const message of ended) {
      const one = this.transfer(message);
      (one.replica ? this.repairs : this.transfers).push(one);
      if (one.rate > (this.rates[one.backend]?.rate ?? 0)) {
        this.rates[one.backend] = { rate: one.rate, version: `${one.policy}@${one.version}` };
      }
    }
    if (isFirst && ended.length >= MAX_LISTED) this.began = this.transfer(ended[0]).end_time;
    if (ended.length) this.version += 1;
  }

  transfer(message) {
    const one = course(message);
    return { ...one, served: this.set(message.serving_replica_ids), targeted: this.set(message.replica_ids) };
  }

  set(names = []) {
    const key = names.join(" ");
    if (!this.sets.has(key)) {
      if (this.sets.size > MAX_TRANSFERS) this.sets.clear();
      this.sets.set(key, new Set(names));
    }
    return this.sets.get(key);
  }

  /** What is older than the history is held nowhere. */
  forget() {
    for (const list of [this.transfers, this.repairs]) {
      const old = list.splice(0, Math.max(0, list.length - MAX_TRANSFERS));
      if (old.length) this.began = Math.max(this.began, old[old.length - 1].end_time);
    }
    if (this.events.length > this.numKept + MAX_EVENTS) {
      this.events = newestOf(this.events);
      this.numKept = this.events.length;
    }
    const from = this.now - SHOWN_SECONDS;
    for (const [name, marks] of this.marks) {
      while (marks.length > 1 && marks[1].time < from) marks.shift();
      if (marks.length === 1 && marks[0].time < from && !this.replicas.has(name)) {
        this.marks.delete(name);
      }
    }
  }

  /** The version of a policy that the pool served at a time; null where it is not known. */
  servedAt(policy, time) {
    const seams = this.transfers.filter((one) => one.policy === policy && one.commit_time && one.served.size);
    const before = seams.filter((one) => one.commit_time <= time);
    const version = before.length ? before[before.length - 1].version
      : seams.length ? seams[0].replaced_version : Number(this.policies.get(policy)?.served_version ?? 0);
    return version || policy === "base" ? version : null;
  }

  /** The version of a policy that a replica serves now; null for none, undefined if nobody knows. */
  servesNow(name, policy) {
    const vector = this.vectors.get(name);
    if (!this.replicas.has(name) || !vector) return undefined;
    if (policy === "base") return Number(vector.base ?? 0);
    const adapter = (vector.adapters ?? []).find((one) => one.policy === policy);
    if (!adapter && vector.num_more_adapters) return undefined;
    return Number(adapter?.alias ?? 0) || null;
  }

  get numReplicas() {
    return (this.facts.replica_counts ?? []).reduce((sum, { num_replicas: some }) => sum + some, 0);
  }

  /** By policy, the replicas in contact that serve another version of it than the pool. */
  behind() {
    const found = new Map();
    for (const name of [...this.replicas.keys()].sort(byName)) {
      if (this.stateOf(name) === "lost") continue;
      for (const one of this.replicas.get(name).differences ?? []) {
        const of = found.get(one.policy) ?? [];
        of.push({ name, isReady: this.stateOf(name) === "ready", isMixed: isMixed(this.replicas.get(name)), ...one });
        found.set(one.policy, of);
      }
    }
    return found;
  }

  /**
   * How many replicas may serve another version of a policy, which is not told: a replica names
   * the first policies that differ, the base first, then by name.
   */
  notTold(policy) {
    return [...this.replicas.values()].filter(({ replica_id: name, differences = [], num_more_differences: more }) => {
      const last = differences[differences.length - 1]?.policy;
      return more && policy !== "base" && this.stateOf(name) !== "lost" && (last === "base" || policy > last);
    }).length;
  }

  /** The coordinator's clock when it answered last. */
  get now() {
    return fromTimestamp(this.facts.time);
  }

  get base() {
    return this.policies.get("base");
  }

  /** The base first, then adapters by name. */
  policyNames() {
    return [...this.policies.keys()].sort((a, b) => (b === "base") - (a === "base") || byName(a, b));
  }

  /** The base that the served version of an adapter was trained on; undefined if it is not told. */
  trainedOn(policy) {
    const on = policy.trained_on_base_version;
    return on === undefined ? undefined : Number(on);
  }

  /** Replicas that are there, or were in the time that is shown. */
  rowNames(from) {
    const names = new Set(this.replicas.keys());
    for (const [name, marks] of this.marks) {
      if (marks[marks.length - 1].time >= from) names.add(name);
    }
    return [...names].sort(byName);
  }

  stateOf(name) {
    const replica = this.replicas.get(name);
    return replica ? replica.state.slice("REPLICA_STATE_".length).toLowerCase() : "gone";
  }
}

const isEnded = ({ state }) => ["TRANSFER_STATE_COMMITTED", "TRANSFER_STATE_ABORTED"].includes(state);

/** The entries of a list that are new, oldest first: it has the newest first. */
async function unknown(ask, list, isKnown, isOld, isWanted = () => true) {
  const found = [];
  let query = isKnown ? { page_size: FEW } : {};
  for (;;) {
    const page = await ask(list, query);
    for (const entry of page[list] ?? []) {
      if (isOld(entry)) return found.reverse();
      if (isWanted(entry)) found.push(entry);
    }
    if (!page.next_page_token) return found.reverse();
    query = { page_token: page.next_page_token };
  }
}

/** As many events as the coordinator keeps: of each topic failures and others, and details. */
function newestOf(events) {
  const counts = {};
  return [...events].reverse().filter(({ topic, tone, detail }) => {
    const kind = detail ? "details" : `${topic} ${tone === "bad"}`;
    counts[kind] = (counts[kind] ?? 0) + 1;
    return counts[kind] <= MAX_EVENTS;
  }).reverse();
}

/** A transfer, with its times in seconds; `total` is what has been so far. */
function course(transfer) {
  const [forming, staging, committing] = ["forming", "staging", "committing"].map((name) =>
    fromDuration(transfer[name]));
  const purpose = transfer.purpose.slice("TRANSFER_PURPOSE_".length).toLowerCase();
  const isCommitted = transfer.committing !== undefined;
  // What forms no group, as a rollback, waits until its commit point: "forming" is all of it.
  const isGrouped = transfer.staging !== undefined || !isCommitted;
  const before = isGrouped ? forming : Math.max(0, forming - committing);
  const begin = fromTimestamp(transfer.begin_time);
  const total = before + staging + committing;
  const isDelta = Boolean(transfer.delta_from);
  const bytes = Number((isDelta ? transfer.sent_bytes : transfer.total_bytes) ?? 0);
  return {
    id: transfer.transfer_id,
    policy: transfer.version.policy,
    version: Number(transfer.version.version ?? 0),
    purpose,
    // A clone or a restore is of one replica, and changes nothing that the pool serves.
    replica: ["clone", "restore"].includes(purpose) ? transfer.replica_ids?.[0] ?? "?" : "",
    trainer: transfer.trainer_id,
    backend: transfer.backend ?? "",
    hops: (transfer.hops ?? []).map(toHop),
    waiting: fromDuration(transfer.waiting),
    waits_for: transfer.waits_for ?? "",
    buckets: Number(transfer.num_buckets ?? 0),
    verified: Number(transfer.num_buckets_verified ?? 0),
    forming: before,
    staging,
    committing,
    total,
    commit_time: isCommitted ? begin + before + staging : 0,
    end_time: isEnded(transfer) ? begin + total : 0,
    replaced_version: Number(transfer.replaced_version ?? 0),
    pause: fromDuration(transfer.pause),
    pauses: Object.fromEntries((transfer.pauses ?? []).map((one) =>
      [one.replica_id, [fromDuration(one.resumed_after), fromDuration(one.pause)]])),
    bytes,
    delta_of: isDelta ? Number(transfer.total_bytes ?? 0) : 0, // bytes of the whole version
    rate: staging > 0 && isCommitted ? bytes / staging : 0,
    failure: transfer.failure ?? null,
    refusals: transfer.refusals ?? [],
  };
}

/** What a link between two members carried, over streams. */
function toHop({ source, target, usage }) {
  const busy = fromDuration(usage.busy);
  return {
    source,
    target,
    rate: busy > 0 ? Number(usage.num_bytes ?? 0) / busy : 0,
    waiting: Number(usage.num_waiting ?? 0),
    isEncrypted: Boolean(usage.encrypted),
  };
}
