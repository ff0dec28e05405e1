"use strict";
// Balance: chunks to ranks, as the planner did it, stage by stage.

const STAGES = {
  contiguous: "Each rank takes κ neighbouring chunks.",
  "dual chunk": "Zigzag: each rank takes one piece from the front and its mirror image from the back.",
  heap: "Chunks in order, each to the least loaded rank that has a free slot.",
  LPT: "Heaviest chunk first, each to the least loaded rank that has a free slot.",
  "stage 1": "Stage 1 of HCC-IPO: from LPT, exact repartition of rank pairs, then exact covers over several ranks.",
  "stage 2": "Stage 2: chunks are swapped one for one between nodes while less crosses between them and loads stay in the band.",
  "stage 3": "Stage 3: stage 1 again inside each node; what crosses between nodes stays as it is.",
  "node first": "The other way: neighbouring chunks per node, evened out, then stage 3. Of these ways the planner keeps the cheapest by its model of compute and links.",
};
const balanceState = { way: "stage 1" };

function openBalance() {
  const section = byId("balance"), p = current.plan, keys = p ? Object.keys(p.options) : [];
  section.querySelector(".empty")?.remove();
  for (const part of [...section.children].slice(1)) part.hidden = keys.length === 0;
  if (!keys.length) {
    section.append(html("p", { class: "empty" }, p ? `Too few rows for chunks to balance: ${p.nq}.` : "The standard masks are balanced on the page of `maskc explain --gallery --html FILE`; this page has plans for your own masks."));
    return;
  }
  byId("balance-lead").textContent = `The planner’s own results for this mask at ${count(p.nq)} rows. Workload: tiles of a chunk’s rows, a PARTIAL tile counting 1.3 UNMASKED ones. Every rank gets at most κ chunks; the step takes as long as the fullest rank.`;
  const worlds = [...new Set(keys.map((k) => k.split(",")[0]))], chosen = byId("plan-ranks").value;
  options(byId("plan-ranks"), worlds.map((w) => [w, w]), worlds.includes(chosen) ? chosen : worlds.includes("8") ? "8" : worlds[worlds.length - 1]);
  chooseChunks();
}

function chooseChunks() {
  const world = byId("plan-ranks").value, before = byId("plan-chunks").value;
  const kappas = Object.keys(current.plan.options).filter((k) => k.split(",")[0] === world).map((k) => k.split(",")[1]);
  options(byId("plan-chunks"), kappas.map((k) => [k, k]), kappas.includes(before) ? before : kappas.includes("4") ? "4" : kappas[0]);
  showBalance();
}

function rankLoads(option, way, world) {
  const out = new Array(world).fill(0);
  decodeOwner(option.ways[way].owner).forEach((r, c) => (out[r] += option.loads[c]));
  return out;
}

function showBalance() {
  const world = Number(byId("plan-ranks").value), option = current.plan.options[`${world},${byId("plan-chunks").value}`];
  if (!(balanceState.way in option.ways)) balanceState.way = "stage 1";
  const group = byId("ways");
  group.replaceChildren(group.firstElementChild, ...Object.keys(option.ways).map((name) => {
    const b = html("button", { "aria-pressed": String(name === balanceState.way), "data-way": name }, name);
    b.onclick = () => {
      balanceState.way = name;
      showBalance();
      byId("ways").querySelector("[aria-pressed=true]").focus();
    };
    return b;
  }));
  byId("stage-words").textContent = STAGES[balanceState.way];
  const owner = decodeOwner(option.ways[balanceState.way].owner), loads = rankLoads(option, balanceState.way, world);
  drawLoads(option, owner);
  drawBars(option, owner, loads, world);
  const inflow = (w) => (w.inflow === null || option.nodes < 2 ? "–" : count(Math.max(...w.inflow)));
  const body = Object.entries(option.ways).map(([name, w]) => {
    const each = rankLoads(option, name, world), peak = Math.max(...each), mean = each.reduce((a, b) => a + b, 0) / world;
    return html("tr", name === balanceState.way ? { class: "on" } : {}, html("th", {}, name), html("td", {}, mean ? (peak / mean).toFixed(4) : "1.0000"), html("td", {}, count(peak)), html("td", {}, option.lower ? `${((peak / option.lower - 1) * 100).toFixed(2)} %` : "–"), html("td", {}, inflow(w)));
  });
  byId("ways-table").replaceChildren(html("thead", {}, html("tr", {}, ...["assignment", "peak / average", "makespan", "above lower bound", option.nodes > 1 ? `rows entering the fuller of ${option.nodes} nodes` : "rows between nodes (one node)"].map((t) => html("th", {}, t)))), html("tbody", {}, ...body));
}

