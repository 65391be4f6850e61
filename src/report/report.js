'use strict';
const report = JSON.parse(document.getElementById('data').textContent);
const { program, documents, corpus } = report;
const main = document.getElementById('main');
const slider = document.getElementById('penalty');
const choose = document.getElementById('choose');
// Of each document the cuts at the slider's penalty; those of the report where it has not moved.
let cuts = documents.map((d) => d.cuts);
let shown = -1;
// Whether the slider has been moved: it rounds to its steps, the report's own penalty need not lie on one.
let moved = false;
const penalty = () => (moved ? Number(slider.value) : program.penalty);

// ---- the dynamic program: that of the library, term for term ----

const UNIT = 4294967296;
// Rounds a term to a multiple of 2^-32, halves upwards.
const fixed = (term) => Math.floor(term * UNIT + 0.5);

// D(b, l) off a curve that was kept at the program's knots and at its last token.
function damage(curve, scored, len) {
  const last = curve[curve.length - 1];
  if (len >= scored) return last * Math.sqrt(len / scored);
  const at = program.knots;
  let i = 0;
  while (i < at.length && at[i] <= len) i += 1;
  const regular = at[curve.length - 1] === scored ? curve.length : curve.length - 1;
  const x0 = i === 0 ? 0 : at[i - 1];
  const y0 = i === 0 ? 0 : curve[i - 1];
  if (i < regular) return y0 + (curve[i] - y0) * ((len - x0) / (at[i] - x0));
  return y0 + (last - y0) * ((len - x0) / (scored - x0));
}

function solve(page, price) {
  const { token, utility, curve, scored, kind } = page.edges;
  const at = [0, ...token, page.tokens];
  const end = at.length - 1;
  const { target, min, max, length_weight: weight } = program;
  const length = (len) => { const ratio = (len - target) / target; return fixed(weight * (ratio * ratio)); };
  const lengths = new Float64Array(Math.min(max, page.tokens) + 1).map((_, len) => length(len));
  const over = new Float64Array(end + 1), under = new Float64Array(end + 1), fallback = new Float64Array(end + 1);
  const value = new Float64Array(end + 1), count = new Float64Array(end + 1), next = new Int32Array(end + 1);
  // Floats of 32 bits come as decimals: this gives them back.
  const curves = program.damage ? curve.map((c) => Float32Array.from(c)) : [];
  for (let node = end - 1; node >= 0; node -= 1) {
    const edge = node - 1;
    const candidate = node > 0 && kind[edge] !== 'fallback';
    let best = null;
    for (let to = node + 1; to <= end; to += 1) {
      const len = at[to] - at[node];
      if (to > node + 1 && len > max) break;
      const o = over[to] + Math.max(0, len - max);
      const u = under[to] + Math.max(0, min - len);
      if (best && (o > best.o || (o === best.o && u > best.u))) continue;
      let v = value[to] + (len < lengths.length ? lengths[len] : length(len));
      if (node > 0) {
        let worth = 0;
        if (candidate) worth = program.damage ? -damage(curves[edge], scored[edge], len) : utility[edge];
        v -= fixed(worth - (program.damage ? -price : price));
      }
      const f = fallback[to], c = count[to];
      const better = !best || o < best.o || (o === best.o && (u < best.u || (u === best.u &&
        (f < best.f || (f === best.f && (v < best.v || (v === best.v && c < best.c)))))));
      if (better) best = { o, u, f, v, c, to };
    }
    over[node] = best.o; under[node] = best.u; value[node] = best.v; next[node] = best.to;
    fallback[node] = best.f + (node > 0 && !candidate ? 1 : 0);
    count[node] = best.c + (node > 0 ? 1 : 0);
  }
  const found = [];
  for (let node = next[0]; node < end; node = next[node]) found.push(node - 1);
  return found;
}

// ---- drawing ----

