"use strict";

// Tables: a click on a heading sorts by its column, a second one in the other direction.
function sortTable(heading) {
  const table = heading.closest("table");
  const place = [...heading.parentNode.children].indexOf(heading);
  const isText = heading.dataset.kind === "text";
  // Figures are compared largest first, names from A to Z; then the other way round.
  const first = isText ? "ascending" : "descending";
  const second = isText ? "descending" : "ascending";
  const order = heading.getAttribute("aria-sort") === first ? second : first;
  for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const keyed = [...table.tBodies[0].rows].map((row) => {
    const cell = row.cells[place];
    return [isText ? cell.textContent.trim() : parseFloat(cell.dataset.value), row];
  });
  keyed.sort(([a], [b]) => {
    if (isText) return sign * a.localeCompare(b, undefined, { numeric: true });
    // A cell without a figure is last in both directions.
    if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
    return sign * (a - b);
  });
  table.tBodies[0].append(...keyed.map(([, row]) => row));
}
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => sortTable(button.closest("th")));
}

// Plots: their texts, lines and background are the page's, which follow the system's theme.
const plots = JSON.parse(document.getElementById("plots").textContent);
const isTouched = matchMedia("(pointer: coarse)").matches;

function themed(layout) {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  const changes = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    "modebar.bgcolor": "rgba(0,0,0,0)",
    "modebar.color": value("--faint"),
    "modebar.activecolor": value("--text"),
    "font.color": value("--text"),
    "font.family": getComputedStyle(document.body).fontFamily,
    "hoverlabel.bgcolor": value("--panel"),
    "hoverlabel.bordercolor": value("--line"),
    "hoverlabel.font.color": value("--text"),
    "hoverlabel.align": "left",
  };
  for (const axis of ["xaxis", "yaxis"]) {
    if (!layout[axis]) continue;
    for (const part of ["gridcolor", "linecolor", "zerolinecolor"]) changes[axis + "." + part] = value("--line");
  }
  return changes;
}

function paint() {
  for (const div of document.querySelectorAll(".plot")) Plotly.relayout(div, themed(div.layout));
}

async function draw() {
  for (const div of document.querySelectorAll(".plot")) {
    const plot = plots[div.id];
    const isMap = div.classList.contains("map");
    // On a touch screen a drag must scroll the page.
    if (isMap && !isTouched) plot.layout.dragmode = "pan";
    const settings = {
      responsive: true,
      displaylogo: false,
      displayModeBar: isMap && !isTouched,
      modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
    };
    await Plotly.newPlot(div, plot.data, plot.layout, settings);
    await Plotly.relayout(div, themed(plot.layout));
  }
  document.documentElement.dataset.ready = "1";
}
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
matchMedia("print").addEventListener("change", () => {
  paint();
  for (const div of document.querySelectorAll(".plot")) Plotly.Plots.resize(div);
});
