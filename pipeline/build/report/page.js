// Sorting and filtering of the table of programs. The page is complete without this script.
const table = document.getElementById("programs");
const body = table.tBodies[0];
const rows = [...body.rows];

const box = Object.assign(document.createElement("input"), {
  type: "search", className: "filter", placeholder: "Filter: rows that contain all words",
});
box.setAttribute("aria-label", "Filter the programs");
box.addEventListener("input", () => {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
  }
});
table.parentElement.before(box);

const sortKey = (row, column) => {
  const cell = row.cells[column];
  return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
};
const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true }));

[...table.tHead.rows[0].cells].forEach((head, column) => {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: head.textContent });
  head.replaceChildren(button);
  button.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    rows.sort((a, b) => (down ? -1 : 1) * compare(sortKey(a, column), sortKey(b, column)));
    body.append(...rows);
  });
});
