// The wiring diagram: heads as dots, edges as curves, and what the chosen head reads and who reads it.

const byId = id => document.getElementById(id);
const facts = JSON.parse(byId("facts").textContent);
const nLayers = facts.layers.length;
const nHeads = facts.heads;
const SVG = "http://www.w3.org/2000/svg";
const LEFT = 34, TOP = 26, RIGHT = 18, BOTTOM = 30;
const room = (byId("canvas").clientWidth - LEFT - RIGHT - 20) / Math.max(nLayers - 1, 1);
const ACROSS = Math.max(30, Math.min(240, 820 / nLayers), room), DOWN = Math.max(15, Math.min(34, 560 / nHeads));
const WIDTH = LEFT + RIGHT + ACROSS * (nLayers - 1) + 20, HEIGHT = TOP + BOTTOM + DOWN * (nHeads - 1) + 10;
const THICKEST = 6;
const OF_A_HEAD = 8; // edges of each direction that the panel lists

// An edge is [kind, layer and head that write, layer and head that read, PK, z, CS, whether it can be filtered by rank].
const edges = facts.edges.map(([kind, i, a, j, b, pk, z, cs, ranked]) =>
  ({ kind, from: i * nHeads + a, to: j * nHeads + b, pk, z, cs, ranked }));
const strongest = edges.reduce((most, edge) => Math.max(most, edge.z), 1);
const roleOf = head => facts.role[Math.floor(head / nHeads)][head % nHeads];
const roleName = head => facts.roles[roleOf(head)] || "";
const label = head => `${facts.layers[Math.floor(head / nHeads)]}.${head % nHeads}`;
const x = head => LEFT + 10 + ACROSS * Math.floor(head / nHeads);
const y = head => TOP + DOWN * (head % nHeads);

const first = edges.length ? edges.reduce((most, edge) => edge.z > most.z ? edge : most).to : null;
let chosen = null; // a head by its number; the panel shows `first` while none is
let pointed = null; // the one under the pointer

function make(tag, parent, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = className;
  parent.append(element);
  return element;
}

function draw(tag, parent, attributes, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  parent.append(element);
  return element;
}

const diagram = byId("diagram");
diagram.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
diagram.style.maxWidth = `${WIDTH * 1.3}px`;
diagram.style.minWidth = `${WIDTH * 0.8}px`; // legible; where the page is narrower, its box scrolls
const lines = draw("g", diagram, {});
const dots = draw("g", diagram, {});
const labels = draw("g", diagram, { "pointer-events": "none" });

