// Sorting of sortable tables, and a filter above those that have one. A page is complete without this script.
const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true }));
const sortKey = (row, column) => {
  const cell = row.cells[column];
  return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
};

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const name = table.caption.textContent;

  const box = Object.assign(document.createElement("input"), { type: "search", className: "filter" });
  box.placeholder = "Filter: rows that contain all words";
  box.setAttribute("aria-label", `Filter the table: ${name}`);
  const found = Object.assign(document.createElement("span"), { className: "filtered" });
  found.setAttribute("role", "status");
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    found.textContent = words.length ? `${shown} of ${rows.length}` : "";
  });
  if (rows.length > 8) table.parentElement.before(box, found);

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
}