const el = (name, properties = {}, ...children) => {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
};
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const unit = () => (program && program.damage ? ' nats' : '');
const starts = (page, chosen) => [0, ...chosen.map((c) => page.edges.token[c])];
const chunkTokens = (page, chosen) => starts(page, chosen).map((s, i, all) => (all[i + 1] ?? page.tokens) - s);

// A canvas of so many rows of pixels, drawn when it comes into sight, and again when the page's width or colours change.
let redraws = [];
function canvas(height, draw, label) {
  const node = el('canvas', { className: 'chart', role: 'img', ariaLabel: label });
  let inSight = false;
  const paint = () => {
    if (!inSight) return;
    const width = node.clientWidth || main.clientWidth, scale = window.devicePixelRatio || 1;
    node.width = width * scale; node.height = height * scale; node.style.height = `${height}px`;
    const c = node.getContext('2d');
    c.scale(scale, scale);
    c.font = '11px system-ui, sans-serif';
    draw(c, width, height);
  };
  node.style.height = `${height}px`;
  new IntersectionObserver((entries) => { inSight = entries.some((e) => e.isIntersecting); paint(); }, { rootMargin: '400px' }).observe(node);
  redraws.push(paint);
  return node;
}
const redraw = () => redraws.forEach((paint) => paint());
window.addEventListener('resize', redraw);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);

// Bars of counts in bins, one or two series over the same bins, with the ends of the axis.
function histogram(series, label, digits) {
  const all = series.flatMap((s) => s.values);
  if (all.length === 0) return el('p', { className: 'note', textContent: 'nothing to show' });
  let low = Infinity, high = -Infinity;
  for (const v of all) { low = Math.min(low, v); high = Math.max(high, v); }
  const bins = 40, span = high - low || 1;
  const counted = series.map((s) => {
    const counts = new Array(bins).fill(0);
    for (const v of s.values) counts[Math.min(bins - 1, Math.floor(((v - low) / span) * bins))] += 1;
    return counts;
  });
  return canvas(140, (c, width, height) => {
    const room = height - 18;
    counted.forEach((counts, i) => {
      // Each series to its own highest bar.
      const top = Math.max(...counts, 1);
      c.fillStyle = colour(series[i].colour);
      c.globalAlpha = i === 0 ? 0.85 : 0.7;
      counts.forEach((n, bin) => {
        const h = n === 0 ? 0 : Math.max(1, (n / top) * (room - 4));
        const w = width / bins, inset = i === 0 ? 0.5 : w * 0.3;
        c.fillRect(bin * w + inset, room - h, w - 2 * inset, h);
      });
    });
    c.globalAlpha = 1;
    c.fillStyle = colour('--soft');
    c.fillText(low.toFixed(digits), 4, height - 5);
    c.textAlign = 'right';
    c.fillText(high.toFixed(digits), width - 4, height - 5);
  }, label);
}

const key = (...entries) => el('div', { className: 'key' }, ...entries.map(([name, text]) => {
  const mark = el('i');
  mark.style.background = `var(${name})`;
  return el('span', {}, mark, text);
}));

function sweepChart() {
  const rows = corpus.sweep;
  const node = canvas(160, (c, width, height) => {
    const room = height - 18, top = Math.max(...rows.map((r) => r[1]), 1);
    const [first, last] = [rows[0][0], rows[rows.length - 1][0]];
    const x = (p) => 6 + ((p - first) / (last - first || 1)) * (width - 12);
    const y = (n) => room - (n / top) * (room - 10);
    c.strokeStyle = colour('--curve');
    c.lineWidth = 2;
    c.beginPath();
    rows.forEach(([p, n], i) => (i === 0 ? c.moveTo(x(p), y(n)) : c.lineTo(x(p), y(n))));
    c.stroke();
    const now = penalty();
    c.strokeStyle = colour('--cut');
    c.lineWidth = 1;
    c.beginPath(); c.moveTo(x(now), 0); c.lineTo(x(now), room); c.stroke();
    c.fillStyle = colour('--soft');
    c.fillText(`${first}${unit()}`, 4, height - 5);
    c.fillText(`${top} chunks`, 4, 12);
    c.textAlign = 'right';
    c.fillText(`${last}${unit()}`, width - 4, height - 5);
  }, 'Number of chunks at each penalty');
  return node;
}

