"use strict";
// A click on a column's name sorts by it; a second click turns the order round.

const isKnown = value => value !== null && value !== "" && !Number.isNaN(value);

// What `Array.sort` asks for: numbers by size, text by alphabet and the numbers in it, what is unknown last in either direction.
function order(a, b, descending) {
  if (!isKnown(a) || !isKnown(b)) return isKnown(b) - isKnown(a);
  const [first, second] = descending ? [b, a] : [a, b];
  if (typeof first === "number" && typeof second === "number") return first - second;
  return String(first).localeCompare(String(second), undefined, { numeric: true });
}

// Calls sort(column, descending) when a name in the header row is clicked.
function sortOnClick(header, sort, descendingFirst = () => false) {
  const names = [...header.cells];
  names.forEach((name, column) => name.querySelector("button").addEventListener("click", () => {
    const now = name.getAttribute("aria-sort");
    const descending = now ? now === "ascending" : descendingFirst(column);
    for (const other of names) other.removeAttribute("aria-sort");
    name.setAttribute("aria-sort", descending ? "descending" : "ascending");
    sort(column, descending);
  }));
}

// The head that the address names, as report.html#L4H11 does: it survives a reload, and can be sent.
function headInAddress() {
  const [, layer, head] = location.hash.match(/^#L(\d+)H(\d+)$/) || [];
  const i = head === undefined ? -1 : facts.layers.indexOf(Number(layer));
  return i >= 0 && Number(head) < facts.heads ? [i, Number(head)] : null;
}

function nameInAddress(i, head) {
  history.replaceState(null, "", `#L${facts.layers[i]}H${head}`);
}

// A link that downloads what `content` makes of the page as it is when it is clicked.
function downloads(link, type, name, content) {
  link.addEventListener("click", () => {
    link.download = name();
    link.setAttribute("href", `data:${type};charset=utf-8,${encodeURIComponent(content())}`);
  });
}

// Drawings one below the other as one SVG with its colours within, which any program opens.
function standalone(drawings, style) {
  const boxes = drawings.map(svg => svg.viewBox.baseVal);
  const file = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const width = Math.max(...boxes.map(box => box.width)), height = boxes.reduce((sum, box) => sum + box.height, 0);
  file.setAttribute("viewBox", `0 0 ${width} ${height}`);
  file.append(Object.assign(document.createElementNS(file.namespaceURI, "style"), { textContent: style }));
  let top = 0;
  drawings.forEach((svg, k) => {
    const copy = svg.cloneNode(true);
    for (const [name, value] of Object.entries({ y: top, width: boxes[k].width, height: boxes[k].height })) copy.setAttribute(name, value);
    copy.removeAttribute("style");
    file.append(copy);
    top += boxes[k].height;
  });
  return new XMLSerializer().serializeToString(file);
}

// What is wider than the page says so.
const widths = new ResizeObserver(entries => entries.forEach(({ target }) => {
  target.closest("figure").querySelector(".hint").hidden = target.scrollWidth <= target.clientWidth;
}));
document.querySelectorAll("figure > .wide").forEach(wide => widths.observe(wide));

// Before it is printed, every table learns by how much it has to shrink to fit a sheet, its margins taken off.
const SHEET = 700; // pixels: A4 and Letter have a little more
addEventListener("beforeprint", () => {
  const { classList } = document.documentElement;
  classList.add("printing");
  const tables = [...document.querySelectorAll("table")];
  const fits = tables.map(table => Math.min(1, SHEET / table.offsetWidth));
  classList.remove("printing");
  tables.forEach((table, k) => table.style.setProperty("--fit", fits[k]));
});

for (const table of document.querySelectorAll("table.sortable")) {
  const valueOf = cell => "value" in cell.dataset ? parseFloat(cell.dataset.value) : cell.textContent;
  sortOnClick(table.tHead.rows[0], (column, descending) => {
    const body = table.tBodies[0];
    const value = row => valueOf(row.cells[column]);
    body.append(...[...body.rows].sort((a, b) => order(value(a), value(b), descending)));
  });
}

// A longer table with a column of layers can show those of one layer.
const LONG = 10; // rows
for (const table of document.querySelectorAll("table.sortable")) {
  const rows = [...table.tBodies[0].rows];
  const column = [...table.tHead.rows[0].cells].findIndex(name => name.textContent === "layer");
  if (column < 0 || rows.length < LONG) continue;
  const layerOf = row => row.cells[column].textContent;
  const label = document.createElement("label"), select = document.createElement("select");
  label.className = "aside";
  label.append("layer ", select);
  select.append(new Option("all"));
  for (const layer of [...new Set(rows.map(layerOf))].sort((a, b) => a - b)) select.append(new Option(layer || "none", `L${layer}`));
  select.addEventListener("change", () => {
    for (const row of rows) row.classList.toggle("elsewhere", select.value !== "all" && select.value !== `L${layerOf(row)}`);
  });
  table.closest(".wide").before(label);
}
