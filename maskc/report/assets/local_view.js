"use strict";
// Localization: who owns which rows, and what the mask looks like to each rank.

const local = { world: 0, bounds: [], owner: [], key: null, rank: 0 };

function openLocal() {
  const worlds = Object.keys(current.local);
  const section = byId("local");
  for (const part of section.querySelectorAll(".controls, .chunks, .locals, .card")) part.hidden = worlds.length === 0;
  section.querySelector(".empty")?.remove();
  if (!worlds.length) {
    section.append(html("p", { class: "empty" }, `Too few rows to share out: ${slice.nq}.`));
    return;
  }
  const kept = worlds.includes(String(local.world)) ? String(local.world) : worlds.includes("4") ? "4" : worlds[worlds.length - 1];
  options(byId("local-ranks"), worlds.map((w) => [w, w]), kept);
  planLocal();
}

function planLocal() {
  local.world = Number(byId("local-ranks").value);
  const given = current.local[local.world];
  local.bounds = Array.from(decodeRuns(given.bounds));
  local.owner = decodeOwner(given.owner);
  local.loads = given.loads;
  local.key = local.key === null ? Math.floor(slice.nk / 3) : Math.min(local.key, slice.nk - 1);
  showLocal();
}

function give(chunk, rank) {
  local.owner[chunk] = ((rank % local.world) + local.world) % local.world;
  showLocal();
  byId("chunks").children[chunk].focus();
}

function showLocal() {
  byId("chunks").replaceChildren(
    ...local.owner.map((rank, c) => {
      const b = html("button", { style: `background:${rankColour(rank)}`, "aria-label": `chunk ${c}, rows ${local.bounds[c]} to ${local.bounds[c + 1] - 1}, rank ${rank}`, title: `chunk ${c}: rows ${count(local.bounds[c])} to ${count(local.bounds[c + 1] - 1)}` }, html("small", {}, String(c)), String(rank));
      b.onclick = () => give(c, rank + 1);
      b.onkeydown = (event) => {
        if (event.key >= "0" && event.key <= "9" && Number(event.key) < local.world) give(c, Number(event.key));
      };
      return b;
    }),
  );
  local.maps = Array.from({ length: local.world }, (_, r) => rowMap(local.bounds, local.owner, r));
  local.slices = local.maps.map((map) => localSlice(slice, map));
  drawGlobal();
  byId("locals").replaceChildren(...local.slices.map(drawRank));
  showColumn();
}

const ranges = (rank) => local.owner.flatMap((r, c) => (r === rank ? [[local.bounds[c], local.bounds[c + 1]]] : [])).reduce((out, [a, b]) => {
  if (out.length && out[out.length - 1][1] === a) out[out.length - 1][1] = b;
  else out.push([a, b]);
  return out;
}, []);

function drawGlobal() {
  const { root, scale, width, height } = plane(byId("global"), "the whole mask, its rows coloured by the rank that holds them", slice.nq, slice.nk), step = columnStep(slice);
  local.scale = scale;
  for (let r = 0; r < local.world; r++) root.append(svg("path", { d: visiblePath(slice, scale, step, ranges(r)), fill: rankColour(r), "shape-rendering": slice.nk <= 520 ? "crispEdges" : "auto" }));
  local.owner.forEach((rank, c) => root.append(svg("rect", { x: -13, y: px(local.bounds[c] * scale.y), width: 10, height: px((local.bounds[c + 1] - local.bounds[c]) * scale.y), fill: rankColour(rank) })));
  const edges = local.bounds.map((b) => `M-13 ${px(b * scale.y)}H${px(width)}`).join("");
  root.append(svg("path", { d: edges, stroke: "var(--paper)", "stroke-width": 0.8, "stroke-opacity": 0.9 }));
  root.append(svg("path", { class: "column-mark", fill: "none", stroke: "var(--mark)", "stroke-width": 1.4 }));
  byId("global").replaceChildren(root);
  pointing(byId("global"), root, scale, width, height, (k) => setColumn(k));
}

