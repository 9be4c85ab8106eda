"use strict";
// Theme: follows the system until the button is pressed.
const root = document.documentElement;
const system = window.matchMedia("(prefers-color-scheme: dark)");
const button = document.getElementById("theme");
const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
const nameButton = () => { button.textContent = isDark() ? "Light" : "Dark"; };
button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; nameButton(); });
system.addEventListener("change", nameButton);
nameButton();

// Legend: a pressed method is shown alone in all figures that draw several.
const chips = [...document.querySelectorAll(".chip")];
for (const chip of chips) {
  chip.addEventListener("click", () => {
    const on = chip.getAttribute("aria-pressed") !== "true";
    for (const other of chips) other.setAttribute("aria-pressed", String(on && other === chip));
    for (const mark of document.querySelectorAll("[data-group]")) {
      mark.classList.toggle("faded", on && mark.dataset.group !== chip.dataset.chip);
    }
  });
}

// Clients: a table of one seed and one figure, sorted by any column.
const data = JSON.parse(document.getElementById("clients-data").textContent);
const table = document.getElementById("clients-table");
if (table) {
  const chosen = { set: document.getElementById("clients-set"), figure: document.getElementById("clients-figure") };
  const sort = { column: 0, down: false };
  const option = (select, value, text) => { const o = document.createElement("option"); o.value = value; o.textContent = text; select.append(o); };
  data.sets.forEach((set, place) => option(chosen.set, place, set.name));
  data.figures.forEach((figure) => option(chosen.figure, figure.key, figure.name));

  const element = (tag, text, kind) => { const e = document.createElement(tag); e.textContent = text; if (kind) e.className = kind; return e; };
  const shown = (value) => value === null || value === "" ? "–" : typeof value === "number" ? value.toLocaleString("en", { useGrouping: false }) : value;
  const decimals = (key) => key === "accuracy" || key === "ece_top1" ? 1 : 3;

  const draw = () => {
    const set = data.sets[chosen.set.value];
    const key = chosen.figure.value;
    const texts = set.clients.some((client) => typeof client[0] === "string") ? [0, 1, 4] : [1, 4];
    const fixed = ["client", "kind", "training rows", "test rows", "main label"];
    const heads = [...fixed, ...set.methods.map((method) => data.groups[method.group])];
    const rows = set.clients.map((client, place) => [
      client[0], client[1] ? "unseen" : "participating", ...client.slice(2), ...set.methods.map((method) => method[key][place]),
    ]);
    const column = Math.min(sort.column, heads.length - 1);
    rows.sort((a, b) => {
      const [x, y] = [a[column], b[column]];
      if (x === null || y === null) return (x === null) - (y === null); // unknown ones last, whichever way
      const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
      return (sort.down ? -order : order) || String(a[0]).localeCompare(String(b[0]), "en", { numeric: true });
    });
    const head = document.createElement("tr");
    heads.forEach((text, place) => {
      const cell = document.createElement("th");
      cell.scope = "col";
      const press = element("button", text, "sort");
      press.type = "button";
      if (texts.includes(place)) cell.className = "text";
      if (place === column) cell.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
      press.addEventListener("click", () => { sort.down = place === column && !sort.down; sort.column = place; draw(); });
      cell.append(press);
      head.append(cell);
    });
    const body = rows.map((row) => {
      const line = document.createElement("tr");
      row.forEach((value, place) => {
        const text = place >= fixed.length && value !== null ? value.toFixed(decimals(key)) : shown(value);
        line.append(element("td", text, texts.includes(place) ? "text" : "number"));
      });
      return line;
    });
    table.tHead.replaceChildren(head);
    table.tBodies[0].replaceChildren(...body);
    document.getElementById("clients-more").textContent = set.left_out ? `${set.left_out} more clients are in clients.csv.` : "";
  };
  for (const select of Object.values(chosen)) select.addEventListener("change", draw);
  draw();
}
