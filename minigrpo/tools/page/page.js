"use strict";
// What the page does in the browser: colours, smoothing, and the samples. All texts of a run are
// set as text, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

function el(tag, properties, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === "style") made.style.cssText = value;
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Choices outlive a reload; a browser may forbid that for files.
const memory = {
  get(name) {
    try { return sessionStorage.getItem("minigrpo " + name); } catch { return null; }
  },
  set(name, value) {
    try { sessionStorage.setItem("minigrpo " + name, value); } catch { /* not remembered */ }
  },
};

// --- colours and curves ---------------------------------------------------------------------------

const plots = () => (window.Bokeh ? Bokeh.documents.flatMap((one) => one.roots()) : []);

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function paint(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  for (const plot of plots()) {
    for (const axis of [...plot.below, ...plot.left]) {
      axis.setv({ major_label_text_color: color("muted") });
    }
    for (const grid of plot.center) {
      if (grid.dimension === 1) grid.setv({ grid_line_color: color("line") });
    }
  }
}

function averaged(values, size) {
  const out = new Float32Array(values.length);
  let sum = 0, count = 0;
  for (let i = 0; i < values.length; i++) {
    if (Number.isFinite(values[i])) { sum += values[i]; count += 1; }
    const old = i >= size ? values[i - size] : NaN;
    if (Number.isFinite(old)) { sum -= old; count -= 1; }
    out[i] = Number.isFinite(values[i]) && count ? sum / count : NaN;
  }
  return out;
}

function smooth() {
  const slider = $("smooth");
  const size = Number(slider.dataset.steps.split(",")[slider.value]);
  slider.parentElement.querySelector("output").textContent = size === 1 ? "1 step" : size + " steps";
  const seen = new Set();
  for (const plot of plots()) {
    for (const renderer of plot.renderers) {
      const source = renderer.data_source;
      if (!source || !source.tags.includes("smooth") || seen.has(source)) continue;
      seen.add(source);
      const columns = { ...source.data };
      for (const name of Object.keys(columns)) {
        if (name.startsWith("drawn")) {
          columns[name] = averaged(columns[name.replace("drawn", "logged")], size);
        }
      }
      source.data = columns;
    }
  }
}

function whenDrawn(action, tries = 400) {
  const drawn = document.querySelector(".plot") === null || plots().length > 0;
  if (drawn) action();
  else if (tries) setTimeout(() => whenDrawn(action, tries - 1), 25);
}

// --- words ----------------------------------------------------------------------------------------

const signed = (x) => (x === null ? "?" : (x >= 0 ? "+" : "−") + Math.abs(x).toFixed(2));
const plain = (x) => (x === null ? "?" : String(Math.round(x * 1000) / 1000));
const many = (n, what) => n + " " + what + (n === 1 ? "" : "s");
const chip = (text, kind) => el("span", { className: "chip " + (kind || "") }, text);

let answer = "truth"; // what the answers of the run that is shown are called

function asked(one) {
  const rows = [["prompt", one.prompt], [answer, one.truth]];
  if (one.kind) rows.push(["kind", one.kind]);
  return el("dl", { className: "asked" }, ...rows.filter(([, text]) => text).flatMap(
    ([name, text]) => [el("dt", {}, name), el("dd", { className: "mono text" }, text)]));
}

// A text with the part marked that differs from the true one, where texts are alike throughout.
function compared(text, truth, mark) {
  if (!mark || text === truth) return el("div", { className: "mono text" }, text || "(empty)");
  let start = 0, end = 0;
  const shorter = Math.min(text.length, truth.length);
  while (start < shorter && text[start] === truth[start]) start++;
  while (end < shorter - start && text.at(-1 - end) === truth.at(-1 - end)) end++;
  const middle = text.slice(start, text.length - end);
  return el("div", { className: "mono text" }, text.slice(0, start),
    middle ? el("mark", {}, middle) : null, text.slice(text.length - end));
}

function select(name, options, onchange) {
  const made = el("select", { onchange: () => onchange(made.value) });
  made.setAttribute("aria-label", name);
  for (const option of options) made.append(el("option", { value: option }, option));
  return made;
}

// --- boards ---------------------------------------------------------------------------------------

