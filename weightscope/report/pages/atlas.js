// Rows of all tables that hold every word of the search stay.
const search = document.querySelector(".search input");
const rows = [...document.querySelectorAll("table.sortable tbody tr")].map(row => [row, row.textContent.toLowerCase()]);
search.addEventListener("input", () => {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const [row, text] of rows) {
    row.hidden = !words.every(word => text.includes(word));
    count += !row.hidden;
  }
  document.querySelector(".search output").textContent = words.length ? `${count} rows` : "";
});
