"use strict";
// What a mask is, as pure functions over the data of a page: no document, no state. The same rules as the library's
// boundary.py, tiles.py and localize.py; tests run this file beside them.

const SKIP = 0, PARTIAL = 1, UNMASKED = 2;
const CLASS_NAMES = ["SKIP", "PARTIAL", "UNMASKED"];
const VECTORS = ["lts", "lte", "uts", "ute", "diag"];
const DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";

// "7x3 4..9 5" -> 7 7 7 4 5 6 7 8 9 5
function decodeRuns(text) {
  if (text === "") return new Int32Array(0);
  const tokens = text.split(" ");
  const parsed = tokens.map((t) => {
    const times = t.indexOf("x"), to = t.indexOf("..");
    if (times > 0) return [Number(t.slice(0, times)), Number(t.slice(times + 1)), 0];
    if (to > 0) return [Number(t.slice(0, to)), Number(t.slice(to + 2)) - Number(t.slice(0, to)) + 1, 1];
    return [Number(t), 1, 0];
  });
  const out = new Int32Array(parsed.reduce((sum, [, count]) => sum + count, 0));
  let at = 0;
  for (const [first, count, step] of parsed) for (let i = 0; i < count; i++) out[at++] = first + i * step;
  return out;
}

const decodeOwner = (text) => Array.from(text, (c) => DIGITS.indexOf(c));

// One batch item and mask head, decoded. With `stride` > 1 only every stride-th key is held.
function openSlice(c, number) {
  const raw = c.slices[number];
  const s = { nq: c.nq, nk: c.nk, causal: raw.causal, stride: raw.stride, blocks: raw.blocks || null, head: raw.head };
  for (const name of VECTORS) s[name] = name in raw.vectors ? decodeRuns(raw.vectors[name]) : null;
  s.inputs = raw.inputs && openInputs(raw.inputs);
  s.given = raw.extremes || null;
  s.extremes = new Map();
  return s;
}

function openInputs(raw) {
  const sets = {}, vectors = {};
  for (const [name, set] of Object.entries(raw.sets))
    sets[name] = { start: decodeRuns(set.start), end: decodeRuns(set.end), kind: set.kind, within: set.within };
  for (const [name, text] of Object.entries(raw.vectors)) vectors[name] = decodeRuns(text);
  return { sets, vectors, scalars: raw.scalars };
}

// The key that stands for key k: itself, or the nearest one before it that is held.
const heldKey = (s, k) => k - (k % s.stride);

// Masked rows of a key: the free triangle [0, k), the first row of DIAG, the lower and the upper interval, each half-open.
function maskedRows(s, k) {
  const i = Math.floor(k / s.stride), out = [];
  if (s.causal && k > 0) out.push({ why: "causal", start: 0, end: Math.min(k, s.nq) });
  if (s.diag) out.push({ why: "diag", start: 0, end: s.diag[i] });
  if (s.lts || s.lte) out.push({ why: "lower", start: s.lts ? s.lts[i] : 0, end: s.lte ? s.lte[i] : s.nq });
  if (s.uts || s.ute) out.push({ why: "upper", start: s.uts ? s.uts[i] : 0, end: s.ute ? s.ute[i] : s.nq });
  return out.filter((r) => r.start < r.end);
}

const hiddenByBlocks = (s, q, k) =>
  s.blocks !== null && s.blocks.keep[Math.floor((s.globalRow ? s.globalRow(q) : q) / s.blocks.q)][Math.floor(k / s.blocks.kv)] !== "1";

const isMasked = (s, q, k) => hiddenByBlocks(s, q, k) || maskedRows(s, k).some((r) => r.start <= q && q < r.end);

// Rows that see a key, block table aside: disjoint [start, end), ascending.
function visibleRows(s, k) {
  const out = [];
  let at = 0;
  for (const r of maskedRows(s, k).sort((a, b) => a.start - b.start || a.end - b.end)) {
    if (r.start > at) out.push([at, r.start]);
    at = Math.max(at, r.end);
  }
  if (at < s.nq) out.push([at, s.nq]);
  return out;
}

