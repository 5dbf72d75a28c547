"use strict";
const facts = JSON.parse(document.getElementById("facts").textContent);
const $ = id => document.getElementById(id);
// Cividis at nine points: the same order of brightness for every kind of colour vision.
const CIVIDIS = [[0, 34, 78], [24, 54, 108], [64, 77, 107], [92, 98, 110], [122, 120, 120], [153, 143, 117], [187, 167, 107], [223, 193, 87], [254, 232, 56]];
const BLUE = "#0072B2", ORANGE = "#D55E00", GREEN = "#009E73";
const shown = x => x === null ? "" : Number.isInteger(x) ? String(x) : (Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3 && x !== 0) ? x.toExponential(2) : x.toPrecision(4);
const make = (tag, text, parent, name) => {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  if (parent) parent.append(element);
  return element;
};
function colour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (CIVIDIS.length - 1), i = Math.min(Math.floor(at), CIVIDIS.length - 2);
  return CIVIDIS[i].map((c, k) => Math.round(c + (at - i) * (CIVIDIS[i + 1][k] - c)));
}

// Heat maps: one canvas pixel a head, enlarged without smoothing.
const nHeads = facts.heads, nLayers = facts.layers.length;
const frames = [];
for (const measure of facts.measures) {
  const figure = make("figure", undefined, $("maps"));
  const caption = make("figcaption", undefined, figure);
  make("span", measure.symbol, caption, "symbol");
  make("span", measure.name + (measure.log ? ", logarithmic" : ""), caption);
  const framed = make("div", undefined, figure, "framed");
  const rows = make("div", undefined, framed, "rows");
  make("span", facts.layers[0], rows); make("span", "layer", rows); make("span", facts.layers[nLayers - 1], rows);
  const canvas = make("canvas", undefined, framed);
  const across = make("div", undefined, framed, "across");
  make("span", 0, across); make("span", "head", across); make("span", nHeads - 1, across);
  canvas.dataset.measure = measure.name;
  const cell = Math.max(2, Math.min(24, Math.floor(480 / nHeads)));
  canvas.width = nHeads * cell; canvas.height = nLayers * Math.min(cell, Math.max(2, Math.floor(640 / nLayers)));
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", measure.symbol + " of every head; the table below has the numbers");
  const values = facts.columns[measure.name];
  const known = values.flat().filter(x => x !== null && (!measure.log || x > 0));
  const place = x => measure.log ? Math.log(x) : x;
  const sorted = known.map(place).sort((a, b) => a - b);
  const low = sorted[0], high = sorted[sorted.length - 1];
  const tall = canvas.height / nLayers, wide = canvas.width / nHeads;
  const draw = chosen => {
    const pen = canvas.getContext("2d");
    values.forEach((row, i) => row.forEach((x, h) => {
      const there = x !== null && (!measure.log || x > 0);
      const [r, g, b] = there ? colour(high > low ? (place(x) - low) / (high - low) : 0.5) : [150, 150, 150];
      pen.fillStyle = `rgb(${r},${g},${b})`;
      pen.fillRect(h * wide, i * tall, wide, tall);
    }));
    if (chosen) { pen.lineWidth = 2; pen.strokeStyle = "#fff"; pen.strokeRect(chosen[1] * wide + 1, chosen[0] * tall + 1, wide - 2, tall - 2); pen.strokeStyle = ORANGE; pen.strokeRect(chosen[1] * wide - 1, chosen[0] * tall - 1, wide + 2, tall + 2); }
  };
  frames.push(draw);
  const at = event => {
    const box = canvas.getBoundingClientRect();
    const i = Math.floor((event.clientY - box.top) / box.height * nLayers), h = Math.floor((event.clientX - box.left) / box.width * nHeads);
    return [Math.min(Math.max(i, 0), nLayers - 1), Math.min(Math.max(h, 0), nHeads - 1)];
  };
  canvas.addEventListener("click", event => choose(...at(event), true));
  canvas.addEventListener("mousemove", event => { const [i, h] = at(event); canvas.title = `layer ${facts.layers[i]} head ${h}: ${shown(values[i][h])}`; });
  const scale = make("div", undefined, figure, "scale");
  const end = x => x === undefined ? "none" : String(Number((measure.log ? Math.exp(x) : x).toPrecision(3)));
  make("span", end(low), scale);
  make("i", undefined, scale).style.background = `linear-gradient(90deg, ${CIVIDIS.map(c => `rgb(${c})`).join(", ")})`;
  make("span", end(high), scale);
}

