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
  try { say(""); await work(); } catch (error) { say(error.message, true); } finally { button.disabled = false; }
}

function item(list, text) {
  const line = document.createElement("li");
  line.textContent = text;
  list.append(line);
}

function fact(list, name, value) {
  const box = document.createElement("div"), term = document.createElement("dt"), shown = document.createElement("dd");
  term.textContent = name; shown.textContent = value;
  box.append(term, shown); list.append(box);
}

function show(image, blob) {
  if (image.src) URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(blob);
  image.hidden = false;
}

function asked() {
  const fields = { data: data || "" };
  for (const [name, value] of new FormData($("form"))) fields[name] = value;
  fields.grayscale = $("grayscale").checked;
  return fields;
}

// --- 1 choose ---

async function list(path) {
  const entries = await ask("/api/list", { path });
  here = path;
  $("here").textContent = path || "the folder of the studio";
  $("entries").replaceChildren();
  const above = path ? [{ name: "↑ one folder up", path: path.split("/").slice(0, -1).join("/"), folder: true }] : [];
  for (const entry of [...above, ...entries]) {
    const line = document.createElement("li"), button = document.createElement("button");
    button.type = "button";
    button.textContent = entry.folder ? `${entry.name}/`.replace("up/", "up") : entry.name;
    button.addEventListener("click", () => entry.folder ? doing(button, () => list(entry.path)) : choose(entry.path));
    line.append(button);
    $("entries").append(line);
  }
}

function choose(path) {
  data = path || ".";
  $("chosen").textContent = path || "the folder of the studio";
  say(`Chosen: ${$("chosen").textContent}. Now look at what is in it.`);
}

// --- 2 look, 5 expect ---

function found(result) {
  $("found").hidden = false;
  $("command-inspect").textContent = result.command;
  const facts = $("found-facts");
  facts.replaceChildren();
  fact(facts, "images", result.records);
  if (result.persons !== null) fact(facts, "persons", result.persons);
  if (result.dicom) { fact(facts, "studies", result.dicom.studies); fact(facts, "series", result.dicom.series); }
  fact(facts, "test images", result.test_images ?? "none");
  fact(facts, "sizes", Object.keys(result.sizes).slice(0, 3).join(", "));
  $("found-classes").replaceChildren();
  for (const [name, count] of Object.entries(result.classes)) {
    const row = $("found-classes").insertRow(), head = document.createElement("th");
    head.scope = "row"; head.textContent = name;
    row.append(head);
    const cell = row.insertCell();
    cell.className = "number"; cell.textContent = count;
  }
  const problems = ["unreadable", "duplicates", "tiny_classes", "mixed"].flatMap((kind) => result[kind]);
  $("found-problems").replaceChildren();
  for (const problem of problems.slice(0, 20)) item($("found-problems"), problem);
  if (!problems.length) item($("found-problems"), "none found");
  if (!$("nominal_size").value) $("nominal_size").value = result.nominal_size;
  if (!$("image_size").value && Object.keys(result.sizes).length) {
    const sides = Object.keys(result.sizes)[0].split("x").map(Number);
    $("image_size").value = sides.every((side) => side >= 8 && side <= 128) ? sides.join("x") : "64";
  }
  say("Looked at it: the figures are below. The suggested size and number are yours to change.");
}

function planned(result) {
  $("planned").hidden = false;
  $("command-plan").textContent = result.command;
  $("planned-lines").replaceChildren();
  const b = result.budget;
  item($("planned-lines"), `Budget: ε = ${b.epsilon} (δ = ${b.delta}, ${b.relation}, ${b.accountant} accountant).`);
  for (const line of result.expect) item($("planned-lines"), line);
  for (const part of result.parts) item($("planned-lines"), `${part.release}: noise-to-signal ratio ${Number(part.noise_to_signal).toPrecision(2)}`);
  for (const line of result.warnings) item($("planned-lines"), `Warning: ${line}`);
  say("The plan is below.");
}

// --- 6 runs ---

const SAID = { working: "at work", done: "done", stopped: "stopped: go on whenever you like; what was paid for is kept", failed: "did not begin" };
const shown = new Map(); // run → what its pictures show

function action(box, text, work) {
  const button = document.createElement("button");
  button.type = "button"; button.textContent = text;
  button.addEventListener("click", () => doing(button, work));
  box.append(button);
}

function picture(article, alt, blob) {
  const image = document.createElement("img");
  image.alt = alt;
  show(image, blob);
  article.querySelector(".sheets").append(image);
}

