// What is wrong now, as the coordinator says it: first on the page, and in the browser's tab.

import { byId, el, setText, show } from "./dom.js";
import { several, versionName } from "./format.js";

const SOME = 5;

const isError = (problem) => problem.severity === "PROBLEM_SEVERITY_ERROR";

/** How many things are wrong, told or not; warnings are not. */
export const wrongs = ({ num_errors: wrong = 0 }) => wrong;

export function drawVerdict(pool) {
  const { facts, numReplicas: total } = pool;
  const { problems = [], num_more_problems: more = 0 } = facts;
  const wrong = wrongs(facts);
  byId("verdict").className = `verdict ${wrong ? "error" : problems.length ? "warning" : "fine"}`;
  setText(byId("verdict-title"), wrong ? `${several(wrong, "thing")} ${wrong === 1 ? "is" : "are"} wrong`
    : problems.length ? "Nothing is wrong, but" : total ? "Nothing is wrong" : "No replica yet");
  show(byId("problems"), JSON.stringify([problems, more]), () => {
    const [first, rest] = [problems.slice(0, SOME), problems.slice(SOME)];
    const hidden = rest.length + more;
    return [...first.map(line), hidden ? el("li", {}, el("details", {}, el("summary", {}, `and ${hidden} more`),
      el("ul", { class: "problems" }, ...rest.map(line), more ? el("li", {}, `${several(more, "problem")} beside these`) : null))) : null]
      .filter(Boolean);
  });
  const ready = (facts.replica_counts ?? []).find(({ state }) => state === "REPLICA_STATE_READY")?.num_replicas ?? 0;
  const adapters = [...pool.policies.values()].filter((one) => one.policy !== "base" && Number(one.served_version ?? 0) && !one.lost).length;
  setText(byId("served"), total ? `${ready} of ${several(total, "replica")} ready; ` +
    `${versionName("base", pool.base?.served_version ?? 0)} and ${several(adapters, "adapter")} served` : "");
}

function line(problem) {
  const kind = isError(problem) ? "error" : "warning";
  return el("li", { class: kind, "data-replica": problem.replica_id, "data-policy": problem.policy },
    el("span", { class: "hidden" }, `${kind}: `), problem.message);
}
