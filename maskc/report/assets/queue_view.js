"use strict";
// One row of tiles as the three roles of the kernel see it.

const ROLES = [
  ["KV Index Generator", "classifies, right to left"],
  ["KV Loader", "loads K and V of queued blocks"],
  ["MMA Consumer", "S = QKᵀ, mask, softmax, PV"],
];
const COLUMNS = 60;

function selectBlock(i, focus = true) {
  const last = Math.ceil(slice.nq / state.tile[0]) - 1;
  state.block = Math.max(0, Math.min(last, i));
  showBand();
  showQueue();
  if (focus) byId("queue").dataset.shown = String(state.block);
}

// Neighbours that are treated alike become one entry once there are too many to draw.
function entries() {
  const [bq, bkv] = state.tile, single = rowOfTiles(slice, state.block, bq, bkv).map((t) => ({ ...t, last: t.block, tests: t.cls === PARTIAL ? tileTests(slice, state.block, t.block, bq, bkv) : [] }));
  if (single.length <= COLUMNS) return single;
  const out = [];
  for (const t of single) {
    const end = out[out.length - 1];
    if (end && end.cls === t.cls && end.tests.join() === t.tests.join()) end.last = t.block;
    else out.push({ ...t });
  }
  return out;
}

function showQueue() {
  const all = entries(), shown = all.slice(0, COLUMNS), narrow = room(byId("roles")) < 600, W = shown.some((t) => t.last !== t.block) ? 134 : 78, LEFT = narrow ? 96 : 236, H = 64, root = svg("svg", {});
  const [bq, bkv] = state.tile, r0 = state.block * bq, r1 = Math.min(slice.nq, r0 + bq), queued = shown.filter((t) => t.cls !== SKIP);
  const width = LEFT + W * (shown.length + 2) + 10, height = 3 * H + 46;
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `queue of Q block ${state.block}` })) root.setAttribute(name, value);
  root.append(svg("text", { x: LEFT, y: 16, class: "quiet" }, narrow ? "right to left →" : "KV blocks from right to left: time runs this way →"));
  ROLES.forEach(([role, duty], lane) => {
    const y = 34 + lane * H;
    root.append(svg("path", { d: `M0 ${y - 4}H${width}`, stroke: "var(--line)" }));
    root.append(...(narrow ? narrowRole(role, y) : [svg("text", { x: 0, y: y + 23, style: "font-weight:620;font-size:15px" }, role), svg("text", { x: 0, y: y + 42, class: "quiet" }, duty)]));
  });
  root.append(svg("path", { d: `M0 ${34 + 3 * H - 4}H${width}`, stroke: "var(--line)" }));
  let ready = 0; // a block is loaded after it is queued, and used after it is loaded
  shown.forEach((t, n) => {
    const title = svg("title", {}, `KV block ${blockName(t)}: ${CLASS_NAMES[t.cls]}${t.tests.length ? `, tests ${t.tests.join(", ")}` : ""}`);
    root.append(entry(LEFT + W * n, 34, W, H, t, blockName(t), t.cls === SKIP ? "SKIP" : CLASS_NAMES[t.cls], title));
    if (t.cls === SKIP) return;
    const load = Math.max(ready, n + 1);
    ready = load + 1;
    root.append(entry(LEFT + W * load, 34 + H, W, H, t, `K, V ${blockName(t)}`, t.cls === PARTIAL ? "and bounds" : "", title.cloneNode(true)));
    root.append(entry(LEFT + W * (load + 1), 34 + 2 * H, W, H, t, `S ${blockName(t)}`, t.cls === PARTIAL ? maskNote(t.tests) : "no test", title.cloneNode(true)));
  });
  byId("roles").replaceChildren(root);
  const last = Math.ceil(slice.nq / bq) - 1, input = byId("q-block");
  input.max = String(last);
  input.value = String(state.block);
  byId("q-block-rows").textContent = `of 0 to ${count(last)}: rows ${count(r0)} to ${count(r1 - 1)}`;
  const tally = [0, 0, 0];
  rowOfTiles(slice, state.block, bq, bkv).forEach((t) => tally[t.cls]++);
  const rest = all.length > shown.length ? ` The first ${shown.length} of ${all.length} runs are drawn.` : "";
  const empty = queued.length ? "" : " The queue is empty: the output of these rows is 0, their lse is −∞.";
  byId("queue-words").textContent = `${count(tally[UNMASKED])} UNMASKED and ${count(tally[PARTIAL])} PARTIAL blocks are queued, ${count(tally[SKIP])} SKIP blocks are dropped.${empty}${rest} Widths are not times.`;
}

const narrowRole = (role, y) => [role.slice(0, role.lastIndexOf(" ")), role.slice(role.lastIndexOf(" "))].map((text, i) => svg("text", { x: 0, y: y + 22 + 17 * i, style: "font-weight:620" }, text));
const maskNote = (tests) => (tests.join(" ").length <= 11 ? `test ${tests.join(" ")}` : "row mask");
const blockName = (t) => (t.last === t.block ? count(t.block) : `${count(t.block)}–${count(t.last)}`);

function entry(x, y, w, h, t, text, note, title) {
  const fill = ["none", "var(--partial)", "var(--unmasked)"][t.cls], g = svg("g", { class: `entry ${CLASS_NAMES[t.cls]}` }, title);
  const ink = ["var(--quiet)", "var(--partial-ink)", "var(--chip-ink)"][t.cls];
  g.append(svg("rect", { x: x + 2, y: y + 5, width: w - 4, height: h - 18, rx: 5, fill, stroke: t.cls === SKIP ? "var(--line)" : "none", "stroke-dasharray": "3 3" }));
  g.append(svg("text", { x: x + w / 2, y: y + (note ? 24 : 32), "text-anchor": "middle", style: `fill:${ink};font-weight:600;font-size:13px` }, text));
  if (note) g.append(svg("text", { x: x + w / 2, y: y + 41, "text-anchor": "middle", style: `fill:${ink};font-size:${note.length > 11 ? 10.5 : 12}px` }, note));
  return g;
}
