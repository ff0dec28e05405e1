"use strict";
// A modelled time line of the forward pass of one rank.

const micro = (seconds) => (seconds > 0 && seconds < 1e-8 ? "under 0.01 µs" : seconds >= 1e-3 ? `${(seconds * 1e3).toPrecision(3)} ms` : `${(seconds * 1e6).toPrecision(3)} µs`);
const mib = (bytes) => (bytes >= 1 << 30 ? `${(bytes / (1 << 30)).toFixed(2)} GiB` : bytes >= 1 << 20 ? `${(bytes / (1 << 20)).toFixed(1)} MiB` : `${(bytes / 1024).toFixed(0)} KiB`);

function openTime() {
  const section = byId("exchange"), c = current.comm;
  section.querySelector(".empty")?.remove();
  for (const part of [...section.children].slice(1)) part.hidden = !c;
  if (!c) {
    section.append(html("p", { class: "empty" }, current.plan ? "Too few rows to share among 8 ranks." : "The standard masks have their time lines on the page of `maskc explain --gallery --html FILE`."));
    return;
  }
  byId("exchange-lead").textContent = `${c.nodes} nodes of ${c.world / c.nodes} GPUs, ${count(current.plan.nq)} rows, the planner’s assignment (${c.method}). A rank computes on its own keys first, then on each chunk of keys as it arrives. Numbers are chunks, colours the ranks that own them.`;
  const m = c.machine;
  byId("model-words").textContent = `A model, not a measurement: attention at ${m.tflops} TFLOP/s (PARTIAL tiles at 1.3 times the cost), ${m.heads} heads of ${m.head_dim} over ${m.heads_kv} key heads in 16 bits, NVLink ${m.intra / 1e9} GB/s into a GPU, network ${m.inter / 1e9} GB/s into a node, ${m.latency * 1e6} µs before a transfer begins; only the receiving link is contended. Which chunks travel is the planner’s own list.`;
  const rank = byId("time-rank"), kept = rank.value;
  options(rank, [...Array(c.world).keys()].map((r) => [String(r), `${r} (node ${Math.floor(r / (c.world / c.nodes))})`]), kept && Number(kept) < c.world ? kept : "0");
  showTime();
}

function showTime() {
  const c = current.comm, rank = Number(byId("time-rank").value), prune = byId("prune").checked, hierarchical = byId("hierarchical").checked;
  const every = [[true, true], [true, false], [false, true], [false, false]].map(([p, h]) => ({ p, h, ranks: simulate(c, p, h) }));
  const all = every.find((e) => e.p === prune && e.h === hierarchical).ranks;
  const span = Math.max(...all.map((r) => r.end)) * 1.02;
  drawTime(c, all[rank], rank, span);
  const bounds = decodeRuns(c.keys.bounds), size = c.world / c.nodes;
  const bytes = (moves) => moves.reduce((sum, m) => sum + (bounds[m.chunk + 1] - bounds[m.chunk]) * c.bytes_per_row, 0);
  const rows = every.map((e) => {
    const moves = exchange(c, e.p, e.h).flat(), far = moves.filter((m) => Math.floor(m.src / size) !== Math.floor(m.dst / size));
    const step = Math.max(...e.ranks.map((r) => r.end)), busy = Math.max(...e.ranks.map((r) => r.work.reduce((s, w) => s + w.end - w.start, 0)));
    return html("tr", e.p === prune && e.h === hierarchical ? { class: "on" } : {}, html("th", {}, `${e.p ? "pruned" : "everything"}, ${e.h ? "hierarchical" : "flat"}`), html("td", {}, mib(bytes(far))), html("td", {}, mib(bytes(moves) - bytes(far))), html("td", {}, micro(busy)), html("td", {}, micro(step)));
  });
  byId("time-table").replaceChildren(html("thead", {}, html("tr", {}, ...["exchange", "between nodes", "inside nodes", "compute of the fullest rank", "step, all ranks"].map((t) => html("th", {}, t)))), html("tbody", {}, ...rows));
}

function drawTime(c, r, rank, span) {
  const W = room(byId("timeline")), L = 92, lanes = ["compute", "NVLink in", "network in"], step = 46, H = lanes.length * step, x = (t) => px(L + ((W - L - 10) * t) / span);
  const root = svg("svg", { viewBox: `0 -26 ${W} ${H + 34}`, role: "img", "aria-label": `time line of rank ${rank}` });
  lanes.forEach((name, i) => root.append(svg("text", { x: 0, y: i * step + 27 }, name), svg("path", { d: `M${L} ${(i + 1) * step - 3}H${W}`, stroke: "var(--line)" })));
  const marks = W < 600 ? 2 : 4;
  for (let i = 0; i <= marks; i++) root.append(svg("text", { x: x((span * i) / marks), y: -10, "text-anchor": i === 0 ? "start" : i === marks ? "end" : "middle", class: "quiet" }, i ? micro((span * i) / marks) : "0"), svg("path", { d: `M${x((span * i) / marks)} -4V${H}`, stroke: "var(--line)", "stroke-opacity": 0.6 }));
  const keyOwner = decodeOwner(c.keys.owner);
  const bar = (lane, start, end, chunk, title, cls) => {
    const a = x(start), w = Math.max(1.2, px(x(end) - a - 0.8)), y = lane * step + 6;
    root.append(svg("rect", { x: a, y, width: w, height: step - 16, fill: rankColour(keyOwner[chunk]), class: cls }, svg("title", {}, title)));
    if (w > 20) root.append(svg("text", { x: px(a + w / 2), y: y + 20, "text-anchor": "middle", style: "fill:#111;font-size:12px" }, String(chunk)));
  };
  for (const w of r.work) bar(0, w.start, w.end, w.chunk, `attends to keys of chunk ${w.chunk} (${w.own ? "own" : `rank ${keyOwner[w.chunk]}`}): ${micro(w.end - w.start)}`, "compute");
  for (const t of r.transfers) bar(t.link === "NVLink" ? 1 : 2, t.start, t.end, t.chunk, `K and V of chunk ${t.chunk} from rank ${t.src}: ${micro(t.start)} to ${micro(t.end)}`, "transfer");
  root.append(svg("path", { d: `M${x(r.end)} -4V${H}`, stroke: "var(--mark)", "stroke-width": 1.6 }));
  const right = x(r.end) > W - 200;
  root.append(svg("text", { x: x(r.end) + (right ? -6 : 6), y: H - 18, "text-anchor": right ? "end" : "start", style: "fill:var(--mark);font-weight:600" }, `done after ${micro(r.end)}`));
  byId("timeline").replaceChildren(root);
}
