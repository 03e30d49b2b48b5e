"use strict";
const $ = (id) => document.getElementById(id);
let here = "", data = null, key = sessionStorage.getItem("key");

function say(text, bad = false) {
  $("said").hidden = bad || !text;
  $("problem").hidden = !bad || !text;
  (bad ? $("problem") : $("said")).textContent = text;
  if (bad) $("problem").scrollIntoView({ block: "nearest" });
}

async function ask(path, fields, kind = "json") {
  const headers = { "X-Datalens-Key": key || "" };
  const how = kind === "json"
    ? { method: "POST", headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(fields || {}) }
    : { headers };
  const url = kind === "json" ? path : path + "?" + new URLSearchParams(fields);
  let answer;
  try { answer = await fetch(url, how); } catch { throw new Error("The studio does not answer: start `datalens studio` again. Runs go on without it."); }
  if (!answer.ok) throw new Error((await answer.json()).error);
  return kind === "json" ? answer.json() : answer.blob();
}

async function doing(button, work) {
  button.disabled = true;
  const began = Date.now();
  let over = false, line = "";
  const tick = setInterval(async () => { // what the command at work says, such as how long it takes
    const seconds = Math.round((Date.now() - began) / 1000);
    let told = "";
    try { told = (await ask("/api/said")).line; } catch { return; }
    if (!over && seconds > 2) say(line = told || `At work: ${seconds} s so far.`);
  }, 2000);
  try { say(""); await work(); } catch (error) { say(error.message, true); } finally {
    over = true;
    clearInterval(tick);
    button.disabled = false;
    if (line && $("said").textContent === line) say("");
  }
}