function drawRank(s, rank) {
  const box_ = html("figure", {}), held = ranges(rank), load = local.owner.reduce((sum, r, c) => sum + (r === rank ? local.loads[c] : 0), 0);
  const mean = local.loads.reduce((a, b) => a + b, 0) / local.world;
  box_.append(html("h3", {}, html("span", { class: "swatch", style: `background:${rankColour(rank)};display:inline-block;vertical-align:-2px;margin-right:6px` }), `rank ${rank} `, html("span", {}, `${count(s.nq)} rows`)));
  if (s.nq === 0) {
    box_.append(html("p", { class: "empty" }, "owns nothing"));
    return box_;
  }
  const scale = localScale(), width = s.nk * scale.x, height = s.nq * scale.y, root = svg("svg", { viewBox: `-10 -4 ${LOCAL_WIDTH + 14} ${px(height + 8)}`, role: "img", "aria-label": `local mask of rank ${rank}` });
  root.append(svg("rect", { x: 0, y: 0, width: px(width), height: px(height), fill: "var(--skip)" }));
  root.append(svg("path", { d: visiblePath(s, scale, columnStep(s)), fill: rankColour(rank), "shape-rendering": slice.nk <= 520 ? "crispEdges" : "auto" }));
  let at = 0;
  for (const [a, b] of held) {
    root.append(svg("path", { d: `M-8 ${px(at * scale.y)}H${px(width)}`, stroke: "var(--ink)", "stroke-width": 1, "stroke-opacity": 0.6 }));
    at += b - a;
  }
  root.append(svg("path", { class: "column-mark", "data-rank": rank, fill: "none", stroke: "var(--mark)", "stroke-width": 1.4 }));
  box_.append(root, html("figcaption", {}, `workload ${mean ? (load / mean).toFixed(3) : "1.000"} of mean; rows ${held.length > 6 ? held.slice(0, 6).map(rangeText).join(", ") + ", …" : held.map(rangeText).join(", ")}`));
  pointing(root, root, scale, width, height, (k) => setColumn(k, rank));
  return box_;
}

const rangeText = ([a, b]) => (b - a === 1 ? count(a) : `${count(a)}–${count(b - 1)}`);

const LOCAL_WIDTH = 300;
const localScale = () => scales(LOCAL_WIDTH, slice.nq, slice.nk);

// `rank`: the one whose offsets are spelled out.
function setColumn(k, rank = local.rank) {
  const key = heldKey(slice, Math.max(0, Math.min(slice.nk - 1, k)));
  if (key === local.key && rank === local.rank) return;
  local.key = key;
  local.rank = rank;
  showColumn();
}

// Global and local boundaries of one key on every rank, and how one follows from the other.
function showColumn() {
  const key = (local.key = heldKey(slice, local.key)), i = Math.floor(key / slice.stride), folded = foldCausal(slice);
  const names = VECTORS.filter((n) => folded[n]);
  for (const mark of document.querySelectorAll(".column-mark")) {
    const onRank = "rank" in mark.dataset, size = onRank ? localScale() : local.scale;
    mark.setAttribute("d", box(key * size.x, 0, Math.max(size.x, 1), (onRank ? local.slices[Number(mark.dataset.rank)].nq : slice.nq) * size.y));
  }
  const head = html("tr", {}, html("th", {}, `key ${count(key)}`), ...names.map((n) => html("th", {}, n.toUpperCase())));
  const rows = [html("tr", {}, html("th", {}, "all rows"), ...names.map((n) => html("td", {}, count(folded[n][i]))))];
  local.slices.forEach((s, rank) => rows.push(html("tr", {}, html("th", {}, html("span", { class: "swatch", style: `background:${rankColour(rank)};display:inline-block;vertical-align:-2px;margin-right:6px` }), `rank ${rank}`), ...names.map((n) => html("td", {}, count(s[n][i]))))));
  const card = byId("column"), table = html("table", { class: "numbers" }, html("thead", {}, head), html("tbody", {}, ...rows));
  card.replaceChildren(html("h4", {}, "Boundaries of one key, on all rows and on each rank"));
  if (!names.length) {
    card.append(html("p", {}, "This mask has no boundary: every rank sees all keys."));
    return;
  }
  const name = names.find((n) => folded[n][i] > 0 && folded[n][i] < slice.nq) || names[0], rank = Math.min(local.rank, local.world - 1), part = local.maps[rank].parts(folded[name][i]);
  card.append(table, html("p", { class: "quiet" }, `${name.toUpperCase()} on rank ${rank}: ${part.chunk < local.owner.length ? `${count(part.x)} lies in chunk ${part.chunk}, which begins at ${count(part.edge)}` : `${count(part.x)} is the end of all chunks`}; the rank has ${count(part.before)} rows before it and ${part.own ? "owns it" : "does not own it"}, so L = ${count(part.before)} + ${part.own} × (${count(part.x)} − ${count(part.edge)}) = ${count(part.result)}.${slice.causal ? " The free triangle q < k became a vector first, for rows have new numbers." : ""}`));
}