function drawRun(run) {
  let article = document.querySelector(`[data-run="${run.name}"]`);
  if (!article) {
    article = $("run-template").content.firstElementChild.cloneNode(true);
    article.dataset.run = run.name;
    article.querySelector("h3").textContent = run.name;
    $("run-list").append(article);
  }
  const left = run.seconds_left === null || run.seconds_left === undefined ? "" : `, about ${run.seconds_left} s left`;
  const what = run.state === "working" && run.doing === "evaluate" ? "measuring" : SAID[run.state];
  const text = `${what}${run.state === "working" && run.planned ? `: step ${run.steps} of ${run.planned}${left}` : ""}${run.error ? `. ${run.error}` : ""}`;
  const state = article.querySelector(".state");
  if (state.textContent !== text) state.textContent = text;
  article.querySelector(".bars").hidden = !run.planned;
  article.querySelector(".steps").max = run.planned || 1;
  article.querySelector(".steps").value = run.steps || 0;
  article.querySelector(".budget").value = run.part || 0;
  article.querySelector(".spent").textContent = run.spent ? `Spent ${run.spent}; the budget is ${run.budget}.` : "";
  article.querySelector("pre").textContent = run.command;
  if (run.accuracy !== null) {
    article.querySelector(".result").textContent = `For you alone: a classifier that learned from the synthetic images is right on ${(100 * run.accuracy).toFixed(1)} % of the held-out real ones`
      + (run.accuracy_real === null ? "." : `; one that learned from as many real images, on ${(100 * run.accuracy_real).toFixed(1)} %.`);
  }
  const now = `${run.state} ${run.doing} ${run.released}`;
  if (shown.get(run.name) === now) return;
  shown.set(run.name, now);
  const box = article.querySelector(".buttons");
  box.replaceChildren();
  article.querySelector(".sheets").replaceChildren();
  if (run.state === "working") action(box, "Stop", async () => { await ask("/api/stop", { run: run.name }); await runs(); });
  if (run.state === "stopped") action(box, "Go on", async () => { await ask("/api/resume", { run: run.name }); await runs(); });
  if (!run.released) return;
  ask("/api/picture", { run: run.name }, "blob").then((blob) => picture(article, "Synthetic images, a row for each class: this is what a recipient sees", blob)).catch(() => {});
  if (run.state === "working") return;
  action(box, "Show real images beside", async () => {
    picture(article, "Some of your real images, for you alone", await ask("/api/real", run.reads, "blob"));
  });
  action(box, "Measure", async () => { await ask("/api/evaluate", { run: run.name }); await runs(); });
  action(box, "Verify", async () => {
    const result = await ask("/api/verify", { run: run.name });
    say(result.ok ? `The certificate of ${run.name} stands: ε = ${result.epsilon} (δ = ${result.delta}, ${result.relation}, ${result.accountant} accountant), for ${result.unit}.` : `The certificate does NOT stand: ${result.problems.join("; ")}`, !result.ok);
  });
  action(box, "Download the release", async () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await ask("/api/zip", { run: run.name }, "blob"));
    link.download = `${run.name}-release.zip`;
    link.click();
    say(`Verified, and downloaded as ${link.download}. Whoever gets it can check it: datalens verify release`);
  });
}

async function runs() {
  const found = await ask("/api/runs");
  if (found.length && $("run-list").querySelector("p.soft:not(.spent)")) $("run-list").replaceChildren();
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
  await runs();
  setInterval(() => runs().catch((error) => say(error.message, true)), 1500);
}

$("choose-this").addEventListener("click", () => choose(here));
document.querySelectorAll("[data-do]").forEach((button) => button.addEventListener("click", () => doing(button, async () => {
  say("Looking: this may take a minute.");
  (button.dataset.do === "inspect" ? found : planned)(await ask(`/api/${button.dataset.do}`, asked()));
})));
$("show-real").addEventListener("click", (event) => doing(event.target, async () => {
  const { label, classes, image_size, record_id, grayscale } = asked();
  show($("real"), await ask("/api/real", { data: data || "", label, classes, image_size, record_id, grayscale }, "blob"));
}));
$("another").addEventListener("click", (event) => doing(event.target, async () => { window.open((await ask("/api/address")).address, "_blank", "noopener"); }));
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  doing(event.submitter, async () => {
    await ask("/api/start", asked());
    await runs();
    $("runs").scrollIntoView();
    say("Started. You may close this page: the run goes on.");
  });
});
begin().catch((error) => say(error.message, true));