function board(squares, truth) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const add = (tag, values) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(values)) made.setAttribute(name, value);
    svg.append(made);
    return made;
  };
  svg.setAttribute("viewBox", "0 0 360 360");
  svg.setAttribute("role", "img");
  const wrong = [];
  for (let i = 0; i < 64; i++) {
    const x = (i % 8) * 45, y = Math.floor(i / 8) * 45, light = (i % 8 + Math.floor(i / 8)) % 2 === 0;
    add("rect", { x, y, width: 45, height: 45, fill: light ? color("light-square") : color("dark-square") });
    if (/[a-z]/i.test(squares[i])) add("use", { href: "#piece-" + squares[i], x, y });
    if (squares[i] === "?") {
      add("text", { x: x + 22, y: y + 32, "text-anchor": "middle", "font-size": 26 }).textContent = "?";
    }
    if (squares[i] !== truth[i]) wrong.push([x, y]);
  }
  for (const [x, y] of wrong) {
    add("rect", { x: x + 2, y: y + 2, width: 41, height: 41, fill: "none", stroke: "#d11f1f", "stroke-width": 4 });
  }
  svg.setAttribute("aria-label", "chess board, " + many(wrong.length, "wrong square"));
  return svg;
}

function boards(truth, written, caption = "written") {
  return el("div", { className: "boards" },
    el("figure", {}, el("figcaption", {}, "true"), board(truth, written)),
    el("figure", {}, el("figcaption", {}, caption), board(written, truth)));
}

// --- the prefix tree of a group -------------------------------------------------------------------

// Nodes are runs of tokens that the same completions share.
function tree(completions) {
  const build = (members, depth) => {
    const next = new Map(), ended = [];
    for (const g of members) {
      const token = completions[g].tokens[depth];
      if (token === undefined) ended.push(g);
      else next.set(token, [...(next.get(token) || []), g]);
    }
    const children = [...next].map(([first, group]) => {
      const tokens = [first];
      const shared = () => {
        const token = completions[group[0]].tokens[depth + tokens.length];
        return token !== undefined
          && group.every((g) => completions[g].tokens[depth + tokens.length] === token);
      };
      while (shared()) tokens.push(completions[group[0]].tokens[depth + tokens.length]);
      return { tokens, members: group, ...build(group, depth + tokens.length) };
    });
    children.sort((a, b) => b.members.length - a.members.length);
    return { children, ended };
  };
  return build(completions.map((_, g) => g), 0);
}

const count = (node) =>
  node.children.reduce((sum, child) => sum + child.tokens.length + count(child), 0);

function drawTree(group, pieces) {
  const { completions } = group;
  const most = Math.max(...completions.map((one) => Math.abs(one.advantage || 0)), 1e-9);
  const draw = (node, depth) => node.children.map((child) => {
    const mean = child.members.reduce((sum, g) => sum + (completions[g].advantage || 0), 0)
      / child.members.length;
    const shade = `rgba(var(--${mean >= 0 ? "up" : "down"}), ${(0.55 * Math.abs(mean) / most).toFixed(3)})`;
    const line = Math.round(3 * (child.members.length - 1) / Math.max(1, completions.length - 1));
    const style = `background:${shade};--shared:${child.members.length > 1 ? Math.max(1, line) : 0}px`;
    const told = `shared by ${child.members.length}, mean advantage ${signed(mean)}`;
    const spans = child.tokens.map((token) =>
      el("span", { className: "token", style, title: told }, pieces[token].replaceAll("\n", "↵\n")));
    const ends = child.ended.slice(0, 1).map((g) => chip(
      `${child.ended.length > 1 ? child.ended.length + " end, " : ""}advantage ${signed(completions[g].advantage)}`));
    return el("div", { className: depth > 6 ? "node deep" : "node" },
      el("div", { className: "run" }, el("span", { className: "count" }, "×" + child.members.length),
        el("span", { className: "tokens mono" }, ...spans, " ", ...ends)),
      ...draw(child, depth + 1));
  });
  const root = tree(completions), distinct = count(root);
  const written = completions.reduce((sum, one) => sum + one.tokens.length, 0);
  const prompt = group.prompt_tokens, all = prompt * completions.length + written;
  const sentence = `${many(completions.length, "completion")} of ${written} tokens, of which `
    + `${distinct} are distinct prefixes. With the prompt of ${many(prompt, "token")} once, that is `
    + `${prompt + distinct} instead of ${all} tokens: ${Math.round(100 * (prompt + distinct) / all)} %.`;
  return el("div", {}, el("p", {}, sentence),
    el("div", { className: "key" },
      el("span", {}, el("i", { style: "background:rgba(var(--up),.55)" }), "better than its group"),
      el("span", {}, el("i", { style: "background:rgba(var(--down),.55)" }), "worse"),
      el("span", {}, el("i", { style: "border-bottom:3px solid var(--muted)" }), "shared by many"),
      el("span", {}, "×n: by how many completions")),
    el("div", { className: "tree" }, ...draw(root, 0)));
}

