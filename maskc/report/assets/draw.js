"use strict";
// Small helpers to make SVG and HTML by hand.

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function svg(tag, attributes = {}, ...children) {
  const e = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
  e.append(...children);
  return e;
}

function html(tag, attributes = {}, ...children) {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
  e.append(...children);
  return e;
}

const options = (select, pairs, chosen) => {
  select.replaceChildren(...pairs.map(([value, text]) => html("option", { value }, text)));
  select.value = chosen;
};

const count = (n) => n.toLocaleString("en-US");
const percent = (x) => (x < 0.0995 && x > 0 ? `${(100 * x).toPrecision(2)} %` : `${(100 * x).toFixed(1)} %`);
const short = (n) => (n >= 1 << 20 && n % (1 << 20) === 0 ? `${n >> 20}M` : n >= 8192 && n % 1024 === 0 ? `${n >> 10}K` : count(n));
const px = (x) => Math.round(x * 100) / 100;
const box = (x, y, w, h) => `M${px(x)} ${px(y)}h${px(w)}v${px(h)}h${px(-w)}z`;

// Colours of ranks: eight hues that colour-blind readers can tell apart, then the same lighter. A number goes with each.
const HUES = ["#e69f00", "#56b4e9", "#2aa37f", "#cc79a7", "#d9d04a", "#5a8fd6", "#e07b54", "#9aa0a6"];
const LIGHTER = ["#f4cf80", "#abd9f4", "#95d1bf", "#e5bcd3", "#ece7a4", "#acc7ea", "#efbda9", "#cccfd2"];
const rankColour = (r) => (r % 16 < 8 ? HUES[r % 8] : LIGHTER[r % 8]);

// Pixels that a figure has: drawings are made at this width, so that their text keeps its size on every screen.
const room = (holder) => Math.max(280, Math.min(1112, holder.clientWidth || 1112));

// Pixels a key and pixels a row: alike, but a side is drawn at least a quarter as long as the other.
function scales(width, nq, nk) {
  const even = width / Math.max(nq, nk), least = width / 4;
  return { x: Math.max(even, least / nk), y: Math.max(even, least / nq) };
}

const cells = (scale, k, q, keys, rows) => box(k * scale.x, q * scale.y, keys * scale.x, rows * scale.y);

// A drawing area for rows x keys with axes outside.
function plane(holder, label, nq, nk, { left = 64, top = 46 } = {}) {
  const scale = scales(room(holder) - left - 8, nq, nk), width = nk * scale.x, height = nq * scale.y;
  const root = svg("svg", { viewBox: `${-left} ${-top} ${px(room(holder))} ${px(height + top + 6)}`, role: "img", "aria-label": label });
  root.append(svg("rect", { x: 0, y: 0, width: px(width), height: px(height), fill: "var(--skip)" }), axes(nq, nk, scale));
  return { root, scale, width, height };
}

function ticks(n, most) {
  const step = [1, 2, 4, 5].flatMap((m) => [...Array(7).keys()].map((e) => m * 10 ** e)).concat([8, 16, 32, 64, 128, 256, 512].concat([...Array(12).keys()].map((e) => 1024 << e)));
  const nice = step.filter((s) => n / s <= most && n % s === 0).sort((a, b) => a - b)[0] || Math.ceil(n / most);
  return [...Array(Math.floor(n / nice) + 1).keys()].map((i) => i * nice);
}

function axes(nq, nk, scale) {
  const g = svg("g", { "aria-hidden": "true" });
  const most = (length) => Math.max(2, Math.min(8, Math.floor(length / 70)));
  for (const t of ticks(nk, most(nk * scale.x))) g.append(svg("text", { x: px(t * scale.x), y: -24, "text-anchor": t === nk ? "end" : t ? "middle" : "start", class: "quiet" }, t ? short(t) : "k = 0"));
  for (const t of ticks(nq, most(nq * scale.y))) if (t * scale.y > 20) g.append(svg("text", { x: -22, y: px(t * scale.y + 4), "text-anchor": "end", class: "quiet" }, short(t)));
  g.append(svg("text", { x: -22, y: 11, "text-anchor": "end", class: "quiet" }, "q"));
  return g;
}

// Where visible cells lie, column by column: exact in the rows, one key for every `step` keys.
function visiblePath(s, scale, step, rows = null) {
  let path = "";
  for (let k = 0; k < s.nk; k += step) {
    const w = Math.min(step, s.nk - k), key = heldKey(s, Math.min(s.nk - 1, k + (step >> 1)));
    for (const [a, b] of visibleRows(s, key))
      if (!rows) path += cells(scale, k, a, w, b - a);
      else for (const [x, y] of rows) if (Math.max(a, x) < Math.min(b, y)) path += cells(scale, k, Math.max(a, x), w, Math.min(b, y) - Math.max(a, x));
  }
  return path;
}

const columnStep = (s) => (s.nk <= 520 ? 1 : Math.ceil(s.nk / 300));

// Tiles of each class, neighbours in a row joined. Very many tiles are drawn in groups of `group` x `group`.
function tilePaths(s, bq, bkv, scale) {
  const group = Math.max(1, Math.ceil(Math.max(s.nq / bq, s.nk / bkv) / 256));
  const rows = Math.ceil(s.nq / (bq * group)), columns = Math.ceil(s.nk / (bkv * group)), paths = ["", "", ""];
  for (let i = 0; i < rows; i++) {
    let from = 0, cls = tileClass(s, i, 0, bq * group, bkv * group);
    for (let j = 1; j <= columns; j++) {
      const next = j < columns ? tileClass(s, i, j, bq * group, bkv * group) : -1;
      if (next === cls) continue;
      const y0 = i * bq * group, y1 = Math.min(s.nq, y0 + bq * group), x0 = from * bkv * group, x1 = Math.min(s.nk, j * bkv * group);
      paths[cls] += cells(scale, x0, y0, x1 - x0, y1 - y0);
      from = j;
      cls = next;
    }
  }
  return { paths, group };
}
