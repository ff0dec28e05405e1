"use strict";
// Who sends which key chunk to whom, and a model of how long that takes. Moves are the planner's (all-gather); times are
// a model: fixed rates, receivers' links alone are contended, compute runs at one rate.

// Phases of moves { src, dst, chunk }: straight from the owners, or into each node once and on from there.
function exchange(c, prune, hierarchical) {
  const rows = decodeOwner(c.rows.owner), keys = decodeOwner(c.keys.owner), size = c.world / c.nodes;
  const wanted = Array.from({ length: c.world }, () => new Set());
  if (prune) rows.forEach((rank, i) => c.need[i].forEach((j) => wanted[rank].add(j)));
  else wanted.forEach((set) => keys.forEach((_, j) => set.add(j)));
  const across = new Map(), inside = new Map();
  const add = (phase, src, dst, chunk) => phase.set(`${src},${dst},${chunk}`, { src, dst, chunk });
  wanted.forEach((chunks, rank) => {
    for (const chunk of chunks) {
      const owner = keys[chunk], node = Math.floor(rank / size), home = Math.floor(owner / size);
      if (!hierarchical) {
        if (owner !== rank) add(across, owner, rank, chunk);
        continue;
      }
      const holder = home === node ? owner : node * size + (owner % size);
      if (holder !== owner) add(across, owner, holder, chunk);
      if (holder !== rank) add(inside, holder, rank, chunk);
    }
  });
  const sorted = (phase) => [...phase.values()].sort((a, b) => a.src - b.src || a.dst - b.dst || a.chunk - b.chunk);
  return [sorted(across), sorted(inside)].filter((phase) => phase.length > 0);
}

// Forward pass of every rank: { transfers: [{ src, chunk, link, start, end }], work: [{ chunk, own, start, end }], end }.
// link: "network" (one into each node, shared by its ranks) or "NVLink" (one into each rank).
function simulate(c, prune, hierarchical) {
  const keyOwner = decodeOwner(c.keys.owner), bounds = decodeRuns(c.keys.bounds), size = c.world / c.nodes;
  const node = (r) => Math.floor(r / size), bytes = (j) => (bounds[j + 1] - bounds[j]) * c.bytes_per_row;
  const network = new Array(c.nodes).fill(0), nvlink = new Array(c.world).fill(0);
  const held = Array.from({ length: c.world }, () => new Map());
  keyOwner.forEach((r, j) => held[r].set(j, 0));
  const out = Array.from({ length: c.world }, () => ({ transfers: [], work: [], end: 0 }));
  const distance = (m) => (m.dst - m.src + c.world) % c.world;
  for (const phase of exchange(c, prune, hierarchical)) {
    const ready = (m) => held[m.src].get(m.chunk);
    const order = [...phase].sort((a, b) => ready(a) - ready(b) || distance(a) - distance(b) || a.dst - b.dst || a.chunk - b.chunk);
    const known = new Map(order.map((m) => [m, ready(m)]));
    for (const m of order) {
      const far = node(m.src) !== node(m.dst), links = far ? network : nvlink, at = far ? node(m.dst) : m.dst;
      const start = Math.max(links[at], known.get(m) + c.machine.latency);
      const end = start + bytes(m.chunk) / (far ? c.machine.inter : c.machine.intra);
      links[at] = end;
      held[m.dst].set(m.chunk, end);
      out[m.dst].transfers.push({ src: m.src, chunk: m.chunk, link: far ? "network" : "NVLink", start, end });
    }
  }
  const rowOwner = decodeOwner(c.rows.owner), work = c.work.map(decodeRuns);
  out.forEach((rank, r) => {
    const chunks = [...held[r].entries()].sort((a, b) => a[1] - b[1] || a[0] - b[0]);
    for (const [chunk, arrival] of chunks) {
      let cost = 0;
      rowOwner.forEach((o, i) => (cost += o === r ? work[i][chunk] : 0));
      if (cost === 0) continue;
      const start = Math.max(rank.end, arrival);
      rank.end = start + cost * c.seconds_per_cost;
      rank.work.push({ chunk, own: keyOwner[chunk] === r, start, end: rank.end });
    }
    rank.end = Math.max(rank.end, ...rank.transfers.map((t) => t.end), 0);
  });
  return out;
}
