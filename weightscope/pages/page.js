"use strict";
// A click on a column's name sorts by it; a second click turns the order round. Empty cells stay last.
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = row => {
      const cell = row.cells[column];
      return cell.dataset.value === undefined ? cell.textContent : parseFloat(cell.dataset.value);
    };
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (typeof x === "number" && typeof y === "number") {
        if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
        return down ? y - x : x - y;
      }
      return down ? String(y).localeCompare(String(x)) : String(x).localeCompare(String(y));
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
  }));
}