// Spectra: logarithmic, the chosen head over its layer's others.
const SVG = "http://www.w3.org/2000/svg";
function plot(title, series, mates) {
  const all = [...series.map(s => s.values), ...mates].flat().filter(x => x > 0);
  const svg = document.createElementNS(SVG, "svg");
  const [w, h, left, right, top, bottom] = [380, 190, 46, 8, 20, 30];
  svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
  const add = (tag, attributes, text) => { const e = document.createElementNS(SVG, tag); for (const k in attributes) e.setAttribute(k, attributes[k]); if (text !== undefined) e.textContent = text; svg.append(e); return e; };
  add("text", { x: left, y: 13, style: "font-weight:600" }, title);
  if (!series.some(s => s.values.length)) { add("text", { x: left, y: 60 }, "no finite singular value"); return svg; }
  const n = Math.max(...series.map(s => s.values.length), ...mates.map(m => m.length));
  const floor = Math.max(Math.min(...all), Math.max(...all) * 1e-9);
  let [a, b] = [Math.log10(floor), Math.log10(Math.max(...all))];
  if (b - a < 0.2) [a, b] = [a - 0.1, b + 0.1];
  const x = i => left + (w - left - right) * (n > 1 ? i / (n - 1) : 0.5), y = v => h - bottom - (h - top - bottom) * (Math.max(Math.log10(v), a) - a) / (b - a);
  add("path", { class: "axis", d: `M${left} ${top}V${h - bottom}H${w - right}` });
  const step = Math.max(1, Math.ceil((b - a) / 4)), ticks = [];
  for (let e = Math.ceil(a); e <= b; e += step) ticks.push([10 ** e, Math.abs(e) > 3 ? `1e${e}` : String(Number((10 ** e).toPrecision(1)))]);
  if (ticks.length < 2) { ticks.length = 0; for (let k = 0; k < 4; k++) { const v = 10 ** (a + (b - a) * k / 3); ticks.push([v, v.toPrecision(2)]); } }
  for (const [v, label] of ticks) add("text", { x: left - 5, y: y(v) + 4, "text-anchor": "end" }, label);
  for (const i of [...new Set([0, Math.floor((n - 1) / 2), n - 1])]) add("text", { x: x(i), y: h - bottom + 13, "text-anchor": i ? (i === n - 1 ? "end" : "middle") : "start" }, i + 1);
  add("text", { x: (left + w - right) / 2, y: h - 4, "text-anchor": "middle" }, "index i");
  const path = values => values.map((v, i) => v > 0 ? `${x(i).toFixed(1)} ${y(v).toFixed(1)}` : null).filter(p => p).map((p, i) => (i ? "L" : "M") + p).join("");
  for (const values of mates) add("path", { class: "mates", d: path(values) });
  for (const s of series) add("path", { class: "line", stroke: s.colour, "stroke-dasharray": s.dash || "none", d: path(s.values) });
  let at = left + 8 * title.length;
  for (const s of series.length > 1 ? series : []) { at += 14; add("path", { class: "line", stroke: s.colour, "stroke-dasharray": s.dash || "none", d: `M${at} 9h16` }); add("text", { x: at + 20, y: 13 }, s.name); at += 22 + 6.5 * s.name.length; }
  return svg;
}

