// Modules by stages: the worst row of each, coloured by its share of the allowed error.
const HEAT = [
  ["h0", "equal bit for bit"], ["h1", "up to a quarter of the limit"], ["h2", "up to the limit"],
  ["h3", "beyond it"], ["h4", "more than 10 times beyond"], ["hn", "not decided"],
];

// `share` may be unknown: then the verdict alone says on which side of the limit a row is.
function heatClass(verdict, share) {
  if (verdict === "exact") return "h0";
  if (verdict !== "rounding" && verdict !== "mismatch" && verdict !== "semantic") return "hn";
  if (verdict === "rounding") return share !== NONE && share <= 0.25 ? "h1" : "h2";
  return share > 10 || Number.isNaN(share) ? "h4" : "h3";
}

// Verdicts of which the ratio says nothing.
const SIGNS = { exact: "=", undetermined: "?", not_exercised: "\u2205" };
const WEIGHT = { mismatch: 6, semantic: 5, undetermined: 4, not_exercised: 3, rounding: 2, exact: 1 };

// {module: {stage: row}}, modules in the order of the forward pass where it is known.
function worstByModule(cell) {
  const rows = rowsOf(cell);
  const found = new Map();
  const order = cell.series.stage.map((_, s) => s);
  const isOutput = (s) => (stageOf(cell, s) === "module_outputs" ? 0 : 1);
  order.sort((a, b) => isOutput(a) - isOutput(b) || a - b);
  for (const s of order) {
    const module = moduleOf(cell, s), stage = stageOf(cell, s);
    if (!found.has(module)) found.set(module, new Map());
    const stages = found.get(module);
    for (let row = rows.starts[s]; row < rows.starts[s] + cell.series.rows[s]; row++) {
      if (!stages.has(stage) || isWorse(cell, row, stages.get(stage))) stages.set(stage, row);
    }
  }
  return found;
}

function isWorse(cell, a, b) {
  const weight = (row) => WEIGHT[verdictOf(cell, row)] || 0;
  const rows = rowsOf(cell);
  return weight(a) !== weight(b) ? weight(a) > weight(b) : rows.ratio[a] > rows.ratio[b];
}

// One tab stop; arrows go from place to place. `choose(module, stage, row)` is called on a click.
function heatMap(cell, choose) {
  const found = worstByModule(cell);
  const stages = data.stages.filter((stage) => [...found.values()].some((each) => each.has(stage)));
  const head = element("tr", {}, element("th", { scope: "col" }, "module"),
    ...stages.map((stage) => element("th", { scope: "col" }, stage)));
  const body = [...found].map(([module, each]) => element("tr", {}, element("th", { scope: "row" }, module),
    ...stages.map((stage) => element("td", {}, ...(each.has(stage) ? [place(cell, module, stage, each.get(stage), choose)] : [])))));
  const table = element("table", { class: "heat", "aria-label": "Worst error / noise by module and stage" }, element("thead", {}, head), element("tbody", {}, ...body));
  const start = table.querySelector("button.first") || table.querySelector("button");
  if (start) start.setAttribute("tabindex", "0");
  table.addEventListener("keydown", (event) => walk(event, body));
  const keys = element("ul", { class: "legend" },
    ...HEAT.map(([name, words]) => element("li", {}, element("span", { class: "key " + name }), words)),
    element("li", {}, "framed: the first divergence"));
  return [element("div", { class: "heat-box" }, table), keys];
}

function place(cell, module, stage, row, choose) {
  const rows = rowsOf(cell), verdict = verdictOf(cell, row);
  const s = rows.seriesOf[row];
  const first = cell.first;
  const isFirst = first && first.stage === stage && inModule(cell, first, module);
  const words = `${module}, ${stage}: ${verdict}, ${number(rows.ratio[row])} x the noise in ${nameOf(cell, s)}, step ${rows.step[row]}`;
  return element("button", {
    type: "button", tabindex: "-1", title: words, onclick: () => choose(module, stage, row),
    "aria-label": words + (isFirst ? ", first divergence" : ""),
    class: heatClass(verdict, shareOf(cell, row)) + (isFirst ? " first" : ""),
  }, SIGNS[verdict] || number(rows.ratio[row]));
}

function inModule(cell, first, module) {
  return cell.series.name.some((_, s) => nameOf(cell, s) === first.tensor &&
    stageOf(cell, s) === first.stage && moduleOf(cell, s) === module);
}

function walk(event, body) {
  const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  const from = event.target.closest("td");
  if (!move || !from) return;
  event.preventDefault();
  let line = body.indexOf(from.parentElement), column = from.cellIndex;
  for (;;) {
    line += move[0];
    column += move[1];
    const cell = body[line] && column > 0 && body[line].cells[column];
    if (!cell) return;
    const button = cell.querySelector("button");
    if (!button) continue;
    event.target.setAttribute("tabindex", "-1");
    button.setAttribute("tabindex", "0");
    button.focus();
    return;
  }
}
