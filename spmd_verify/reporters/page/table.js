// The table of rows: filtered, sorted, a page at a time.
const PAGE = 50;
const COLUMNS = [
  ["tensor", "tensor"], ["stage", "stage"], ["step", "step", "num"], ["verdict", "verdict"],
  ["error", "error", "num"], ["noise", "noise", "num"], ["ratio", "error / noise", "num"],
  ["ulp", "ulp", "num"], ["layout", "layout"],
];
const NUMERIC = new Set(["step", "error", "noise", "ratio", "ulp"]);

class RowTable {
  // `choose(cell, series)` is called when a tensor is clicked.
  constructor(choose) {
    this.choose = choose;
    this.sort = { column: "ratio", isDown: true };
    this.page = 0;
    this.scope = "cell";
    this.words = element("input", { type: "search", placeholder: "name or module", oninput: () => this.restart(), spellcheck: "false" });
    this.stage = this.picker(["all stages", ...data.stages]);
    this.verdict = this.picker(["all verdicts", ...Object.values(data.verdicts)]);
    this.cells = this.picker(["this cell", "all cells"]);
    this.steps = element("input", { type: "checkbox", onchange: () => this.restart() });
    this.body = element("tbody", {});
    this.head = element("tr", {});
    this.status = element("span", { role: "status" });
    this.back = element("button", { type: "button", onclick: () => this.turn(-1) }, "Previous");
    this.on = element("button", { type: "button", onclick: () => this.turn(1) }, "Next");
  }

  picker(options) {
    const made = options.map((option) => element("option", { value: option }, option));
    return element("select", { onchange: () => this.restart() }, ...made);
  }

  // Everything of the table, once.
  parts() {
    const labelled = (words, control) => element("label", {}, words, control);
    const controls = element("div", { class: "controls", role: "search", "aria-label": "Filter tensors" },
      labelled("Tensor", this.words), labelled("Stage", this.stage), labelled("Verdict", this.verdict),
      labelled("Cells", this.cells), element("label", { class: "check" }, this.steps, "every step"),
      element("button", { type: "button", onclick: () => this.clear() }, "Clear"));
    const table = element("table", { class: "rows", "aria-label": "Tensors" }, element("thead", {}, this.head), this.body);
    const pager = element("div", { class: "pager" }, this.back, this.on, this.status);
    return [controls, element("div", { class: "scroll" }, table), pager];
  }

  show(cell) {
    this.cell = cell;
    this.chosen = null;
    this.restart();
  }

  clear() {
    this.words.value = "";
    this.module = null;
    for (const each of [this.stage, this.verdict, this.cells]) each.selectedIndex = 0;
    this.steps.checked = false;
    this.restart();
  }

  // Show the rows of one module at one stage.
  narrow(module, stage) {
    this.clear();
    this.module = module;
    this.words.value = module;
    this.stage.value = stage;
    this.restart();
  }

  restart() {
    this.page = 0;
    this.found = this.sorted(this.filtered());
    this.fill();
  }

  // Pairs [cell, row]; without "every step" the worst row of each series.
  filtered() {
    const words = this.words.value.trim().toLowerCase();
    // A module chosen in the heat map is that module, not whatever has its name inside.
    const module = this.module !== null && this.words.value === this.module ? this.module : null;
    const stage = this.stage.selectedIndex ? this.stage.value : null;
    const verdict = this.verdict.selectedIndex ? this.verdict.value : null;
    const found = [];
    for (const cell of this.cells.selectedIndex ? data.cells : [this.cell]) {
      const rows = rowsOf(cell);
      for (let s = 0; s < rows.starts.length; s++) {
        if (stage !== null && stageOf(cell, s) !== stage) continue;
        if (module !== null && moduleOf(cell, s) !== module) continue;
        if (module === null && words && !nameOf(cell, s).toLowerCase().includes(words) &&
          !moduleOf(cell, s).toLowerCase().includes(words)) continue;
        let worst = -1;
        for (let row = rows.starts[s]; row < rows.starts[s] + cell.series.rows[s]; row++) {
          if (verdict !== null && verdictOf(cell, row) !== verdict) continue;
          if (this.steps.checked) found.push([cell, row]);
          else if (worst < 0 || isWorse(cell, row, worst)) worst = row;
        }
        if (worst >= 0) found.push([cell, worst]);
      }
    }
    return found;
  }