// Utilities over tokens, with candidates, cuts and true units, as in the paper's figure 2; of a long document side by side, so many tokens each.
const STRIP = 4000;
function strips(page, chosen) {
  const count = Math.max(1, Math.ceil(page.tokens / STRIP)), each = Math.max(1, Math.ceil(page.tokens / count));
  const node = el('div', { className: 'strips', tabIndex: count > 1 ? 0 : -1 });
  for (let i = 0; i < count; i += 1) node.append(strip(page, chosen, i * each, Math.min(page.tokens, (i + 1) * each), count));
  return node;
}

function strip(page, chosen, from, to, count) {
  const { token, utility, kind } = page.edges;
  const node = canvas(page.gold ? 150 : 130, (c, width, height) => {
    const x = (t) => ((t - from) / Math.max(1, to - from)) * width;
    const bands = 18, gold = page.gold ? 16 : 0, top = gold + 4, base = height - bands - 4;
    if (page.gold) {
      [0, ...page.gold].forEach((t, i, all) => {
        c.fillStyle = colour('--gold');
        c.globalAlpha = i % 2 === 0 ? 0.9 : 0.5;
        c.fillRect(x(t), 2, Math.max(1, x(all[i + 1] ?? page.tokens) - x(t) - 1), gold - 4);
      });
      c.globalAlpha = 1;
    }
    if (utility.some((u) => u !== null)) {
      // The highest utility of every column of pixels.
      const columns = new Float64Array(Math.ceil(width) + 1).fill(-1);
      token.forEach((t, i) => { if (utility[i] !== null && t >= from && t <= to) { const p = Math.floor(x(t)); columns[p] = Math.max(columns[p], utility[i]); } });
      c.strokeStyle = colour('--curve');
      c.lineWidth = 1.2;
      c.beginPath();
      let begun = false;
      columns.forEach((u, p) => {
        if (u < 0) return;
        const y = base - u * (base - top);
        if (begun) c.lineTo(p, y); else c.moveTo(p, y);
        begun = true;
      });
      c.stroke();
      c.fillStyle = colour('--curve');
      token.forEach((t, i) => { if (utility[i] !== null && kind[i] === 'sentence') c.fillRect(x(t) - 1, base - utility[i] * (base - top) - 1, 2.5, 2.5); });
      if (program && !program.damage) {
        const y = base - Math.min(1, penalty()) * (base - top);
        c.strokeStyle = colour('--soft');
        c.setLineDash([3, 4]);
        c.beginPath(); c.moveTo(0, y); c.lineTo(width, y); c.stroke();
        c.setLineDash([]);
      }
    }
    starts(page, chosen).forEach((t, i, all) => {
      c.fillStyle = colour(i % 2 === 0 ? '--band-a' : '--band-b');
      c.fillRect(x(t), base + 4, x(all[i + 1] ?? page.tokens) - x(t), bands);
      if (i > 0) { c.fillStyle = colour('--cut'); c.fillRect(x(t) - 0.75, top, 1.5, height - top); }
    });
    if (count > 1) { c.fillStyle = colour('--ink'); c.fillText(`token ${from}`, 4, height - 5); }
  }, `Utility of each candidate over the tokens ${from} to ${to} of the document, with cuts`);
  node.classList.add('strip');
  node.addEventListener('click', (event) => {
    const t = from + (event.offsetX / node.clientWidth) * (to - from);
    const begun = starts(page, chosen);
    let chunk = 0;
    while (chunk + 1 < begun.length && begun[chunk + 1] <= t) chunk += 1;
    document.querySelectorAll('.chunk.here').forEach((n) => n.classList.remove('here'));
    const found = document.querySelectorAll('.chunk')[chunk];
    found.classList.add('here');
    found.scrollIntoView({ block: 'start' });
  });
  return node;
}