// ---------------------------------------------------------------- tiles

// Minimum and maximum of each vector over every KV block.
function blockExtremes(s, kv) {
  if (!s.extremes.has(kv)) s.extremes.set(kv, s.given ? givenExtremes(s, kv) : computedExtremes(s, kv));
  return s.extremes.get(kv);
}

function computedExtremes(s, kv) {
  const out = {};
  for (const name of VECTORS) {
    const v = s[name];
    if (!v) continue;
    const count = Math.ceil(v.length / kv), low = new Int32Array(count), high = new Int32Array(count);
    for (let j = 0; j < count; j++) {
      let a = v[j * kv], b = a;
      for (let i = j * kv + 1; i < Math.min(v.length, (j + 1) * kv); i++) {
        if (v[i] < a) a = v[i];
        if (v[i] > b) b = v[i];
      }
      low[j] = a;
      high[j] = b;
    }
    out[name] = { low, high };
  }
  return out;
}

// From those that came with the page, for the same size or a multiple of it.
function givenExtremes(s, kv) {
  const base = Math.max(...Object.keys(s.given).map(Number).filter((n) => kv % n === 0));
  const out = {};
  for (const [name, [lows, highs]] of Object.entries(s.given[base])) {
    const low = decodeRuns(lows), high = decodeRuns(highs), group = kv / base;
    const pick = (v, best) =>
      Int32Array.from({ length: Math.ceil(v.length / group) }, (_, j) => v.subarray(j * group, (j + 1) * group).reduce((a, b) => best(a, b)));
    out[name] = { low: pick(low, Math.min), high: pick(high, Math.max) };
  }
  return out;
}

// The class of the tile of Q block i and KV block j.
function tileClass(s, i, j, bq, bkv) {
  const e = blockExtremes(s, bkv);
  const r0 = i * bq, r1 = Math.min(r0 + bq, s.nq), c0 = j * bkv, c1 = Math.min(c0 + bkv, s.nk);
  let covered = r0, clear = true; // rows [r0, covered) are masked in every column
  if (s.causal) {
    covered = Math.max(covered, c0);
    clear = r0 >= c1 - 1;
  }
  if (e.diag) {
    covered = Math.max(covered, e.diag.low[j]);
    clear = clear && r0 >= e.diag.high[j];
  }
  const slots = [tileSlot(e.lts, e.lte, j, s.nq), tileSlot(e.uts, e.ute, j, s.nq)].filter((x) => x !== null);
  for (const x of slots) clear = clear && (r1 <= x.startLow || x.endHigh <= r0 || x.endHigh <= x.startLow);
  for (const x of slots.concat(slots.slice(0, 1))) if (x.startHigh <= covered) covered = Math.max(covered, x.endLow);
  return underBlocks(s, covered >= r1 ? SKIP : clear ? UNMASKED : PARTIAL, r0, r1, c0, c1);
}

function tileSlot(start, end, j, nq) {
  if (!start && !end) return null;
  return {
    startLow: start ? start.low[j] : 0, startHigh: start ? start.high[j] : 0,
    endLow: end ? end.low[j] : nq, endHigh: end ? end.high[j] : nq,
  };
}

function underBlocks(s, cls, r0, r1, c0, c1) {
  if (!s.blocks || cls === SKIP) return cls;
  let kept = 0, touched = 0;
  for (let i = Math.floor(r0 / s.blocks.q); i * s.blocks.q < r1; i++)
    for (let j = Math.floor(c0 / s.blocks.kv); j * s.blocks.kv < c1; j++) {
      touched++;
      kept += s.blocks.keep[i][j] === "1" ? 1 : 0;
    }
  if (kept === 0) return SKIP;
  return kept < touched ? PARTIAL : cls;
}

