// On a phone a table of at most four columns that is wider than the screen becomes cards: a row is one card, and each cell
// says its column. Without it the last column, the remedy of troubleshooting.md for example, is off the screen.
document$.subscribe(() => {
  if (!matchMedia("(max-width: 59.9375em)").matches) return;
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const columns = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
    const room = table.closest("article").clientWidth;
    if (columns.length < 2 || columns.length > 4 || table.scrollWidth <= room) continue;
    table.classList.add("cards");
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, column) => (cell.dataset.column = columns[column]));
  }
});