function cutLabel(page, i, edge, tokens) {
  const { score, utility, kind } = page.edges;
  const parts = [`chunk ${i}`, `${tokens} tokens`];
  if (edge !== null) {
    const known = page.edges.damage[edge];
    if (program && program.damage && kind[edge] !== 'fallback') {
      parts.push(`cut damage ${damage(Float32Array.from(page.edges.curve[edge]), page.edges.scored[edge], tokens).toFixed(1)} nats`);
    } else if (known !== null && known !== undefined) parts.push(`cut damage ${known.toFixed(1)} nats`);
    if (score[edge] !== null) parts.push(`score ${score[edge].toFixed(3)}`);
    if (utility[edge] !== null && utility[edge] !== undefined) parts.push(`utility ${utility[edge].toFixed(3)}`);
    if (kind[edge] === 'fallback') parts.push('a fallback edge');
  }
  return parts.join(' · ');
}

function showDocument(number) {
  const page = documents[number], chosen = cuts[number], tokens = chunkTokens(page, chosen);
  const begin = [0, ...chosen.map((c) => page.edges.at[c])];
  const text = el('div', { className: 'text' });
  begin.forEach((from, i) => {
    const chunk = el('section', { className: 'chunk', id: `chunk-${i}` });
    chunk.append(el('span', { className: 'cut', textContent: cutLabel(page, i, i === 0 ? null : chosen[i - 1], tokens[i]) }));
    chunk.append(page.text.slice(from, begin[i + 1] ?? page.text.length));
    text.append(chunk);
  });
  const entries = [['--curve', 'utility of candidates, dots at sentence ends'], ['--cut', 'cuts'], ['--band-a', 'chunks']];
  if (page.gold) entries.push(['--gold', 'true units']);
  const note = `${page.tokens} tokens, ${begin.length} chunks${page.tokens > STRIP ? '; the curve goes on to the right' : ''}${program && page.relaxed && chosen === page.cuts ? '; a limit gave way' : ''}`;
  const facts = el('p', { className: 'note', id: 'facts', textContent: note });
  facts.dataset.chunks = begin.length;
  facts.dataset.cuts = starts(page, chosen).slice(1).join(',');
  // The same document cut anew shows the same part of its curve.
  const left = main.dataset.document === String(number) ? main.querySelector('.strips').scrollLeft : 0;
  main.replaceChildren(el('h1', { textContent: page.id, dir: 'auto' }), facts, strips(page, chosen), key(...entries), text);
  main.dataset.document = number;
  main.querySelector('.strips').scrollLeft = left;
}

