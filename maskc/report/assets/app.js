"use strict";
// The page: which mask is shown, and what keys and controls do.

function openCase(number) {
  state.number = (number + page.cases.length) % page.cases.length;
  current = page.cases[state.number];
  byId("pick").value = String(state.number);
  byId("name").textContent = current.name;
  const slices = current.slices.map((s, i) => [String(i), `item ${s.item}, head ${s.head}`]);
  const rest = current.batch * current.heads - slices.length;
  byId("slice-label").hidden = slices.length < 2;
  byId("slice-label").title = rest ? `${rest} more are counted but not drawn` : "";
  options(byId("slice"), slices, "0");
  options(byId("tile"), Object.keys(current.tiles).map((t) => [t, t.replace("x", " × ")]), current.tile);
  showWords();
  openSliceOf(0);
  openBalance();
  openTime();
  history.replaceState(null, "", `#m=${encodeURIComponent(current.name)}`);
}

function openSliceOf(number) {
  state.slice = number;
  slice = openSlice(current, number);
  state.cell = [Math.floor(slice.nq * 0.6), heldKey(slice, Math.floor(slice.nk * 0.55))]; // an example to begin with
  local.key = null;
  showLegend();
  chooseTile();
  openLocal();
}

function chooseTile() {
  state.tile = byId("tile").value.split("x").map(Number);
  state.block = Math.floor((Math.ceil(slice.nq / state.tile[0]) - 1) / 2);
  showMask();
  showCounts();
  selectBlock(state.block, false);
  showCell();
}

function showWords() {
  const shape = `${count(current.nq)} rows × ${count(current.nk)} keys${current.batch > 1 ? `, batch ${current.batch}` : ""}${current.heads > 1 ? `, ${current.heads} mask heads` : ""}`;
  const cells = current.nq * current.nk * current.batch * current.heads;
  byId("summary").textContent = `${current.verdict}; ${shape}; ${percent(current.visible / Math.max(1, cells))} of the cells are visible${current.slices[0].stride > 1 ? `; this page holds one key in ${current.slices[0].stride}` : ""}`;
  const indented = (line) => html("li", { style: `padding-left:${1.4 + 0.6 * (line.length - line.trimStart().length)}em;text-indent:-1.4em` }, line.trimStart());
  byId("rows").replaceChildren(...current.rows.map(indented));
  byId("needs").replaceChildren(...(current.needs.length ? [html("h3", {}, "Where the data"), html("ul", { class: "words" }, ...current.needs.map((line) => html("li", {}, line)))] : []));
  const facts = [...Object.entries(current.words).map(([n, t]) => [n === "causal" ? "causal flag" : n, t]), ...current.properties];
  byId("facts").replaceChildren(...facts.flatMap(([name, text]) => [html("dt", {}, name), html("dd", {}, text)]));
}

function showCounts() {
  const numbers = current.tiles[byId("tile").value], total = numbers.reduce((a, b) => a + b, 0), cells = current.nq * current.nk * current.batch * current.heads;
  const row = (name, value, share) => html("tr", {}, html("th", {}, name), html("td", {}, value), html("td", {}, share));
  byId("counts").replaceChildren(
    row("visible cells", count(current.visible), percent(current.visible / Math.max(1, cells))),
    row("tiles", count(total), ""),
    ...[UNMASKED, PARTIAL, SKIP].map((c) => row(html("span", { class: `chip ${CLASS_NAMES[c]}` }, CLASS_NAMES[c]), count(numbers[c]), percent(numbers[c] / Math.max(1, total)))),
  );
}

function showLegend() {
  const item = (fill, text) => html("li", {}, html("span", { class: "swatch", style: `background:${fill}` }), text);
  byId("mask-legend").replaceChildren(
    item("var(--unmasked)", "UNMASKED tile"),
    item("var(--partial)", "PARTIAL tile: visible"),
    item("var(--partial-tint)", "PARTIAL tile: masked"),
    item("var(--skip)", "SKIP tile"),
    ...(stripSets().length ? [item("linear-gradient(90deg, var(--strip-a) 50%, var(--strip-b) 50%)", `${stripSets().map(([name]) => name).join(", then ")} (strips beside the axes)`)] : []),
  );
}

// Drawings are as wide as the page: draw them again once it has another width.
let drawnWidth = 0, waiting = 0;
function resized() {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    if (drawnWidth === document.body.clientWidth) return;
    drawnWidth = document.body.clientWidth;
    showMask();
    if (Object.keys(current.local).length) showLocal();
    openBalance();
    openTime();
  }, 120);
}

function keys(event) {
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "[" || event.key === "]") openCase(state.number + (event.key === "]" ? 1 : -1));
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const onMask = byId("matrix").contains(event.target), onGlobal = byId("global").contains(event.target);
  if (event.key in moves && (onMask || onGlobal)) {
    event.preventDefault();
    const [dq, dk] = moves[event.key], coarse = Math.max(1, Math.round(Math.max(slice.nq, slice.nk) / 300));
    const by = (size, held) => (event.shiftKey ? size : Math.max(coarse, held));
    if (onGlobal) setColumn(local.key + dk * by(state.tile[1], slice.stride));
    else {
      const [q, k] = state.cell;
      setCell(q + dq * by(state.tile[0], 1), k + dk * by(state.tile[1], slice.stride));
    }
  }
  if ((event.key === "Enter" || event.key === " ") && onMask) {
    event.preventDefault();
    selectBlock(Math.floor(state.cell[0] / state.tile[0]));
  }
}

function start() {
  page = JSON.parse(byId("data").textContent);
  const groups = [...new Set(page.cases.map((c) => c.group))];
  byId("pick").append(...groups.map((g) => html("optgroup", { label: g === "standard" ? "standard masks" : "your masks" }, ...page.cases.flatMap((c, i) => (c.group === g ? [html("option", { value: String(i) }, c.name)] : [])))));
  byId("pick").onchange = () => openCase(Number(byId("pick").value));
  byId("previous").onclick = () => openCase(state.number - 1);
  byId("next").onclick = () => openCase(state.number + 1);
  byId("slice").onchange = () => openSliceOf(Number(byId("slice").value));
  byId("tile").onchange = chooseTile;
  byId("q-block").onchange = () => selectBlock(Number(byId("q-block").value));
  byId("local-ranks").onchange = planLocal;
  byId("local-reset").onclick = planLocal;
  byId("plan-ranks").onchange = chooseChunks;
  byId("plan-chunks").onchange = showBalance;
  for (const id of ["time-rank", "prune", "hierarchical"]) byId(id).onchange = showTime;
  document.addEventListener("keydown", keys);
  addEventListener("resize", resized);
  drawnWidth = document.body.clientWidth;
  const asked = decodeURIComponent(location.hash.replace("#m=", "")), found = page.cases.findIndex((c) => c.name === asked);
  openCase(found >= 0 ? found : 0);
}

start();