  sorted(found) {
    const { column, isDown } = this.sort;
    const sign = isDown ? -1 : 1;
    const keys = new Map(found.map((pair) => [pair, this.key(pair, column)]));
    const compare = NUMERIC.has(column)
      // NaN is larger than everything: it is the worst that can be.
      ? (a, b) => (Number.isNaN(a) ? (Number.isNaN(b) ? 0 : 1) : Number.isNaN(b) ? -1 : a < b ? -1 : a > b ? 1 : 0)
      : (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    return found.sort((a, b) => sign * compare(keys.get(a), keys.get(b)) || a[1] - b[1]);
  }

  key([cell, row], column) {
    const rows = rowsOf(cell), s = rows.seriesOf[row];
    if (NUMERIC.has(column)) return rows[column][row];
    if (column === "tensor") return nameOf(cell, s);
    if (column === "stage") return data.stages.indexOf(stageOf(cell, s));
    if (column === "layout") return text(cell.series.layout[s]);
    return verdictOf(cell, row);
  }

  turn(by) {
    this.page += by;
    this.fill();
  }

  order(column) {
    const isSame = this.sort.column === column;
    this.sort = { column, isDown: isSame ? !this.sort.isDown : NUMERIC.has(column) };
    this.restart();
    this.head.querySelector(`[data-column="${column}"]`).focus();
  }

  fill() {
    const isMany = this.cells.selectedIndex > 0;
    this.head.replaceChildren(
      ...(isMany ? [element("th", { scope: "col" }, "cell")] : []),
      ...COLUMNS.map(([column, words, kind]) => this.heading(column, words, kind)));
    const first = this.page * PAGE;
    const shown = this.found.slice(first, first + PAGE);
    this.body.replaceChildren(...shown.map((pair) => this.line(pair, isMany)));
    this.back.disabled = this.page === 0;
    this.on.disabled = first + PAGE >= this.found.length;
    const what = this.steps.checked ? "row" : "tensor";
    this.status.textContent = this.found.length
      ? `${first + 1}-${first + shown.length} of ${count(this.found.length, what)}` +
        (this.steps.checked ? "" : ", each at its worst step")
      : "nothing matches";
  }

  heading(column, words, kind) {
    const isSorted = this.sort.column === column;
    const arrow = isSorted ? (this.sort.isDown ? " \u25be" : " \u25b4") : "";
    return element("th", {
      scope: "col", class: kind || "",
      "aria-sort": isSorted ? (this.sort.isDown ? "descending" : "ascending") : null,
    }, element("button", { type: "button", "data-column": column, onclick: () => this.order(column) }, words + arrow));
  }

  line([cell, row], isMany) {
    const rows = rowsOf(cell), s = rows.seriesOf[row];
    const verdict = verdictOf(cell, row);
    const tensor = element("button", { type: "button", class: "tensor", onclick: () => this.choose(cell, s) }, nameOf(cell, s));
    const cells = [
      element("td", { class: "name" }, tensor), element("td", {}, stageOf(cell, s)),
      element("td", { class: "num" }, String(rows.step[row])),
      element("td", {}, element("span", { class: "chip " + verdict }, verdict)),
      ...["error", "noise", "ratio", "ulp"].map((each) => element("td", { class: "num" }, number(rows[each][row]))),
      element("td", { class: "name" }, element("code", {}, text(cell.series.layout[s]))),
    ];
    if (isMany) cells.unshift(element("td", {}, `${cell.style} ${cell.mesh}`));
    const isChosen = this.chosen && this.chosen[0] === cell && this.chosen[1] === s;
    return element("tr", { class: isChosen ? "chosen" : null }, ...cells);
  }

  mark(cell, s) {
    this.chosen = [cell, s];
    this.fill();
  }
}
