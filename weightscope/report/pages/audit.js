// Heat maps, spectra and the table of an audit, drawn from the facts in the page.

const facts = JSON.parse(document.getElementById("facts").textContent);
const nLayers = facts.layers.length;
const nHeads = facts.heads;

const BLUE = "#0072B2", ORANGE = "#D55E00", GREEN = "#009E73", PINK = "#CC79A7", YELLOW = "#E69F00";
// Cividis at nine points: its brightness rises evenly for every kind of colour vision.
const CIVIDIS = [
  [0, 34, 78], [24, 54, 108], [64, 77, 107], [92, 98, 110], [122, 120, 120],
  [153, 143, 117], [187, 167, 107], [223, 193, 87], [254, 232, 56],
];
const UNKNOWN = [150, 150, 150];
const stacked = matchMedia("(max-width: 62rem)"); // as in the style sheet: the panel stands above the maps
const SHOWN_AT_FIRST = 100; // rows of the table

const byId = id => document.getElementById(id);
// What is chosen: the layer by its row in the maps, and the head.
const selected = () => [Number(byId("layer").value), Number(byId("head").value)];
const within = (low, value, high) => Math.min(Math.max(value, low), high);
const count = n => [...Array(n).keys()];
const smallest = values => values.reduce((a, b) => Math.min(a, b), Infinity); // Math.min(...) has a limit
const largest = values => values.reduce((a, b) => Math.max(a, b), -Infinity);

function make(tag, parent, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = className;
  parent?.append(element);
  return element;
}