function element(tag, text, kind = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function lines(list, texts) { list.replaceChildren(...texts.map((text) => element("li", text))); }

function fact(list, name, value) {
  const box = document.createElement("div");
  box.append(element("dt", name), element("dd", value));
  list.append(box);
}

function show(image, blob) {
  if (image.src) URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(blob);
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

function asked() {
  const fields = { data: data || "" };
  for (const [name, value] of new FormData($("form"))) fields[name] = value;
  fields.grayscale = $("grayscale").checked;
  return fields;
}

// --- commands, as the studio would write them ---

function command(box, text) { // a line ends between words, and not behind a hyphen
  box.replaceChildren(...text.split(/( |\n)/).map((word) => word.trim() ? element("span", word) : document.createTextNode(word)));
}

let waiting = 0;

function commands() {
  clearTimeout(waiting);
  waiting = setTimeout(async () => {
    if (data === null) return;
    let found;
    try { found = await ask("/api/commands", asked()); } catch { return; } // said when it is tried
    for (const shown of document.querySelectorAll("[data-command]")) command(shown, found[shown.dataset.command]);
  }, 250);
}

// --- 1 choose ---

async function list(path) {
  const found = await ask("/api/list", { path });
  here = path;
  $("here").textContent = path || "the folder of the studio";
  $("entries").replaceChildren();
  const above = path ? [{ name: "one folder up", path: path.split("/").slice(0, -1).join("/"), folder: true, kind: "up" }] : [];
  for (const entry of [...above, ...found.entries]) {
    const line = document.createElement("li"), button = element("button", entry.folder && !entry.kind ? `${entry.name}/` : entry.name);
    button.type = "button";
    button.className = entry.kind || (entry.folder ? "folder" : "list");
    button.addEventListener("click", () => entry.folder ? doing(button, () => list(entry.path)) : choose(entry.path));
    line.append(button);
    $("entries").append(line);
  }
  const notes = [];
  if (found.more) notes.push(`${found.more} more folders are not shown.`);
  if (found.others) notes.push(`${found.others} other files are here, such as images.`);
  $("others").textContent = notes.join(" ");
}

function choose(path) {
  data = path || ".";
  $("chosen").textContent = path || "the folder of the studio";
  $("found").hidden = $("planned").hidden = true;
  commands();
  $("look-title").focus({ preventScroll: true });
  $("look").scrollIntoView();
  say(`Chosen: ${$("chosen").textContent}. Now look at what is in it.`);
}

// --- 2 look, 5 expect ---

function found(result) {
  $("found").hidden = false;
  $("real-figure").hidden = true;
  const facts = $("found-facts");
  facts.replaceChildren();
  fact(facts, "images", result.records);
  if (result.persons !== null) fact(facts, "persons", result.persons);
  if (result.dicom) { fact(facts, "studies", result.dicom.studies); fact(facts, "series", result.dicom.series); }
  fact(facts, "test images", result.test_images ?? "none");
  fact(facts, "sizes", Object.keys(result.sizes).slice(0, 3).join(", "));
  $("found-classes").replaceChildren();
  const most = Math.max(1, ...Object.values(result.classes));
  for (const [name, count] of Object.entries(result.classes)) {
    const row = $("found-classes").insertRow(), head = element("th", name);
    head.scope = "row";
    row.append(head);
    const cell = row.insertCell(), bar = row.insertCell(), meter = document.createElement("progress");
    cell.className = "number"; cell.textContent = count;
    meter.max = most; meter.value = count;
    bar.className = "bar"; bar.setAttribute("aria-hidden", "true"); bar.append(meter);
  }
  const problems = ["unreadable", "duplicates", "tiny_classes", "mixed"].flatMap((kind) => result[kind]);
  lines($("found-problems"), problems.length ? problems.slice(0, 20) : ["none found"]);
  if (problems.length > 20) $("found-problems").append(element("li", `and ${problems.length - 20} more, which the command lists`));
  if (!$("nominal_size").value) $("nominal_size").value = result.nominal_size;
  if (!$("image_size").value && Object.keys(result.sizes).length) {
    const sides = Object.keys(result.sizes)[0].split("x").map(Number);
    $("image_size").value = sides.every((side) => side >= 8 && side <= 128) ? sides.join("x") : "64";
  }
  commands();
  say("Looked at it: the figures are below. The suggested size and number are yours to change.");
}

function planned(result) {
  $("planned").hidden = false;
  const b = result.budget;
  lines($("planned-lines"), [
    `Budget: ε = ${b.epsilon} (δ = ${b.delta}, ${b.relation}, ${b.accountant} accountant).`,
    ...(result.seconds ? [`Time: about ${duration(result.seconds)} on this computer.`] : []),
    ...result.expect,
  ]);
  for (const text of result.warnings) $("planned-lines").append(element("li", `Warning: ${text}`, "warning"));
  const judged = (result.for_the_owner_only || {}).classes || [];
  $("planned-owner").hidden = !judged.length;
  lines($("planned-classes"), judged);
  lines($("planned-parts"), result.parts.map((part) => `${part.release}: noise-to-signal ratio ${Number(part.noise_to_signal).toPrecision(2)}`));
  say("The plan is below.");
}

function duration(seconds) {
  return seconds < 90 ? `${Math.max(1, Math.round(seconds))} s` : seconds < 5400 ? `${Math.round(seconds / 60)} minutes` : `${Math.round(seconds / 3600)} hours`;
}

// --- 4 budgets ---

async function budgets(chosen) {
  const all = await ask("/api/budgets"), select = $("budget"), before = chosen || select.value;
  select.replaceChildren(new Option("none: this run is counted alone", ""), ...all.map((one) => new Option(one.name, one.name)));
  if (all.some((one) => one.name === before)) select.value = before;
  $("budget-list").replaceChildren(...all.map((one) => {
    const box = document.createElement("div"), list = element("ul", "", "plain");
    lines(list, one.lines);
    const typed = element("pre", "");
    command(typed, one.command);
    box.append(element("h3", `Budget ${one.name}`), list, typed);
    return box;
  }));
}

// --- 6 runs ---

const SAID = { working: "at work", done: "done", stopped: "stopped: go on whenever you like; what was paid for is kept", failed: "did not begin" };
const DOING = { train: "at work", evaluate: "measuring", sample: "drawing images" };
const shown = new Map(), painted = new Map(), drawn = {}; // run → what its buttons are for; its picture; how many images

function action(box, text, work) {
  const button = element("button", text);
  button.type = "button";
  button.addEventListener("click", () => doing(button, work));
  box.append(button);
  return button;
}

function picture(article, kind, caption, blob) {
  let figure = article.querySelector(`figure.${kind}`);
  if (!figure) {
    figure = document.createElement("figure");
    figure.className = kind;
    figure.append(document.createElement("figcaption"), document.createElement("img"));
    article.querySelector(".sheets").append(figure);
  }
  figure.querySelector("figcaption").textContent = caption;
  figure.querySelector("img").alt = `${caption}, a row for each class`;
  show(figure.querySelector("img"), blob);
}

function drawRun(run) {
  let article = document.querySelector(`[data-run="${run.name}"]`);
  if (!article) {
    article = $("run-template").content.firstElementChild.cloneNode(true);
    article.dataset.run = run.name;
    article.querySelector("h3").textContent = run.name;
    const next = [...$("run-list").children].find((other) => other.dataset.run && order.indexOf(other.dataset.run) > order.indexOf(run.name));
    $("run-list").insertBefore(article, next || null);
  }
  const training = run.state === "working" && run.doing === "train";
  const left = run.seconds_left === null || run.seconds_left === undefined ? "" : `, about ${duration(run.seconds_left)} left`;
  const what = run.state === "working" ? DOING[run.doing] : SAID[run.state];
  const text = `${what}${training && run.planned ? `: step ${run.steps} of ${run.planned}${left}` : ""}${run.error ? `. ${run.error}` : ""}`;
  const state = article.querySelector(".state");
  if (state.textContent !== text) state.textContent = text;
  state.dataset.state = run.state;
  article.querySelector(".bars").hidden = !run.planned;
  article.querySelector(".steps-done").max = run.planned || 1;
  article.querySelector(".steps-done").value = run.steps || 0;
  article.querySelector(".budget").value = run.part || 0;
  article.querySelector(".spent").textContent = run.spent ? `Spent ${run.spent}; the budget is ${run.budget}.` : "";
  const typed = [run.command, ...run.commands.filter((one) => one !== run.command)].join("\n");
  if (article.querySelector("pre").textContent !== typed) command(article.querySelector("pre"), typed);
  if (run.accuracy !== null) {
    article.querySelector(".result").textContent = `For you alone: a classifier that learned from the synthetic images is right on ${(100 * run.accuracy).toFixed(1)} % of the held-out real ones`
      + (run.accuracy_real === null ? "." : `; one that learned from as many real images, on ${(100 * run.accuracy_real).toFixed(1)} %.`);
  }
  if (run.picture !== null && painted.get(run.name) !== run.picture) {
    painted.set(run.name, run.picture);
    const caption = run.released ? "Synthetic: this is what a recipient sees" : "First images, from what has been released so far";
    ask("/api/picture", { run: run.name }, "blob").then((blob) => picture(article, "synthetic", caption, blob)).catch(() => painted.delete(run.name));
  }
  const now = `${run.state} ${run.doing} ${Boolean(run.planned)} ${run.released} ${run.images}`;
  if (shown.get(run.name) === now) return;
  shown.set(run.name, now);
  budgets().catch(() => {}); // the run may have reserved its part
  const box = article.querySelector(".buttons");
  box.replaceChildren();
  if (run.state === "working") action(box, "Stop", async () => { await ask("/api/stop", { run: run.name }); await runs(); });
  if (run.state === "stopped") action(box, "Go on", async () => { await ask("/api/resume", { run: run.name }); await runs(); });
  if (run.released && run.state !== "working") released(run, article, box);
}

function released(run, article, box) {
  action(box, "Show real images beside", async () => {
    picture(article, "real", "Real: for you alone", await ask("/api/real", run.reads, "blob"));
  });
  action(box, "Measure", async () => { await ask("/api/evaluate", { run: run.name }); await runs(); });
  action(box, "Verify", async () => {
    const result = await ask("/api/verify", { run: run.name });
    say(result.ok ? `The certificate of ${run.name} stands: ε = ${result.epsilon} (δ = ${result.delta}, ${result.relation}, ${result.accountant} accountant), for ${result.unit}.` : `The certificate does NOT stand: ${result.problems.join("; ")}`, !result.ok);
  });
  action(box, "See what a recipient reads", async () => {
    window.open((await ask("/api/report", { run: run.name })).path, "_blank", "noopener");
  });
  action(box, "Download the release", async () => {
    save(await ask("/api/zip", { run: run.name }, "blob"), `${run.name}-release.zip`);
    say(`Verified, and downloaded as ${run.name}-release.zip. Whoever gets it can check it: datalens verify release`);
  }).className = "main";
  const draw = element("span", "", "draw"), label = element("label", "Images to hand on "), count = document.createElement("input");
  count.value = drawn[run.name] || "1000"; count.inputMode = "numeric";
  count.addEventListener("input", () => { drawn[run.name] = count.value; });
  label.append(count); draw.append(label); box.append(draw);
  action(draw, "Draw", async () => { await ask("/api/sample", { run: run.name, count: count.value }); await runs(); });
  if (run.images !== null) action(draw, `Download ${run.images} images and their papers`, async () => {
    save(await ask("/api/images", { run: run.name }, "blob"), `${run.name}-images.zip`);
    say(`Downloaded as ${run.name}-images.zip: ${run.images} images, a dataset card, Croissant metadata and an entry for the registry.`);
  });
}

let order = [];

async function runs() {
  const found = await ask("/api/runs");
  order = found.map((run) => run.name);
  if (found.length) $("run-list").querySelector(".none")?.remove();
  found.forEach(drawRun);
}

// --- begin ---

async function begin() {
  const token = location.hash.slice(1);
  if (token.length > 20) {
    history.replaceState(null, "", "/");
    key = (await ask("/api/key", { token })).key;
    sessionStorage.setItem("key", key);
  }
  await list("");
  await Promise.all([runs(), budgets()]);
  setInterval(() => runs().then(() => { if ($("problem").textContent.startsWith("The studio does not answer")) say(""); }).catch((error) => say(error.message, true)), 1500);
}

$("choose-this").addEventListener("click", () => choose(here));
$("form").addEventListener("input", commands);
document.querySelectorAll("[data-do]").forEach((button) => button.addEventListener("click", () => doing(button, async () => {
  if (data === null) throw new Error("Choose your images first: step 1.");
  say("Looking: this may take a minute.");
  (button.dataset.do === "inspect" ? found : planned)(await ask(`/api/${button.dataset.do}`, asked()));
})));
$("show-real").addEventListener("click", (event) => doing(event.target, async () => {
  const { label, classes, image_size, record_id, grayscale } = asked();
  show($("real"), await ask("/api/real", { data, label, classes, image_size, record_id, grayscale }, "blob"));
  $("real-figure").hidden = false;
}));
$("make-budget").addEventListener("click", (event) => doing(event.target, async () => {
  const name = $("budget-name").value;
  await ask("/api/new-budget", { name, epsilon: $("budget-epsilon").value, delta: $("budget-delta").value });
  await budgets(name);
  commands();
  $("new-budget").open = false;
  say(`The budget ${name} is made, and this run will be counted in it.`);
}));
$("another").addEventListener("click", (event) => doing(event.target, async () => { window.open((await ask("/api/address")).address, "_blank", "noopener"); }));
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  doing(event.submitter, async () => {
    if (data === null) throw new Error("Choose your images first: step 1.");
    await ask("/api/start", asked());
    await Promise.all([runs(), budgets()]);
    $("runs-title").focus({ preventScroll: true });
    $("runs").scrollIntoView();
    say("Started. You may close this page: the run goes on.");
  });
});
begin().catch((error) => say(error.message, true));
