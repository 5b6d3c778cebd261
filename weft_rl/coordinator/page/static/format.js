// Numbers, times and names as people read them. A unit stays on the line of its number.

const whole = new Intl.NumberFormat("en-US");
const clockFormat = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
});
const fullFormat = new Intl.DateTimeFormat(undefined, {
  dateStyle: "medium", timeStyle: "long", hourCycle: "h23",
});

/** How many colours versions have; see style.css. */
export const COLOURS = 6;

export const count = (number) => whole.format(number);

/** "1 replica", "2 replicas". */
export const several = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

function digits(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** Decimal units, as the rest of Weft says them. */
export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) {
    number /= 1000;
    unit += 1;
  }
  return `${unit ? digits(number) : number}\u00a0${units[unit]}`;
}

export const rate = (bytesPerSecond) => `${bytes(Math.round(bytesPerSecond))}/s`;

/** A duration: "0.4 ms", "86 ms", "1.42 s", "2 min 5 s". */
export function duration(seconds) {
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)}\u00a0ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)}\u00a0ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(1)}\u00a0s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes}\u00a0min ${Math.round(seconds % 60)}\u00a0s`;
  return `${Math.floor(minutes / 60)}\u00a0h ${minutes % 60}\u00a0min`;
}

/** How long ago: "now", "12 s ago", "3 min ago". */
export function ago(seconds) {
  if (seconds < 1.5) return "now";
  if (seconds < 90) return `${Math.round(seconds)}\u00a0s\u00a0ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)}\u00a0min\u00a0ago`;
  return `${Math.round(seconds / 3600)}\u00a0h\u00a0ago`;
}

export const clock = (time) => clockFormat.format(new Date(time * 1000));
export const full = (time) => fullFormat.format(new Date(time * 1000));

/** Seconds of a duration of the protos, "0.0193s"; 0 where there is none. */
export const fromDuration = (text) => (text ? Number(text.slice(0, -1)) : 0);

/** Seconds since 1970 of a time of the protos. */
export const fromTimestamp = (text) => Date.parse(text) / 1000;

/** The class of a version's colour: neighbours differ, in tone and in lightness. */
export const colour = (version) =>
  version < 0 ? "other" : `v${((version % COLOURS) + COLOURS) % COLOURS}`;

export const versionName = (policy, version) =>
  version < 0 ? "other bytes" : `${policy}@${version}`;

/** Names with numbers in the order of the numbers. */
export const byName = new Intl.Collator("en", { numeric: true }).compare;
