// The page: which cell and tensor are looked at. The address says it, so that it can be pasted:
// #cell=case/style/mesh/dtype&tensor=stage/name
const root = document.documentElement;
root.classList.add("js");

const explorer = document.getElementById("explorer");
const picker = document.getElementById("cell-picker");
const sections = new Map(data.cells.map((cell) => [cell.key, document.getElementById(cell.key)]));
const links = [...document.querySelectorAll("a.chip")];

const table = new RowTable((cell, s) => visit(cell, s));
const heatBox = element("div", {});
const growthBox = element("div", {});
const tensorBox = element("div", { id: "tensor", tabindex: "-1" });
const stepsBox = element("div", { class: "two" });
let current = null, currentSeries = null;

const encoded = (words) => encodeURIComponent(words).replaceAll("%2F", "/").replaceAll("%3D", "=").replaceAll("%2C", ",");

function address(cell, s) {
  const tensor = s === null ? "" : "&tensor=" + encoded(stageOf(cell, s) + "/" + nameOf(cell, s));
  return "#" + cell.key.split("=")[0] + "=" + encoded(cell.key.slice("cell=".length)) + tensor;
}

function visit(cell, s) {
  const to = address(cell, s);
  if (location.hash === to) follow();
  else location.hash = to;
}

// Read the address; what it does not name falls back to the first cell that fails.
function follow() {
  const parts = location.hash.slice(1).split("&");
  const named = decode(parts.find((part) => part.startsWith("cell=")));
  const cell = data.cells.find((each) => each.key === named);
  if (cell) {
    look(cell);
    const tensor = decode(parts.find((part) => part.startsWith("tensor=")));
    const s = tensor === null ? -1 : cell.series.name.findIndex((_, i) => "tensor=" + stageOf(cell, i) + "/" + nameOf(cell, i) === tensor);
    showTensor(cell, s < 0 ? startOf(cell) : s);
    const target = s < 0 ? sections.get(cell.key) : tensorBox;
    target.scrollIntoView({ block: s < 0 ? "start" : "nearest" });
    // In the heat map the focus stays, so that the arrows go on from there.
    if (!heatBox.contains(document.activeElement)) target.focus({ preventScroll: true });
  } else if (!current && data.cells.length) {
    const start = data.cells.find((each) => each.fails) || data.cells.find((each) => each.rows.verdict) || data.cells[0];
    look(start);
    showTensor(start, startOf(start));
  }
}

function decode(part) {
  if (part === undefined) return null;
  try {
    return decodeURIComponent(part);
  } catch {
    return null; // A half-pasted address names nothing.
  }
}

// The tensor that is shown first: of the first divergence, else the worst, else some gradient.
function startOf(cell) {
  const find = (named) => named ? cell.series.name.findIndex((_, i) => nameOf(cell, i) === named.tensor && stageOf(cell, i) === named.stage) : -1;
  const found = [cell.first, cell.worst].map(find).find((s) => s >= 0);
  const gradient = cell.series.stage.findIndex((_, i) => stageOf(cell, i) === "gradients");
  return found === undefined ? Math.max(gradient, 0) : found;
}