facts.layers.forEach((layer, i) => {
  if (i % Math.ceil(nLayers / 16) === 0) draw("text", diagram, { x: x(i * nHeads), y: HEIGHT - 16, "text-anchor": "middle" }, layer);
});
for (let h = 0; h < nHeads; h += Math.ceil(nHeads / 16)) {
  draw("text", diagram, { x: LEFT - 12, y: y(h) + 4, "text-anchor": "end" }, h);
}
draw("text", diagram, { x: WIDTH / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "layer");
draw("text", diagram, { x: 4, y: 11 }, "head");

const circles = [...Array(nLayers * nHeads).keys()].map(head => {
  const circle = draw("circle", dots, { cx: x(head), cy: y(head), fill: facts.colours.at(roleOf(head)) });
  draw("title", circle, {}, [label(head), roleName(head)].filter(Boolean).join(", "));
  circle.addEventListener("click", () => choose(head === chosen ? null : head));
  circle.addEventListener("pointerenter", event => event.pointerType === "mouse" && point(head));
  circle.addEventListener("pointerleave", event => event.pointerType === "mouse" && point(null));
  return circle;
});

// The edges that the filters leave; of the head in focus all, whatever their rank.
function visible() {
  const kinds = new Set([...document.querySelectorAll("[name=kind]:checked")].map(box => Number(box.value)));
  const most = Number(byId("strength").value), role = byId("role").value, focus = pointed ?? chosen;
  const fits = head => !role || (role === "named" ? roleOf(head) >= 0 : roleName(head) === role);
  const counts = [0, 0, 0];
  return edges.filter(edge => {
    if (!kinds.has(edge.kind)) return false;
    const among = edge.ranked && counts[edge.kind]++ < most;
    if (focus !== null) return edge.from === focus || edge.to === focus;
    return among && (fits(edge.from) || fits(edge.to));
  });
}

function redraw() {
  byId("shown-edges").textContent = byId("strength").value;
  const shown = visible(), focus = pointed ?? chosen;
  const involved = new Set(shown.flatMap(edge => [edge.from, edge.to]));
  lines.replaceChildren();
  labels.replaceChildren();
  for (const edge of shown.slice().reverse()) {
    const bend = (x(edge.to) - x(edge.from)) / 2;
    draw("path", lines, {
      d: `M${x(edge.from)} ${y(edge.from)}c${bend} 0 ${bend} ${y(edge.to) - y(edge.from)} ${2 * bend} ${y(edge.to) - y(edge.from)}`,
      stroke: facts.kinds[edge.kind].colour,
      "stroke-width": Math.max(0.6, THICKEST * Math.max(edge.z, 0) / strongest),
      "stroke-opacity": 0.7,
    });
  }
  circles.forEach((circle, head) => {
    const there = involved.has(head) || head === focus;
    circle.setAttribute("r", there ? 5.5 : roleOf(head) >= 0 ? 4.5 : 3);
    circle.classList.toggle("away", focus !== null && !there);
    circle.classList.toggle("chosen", head === (focus ?? first));
    if (there && (focus !== null || roleOf(head) >= 0)) {
      draw("text", labels, { x: x(head), y: y(head) - 7, "text-anchor": "middle", class: "name" }, label(head));
    }
  });
}

function list(place, title, own, other) {
  place.replaceChildren();
  make("h4", place, title);
  const rows = make("ul", place);
  if (!own.length) make("li", rows, "nobody");
  for (const edge of own.slice(0, OF_A_HEAD)) {
    const row = make("li", rows), head = other(edge);
    make("i", row, "", "line").style.background = facts.kinds[edge.kind].colour;
    const button = make("button", row, label(head), "head");
    button.type = "button";
    button.addEventListener("click", () => choose(head));
    make("small", row, [roleName(head), facts.kinds[edge.kind].name, `PK ${edge.pk}`, `z ${Math.round(edge.z)}`].filter(Boolean).join(", "));
  }
}

function describe(head) {
  head ??= first;
  byId("chosen").textContent = head === null ? "Choose a head" : `Head ${label(head)}`;
  for (const id of ["reads", "read-by", "scores"]) byId(id).replaceChildren();
  byId("called").textContent = "";
  if (head === null) return;
  const i = Math.floor(head / nHeads), h = head % nHeads;
  byId("called").textContent = [roleName(head) || "no name", facts.often[roleOf(head)]].filter(Boolean).join("; ");
  const strongestFirst = own => own.sort((one, other) => other.z - one.z);
  list(byId("reads"), "It reads", strongestFirst(edges.filter(edge => edge.to === head)), edge => edge.from);
  list(byId("read-by"), "It is read by", strongestFirst(edges.filter(edge => edge.from === head)), edge => edge.to);
  for (const [name, values] of Object.entries(facts.scores)) {
    const row = make("tr", byId("scores"));
    make("td", row, name.replaceAll("_", " "));
    make("td", row, values[i][h] === null ? "" : values[i][h], "number");
  }
}

function choose(head) {
  show(head);
  if (head === null) history.replaceState(null, "", " ");
  else nameInAddress(Math.floor(head / nHeads), head % nHeads);
}

function show(head) {
  chosen = head;
  pointed = null;
  describe(head);
  redraw();
}

function point(head) {
  pointed = head;
  describe(head ?? chosen);
  redraw();
}

diagram.addEventListener("keydown", event => {
  const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
  if (event.key === "Escape") choose(null);
  if (!step) return;
  event.preventDefault();
  if (chosen === null) { choose(first ?? 0); return; }
  const i = Math.min(Math.max(Math.floor(chosen / nHeads) + step[0], 0), nLayers - 1);
  const h = Math.min(Math.max(chosen % nHeads + step[1], 0), nHeads - 1);
  choose(i * nHeads + h);
});
for (const button of document.querySelectorAll("#names .head")) {
  button.addEventListener("click", () => {
    const [layer, head] = button.dataset.head.split(".").map(Number);
    choose(facts.layers.indexOf(layer) * nHeads + head);
    byId("wiring").scrollIntoView();
  });
}
const OF_A_FILE = "text{font:11px sans-serif;fill:#444}.name{font-size:10px;fill:#111}path{fill:none}.away{opacity:.18}";
downloads(byId("as-svg"), "image/svg+xml", () => "wiring.svg", () => standalone([diagram], OF_A_FILE));
byId("filters").addEventListener("input", redraw);
byId("filters").addEventListener("submit", event => event.preventDefault());
function openAddress() {
  const named = headInAddress();
  show(named && named[0] * nHeads + named[1]);
  if (named) byId("wiring").scrollIntoView();
}
addEventListener("hashchange", openAddress);
for (const link of document.querySelectorAll("td a[href^='#L']")) link.addEventListener("click", () => setTimeout(openAddress)); // also again
openAddress();
