"use strict";
// The predicate of a mask at one cell, part by part. The same rules as the library's reference.py: a read of an outside
// token makes the comparison around it false, in both polarities.

class Outside extends Error {}

const COMPARE = {
  "<=": (a, b) => a <= b, "<": (a, b) => a < b, "==": (a, b) => a === b,
  "!=": (a, b) => a !== b, ">=": (a, b) => a >= b, ">": (a, b) => a > b,
};

// env: { nq, nk, sets, vectors, scalars }; at: { q, k, h }
function holds(node, env, at, positive = true) {
  const [kind, ...rest] = node.p;
  switch (kind) {
    case "const": return rest[0] === positive;
    case "not": return holds(rest[0], env, at, !positive);
    case "and": return positive ? rest.every((t) => holds(t, env, at, true)) : rest.some((t) => holds(t, env, at, false));
    case "or": return positive ? rest.some((t) => holds(t, env, at, true)) : rest.every((t) => holds(t, env, at, false));
    case "same": {
      const own = segmentOf(env, rest[0], at.q);
      return (own !== null && own === segmentOf(env, rest[0], at.k)) === positive;
    }
    case "in": return (orOutside(() => segmentOf(env, rest[0], valueOf(rest[1], env, at)), null) !== null) === positive;
    case "edge": return orOutside(() => inEdge(env, rest, at) === positive, !positive);
    case "flag": return orOutside(() => Boolean(readInput(env, rest[0], rest[1], rest[2], at)) === positive, !positive);
    case "cmp": return orOutside(() => COMPARE[rest[0]](valueOf(rest[1], env, at), valueOf(rest[2], env, at)) === positive, false);
    default: throw new Error(`unknown condition ${kind}`);
  }
}

function orOutside(compute, otherwise) {
  try {
    return compute();
  } catch (e) {
    if (e instanceof Outside) return otherwise;
    throw e;
  }
}

function valueOf(e, env, at) {
  if (typeof e === "number") return e;
  if (e === "q" || e === "k" || e === "h") return at[e];
  const [kind, ...rest] = e;
  const v = (x) => valueOf(x, env, at);
  switch (kind) {
    case "int": return rest[0] === "nq" ? env.nq : rest[0] === "nk" ? env.nk : env.scalars[rest[0]];
    case "field": return readInput(env, rest[0], rest[1], rest[2], at);
    case "+": return rest.map(v).reduce((a, b) => a + b, 0);
    case "*": return v(rest[0]) * v(rest[1]);
    case "//": return Math.floor(v(rest[0]) / v(rest[1]));
    case "%": return v(rest[0]) - v(rest[1]) * Math.floor(v(rest[0]) / v(rest[1]));
    case "min": return Math.min(...rest.map(v));
    case "max": return Math.max(...rest.map(v));
    case "if":
      if (holds(rest[0], env, at, true)) return v(rest[1]);
      if (holds(rest[0], env, at, false)) return v(rest[2]);
      throw new Outside();
    default: return attribute(kind, rest[0], v(rest[1]), env);
  }
}

function attribute(kind, of, token, env) {
  const i = segmentOf(env, of, token);
  if (i === null) throw new Outside();
  const start = env.sets[of].start[i], end = env.sets[of].end[i];
  switch (kind) {
    case "start": return start;
    case "end": return end;
    case "len": return end - start;
    case "pos": return token - start;
    case "ordinal": return i;
    default: throw new Error(`unknown expression ${kind}`);
  }
}

// Ordinal of the segment or span that holds a token, or null: starts never decrease, empty ones hold nothing.
function segmentOf(env, of, token) {
  const { start, end } = env.sets[of];
  let low = 0, high = start.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (start[middle] <= token) low = middle + 1;
    else high = middle;
  }
  for (let i = low - 1; i >= 0; i--) {
    if (token < end[i]) return i;
    if (start[i] < end[i]) return null;
  }
  return null;
}

function readInput(env, name, per, index, at) {
  const vector = env.vectors[name];
  let i;
  if (per === "key" || per === "row") i = valueOf(index, env, at);
  else if (per === "head") i = 0; // a slice holds its own head's value alone
  else i = orOutside(() => segmentOf(env, per, valueOf(index, env, at)), null) ?? -1;
  if (i < 0 || i >= vector.length) throw new Outside();
  return vector[i];
}

function inEdge(env, [of, within, edge, index], at) {
  const token = valueOf(index, env, at);
  let low = 0, high = Math.max(env.nq, env.nk);
  if (within !== null) {
    const parent = segmentOf(env, within, token);
    if (parent === null) throw new Outside();
    low = env.sets[within].start[parent];
    high = env.sets[within].end[parent];
  }
  const { start, end } = env.sets[of], inside = [];
  for (let i = 0; i < start.length; i++) if (low <= start[i] && start[i] < end[i] && end[i] <= high) inside.push(i);
  if (inside.length === 0) return false;
  const i = edge === "first" ? inside[0] : inside[inside.length - 1];
  return start[i] <= token && token < end[i];
}
