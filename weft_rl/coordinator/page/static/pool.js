// What the coordinator has told: the pool as it is, and its history, put together from answers.

import { byName, fromDuration, fromTimestamp } from "./format.js";

/** Whether the weights of a replica may be mixed: they are no version's. */
export const isMixed = (replica) => Boolean(replica.report?.dirty_reason);

export class Pool {
  constructor() {
    this.cursor = "";
    this.clear();
  }

  clear() {
    this.facts = null;
    this.replicas = new Map();
    this.policies = new Map();
    this.members = new Map();
    this.transfers = []; // pushes and rollbacks that have ended, oldest first
    this.repairs = []; // clones and restores
    this.marks = new Map(); // by replica, oldest first
    this.events = []; // oldest first
    this.underWay = [];
    this.numKept = 0; // events, when they were cut last
    this.version = 0; // grows with each change of the history
  }

  /** Take in an answer of the endpoint. */
  apply(answer) {
    if (answer.is_new) this.clear();
    this.cursor = answer.cursor;
    this.facts = answer;
    for (const [number, names] of Object.entries(answer.members)) {
      this.members.set(Number(number), new Set(names));
    }
    for (const name of answer.gone_replicas) this.replicas.delete(name);
    for (const name of answer.gone_policies) this.policies.delete(name);
    for (const replica of answer.replicas) this.replicas.set(replica.replica_id, replica);
    for (const policy of answer.policies) this.policies.set(policy.policy, policy);
    for (const past of answer.transfers) this.transfers.push(this.ended(past));
    for (const past of answer.repairs) this.repairs.push(this.ended(past));
    for (const mark of answer.marks) {
      if (!this.marks.has(mark.replica_id)) this.marks.set(mark.replica_id, []);
      this.marks.get(mark.replica_id).push(mark);
    }
    this.events.push(...answer.events.map((event) => ({
      ...event, time: fromTimestamp(event.time), kind: event.kind.slice("EVENT_KIND_".length),
    })));
    this.underWay = answer.under_way.map((one) => ({ ...one, ...course(one.transfer) }));
    if (answer.transfers.length + answer.repairs.length + answer.marks.length) this.version += 1;
    this.forget();
  }

  ended(past) {
    return {
      ...past,
      ...course(past.transfer),
      served: this.members.get(past.served_by),
      targeted: this.members.get(past.targets),
    };
  }

  /** What is older than the history is held nowhere. */
  forget() {
    const { num_transfers: most, seconds } = this.facts.history;
    this.transfers.splice(0, Math.max(0, this.transfers.length - most));
    this.repairs.splice(0, Math.max(0, this.repairs.length - most));
    if (this.events.length > this.numKept + this.facts.history.num_events) {
      this.events = this.newest(this.events);
      this.numKept = this.events.length;
    }
    const from = this.now - seconds;
    for (const [name, marks] of this.marks) {
      while (marks.length > 1 && marks[1].time < from) marks.shift();
      if (marks.length === 1 && marks[0].time < from && !this.replicas.has(name)) {
        this.marks.delete(name);
      }
    }
  }

  /** As many as the coordinator keeps of those that it keeps with each other. */
  newest(events) {
    const counts = {};
    return events.reverse().filter(({ kept_with: kind }) => {
      counts[kind] = (counts[kind] ?? 0) + 1;
      return counts[kind] <= this.facts.history.num_events;
    }).reverse();
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
    return fromTimestamp(this.facts.pool.time);
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

/** The times of a transfer, in seconds; `total` is what has been so far. */
function course(transfer) {
  const [forming, staging, committing] = ["forming", "staging", "committing"].map((name) =>
    fromDuration(transfer[name]));
  const purpose = transfer.purpose.slice("TRANSFER_PURPOSE_".length).toLowerCase();
  // What forms no group, as a rollback, waits until its commit point: "forming" is all of it.
  const isGrouped = transfer.staging !== undefined || !committing;
  const before = isGrouped ? forming : Math.max(0, forming - committing);
  return {
    id: transfer.transfer_id,
    policy: transfer.version.policy,
    version: Number(transfer.version.version ?? 0),
    purpose,
    trainer: transfer.trainer_id,
    begin: fromTimestamp(transfer.begin_time),
    forming: before,
    staging,
    committing,
    total: before + staging + committing,
    pause: fromDuration(transfer.pause),
    bytes: Number(transfer.total_bytes ?? 0),
    rate: staging > 0 && committing > 0 ? Number(transfer.total_bytes ?? 0) / staging : 0,
    failure: transfer.failure_reason ? { reason: transfer.failure_reason, message: transfer.failure_message } : null,
    refusals: transfer.refusals ?? [],
  };
}
