"use strict";
// The mask itself: tiles, documents, the cell under the pointer and why it is what it is, the vectors as curves.

const state = { number: 0, slice: 0, tile: [16, 16], cell: null, block: 0 };
let page, current, slice;
let scale = { x: 1, y: 1 }; // pixels a key, pixels a row, in the mask and its curves

const WHY = {
  causal: "the free triangle q < k",
  diag: "DIAG, the first row of the free triangle",
  lower: "the lower interval",
  upper: "the upper interval",
};

function showMask() {
  const holder = byId("matrix"), area = plane(holder, `tiles of ${current.name}, rows down, keys across`, slice.nq, slice.nk), { root, width, height } = area;
  scale = area.scale;
  const [bq, bkv] = state.tile, { paths, group } = tilePaths(slice, bq, bkv, scale), step = columnStep(slice);
  root.append(svg("path", { d: paths[PARTIAL], fill: "var(--partial-tint)" }));
  root.append(svg("path", { d: visiblePath(slice, scale, step), fill: "var(--partial)" }));
  if (slice.blocks) root.append(svg("path", { d: hiddenPath(), fill: "var(--partial-tint)" }));
  root.append(svg("path", { d: paths[SKIP], fill: "var(--skip)" }), svg("path", { d: paths[UNMASKED], fill: "var(--unmasked)" }));
  for (const p of root.querySelectorAll("path, rect")) p.setAttribute("shape-rendering", slice.nk <= 520 ? "crispEdges" : "auto");
  if (group === 1 && Math.min(bq * scale.y, bkv * scale.x) >= 5) root.append(grid(width, height));
  root.append(documents());
  root.append(svg("rect", { id: "q-band", fill: "none", stroke: "var(--ink)", "stroke-width": 1.6, rx: 2 }));
  root.append(svg("path", { id: "cross", fill: "none", stroke: "var(--mark)", "stroke-width": 1.1 }));
  holder.replaceChildren(root);
  pointing(holder, root, scale, width, height, (k, q) => setCell(q, k), () => selectBlock(Math.floor(state.cell[0] / bq)));
  showCurves();
  showCross();
  showBand();
}

// Calls back with the key and row under the pointer.
function pointing(holder, root, scale, width, height, move, press) {
  const at = (event) => {
    const p = new DOMPoint(event.clientX, event.clientY).matrixTransform(root.getScreenCTM().inverse());
    if (p.x < 0 || p.y < 0 || p.x >= width || p.y >= height) return false;
    move(Math.floor(p.x / scale.x), Math.floor(p.y / scale.y));
    return true;
  };
  holder.onpointermove = at;
  holder.onclick = (event) => at(event) && press && press();
}

function grid(width, height) {
  const [bq, bkv] = state.tile;
  let d = "";
  for (let q = bq; q < slice.nq; q += bq) d += `M0 ${px(q * scale.y)}h${px(width)}`;
  for (let k = bkv; k < slice.nk; k += bkv) d += `M${px(k * scale.x)} 0v${px(height)}`;
  return svg("path", { d, stroke: "var(--paper)", "stroke-width": 0.9, "stroke-opacity": 0.7, fill: "none" });
}

function hiddenPath() {
  const { q, kv, keep } = slice.blocks;
  let d = "";
  keep.forEach((row, i) => [...row].forEach((bit, j) => {
    if (bit === "0") d += cells(scale, j * kv, i * q, Math.min(kv, slice.nk - j * kv), Math.min(q, slice.nq - i * q));
  }));
  return d;
}

// The sets that are marked: outermost first.
const stripSets = () => (slice.inputs ? Object.entries(slice.inputs.sets).sort((a, b) => (a[1].within !== null) - (b[1].within !== null)).slice(0, 2) : []);

// Segments and spans as strips beside the axes, and the edges of the outermost segments across the mask.
function documents() {
  const g = svg("g", { "aria-hidden": "true" });
  if (!slice.inputs) return g;
  const sets = stripSets();
  sets.forEach(([, set], track) => {
    const at = -8 - 9 * track;
    const strips = ["", ""], sides = ["", ""];
    for (let i = 0; i < set.start.length && i < 4000; i++) {
      const a = set.start[i] * scale.x, w = (set.end[i] - set.start[i]) * scale.x;
      if (w <= 0) continue;
      strips[i % 2] += box(a, at, w, 7);
      sides[i % 2] += box(at, a, 7, w);
    }
    for (const parity of [0, 1]) {
      const fill = parity ? "var(--strip-b)" : "var(--strip-a)";
      g.append(svg("path", { d: strips[parity], fill }));
      if (slice.nq === slice.nk) g.append(svg("path", { d: sides[parity], fill }));
    }
  });
  if (sets.length && sets[0][1].within === null && sets[0][1].start.length <= 200 && slice.nq === slice.nk) {
    let d = "";
    const { start, end } = sets[0][1];
    for (let i = 0; i < start.length; i++) d += cells(scale, start[i], start[i], end[i] - start[i], end[i] - start[i]);
    g.append(svg("path", { d, fill: "none", stroke: "var(--ink)", "stroke-width": 1, "stroke-dasharray": "2 3", "stroke-opacity": 0.75 }));
  }
  return g;
}