function showCorpus() {
  delete main.dataset.document;
  const tiles = el('div', { className: 'tiles' });
  for (const [name, value] of corpus.figures) tiles.append(el('div', { className: 'tile' }, el('b', { textContent: value }), el('span', { textContent: name })));
  const other = cuts.some((c, i) => c !== documents[i].cuts);
  const lengths = other ? documents.flatMap((d, i) => chunkTokens(d, cuts[i])) : corpus.lengths;
  const parts = [el('h1', { textContent: report.title, dir: 'auto' }), tiles];
  parts.push(el('h2', { textContent: 'Tokens of a chunk' }), histogram([{ values: lengths, colour: '--curve' }], 'Histogram of chunk lengths', 0));
  const total = el('p', { className: 'note', id: 'facts', textContent: `${lengths.length} chunks${other ? ' at this penalty' : ''}` });
  total.dataset.chunks = lengths.length;
  parts.push(total);
  if (corpus.cut_scores.length + corpus.scores.length > 0) {
    const series = [{ values: corpus.scores, colour: '--curve' }, { values: corpus.cut_scores, colour: '--cut' }];
    parts.push(el('h2', { textContent: 'Scores' }), histogram(series, 'Histogram of scores of candidates and of cuts', 2));
    parts.push(key(['--curve', 'candidates'], ['--cut', 'cuts, at the report’s penalty']), el('p', { className: 'note', textContent: 'Each to its own highest bar; larger favours a cut.' }));
  }
  if (corpus.sweep.length > 1) parts.push(el('h2', { textContent: 'Chunks at each penalty' }), sweepChart());
  const rows = documents.map((d, i) => el('tr', {},
    el('td', {}, el('a', { href: `#${i}`, textContent: d.id })), el('td', { textContent: d.tokens }), el('td', { textContent: cuts[i].length + 1 }),
    el('td', { className: 'wide', textContent: Math.round(d.tokens / (cuts[i].length + 1)) })));
  parts.push(el('h2', { textContent: 'Documents' }), el('table', {},
    el('thead', {}, el('tr', {}, el('th', { textContent: 'document' }), el('th', { textContent: 'tokens' }), el('th', { textContent: 'chunks' }), el('th', { className: 'wide', textContent: 'mean' }))),
    el('tbody', {}, ...rows)));
  main.replaceChildren(...parts);
}

function draw() {
  redraws = [];
  if (shown < 0) showCorpus(); else showDocument(shown);
  choose.value = String(shown);
  document.getElementById('previous').disabled = shown < 0;
  document.getElementById('next').disabled = shown >= documents.length - 1;
  redraw();
}

function go(number) {
  const to = Math.max(-1, Math.min(documents.length - 1, number));
  if (to === shown) return;
  shown = to;
  if (program) recut();
  history.replaceState(null, '', to < 0 ? '#' : `#${to}`);
  draw();
  window.scrollTo(0, 0);
}

// Cuts what is on the page anew: one document, or all of them for the corpus.
function recut() {
  const which = shown < 0 ? documents.keys() : [shown];
  for (const i of which) cuts[i] = moved ? solve(documents[i], penalty()) : documents[i].cuts;
  document.getElementById('value').textContent = `${penalty()}${unit()}`;
}

function setUp() {
  choose.append(new Option('all documents', '-1'), ...documents.map((d, i) => new Option(d.id, String(i))));
  choose.addEventListener('change', () => go(Number(choose.value)));
  document.getElementById('home').addEventListener('click', () => go(-1));
  document.getElementById('previous').addEventListener('click', () => go(shown - 1));
  document.getElementById('next').addEventListener('click', () => go(shown + 1));
  if (program) {
    [slider.min, slider.max, slider.step] = program.penalties;
    slider.value = program.penalty;
    let waiting = 0;
    slider.addEventListener('input', () => {
      moved = true;
      // One cut a frame, however fast the slider moves.
      cancelAnimationFrame(waiting);
      waiting = requestAnimationFrame(() => { recut(); draw(); });
    });
    document.getElementById('reset').addEventListener('click', () => { moved = false; slider.value = program.penalty; recut(); draw(); });
    recut();
  } else {
    document.getElementById('cutting').hidden = true;
    document.getElementById('cutting').style.display = 'none';
  }
  document.addEventListener('keydown', (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target === slider || event.target === choose || event.target.className === 'strips') return;
    const moves = { ArrowLeft: shown - 1, k: shown - 1, ArrowRight: shown + 1, j: shown + 1, Home: -1 };
    if (event.key in moves) { event.preventDefault(); go(moves[event.key]); }
  });
  const address = () => (/^#\d+$/.test(location.hash) ? Number(location.hash.slice(1)) : -1);
  window.addEventListener('hashchange', () => { if (!location.hash.startsWith('#chunk')) go(address()); });
  shown = address() < documents.length ? address() : -1;
  if (program) recut();
  draw();
}
setUp();
