// The record's rows, as html_data.py packs them. Four characters of base 64 are one number.
const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const VALUE_OF = new Uint8Array(128);
for (let i = 0; i < 64; i++) VALUE_OF[DIGITS.charCodeAt(i)] = i;
const OFFSET = 4, MANTISSAS = 9000, LEAST_EXPONENT = -324;
const SPECIAL = [0, null, Infinity, NaN];
// What -1 stands for in a packed column: the record has no number there.
const NONE = -1;

const data = JSON.parse(document.getElementById("data").textContent);
const text = (i) => data.strings[i];

function unpack(packed) {
  const found = new Float64Array(packed.length / 4);
  for (let i = 0, at = 0; i < found.length; i++, at += 4) {
    let code = 0;
    for (let j = 0; j < 4; j++) code = code * 64 + VALUE_OF[packed.charCodeAt(at + j)];
    if (code < OFFSET) {
      found[i] = SPECIAL[code] === null ? NONE : SPECIAL[code];
    } else {
      const exponent = Math.floor((code - OFFSET) / MANTISSAS);
      const mantissa = (code - OFFSET) % MANTISSAS + 1000;
      found[i] = Number(mantissa + "e" + (exponent + LEAST_EXPONENT - 3));
    }
  }
  return found;
}

function unpackSteps(packed) {
  const found = new Uint32Array(packed.length / 3);
  for (let i = 0; i < packed.length; i++) {
    const at = Math.floor(i / 3);
    found[at] = found[at] * 64 + VALUE_OF[packed.charCodeAt(i)];
  }
  return found;
}

// A cell's rows lie series after series; a series is a tensor at a stage, its rows by step.
function decoded(cell) {
  const { series, rows } = cell;
  const count = rows.verdict.length;
  const seriesOf = new Uint32Array(count);
  const starts = [];
  let at = 0;
  series.rows.forEach((n, i) => {
    starts.push(at);
    seriesOf.fill(i, at, at + n);
    at += n;
  });
  const details = new Map(cell.details.map(([row, ...rest]) => [row, rest]));
  return {
    count, seriesOf, starts, details,
    step: unpackSteps(rows.step),
    error: unpack(rows.error),
    noise: unpack(rows.noise),
    ratio: unpack(rows.ratio),
    ulp: unpack(rows.ulp),
  };
}

const ready = new Map();
// Cells are decoded when they are first looked at.
function rowsOf(cell) {
  if (!ready.has(cell)) ready.set(cell, decoded(cell));
  return ready.get(cell);
}

const verdictOf = (cell, row) => data.verdicts[cell.rows.verdict[row]];
const nameOf = (cell, s) => text(cell.series.name[s]);
const stageOf = (cell, s) => text(cell.series.stage[s]);
const moduleOf = (cell, s) => text(cell.series.module[s]);

function limitOf(cell, s, row) {
  const norm = cell.rows.norm[row] === "r" ? "row" : "tensor";
  const limit = data.limits[text(cell.series.dtype[s]) + "/" + norm];
  return limit === undefined ? NONE : limit;
}

// A row's error as a share of what is allowed; NONE where the record does not say.
function shareOf(cell, row) {
  const rows = rowsOf(cell);
  const limit = limitOf(cell, rows.seriesOf[row], row);
  return rows.ratio[row] === NONE || limit === NONE ? NONE : rows.ratio[row] / limit;
}

function detailOf(cell, row) {
  const found = rowsOf(cell).details.get(row);
  if (!found) return null;
  const [index, actual, expected, cause, downstream, ranks, reason] = found;
  return {
    index, actual, expected,
    cause: text(cause), downstream: text(downstream), ranks: text(ranks), reason: text(reason),
  };
}

// 1.66e7, 0.906, 1.08e-8: three significant digits, as everywhere in the reports.
function number(value) {
  if (value === NONE) return "-";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : "inf";
  if (value === 0) return "0";
  const exponent = Math.floor(Math.log10(Math.abs(value)));
  if (exponent >= -4 && exponent < 3) return String(Number(value.toPrecision(3)));
  return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
}

const count = (n, word) => n + " " + word + (n === 1 ? "" : "s");

// Elements are made of text only: nothing of the record is ever parsed as HTML.
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === false || value === undefined) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

const SVG = "http://www.w3.org/2000/svg";
function drawn(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