function setCell(q, k) {
  state.cell = [Math.max(0, Math.min(slice.nq - 1, q)), heldKey(slice, Math.max(0, Math.min(slice.nk - 1, k)))];
  showCross();
  showCell();
}

function showCross() {
  const [q, k] = state.cell, w = Math.max(scale.x, 1.5), h = Math.max(scale.y, 1.5);
  const x = k * scale.x, y = q * scale.y, width = slice.nk * scale.x, height = slice.nq * scale.y;
  byId("cross").setAttribute("d", `M0 ${px(y + h / 2)}H${px(x)}M${px(x + w)} ${px(y + h / 2)}H${px(width)}M${px(x + w / 2)} 0V${px(y)}M${px(x + w / 2)} ${px(y + h)}V${px(height)}${box(x, y, w, h)}`);
  const line = byId("curve-cross");
  if (line) line.setAttribute("d", `M${px(x + w / 2)} 0V${px(height)}M0 ${px(y + h / 2)}H${px(width)}`);
}

function showBand() {
  const [bq] = state.tile, y = state.block * bq;
  const band = byId("q-band");
  for (const [name, value] of Object.entries({ x: -1.5, y: px(y * scale.y - 0.5), width: px(slice.nk * scale.x + 3), height: px(Math.max(2, Math.min(bq, slice.nq - y) * scale.y + 1)) })) band.setAttribute(name, value);
}

// ---------------------------------------------------------------- one cell

function showCell() {
  const card = byId("cell");
  const [q, k] = state.cell, [bq, bkv] = state.tile, i = Math.floor(q / bq), j = Math.floor(k / bkv);
  const masked = isMasked(slice, q, k), cls = tileClass(slice, i, j, bq, bkv);
  const head = html("h4", {}, `row ${count(q)}, key ${count(k)}: ${masked ? "masked" : "visible"}`);
  const tile = html("p", {}, "tile (", String(i), ", ", String(j), ") is ", html("span", { class: `chip ${CLASS_NAMES[cls]}` }, CLASS_NAMES[cls]), " ", CLASS_MEANING[cls]);
  card.replaceChildren(head, tile, rowsOfKey(q, k), intervalWords(q, k));
  const tree = predicateTree(q, k);
  if (tree) card.append(html("p", { class: "quiet" }, "and in the words of the predicate"), tree);
  markSource(q, k);
}

const CLASS_MEANING = ["every element masked: never loaded", "each element is tested", "nothing masked: no test"];

// All rows against this key as one bar, the row marked.
function rowsOfKey(q, k) {
  const W = 400, root = svg("svg", { viewBox: `0 -16 ${W} 34`, role: "img", "aria-label": `rows that see key ${k}` });
  const x = (row) => px((row * W) / slice.nq);
  root.append(svg("rect", { x: 0, y: 0, width: W, height: 12, fill: "var(--skip)" }));
  for (const [a, b] of visibleRows(slice, k)) root.append(svg("rect", { x: x(a), y: 0, width: x(b) - x(a), height: 12, fill: "var(--partial)" }));
  const at = x(q + 0.5);
  root.append(svg("path", { d: `M${at} -2v16`, stroke: "var(--mark)", "stroke-width": 2 }));
  root.append(svg("text", { x: 0, y: -5, class: "quiet" }, `rows of key ${count(k)}`));
  root.append(svg("text", { x: W, y: -5, class: "quiet", "text-anchor": "end" }, count(slice.nq)));
  return root;
}

function intervalWords(q, k) {
  const all = maskedRows(slice, k), here = all.filter((r) => r.start <= q && q < r.end);
  const said = (r) => `[${count(r.start)}, ${count(r.end)}) (${WHY[r.why]})`;
  let text;
  if (here.length) text = `Row ${count(q)} lies in the masked rows ${here.map(said).join(" and ")}.`;
  else if (hiddenByBlocks(slice, q, k)) text = "The block table hides this block.";
  else if (all.length) text = `Masked for this key: ${all.map(said).join(", ")}; row ${count(q)} lies outside.`;
  else text = "No row is masked for this key.";
  return html("p", {}, text);
}

function predicateTree(q, k) {
  if (!slice.inputs) return null;
  const env = { nq: slice.nq, nk: slice.nk, ...slice.inputs }, at = { q, k, h: slice.head };
  const line = (node) => {
    const [kind, ...terms] = node.p, yes = holds(node, env, at);
    const mark = html("span", { class: yes ? "yes" : "no", "aria-label": yes ? "holds" : "does not hold" }, yes ? "✓" : "✗");
    if (kind !== "and" && kind !== "or") return html("li", {}, mark, html("span", {}, node.t));
    return html("li", {}, mark, html("span", { class: "quiet" }, kind === "and" ? "all of" : "any of"), html("ul", {}, ...terms.map(line)));
  };
  return html("ul", { class: "tree" }, line(current.predicate));
}