// A cell as a reader sees it: four significant digits, nothing where a value is unknown.
function shown(value) {
  if (value === null) return "";
  if (typeof value === "string" || Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : value.toPrecision(4);
}

// Where a head stands among those of other checkpoints: its percentile, and in words; empty where that is unknown.
function standing(name, i, head) {
  const percentile = (facts.percentiles[name] || [])[i]?.[head] ?? null;
  if (percentile === null) return { short: "", words: "" };
  const count = facts.compared_with[name][i];
  const of = `${count} other checkpoint${count === 1 ? "" : "s"}`;
  if (percentile === 0 || percentile === 100) {
    return { short: percentile ? "above all" : "below all", words: `${percentile ? "higher" : "lower"} than every head of ${of}` };
  }
  const last = percentile % 10;
  const ending = percentile > 10 && percentile < 14 ? "th" : { 1: "st", 2: "nd", 3: "rd" }[last] || "th";
  return { short: `${percentile}${ending}`, words: `higher than ${percentile}% of the heads of ${of}` };
}

// ---- Heat maps: one canvas pixel a head, enlarged by the style sheet.

function cividis(share) {
  const place = within(0, share, 1) * (CIVIDIS.length - 1);
  const below = Math.min(Math.floor(place), CIVIDIS.length - 2);
  const mix = (low, channel) => Math.round(low + (place - below) * (CIVIDIS[below + 1][channel] - low));
  return CIVIDIS[below].map(mix);
}

// A measure's values on the colour map, from the smallest known one to the largest.
function colourScale(values, log) {
  const usable = x => x !== null && (!log || x > 0);
  const along = log ? Math.log : x => x;
  const known = values.flat().filter(usable);
  const [low, high] = [smallest(known), largest(known)];
  const share = x => high > low ? (along(x) - along(low)) / (along(high) - along(low)) : 0.5;
  return { low, high, colour: x => usable(x) ? cividis(share(x)) : UNKNOWN };
}

function paint(canvas, values, colour) {
  [canvas.width, canvas.height] = [nHeads, nLayers];
  const pen = canvas.getContext("2d"), image = pen.createImageData(nHeads, nLayers);
  values.flat().forEach((value, k) => image.data.set([...colour(value), 255], 4 * k));
  pen.putImageData(image, 0, 0);
}

const rounded = x => Number.isFinite(x) ? String(Number(x.toPrecision(3))) : "none";

function drawHeatMap({ name, log }) {
  const canvas = document.querySelector(`canvas[data-measure="${name}"]`);
  const map = canvas.parentElement;
  const [lowEnd, bar, highEnd] = canvas.closest("figure").querySelector(".scale").children;
  const values = facts.columns[name];
  const { low, high, colour } = colourScale(values, log);

  canvas.style.aspectRatio = `${nHeads} / ${Math.min(nLayers, 1.4 * nHeads)}`;
  paint(canvas, values, colour);
  lowEnd.textContent = rounded(low);
  highEnd.textContent = rounded(high);
  bar.style.background = `linear-gradient(90deg, ${CIVIDIS.map(channels => `rgb(${channels})`)})`;

  leads(map, (i, head) => {
    const { words } = standing(name, i, head);
    return `: ${shown(values[i][head])}${words && `, ${words}`}`;
  });
}

// A click on a map shows the head under it, whose name and `about(i, head)` are the tooltip.
function leads(map, about, go = () => {}) {
  const headAt = event => {
    const box = map.getBoundingClientRect();
    const i = Math.floor((event.clientY - box.top) / box.height * nLayers);
    const head = Math.floor((event.clientX - box.left) / box.width * nHeads);
    return [within(0, i, nLayers - 1), within(0, head, nHeads - 1)];
  };
  map.addEventListener("click", event => {
    choose(...headAt(event), true);
    go();
  });
  map.addEventListener("mousemove", event => {
    const [i, head] = headAt(event);
    map.title = `layer ${facts.layers[i]} head ${head}${called(facts.layers[i], head)}${about(i, head)}`;
  });
}

// ---- Maps of cells with signs and frames: what each head does, and where the findings of a kind are.

function drawCells(canvas, [widest, highest], colour, sign, framed) {
  const wide = within(3, Math.floor(widest / nHeads), 48), high = within(3, Math.floor(highest / nLayers), wide);
  const least = Math.min(wide, high), edge = Math.max(0.8, least / 20);
  [canvas.width, canvas.height] = [2 * wide * nHeads, 2 * high * nLayers]; // two pixels each, for dense screens
  canvas.style.maxWidth = `${wide * nHeads}px`;
  const pen = canvas.getContext("2d");
  pen.scale(2, 2);
  pen.font = `bold ${Math.min(0.95 * least, 24)}px sans-serif`;
  [pen.textAlign, pen.textBaseline] = ["center", "middle"];
  for (const i of count(nLayers)) for (const head of count(nHeads)) {
    const [x, y] = [head * wide, i * high];
    pen.fillStyle = colour(i, head);
    pen.fillRect(x + 0.5, y + 0.5, wide - 1, high - 1);
    pen.fillStyle = "#000";
    pen.fillText(sign(i, head), x + wide / 2, y + high / 2);
    if (!framed(i, head)) continue;
    for (const [stroke, inset] of [["#fff", 2.5], ["#000", 1]]) {
      pen.strokeStyle = stroke;
      pen.lineWidth = 1.5 * edge;
      pen.strokeRect(x + inset * edge, y + inset * edge, wide - 2 * inset * edge, high - 2 * inset * edge);
    }
  }
}

// Whether a head is one that these findings are about.
function among(findings) {
  const found = new Set(findings.flatMap(({ layer, heads }) => heads.map(head => `${layer}.${head}`)));
  return (i, head) => found.has(`${facts.layers[i]}.${head}`);
}

function drawDeeds() {
  const canvas = document.querySelector("#deeds canvas");
  if (!canvas) return;
  const colours = Object.fromEntries(facts.deeds.map(({ name, colour }) => [name, colour]));
  const signs = Object.fromEntries(facts.deeds.map(({ kind, sign }) => [kind, sign]));
  const role = (i, head) => facts.roles[`${facts.layers[i]}.${head}`] || facts.unnamed;
  const kind = (i, head) => facts.columns.sink_kind?.[i][head];
  drawCells(canvas, [360, 360], (i, head) => colours[role(i, head)], (i, head) => signs[kind(i, head)] || "", among(facts.findings));
  leads(canvas.parentElement, (i, head) => kind(i, head) in signs ? `: ${kind(i, head)} sink` : "", () => byId("heads").scrollIntoView());
}

// The maps of a kind's measures, with the heads framed that its findings are about.
function drawPictures() {
  for (const details of document.querySelectorAll(".kind")) {
    const ofHeads = facts.findings.filter(({ kind, map, heads }) => kind === details.id && map && heads.length);
    for (const name of new Set(ofHeads.map(({ map }) => map))) {
      const values = facts.columns[name];
      const { low, high, colour } = colourScale(values, facts.measures.find(measure => measure.name === name).log);
      const figure = make("figure", null, "", "picture"), canvas = make("canvas", figure);
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${name} by layer and head, with the heads of these findings framed`);
      drawCells(canvas, [208, 130], (i, head) => `rgb(${colour(values[i][head])})`, () => "", among(ofHeads.filter(({ map }) => map === name)));
      leads(canvas, (i, head) => `: ${shown(values[i][head])}`, () => byId("heads").scrollIntoView());
      const caption = make("figcaption", figure);
      const range = Number.isFinite(low) ? `; dark: ${rounded(low)}, bright: ${rounded(high)}` : "";
      caption.append(document.querySelector(`#maps canvas[data-measure="${name}"]`).closest("figure").querySelector("b math, b").cloneNode(true), ` by layer and head${range}; framed: the heads found here`);
      details.querySelector("summary").after(figure);
    }
  }
}

// The layers that the findings of a kind are about as a whole, among all layers where their measure is known.
function drawProfiles() {
  for (const details of document.querySelectorAll(".kind")) {
    const ofLayers = facts.findings.filter(({ kind, usual, measure, whole_layers: at }) =>
      kind === details.id && Object.values(at).some(number => number > 0) && (usual > 0 || measure in facts.profiles));
    for (const name of new Set(ofLayers.map(({ measure }) => measure))) {
      const findings = ofLayers.filter(({ measure }) => measure === name), profile = facts.profiles[name];
      const at = value => facts.layers.map(layer => value(findings.find(finding => layer in finding.whole_layers), layer));
      const found = { values: at((finding, layer) => finding?.whole_layers[layer]), colour: ORANGE, dots: 9 };
      const rest = profile ? { values: profile, colour: BLUE, dash: "none" } : { values: at(finding => finding?.usual), colour: BLUE, dots: 5 };
      const figure = make("figure", null, "", "picture");
      plot(figure, name, [rest, found], [], { under: "layer", label: i => facts.layers[i], size: SMALL });
      make("figcaption", figure, `${name} by layer; large dots: found here; ${profile ? "line: every layer" : "small dots: usual"}`);
      details.querySelector("summary").after(figure);
    }
  }
}

// The frame of the chosen head lies over every map.
function frame(i, head) {
  for (const { style } of document.querySelectorAll("#maps .frame")) {
    style.left = `${100 * head / nHeads}%`;
    style.top = `${100 * i / nLayers}%`;
    style.width = `${100 / nHeads}%`;
    style.height = `${100 / nLayers}%`;
  }
}

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function moveByKey(event) {
  if (!(event.key in ARROWS)) return;
  event.preventDefault(); // the page must not scroll as well
  const [i, head] = selected();
  const [down, right] = ARROWS[event.key];
  choose(within(0, i + down, nLayers - 1), within(0, head + right, nHeads - 1));
}

// ---- Spectra: singular values on a logarithmic axis, the chosen head over its layer's others.

const PLOT = { width: 380, height: 190, left: 46, right: 372, top: 20, bottom: 160 };
const SMALL = { width: 264, height: 136, left: 46, right: 256, top: 20, bottom: 106 };
const ROUND_OFF = 1e-9; // of the largest value; what is below is drawn on the axis

function makeSvg(tag, parent, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  parent.append(element);
  return element;
}

// Exponents of ten at both ends of the axis.
function decades(values) {
  const high = Math.log10(largest(values));
  const low = Math.max(Math.log10(smallest(values)), high + Math.log10(ROUND_OFF));
  return high - low < 0.2 ? [low - 0.1, high + 0.1] : [low, high];
}

// Values to mark and their labels: powers of ten, or four values where fewer than two powers fit.
function ticks(low, high) {
  const step = Math.max(1, Math.ceil((high - low) / 4));
  const first = Math.ceil(low);
  const exponents = count(Math.max(0, Math.floor((high - first) / step) + 1)).map(k => first + k * step);
  const label = e => Math.abs(e) > 3 ? `1e${e}` : String(Number((10 ** e).toPrecision(1)));
  if (exponents.length > 1) return exponents.map(e => [10 ** e, label(e)]);
  return count(4).map(k => 10 ** (low + (high - low) * k / 3)).map(value => [value, Number(value.toPrecision(2))]);
}

// Curves are { name, values, colour, dash }; mates are the values of the layer's other heads.
function plot(parent, title, curves, mates, { under = "index i", label = k => k + 1, size = PLOT } = {}) {
  const { left, right, top, bottom, width, height } = size;
  const svg = makeSvg("svg", parent, { viewBox: `0 0 ${width} ${height}`, class: "plot", role: "img", "aria-label": title });
  makeSvg("text", svg, { x: left, y: 13, class: "title" }, title);
  if (!curves.some(curve => curve.values.length)) {
    makeSvg("text", svg, { x: left, y: 60 }, "no finite singular value");
    return;
  }
  const spectra = [...curves.map(curve => curve.values), ...mates];
  const length = largest(spectra.map(values => values.length));
  const [low, high] = decades(spectra.flat().filter(value => value > 0));
  const x = index => left + (right - left) * (length > 1 ? index / (length - 1) : 0.5);
  const y = value => bottom - (bottom - top) * (Math.max(Math.log10(value), low) - low) / (high - low);
  const path = (values, dots) => {
    const points = values.map((value, k) => [value, k]).filter(([value]) => value > 0);
    if (!points.length) return "";  // a head of zeros
    return "M" + points.map(([value, k]) => `${x(k).toFixed(1)} ${y(value).toFixed(1)}`).join(dots ? "h0M" : "L") + (dots ? "h0" : "");
  };

  makeSvg("path", svg, { class: "axis", d: `M${left} ${top}V${bottom}H${right}` });
  for (const [value, mark] of ticks(low, high)) {
    makeSvg("text", svg, { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, mark);
  }
  for (const index of new Set([0, Math.floor((length - 1) / 2), length - 1])) {
    const anchor = index === 0 ? "start" : index === length - 1 ? "end" : "middle";
    makeSvg("text", svg, { x: x(index), y: bottom + 13, "text-anchor": anchor }, label(index));
  }
  makeSvg("text", svg, { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, under);
  for (const values of mates) makeSvg("path", svg, { class: "mates", d: path(values) });
  const line = (curve, d) => {
    const dots = curve.dots ? { "stroke-width": curve.dots, "stroke-linecap": "round" } : { "stroke-dasharray": curve.dash };
    makeSvg("path", svg, { class: curve.dots ? "dots" : "line", stroke: curve.colour, ...dots, d });
  };
  for (const curve of curves) line(curve, path(curve.values, curve.dots));
  if (curves.length > 1 && curves[0].name) legend(svg, left + 8 * title.length + 14, curves, line);
}

// Names of the curves to the right of the title.
function legend(svg, start, curves, line) {
  let at = start;
  for (const curve of curves) {
    line(curve, `M${at} 9h16`);
    makeSvg("text", svg, { x: at + 20, y: 13 }, curve.name);
    at += 36 + 6.5 * curve.name.length;
  }
}

function showSpectra(i, head) {
  // Each value at its place: of many heads a page has every so many values alone, and curves skip what is 0.
  const placed = (name, values) => {
    const places = facts.places[name], known = (values || []).filter(value => value !== null);
    if (!known.length || places.length === places.at(-1) + 1) return known;
    const whole = Array(places.at(-1) + 1).fill(0);
    values.forEach((value, k) => { whole[places[k]] = value ?? 0; });
    return whole;
  };
  const own = name => placed(name, facts.spectra[name][i][head]);
  const mates = name => facts.spectra[name][i].filter((_, other) => other !== head).map(values => placed(name, values));
  const forms = facts.forms.map((form, k) => ({
    name: form,
    values: own(`qk_singular_values_${form}`),
    colour: [GREEN, ORANGE, PINK, YELLOW][k % 4],
    dash: "5 3",
  }));
  const panel = byId("spectra");
  panel.replaceChildren();
  plot(panel, "σᵢ(W_QK)", [
    { name: "distance 0", values: own("qk_singular_values"), colour: BLUE, dash: "none" }, ...forms,
  ], mates("qk_singular_values"), { under: "index i; σᵢ has no 1/√d′" });
  plot(panel, "σᵢ(W_VO)", [
    { name: "linear", values: own("vo_singular_values"), colour: ORANGE, dash: "none" },
    { name: "with bias", values: own("vo_affine_singular_values"), colour: GREEN, dash: "5 3" },
  ], mates("vo_singular_values"));
}

// The spectra in the panel as a table, a row a value.
function spectraTable() {
  const [i, head] = selected();
  const rows = Object.entries(facts.spectra).flatMap(([name, values]) =>
    values[i][head].map((value, k) => [name, facts.places[name][k] + 1, value]));
  return [["of", "index", "value"], ...rows].map(row => row.join(",")).join("\n") + "\n";
}

const OF_A_FILE = "text{font:11px sans-serif;fill:#444}path{fill:none}.axis{stroke:#999}.mates{stroke:#888;opacity:.25;stroke-width:.7}.line{stroke-width:2}";

// ---- The chosen head: its spectra, what was found of it, its tokens, its measures.

function showRemarks(layer, head) {
  byId("remarks").replaceChildren();
  for (const finding of facts.findings) {
    const concerns = finding.layer === layer && (finding.heads.includes(head) || !finding.heads.length);
    if (concerns) make("li", byId("remarks"), `${finding.title}: ${finding.text}`);
  }
}

function showDirections(layer, head) {
  const panel = byId("directions");
  const directions = facts.directions[`${layer}.${head}`] || [];
  panel.replaceChildren();
  if (directions.length) {
    make("h3", panel, "Tokens along its first directions");
    for (const note of facts.read_through) make("p", panel, note);
  }
  for (const direction of directions) {
    const paragraph = make("p", panel, `${direction.title} `);
    for (const side of direction.sides) {
      make("br", paragraph);
      paragraph.append(`${side.name} `);
      for (const token of side.tokens) {
        make("code", paragraph, token);
        paragraph.append(" ");
      }
    }
  }
}

function showMeasures(i, head) {
  const { rows } = byId("measures").tBodies[0];
  Object.entries(facts.columns).forEach(([name, values], k) => {
    const { short, words } = standing(name, i, head);
    rows[k].cells[1].textContent = shown(values[i][head]);
    rows[k].cells[2].textContent = short;
    rows[k].cells[2].title = words;
  });
}

// A head's role from the weights, where it has one.
function called(layer, head) {
  const role = facts.roles[`${layer}.${head}`];
  return role ? ` (${role})` : "";
}

// `i` is the layer's row in the maps. With `jump` the page goes to the panel where that is not in sight.
function show(i, head) {
  const layer = facts.layers[i];
  const shared = facts.kv_heads[head];
  byId("layer").value = i;
  byId("head").value = head;
  const sharing = shared === head ? "" : ` (key-value head ${shared})`;
  byId("chosen").textContent = `Layer ${layer}, head ${head}${sharing}${called(layer, head)}`;
  frame(i, head);
  showSpectra(i, head);
  showRemarks(layer, head);
  showDirections(layer, head);
  showMeasures(i, head);
  markRow();
}

function choose(i, head, jump = false) {
  show(i, head);
  nameInAddress(i, head);
  if (jump && stacked.matches) byId("panel").scrollIntoView();
}

// ---- The table: sorted over all heads, the first rows drawn until more are asked for.

const allRows = facts.layers.flatMap((layer, i) => count(nHeads).map(head => ({
  i, head, cells: [layer, head, ...facts.measures.map(measure => facts.columns[measure.name][i][head])],
})));
const table = { rows: allRows, length: SHOWN_AT_FIRST };

function fillTable() {
  const body = byId("rows").tBodies[0];
  body.replaceChildren();
  for (const { i, head, cells } of table.rows.slice(0, table.length)) {
    const row = make("tr", body);
    row.dataset.at = `${i}.${head}`;
    cells.forEach((cell, column) => {
      const measure = facts.measures[column - 2]; // the first two are layer and head
      make("td", row, shown(cell), "number").title = measure ? standing(measure.name, i, head).words : "";
    });
    row.addEventListener("click", () => choose(i, head, true));
  }
  byId("more").hidden = table.rows.length <= table.length;
  byId("of-all").textContent = byId("more").hidden ? "" : `The first ${table.length} of ${table.rows.length} heads.`;
  markRow();
}

function markRow() {
  const chosen = selected().join(".");
  for (const row of byId("rows").tBodies[0].rows) row.classList.toggle("chosen", row.dataset.at === chosen);
}

function sortTable(column, descending) {
  table.rows = [...allRows].sort((a, b) => order(a.cells[column], b.cells[column], descending));
  fillTable();
}

// ---- Start.

facts.measures.forEach(drawHeatMap);
drawDeeds();
drawPictures();
drawProfiles();
fillTable();
byId("own").open = !stacked.matches; // a long list, which would hide the maps

byId("maps").addEventListener("keydown", moveByKey);
byId("which").addEventListener("change", () => choose(...selected()));
// Layers and heads start with the lowest, measures with the largest value.
sortOnClick(byId("rows").tHead.rows[0], sortTable, column => column > 1);
byId("more").addEventListener("click", () => {
  table.length = Infinity;
  fillTable();
});

const fileOf = ending => () => `layer-${facts.layers[selected()[0]]}-head-${selected()[1]}.${ending}`;
downloads(byId("as-csv"), "text/csv", fileOf("csv"), spectraTable);
downloads(byId("as-svg"), "image/svg+xml", fileOf("svg"), () => standalone([...document.querySelectorAll("#spectra svg")], OF_A_FILE));

// A finding's button shows the head it is about; the page opens with the head in its address, else the first of them.
const buttons = [...document.querySelectorAll("button.where")];
const headOf = ({ dataset }) => [facts.layers.indexOf(Number(dataset.layer)), Number(dataset.head)];
for (const button of buttons) {
  button.addEventListener("click", () => {
    choose(...headOf(button));
    byId("heads").scrollIntoView();
  });
}
function openAddress() {
  const named = headInAddress();
  if (named) show(...named);
  if (named) byId("heads").scrollIntoView();
  return named;
}
addEventListener("hashchange", openAddress);
if (!openAddress()) show(...(buttons.length ? headOf(buttons[0]) : [0, 0]));