// Which bounds the elements of a PARTIAL tile are tested against, as the kernel tags it.
function tileTests(s, i, j, bq, bkv) {
  const e = blockExtremes(s, bkv);
  const r0 = i * bq, r1 = Math.min(r0 + bq, s.nq), c1 = Math.min((j + 1) * bkv, s.nk), out = [];
  if (s.causal && r0 < c1 - 1) out.push("q < k");
  for (const [a, b] of [["lts", "lte"], ["uts", "ute"]]) {
    const x = tileSlot(e[a], e[b], j, s.nq);
    if (x === null || !(r0 < x.endHigh && r1 > x.startLow && x.startLow < x.endHigh)) continue;
    if (e[a] && r0 < x.startHigh) out.push(a.toUpperCase());
    if (e[b] && r1 > x.endLow) out.push(b.toUpperCase());
  }
  if (e.diag && r0 < e.diag.high[j]) out.push("DIAG");
  if (s.blocks) out.push("block table");
  return out;
}

// Every KV block of a Q block from right to left, with its class: what the KV Index Generator walks over.
function rowOfTiles(s, i, bq, bkv) {
  const out = [];
  for (let j = Math.ceil(s.nk / bkv) - 1; j >= 0; j--) out.push({ block: j, cls: tileClass(s, i, j, bq, bkv) });
  return out;
}

// ---------------------------------------------------------------- localization

// L(x): how many of a rank's rows lie below x. One look-up per entry, no loop over chunks.
function rowMap(bounds, owner, rank) {
  const own = owner.map((r) => (r === rank ? 1 : 0)), before = [0];
  own.forEach((mine, c) => before.push(before[c] + mine * (bounds[c + 1] - bounds[c])));
  own.push(0);
  const size = bounds[1], last = bounds.length - 1;
  const regular = bounds.every((b, c) => c === last || b === c * size) && bounds[last] - bounds[last - 1] <= size;
  const length = before[last];
  const clip = (x) => Math.min(Math.max(x, 0), bounds[last]);
  const chunkOf = (x) => {
    if (regular) return Math.min(Math.floor(x / size), last);
    let low = 0, high = last;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (bounds[middle] <= x) low = middle;
      else high = middle - 1;
    }
    return low;
  };
  const at = (value) => {
    const x = clip(value), c = chunkOf(x);
    return before[c] + own[c] * (x - bounds[c]);
  };
  const parts = (value) => {
    const x = clip(value), c = chunkOf(x);
    return { x, chunk: c, before: before[c], own: own[c], edge: bounds[c], result: at(value) };
  };
  const globalRow = (l) => {
    let c = 0;
    while (before[c + 1] <= l) c++;
    return bounds[c] + l - before[c];
  };
  return { at, parts, length, globalRow };
}

// The same mask without the free triangle: as UTE where one interval still has room for it, else as DIAG.
function foldCausal(s) {
  if (!s.causal) return s;
  const count = Math.ceil(s.nk / s.stride);
  const key = Int32Array.from({ length: count }, (_, i) => Math.min(i * s.stride, s.nq));
  const larger = (v) => v.map((x, i) => Math.max(x, key[i]));
  const base = { ...s, causal: false, extremes: new Map() };
  if (!s.ute) return { ...base, ute: key };
  if (!s.uts) return { ...base, ute: larger(s.ute) };
  if (!s.lts) return { ...base, lts: s.uts, lte: s.ute, uts: null, ute: key };
  return { ...base, diag: s.diag ? larger(s.diag) : key };
}

// The mask of one rank's rows against all keys, from the vectors alone.
function localSlice(s, map) {
  const folded = foldCausal(s), out = { ...folded, nq: map.length, extremes: new Map(), given: null, globalRow: map.globalRow };
  for (const name of VECTORS) out[name] = folded[name] && folded[name].map((x) => map.at(x));
  return out;
}
