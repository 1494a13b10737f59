// Charts over steps with a logarithmic axis. A line is {label, kind, points: [{step, value, say}]};
// `say` makes a point one that the keyboard reaches, with its words beside it.
// A narrow window gets a narrow chart, so that its words stay readable.
const WIDTH = window.innerWidth < 640 ? 380 : 600, HEIGHT = 250, LEFT = 58, RIGHT = 12, TOP = 26, BOTTOM = 24;
// Zero has no logarithm and infinity no place: they have rows of their own, below and above.
const MARGIN_ROW = 16;

const isDrawable = (value) => value !== NONE && value > 0 && Number.isFinite(value);

// Powers of ten around all values with room below for the noise band, at least two decades, and how many decades a label stands for.
function decades(values) {
  const found = values.filter(isDrawable).map(Math.log10);
  let low = found.length ? Math.floor(Math.min(...found) - 0.5) : -8;
  let high = found.length ? Math.ceil(Math.max(...found)) : 0;
  if (high - low < 2) { low -= 1; high = Math.max(high, low + 2); }
  return { low, high, every: Math.ceil((high - low) / 6) };
}

function scales(lines) {
  const points = lines.flatMap((line) => line.points);
  const values = points.map((point) => point.value);
  const { low, high, every } = decades(values);
  const first = Math.min(...points.map((p) => p.step)), last = Math.max(...points.map((p) => p.step));
  const hasZero = values.some((v) => v === 0);
  const hasMore = values.some((v) => !Number.isFinite(v));
  const bottom = HEIGHT - BOTTOM - (hasZero ? MARGIN_ROW : 0);
  const top = TOP + (hasMore ? MARGIN_ROW : 0);
  const width = WIDTH - LEFT - RIGHT;
  return {
    low, high, every, first, last, hasZero, hasMore, top, bottom,
    x: (step) => LEFT + (last === first ? width / 2 : 16 + (width - 32) * (step - first) / (last - first)),
    y: (value) => {
      if (value === 0) return HEIGHT - BOTTOM - 5;
      if (!Number.isFinite(value)) return TOP;
      return bottom - (bottom - top) * (Math.log10(value) - low) / (high - low);
    },
  };
}