// --- completions ----------------------------------------------------------------------------------

function written(one, truth, truthBoard) {
  const made = el("div", { className: "written" });
  const chips = [];
  if (one.advantage !== undefined) chips.push(chip("advantage " + signed(one.advantage)));
  if (one.times > 1) chips.push(chip("written " + one.times + " times"));
  chips.push(chip("reward " + plain(one.reward)));
  for (const [name, value] of Object.entries(one.parts)) {
    chips.push(chip(name + " " + plain(value), value === 1 ? "good" : value === 0 ? "bad" : ""));
  }
  made.append(compared(one.text, truth, truthBoard), el("div", {}, ...chips));
  if (one.explained) made.append(el("p", { className: "how" }, one.explained));
  if (one.board && truthBoard && one.board !== truthBoard) {
    const toggle = el("button", { type: "button", onclick: () => {
      if (made.querySelector(".boards")) made.querySelector(".boards").remove();
      else made.append(boards(truthBoard, one.board));
      toggle.textContent = made.querySelector(".boards") ? "Hide boards" : "Show boards";
    } }, "Show boards");
    made.append(toggle);
  }
  return made;
}

function distinctTexts(completions) {
  const found = new Map();
  for (const one of completions) {
    const key = one.text + "\u0000" + one.advantage;
    if (found.has(key)) found.get(key).times += 1;
    else found.set(key, { ...one, times: 1 });
  }
  return [...found.values()].sort((a, b) => (b.reward ?? 0) - (a.reward ?? 0));
}

// --- the two browsers -----------------------------------------------------------------------------

const ALL = "all kinds";
const kindsOf = (items) => [...new Set(items.map((item) => item.kind).filter(Boolean))].sort();

// Shows one of the items that the filters leave; `show` draws it.
function browser(place, name, items, filters, title, show) {
  if (!items.length) {
    place.replaceChildren(el("p", { className: "muted" }, "This run has logged none."));
    return;
  }
  const chosen = filters.map(([, options]) => options[0]);
  const body = el("div");
  const at = el("span", { className: "at" });
  const slider = el("input", { type: "range", min: 0, value: 0 });
  slider.setAttribute("aria-label", name);
  const back = el("button", { type: "button" }, "‹");
  const forth = el("button", { type: "button" }, "›");
  back.setAttribute("aria-label", "previous");
  forth.setAttribute("aria-label", "next");
  let left = items;
  const draw = () => {
    const i = Number(slider.value);
    back.disabled = i <= 0;
    forth.disabled = i >= left.length - 1;
    at.textContent = left.length ? title(left[i], i, left.length) : "none";
    body.replaceChildren(left.length ? show(left[i]) : el("p", { className: "muted" }, "None is left by the filter."));
  };
  const filter = () => {
    left = items.filter((item) => filters.every(([, , keep], k) => keep(item, chosen[k])));
    slider.max = Math.max(0, left.length - 1);
    slider.value = Math.min(Number(slider.value), left.length - 1);
    draw();
  };
  const move = (by) => {
    slider.value = Number(slider.value) + by;
    memory.set(name, slider.value);
    draw();
  };
  slider.oninput = () => move(0);
  back.onclick = () => move(-1);
  forth.onclick = () => move(1);
  const selects = filters.filter(([, options]) => options.length > 1).map(([label, options]) =>
    select(label, options, (value) => {
      chosen[filters.findIndex(([other]) => other === label)] = value;
      filter();
    }));
  place.replaceChildren(el("div", { className: "panel" },
    el("div", { className: "controls" }, back, slider, forth, at, ...selects), body));
  slider.max = items.length - 1;
  slider.value = memory.get(name) ?? (name === "step" ? items.length - 1 : 0);
  filter();
}