// ---------------------------------------------------------------- source

function leaves(node) {
  const [kind, ...terms] = node.p;
  return kind === "and" || kind === "or" ? terms.flatMap(leaves) : [node];
}

// The text of the file; parts of the predicate underlined by whether they hold at the cell.
function markSource(q, k) {
  const text = current.source, pre = byId("source");
  let marks = [];
  if (slice.inputs) {
    const env = { nq: slice.nq, nk: slice.nk, ...slice.inputs }, at = { q, k, h: slice.head };
    marks = leaves(current.predicate).filter((n) => n.at).map((n) => ({ a: n.at[0], b: n.at[1], yes: holds(n, env, at) }));
    marks.sort((x, y) => x.a - y.a);
    marks = marks.filter((m, n) => n === 0 || m.a >= marks[n - 1].b);
  }
  const out = [];
  let from = 0;
  for (const m of marks) {
    out.push(text.slice(from, m.a), html("span", { class: m.yes ? "on" : "off" }, text.slice(m.a, m.b)));
    from = m.b;
  }
  pre.replaceChildren(...out, text.slice(from).trimEnd());
}

// ---------------------------------------------------------------- vectors

const CURVES = { lts: ["lower", ""], lte: ["lower", "5 3"], uts: ["upper", "5 3"], ute: ["upper", ""], diag: ["quiet", "2 3"] };

// The vectors in the mask's own coordinates: keys across, rows down; what they hide is hatched.
function showCurves() {
  const holder = byId("curves"), { root, width, height } = plane(holder, "boundary vectors: a row for every key", slice.nq, slice.nk);
  root.firstChild.setAttribute("fill", "var(--panel)");
  root.firstChild.setAttribute("stroke", "var(--line)");
  const step = columnStep(slice), shades = { lower: "", upper: "", causal: "", diag: "" };
  for (let k = 0; k < slice.nk; k += step) {
    const w = Math.min(step, slice.nk - k);
    for (const r of maskedRows(slice, heldKey(slice, k))) shades[r.why] += cells(scale, k, r.start, w, r.end - r.start);
  }
  root.append(svg("path", { d: shades.causal + shades.diag, fill: "var(--quiet)", "fill-opacity": 0.13 }));
  root.append(svg("path", { d: shades.lower, fill: "var(--lower)", "fill-opacity": 0.13 }), svg("path", { d: shades.upper, fill: "var(--upper)", "fill-opacity": 0.13 }));
  const shown = [];
  if (slice.causal) {
    const end = Math.min(slice.nq, slice.nk);
    root.append(svg("path", { d: `M0 0L${px(end * scale.x)} ${px(end * scale.y)}`, stroke: "var(--quiet)", "stroke-width": 1.6, "stroke-dasharray": "2 3" }));
  }
  for (const name of VECTORS) {
    if (!slice[name]) continue;
    shown.push(name);
    const [colour, dash] = CURVES[name];
    root.append(svg("path", { d: curve(slice[name], step), fill: "none", stroke: `var(--${colour})`, "stroke-width": 2, "stroke-dasharray": dash, class: "curve", "data-vector": name }));
  }
  root.append(svg("path", { id: "curve-cross", fill: "none", stroke: "var(--mark)", "stroke-width": 1, "stroke-opacity": 0.8 }));
  holder.replaceChildren(curveLegend(shown), root);
  pointing(root, root, scale, width, height, (k, q) => setCell(q, k));
  const every = step > 1 ? ` One key in ${step} is drawn.` : "";
  byId("curves-note").textContent = `Each curve gives a row for every key; the rows between the curves of one colour are masked.${every}${slice.stride > 1 ? ` This page holds one key in ${slice.stride}.` : ""}`;
}

function curve(v, step) {
  let d = "";
  for (let k = 0; k < slice.nk; k += step) {
    const y = px(v[Math.floor(k / slice.stride)] * scale.y);
    d += `${k ? "V" : `M0 `}${y}H${px(Math.min(slice.nk, k + step) * scale.x)}`;
  }
  return d;
}

function curveLegend(shown) {
  const item = (colour, dash, text) => {
    const line = svg("svg", { viewBox: "0 0 26 10", style: "width:26px;flex:none", "aria-hidden": "true" }, svg("path", { d: "M0 5H26", stroke: `var(--${colour})`, "stroke-width": 2.4, "stroke-dasharray": dash }));
    return html("li", {}, line, text);
  };
  const list = html("ul", { class: "legend" });
  if (slice.causal) list.append(item("quiet", "2 3", "q = k, rows above are masked for free"));
  for (const name of shown) list.append(item(...CURVES[name], name.toUpperCase()));
  if (!shown.length && !slice.causal) list.append(html("li", {}, "no vector: nothing is masked"));
  return list;
}