function drawLoads(option, owner) {
  const n = option.loads.length, W = room(byId("loads")), H = 110, top = Math.max(1, ...option.loads), w = W / n, root = svg("svg", { viewBox: `0 -4 ${W} ${H + 26}`, role: "img", "aria-label": "workload of each chunk" });
  option.loads.forEach((load, c) => {
    const h = (H * load) / top;
    root.append(svg("rect", { x: px(c * w + Math.min(1, w / 8)), y: px(H - h), width: px(w - Math.min(2, w / 4)), height: px(h), fill: rankColour(owner[c]) }, svg("title", {}, `chunk ${c}: workload ${count(load)}, rank ${owner[c]}`)));
    if (w >= 19) root.append(svg("text", { x: px(c * w + w / 2), y: H + 16, "text-anchor": "middle", class: "quiet" }, String(c)));
  });
  if (w < 19) root.append(svg("text", { x: 0, y: H + 16, class: "quiet" }, `chunk 0 to ${n - 1}, ${count(option.chunk)} rows each`));
  root.append(svg("path", { d: `M0 ${H}H${W}`, stroke: "var(--line)" }));
  byId("loads").replaceChildren(root);
}

function drawBars(option, owner, loads, world) {
  const W = room(byId("bars")), L = 62, R = 58, step = world > 8 ? 23 : 32, H = step * world, mean = loads.reduce((a, b) => a + b, 0) / world;
  const top = Math.max(1, ...loads, option.lower) * 1.02, x = (load) => px(L + ((W - L - R) * load) / top);
  const root = svg("svg", { viewBox: `0 -46 ${W} ${H + 52}`, role: "img", "aria-label": "workload of each rank" });
  for (let r = 0; r < world; r++) {
    let at = 0;
    const y = r * step + 3;
    root.append(svg("text", { x: L - 10, y: y + step / 2 + 1, "text-anchor": "end" }, `rank ${r}`));
    owner.forEach((o, c) => {
      if (o !== r) return;
      const a = x(at), b = x(at + option.loads[c]);
      root.append(svg("rect", { x: a, y, width: Math.max(0, px(b - a - 1)), height: step - 6, fill: rankColour(r), class: "segment" }, svg("title", {}, `rank ${r}, chunk ${c}: ${count(option.loads[c])}`)));
      if (b - a > 22) root.append(svg("text", { x: px((a + b) / 2), y: y + step / 2 + 1, "text-anchor": "middle", style: "fill:#111;font-size:12px" }, String(c)));
      at += option.loads[c];
    });
    root.append(svg("text", { x: W, y: y + step / 2 + 1, "text-anchor": "end", style: "font-variant-numeric:tabular-nums" }, mean ? (at / mean).toFixed(3) : ""));
    if (option.nodes > 1 && r > 0 && r % (world / option.nodes) === 0) root.append(svg("path", { d: `M0 ${r * step}H${W}`, stroke: "var(--line)" }));
  }
  const line = (load, text, y, dash) => {
    root.append(svg("path", { d: `M${x(load)} ${y + 4}V${H}`, stroke: "var(--ink)", "stroke-width": 1.4, "stroke-dasharray": dash }));
    root.append(svg("text", { x: x(load) + (x(load) > W - 300 ? -6 : 6), y: y + 8, "text-anchor": x(load) > W - 300 ? "end" : "start", class: "quiet over" }, text));
  };
  line(mean, `average ${count(Math.round(mean))}`, -42, "");
  line(option.lower, `lower bound ${count(option.lower)}${option.proven > option.lower && W > 600 ? `, proven ${count(option.proven)}` : ""}`, -22, "5 3");
  byId("bars").replaceChildren(root);
}