function showGroup(group, pieces) {
  const hasTree = group.completions.every((one) => one.tokens.length);
  const list = () => el("div", {}, ...distinctTexts(group.completions).map(
    (one) => written(one, group.truth, group.board)));
  if (!hasTree) return el("div", {}, asked(group), list());
  const views = { "Prefix tree": () => drawTree(group, pieces), Completions: list };
  const body = el("div");
  const buttons = Object.keys(views).map((name) => el("button", { type: "button", onclick: () => {
    memory.set("view", name);
    for (const button of buttons) button.setAttribute("aria-pressed", button.textContent === name);
    body.replaceChildren(views[name]());
  } }, name));
  const first = buttons.find((button) => button.textContent === memory.get("view")) || buttons[0];
  first.click();
  return el("div", {}, asked(group), el("div", { className: "controls" }, ...buttons), body);
}

function showPrompt(prompt) {
  const cell = (one, how) => {
    if (!one) return el("div", {});
    const verdict = one.right === null ? "" : one.right ? "right" : "wrong";
    const head = el("div", { className: "how" }, how + (verdict ? ": " : ""),
      verdict ? el("span", { className: one.right ? "good" : "bad" }, verdict) : null);
    const text = compared(one.text, prompt.truth, prompt.board);
    const told = one.explained ? el("p", { className: "how" }, one.explained) : null;
    return el("div", {}, head, text, told);
  };
  return el("div", {}, asked(prompt), ...prompt.rows.map((row) => {
    const made = el("div", { className: "evaluated" }, el("h4", {}, "Step " + row.step),
      el("div", { className: "pair" }, cell(row.greedy, "greedy"), cell(row.sampled, "sampled")));
    const wrong = [row.greedy, row.sampled].find((one) => one && one.board && one.board !== prompt.board);
    if (wrong && prompt.board && row === prompt.rows.at(-1)) {
      const how = wrong === row.greedy ? "greedy" : "sampled";
      made.append(boards(prompt.board, wrong.board, `written, ${how}`));
    }
    return made;
  }));
}

const COURSES = {
  "all prompts": () => true,
  "became right": (first, last) => !first && last,
  "became wrong": (first, last) => first && !last,
  "right at both ends": (first, last) => first && last,
  "wrong at both ends": (first, last) => !first && !last,
};

function course(prompt, name) {
  const found = prompt.rows.map((row) => row.greedy).filter((one) => one && one.right !== null);
  if (name === "all prompts") return true;
  return found.length > 0 && COURSES[name](found[0].right === 1, found.at(-1).right === 1);
}

function showSamples(run) {
  answer = run.answer;
  const kind = (items) => ["kind", [ALL, ...kindsOf(items)], (item, x) => x === ALL || item.kind === x];
  browser($("train"), "step", run.train, [kind(run.train)], (group) => "step " + group.step,
    (group) => showGroup(group, run.pieces));
  const courses = ["course", Object.keys(COURSES), course];
  browser($("held-out"), "prompt", run.held_out, [kind(run.held_out), courses],
    (_, i, n) => `prompt ${i + 1} of ${n}`, showPrompt);
  for (const [id, all, kept] of [["train", run.num_train, run.train], ["held-out", run.num_held_out, run.held_out]]) {
    if (kept.length < all) {
      $(id).append(el("p", { className: "muted" }, `${kept.length} of ${all} that were logged are on this page.`));
    }
  }
}

// --- start ----------------------------------------------------------------------------------------

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const theme = () => memory.get("theme") || (dark.matches ? "dark" : "light");
dark.addEventListener("change", () => paint(theme()));
$("theme").onclick = () => {
  memory.set("theme", theme() === "dark" ? "light" : "dark");
  paint(theme());
};
$("smooth").value = memory.get("smooth") ?? $("smooth").value;
$("smooth").oninput = () => { memory.set("smooth", $("smooth").value); smooth(); };
paint(theme());
whenDrawn(() => { paint(theme()); smooth(); document.body.dataset.ready = "yes"; });

const runs = $("pick-run").querySelector("select");
for (const [i, run] of data.entries()) runs.append(el("option", { value: i }, run.name));
runs.onchange = () => showSamples(data[runs.value]);
$("pick-run").hidden = data.length < 2;
if (data.length < 2) $("pick-run").style.display = "none";
showSamples(data[0]);

for (const button of document.querySelectorAll(".copy")) {
  button.onclick = async () => {
    try {
      await navigator.clipboard.writeText(button.previousElementSibling.textContent);
      button.textContent = "Copied";
    } catch { // not allowed for this page: select it, so that the user can copy
      getSelection().selectAllChildren(button.previousElementSibling);
    }
  };
}

const seconds = Number(document.body.dataset.reload);
if (seconds) setTimeout(() => location.reload(), 1000 * seconds);