function choose(i, h, jump) {
  frames.forEach(draw => draw([i, h]));
  $("layer").value = i; $("head").value = h;
  $("chosen").textContent = `Layer ${facts.layers[i]}, head ${h}` + (facts.kv_heads[h] !== h ? ` (key-value head ${facts.kv_heads[h]})` : "");
  const one = name => (facts.spectra[name][i][h] || []).filter(x => x !== null);
  const mates = name => facts.spectra[name][i].filter((_, k) => k !== h).map(s => (s || []).filter(x => x !== null));
  const others = facts.forms.map((name, k) => ({ name, values: one("qk_singular_values_" + name), colour: [GREEN, ORANGE, "#CC79A7", "#E69F00"][k % 4], dash: "5 3" }));
  $("spectra").replaceChildren(
    plot("σᵢ(W_QK)", [{ name: "distance 0", values: one("qk_singular_values"), colour: BLUE }, ...others], mates("qk_singular_values")),
    plot("σᵢ(W_VO)", [{ name: "linear", values: one("vo_singular_values"), colour: ORANGE }, { name: "with bias", values: one("vo_affine_singular_values"), colour: GREEN, dash: "5 3" }], mates("vo_singular_values")));
  $("remarks").replaceChildren();
  for (const f of facts.findings.filter(f => f.layer === facts.layers[i] && (f.head === h || f.head === null))) make("li", `${f.title}: ${f.text}`, $("remarks"));
  $("directions").replaceChildren();
  const lines = facts.directions[`${facts.layers[i]}.${h}`] || [];
  if (lines.length) make("h3", "Tokens along its first directions", $("directions"));
  for (const line of lines) {
    const p = make("p", line.title + " ", $("directions"));
    for (const side of line.sides) { p.append(document.createElement("br"), side.name + " "); side.tokens.forEach(token => { make("code", token, p); p.append(" "); }); }
  }
  const table = make("table"), body = make("tbody", undefined, table);
  for (const name of facts.names) { const row = make("tr", undefined, body); make("td", name, row); make("td", typeof facts.columns[name][i][h] === "string" ? facts.columns[name][i][h] : shown(facts.columns[name][i][h]), row, "number"); }
  $("measures").replaceChildren(table);
  for (const row of $("rows").tBodies[0].rows) row.classList.toggle("chosen", row.dataset.at === `${i}.${h}`);
  if (jump && matchMedia("(max-width: 62rem)").matches) $("panel").scrollIntoView({ behavior: "smooth", block: "start" });
}
facts.layers.forEach((layer, i) => { make("option", layer, $("layer")).value = i; });
for (let h = 0; h < nHeads; h++) make("option", h, $("head")).value = h;
$("which").addEventListener("change", () => choose(Number($("layer").value), Number($("head").value), false));

// Table: sorted over all heads, drawn a hundred at a time.
const FIRST = 100, columns = ["layer", "head", ...facts.measures.map(m => m.name)];
const all = facts.layers.flatMap((layer, i) => [...Array(nHeads).keys()].map(h => ({ i, h, cells: [layer, h, ...facts.measures.map(m => facts.columns[m.name][i][h])] })));
let order = [0, false], whole = false;
function fill() {
  const [column, down] = order;
  const rows = [...all].sort((p, q) => { const [a, b] = [p.cells[column], q.cells[column]]; return a === null || b === null ? (a === null) - (b === null) : (down ? b - a : a - b) || p.i - q.i || p.h - q.h; });
  const body = $("rows").tBodies[0];
  body.replaceChildren(...(whole ? rows : rows.slice(0, FIRST)).map(row => {
    const tr = make("tr"); tr.dataset.at = `${row.i}.${row.h}`;
    for (const x of row.cells) make("td", shown(x), tr, "number");
    tr.addEventListener("click", () => { choose(row.i, row.h, true); });
    return tr;
  }));
  $("more").hidden = whole || rows.length <= FIRST;
}
const heading = make("tr", undefined, $("rows").tHead);
columns.forEach((name, column) => {
  const th = make("th", undefined, heading); th.scope = "col";
  make("button", name, th).addEventListener("click", () => {
    order = [column, order[0] === column ? !order[1] : column > 1];
    for (const other of heading.cells) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", order[1] ? "descending" : "ascending");
    fill();
  });
});
$("more").addEventListener("click", () => { whole = true; fill(); });
fill();
for (const button of document.querySelectorAll("button.where")) button.addEventListener("click", () => { choose(Number(button.dataset.layer), Number(button.dataset.head), true); $("heads").scrollIntoView({ behavior: "smooth" }); });
const first = document.querySelector("button.where");
choose(first ? Number(first.dataset.layer) : 0, first ? Number(first.dataset.head) : 0, false);