function look(cell) {
  if (current === cell) return;
  current = cell;
  for (const [key, section] of sections) section.classList.toggle("chosen", key === cell.key);
  for (const link of links) {
    if (decode(link.getAttribute("href").slice(1)) === cell.key) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  picker.value = cell.key;
  const hasRows = cell.rows.verdict.length > 0;
  explorer.hidden = !hasRows;
  if (!hasRows) return;
  heatBox.replaceChildren(...heatMap(cell, (module, stage, row) => {
    table.narrow(module, stage);
    visit(cell, rowsOf(cell).seriesOf[row]);
  }));
  const worst = heatBox.querySelector("button.first, button.h4, button.h3");
  if (worst) heatBox.firstChild.scrollTop = worst.offsetTop - heatBox.firstChild.offsetTop - 60;
  growthBox.replaceChildren(...(cell.growth.length
    ? [growthChart(cell), legend([["error", cell.style + " on " + cell.mesh], ["other", "other cells"], ["limit", "limit"]])]
    : [element("p", { class: "muted" }, "The record has no growth for this cell.")]));
  table.show(cell);
}

function showTensor(cell, s) {
  hideTips();
  currentSeries = explorer.hidden ? null : s;
  if (explorer.hidden) return;
  const own = cell.series;
  const stages = own.name.map((_, i) => i).filter((i) => own.name[i] === own.name[s]);
  const tabs = stages.map((i) => element("button", {
    type: "button", "aria-pressed": String(i === s), disabled: i === s, onclick: () => visit(cell, i),
  }, stageOf(cell, i)));
  const aliases = text(own.aliases[s]);
  const facts = [["shape", text(own.shape[s])], ["dtype", text(own.dtype[s])], ["layout", text(own.layout[s])], ["also called", aliases]];
  tensorBox.replaceChildren(
    element("h4", {}, "Error over steps: ", element("code", {}, nameOf(cell, s))),
    element("p", { class: "controls", role: "group", "aria-label": "Stage" }, ...tabs),
    tensorChart(cell, s),
    legend([["error", "error"], ["noise", "noise floor"], ["limit", "limit: c x noise"], ["other", "other cells"]]));
  stepsBox.replaceChildren(stepTable(cell, s), element("div", {}, factList(facts), ...said(cell, s)));
  table.mark(cell, s);
}

function factList(facts) {
  const told = facts.filter(([, value]) => value);
  return element("dl", {}, ...told.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

function seriesRows(cell, s) {
  return Array.from({ length: cell.series.rows[s] }, (_, i) => rowsOf(cell).starts[s] + i);
}

function stepTable(cell, s) {
  const rows = rowsOf(cell);
  const line = (row) => element("tr", {},
    element("td", { class: "num" }, String(rows.step[row])), element("td", {}, data.runs[cell.rows.run[row]]),
    element("td", {}, verdictOf(cell, row)),
    ...["error", "noise", "ratio", "ulp"].map((each) => element("td", { class: "num" }, number(rows[each][row]))));
  const head = ["step", "run", "verdict", "error", "noise", "error / noise", "ulp"];
  return element("div", { class: "scroll" }, element("table", { "aria-label": `Steps of ${nameOf(cell, s)}` },
    element("thead", {}, element("tr", {}, ...head.map((words, i) => element("th", { scope: "col", class: i === 0 || i > 2 ? "num" : "" }, words)))),
    element("tbody", {}, ...seriesRows(cell, s).map(line))));
}

// What the first rows that differ say: worst element, cause, or what they follow from.
function said(cell, s) {
  const rows = rowsOf(cell), own = seriesRows(cell, s);
  const told = own.map((row) => [row, detailOf(cell, row)]).filter(([, detail]) => detail);
  if (!told.length && data.left_out > 0 && own.some((row) => verdictOf(cell, row) === "mismatch")) {
    return [element("p", { class: "muted" },
      `Worst elements and causes of ${count(data.left_out, "later row")} are left out here; the JSON record has them.`)];
  }
  return told.slice(0, 1).map(([row, detail]) => {
    const facts = [
      ["worst element", detail.index ? `${detail.index} is ${detail.actual}, expected ${detail.expected}` : ""],
      ["ranks", detail.ranks], ["cause", detail.cause], ["follows from", detail.downstream], ["reason", detail.reason],
    ];
    return element("div", { class: "cause" }, element("strong", {}, `Step ${rows.step[row]}`), factList(facts));
  });
}

function build() {
  const titled = (words, ...inside) => element("section", { "aria-label": words }, element("h4", {}, words), ...inside);
  explorer.append(
    titled("Modules and stages: worst error / noise", heatBox),
    element("div", { class: "two" },
      element("section", { "aria-label": "Error over steps" }, tensorBox),
      titled("Growth: largest parameter error / noise by step", growthBox)),
    stepsBox,
    titled("Tensors", ...table.parts()));
  const isOneCase = new Set(data.cells.map((cell) => cell.case)).size < 2;
  picker.append(...data.cells.map((cell) => element("option", { value: cell.key },
    `${cell.style} on ${cell.mesh}, ${cell.dtype}: ${cell.verdict}` + (isOneCase ? "" : ` (${cell.case})`))));
  picker.addEventListener("change", () => visit(data.cells.find((cell) => cell.key === picker.value), null));
}

function listen() {
  window.addEventListener("hashchange", follow);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTips(); });
  const theme = document.getElementById("theme");
  const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const say = () => {
    theme.setAttribute("aria-pressed", String(isDark()));
  };
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    say();
  });
  say();
  document.getElementById("copy").addEventListener("click", async () => {
    const status = document.getElementById("copied");
    if (!current) return;
    location.hash = address(current, currentSeries);
    try {
      await navigator.clipboard.writeText(location.href);
      status.textContent = "copied";
    } catch {
      status.textContent = "the address bar has it";
    }
  });
}

build();
listen();
follow();
root.dataset.ready = String(Math.round(performance.now()));