function axes(at, unit) {
  const parts = [];
  for (let power = at.low; power <= at.high; power += at.every) {
    const y = at.y(10 ** power);
    parts.push(drawn("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }));
    const label = power >= -2 && power <= 3 ? String(Number((10 ** power).toPrecision(1))) : "1e" + power;
    parts.push(drawn("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, label));
  }
  if (at.hasZero) parts.push(drawn("text", { x: LEFT - 6, y: at.y(0) + 4, "text-anchor": "end" }, "0"));
  if (at.hasMore) parts.push(drawn("text", { x: LEFT - 6, y: at.y(Infinity) + 4, "text-anchor": "end" }, "inf"));
  const every = Math.max(1, Math.ceil((at.last - at.first) / 10));
  for (let step = at.first; step <= at.last; step += every) {
    parts.push(drawn("text", { x: at.x(step), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, String(step)));
  }
  parts.push(drawn("text", { x: LEFT - 6, y: HEIGHT - BOTTOM + 16, "text-anchor": "end" }, "step"));
  parts.push(drawn("text", { x: 2, y: 12 }, unit));
  return parts;
}

function path(points, at) {
  const shown = points.filter((point) => point.value !== NONE);
  return shown.map((p, i) => (i ? "L" : "M") + at.x(p.step).toFixed(1) + " " + at.y(p.value).toFixed(1)).join("");
}

function band(line, at) {
  const shown = line.points.filter((point) => point.value !== NONE);
  if (!shown.length) return [];
  const ground = HEIGHT - BOTTOM;
  const left = shown.length === 1 ? LEFT : at.x(shown[0].step) - 8;
  const right = shown.length === 1 ? WIDTH - RIGHT : at.x(shown[shown.length - 1].step) + 8;
  const edge = [[left, at.y(shown[0].value)], ...shown.map((p) => [at.x(p.step), at.y(p.value)]),
    [right, at.y(shown[shown.length - 1].value)]];
  const top = edge.map(([x, y]) => x.toFixed(1) + " " + y.toFixed(1)).join("L");
  return [
    drawn("path", { class: "band", d: `M${top}L${right} ${ground}L${left} ${ground}Z` }),
    drawn("path", { class: "noise", d: "M" + top }),
  ];
}

// A chart with words on its points, shown on hover and focus; arrows go from point to point.
function chart(title, unit, lines) {
  const at = scales(lines);
  const picture = drawn("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group", "aria-label": title });
  const floors = lines.filter((line) => line.kind === "noise");
  picture.append(...floors.flatMap((line) => band(line, at)), ...axes(at, unit));
  for (const line of lines) {
    if (line.kind === "noise") continue;
    const stroke = drawn("path", { class: line.kind, d: path(line.points, at) });
    if (line.kind === "other") stroke.append(drawn("title", {}, line.label));
    picture.append(stroke);
  }
  const box = element("div", { class: "plot" }, picture);
  const dots = lines.flatMap((line) => line.points.filter((p) => p.say && p.value !== NONE));
  const marks = dots.map((point, i) => dot(point, at, box, i === 0));
  marks.forEach((mark, i) => mark.addEventListener("keydown", (event) => {
    const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: marks.length - 1 }[event.key];
    if (to === undefined || !marks[to]) return;
    event.preventDefault();
    mark.setAttribute("tabindex", "-1");
    marks[to].setAttribute("tabindex", "0");
    marks[to].focus();
  }));
  picture.append(...marks);
  return box;
}

function dot(point, at, box, isReachable) {
  const x = at.x(point.step), y = at.y(point.value);
  const mark = drawn("circle", {
    class: "dot", cx: x.toFixed(1), cy: y.toFixed(1), r: 5,
    tabindex: isReachable ? "0" : "-1", role: "img", "aria-label": point.say,
  });
  const show = () => {
    hideTips();
    const tip = element("div", { class: "tip" }, point.say);
    if (x > WIDTH / 2) tip.style.right = 100 * (1 - x / WIDTH) + 2 + "%";
    else tip.style.left = 100 * x / WIDTH + 2 + "%";
    tip.style.top = 100 * y / HEIGHT + "%";
    box.append(tip);
  };
  for (const event of ["mouseenter", "focus"]) mark.addEventListener(event, show);
  for (const event of ["mouseleave", "blur"]) mark.addEventListener(event, hideTips);
  return mark;
}

function hideTips() {
  document.querySelectorAll(".tip").forEach((tip) => tip.remove());
}

function legend(entries) {
  const items = entries.map(([kind, words]) => {
    const key = drawn("svg", { width: 26, height: 12, viewBox: "0 0 26 12", "aria-hidden": "true" });
    if (kind === "noise") key.append(drawn("rect", { class: "band", width: 26, height: 12 }), drawn("path", { class: "noise", d: "M0 1H26" }));
    else key.append(drawn("path", { class: kind, d: "M0 6H26" }));
    return element("li", {}, key, " " + words);
  });
  return element("ul", { class: "legend" }, ...items);
}

// Error over steps of one tensor at one stage: the noise floor as a band, the limit dashed.
function tensorChart(cell, s) {
  const rows = rowsOf(cell);
  const own = Array.from({ length: cell.series.rows[s] }, (_, i) => rows.starts[s] + i);
  const lines = [
    { kind: "noise", label: "noise", points: own.map((r) => ({ step: rows.step[r], value: rows.noise[r] })) },
    { kind: "limit", label: "limit", points: own.map((r) => ({ step: rows.step[r], value: limitValue(cell, s, r) })) },
    ...sameTensor(cell, s).map(([other, t]) => otherLine(other, t)),
    { kind: "error", label: "error", points: own.map((r) => ({ step: rows.step[r], value: rows.error[r], say: sayRow(cell, r) })) },
  ];
  return chart(`Error over steps, ${nameOf(cell, s)}, ${stageOf(cell, s)}`, "error (norm)", lines);
}

function limitValue(cell, s, row) {
  const noise = rowsOf(cell).noise[row], limit = limitOf(cell, s, row);
  return noise === NONE || limit === NONE ? NONE : noise * limit;
}

function otherLine(cell, s) {
  const rows = rowsOf(cell);
  const points = Array.from({ length: cell.series.rows[s] }, (_, i) => {
    const row = rows.starts[s] + i;
    return { step: rows.step[row], value: rows.error[row] };
  });
  return { kind: "other", label: `${cell.style} on ${cell.mesh}`, points };
}

// The same tensor and stage in the other cells of the case and dtype.
function sameTensor(cell, s) {
  const { name, stage } = cell.series;
  return data.cells.flatMap((other) => {
    if (other === cell || other.case !== cell.case || other.dtype !== cell.dtype) return [];
    const t = other.series.name.findIndex((n, i) => n === name[s] && other.series.stage[i] === stage[s]);
    return t < 0 ? [] : [[other, t]];
  });
}

function sayRow(cell, row) {
  const rows = rowsOf(cell);
  return `step ${rows.step[row]}: ${verdictOf(cell, row)}\nerror ${number(rows.error[row])}, noise ` +
    `${number(rows.noise[row])}, error / noise ${number(rows.ratio[row])}`;
}

// Largest parameter error / noise by step, of this cell and of the others of its case.
function growthChart(cell) {
  const line = (each, kind, isSaid) => ({
    kind, label: `${each.style} on ${each.mesh}`,
    points: each.growth.map(Number).map((value, step) => ({
      step, value, say: isSaid ? `step ${step}: ${number(value)} x the noise` : null,
    })),
  });
  const others = data.cells.filter((each) => each !== cell && each.case === cell.case && each.growth.length);
  const limit = data.limits[cell.dtype + "/tensor"];
  const steps = cell.growth.map((_, step) => step);
  const allowed = limit === undefined ? [] : [{ kind: "limit", points: steps.map((step) => ({ step, value: limit })) }];
  return chart(
    "Largest parameter error / noise by step", "error / noise",
    [...allowed, ...others.map((each) => line(each, "other", false)), line(cell, "error", true)],
  );
}
