// What keeps the pages up to date. Without this script they show what was so when they were loaded.
"use strict";

const byId = (id) => document.getElementById(id);

// JSON of an address, null while it has not changed since the last call.
const known = new Map();
async function news(address) {
  const headers = known.has(address) ? { "If-None-Match": known.get(address) } : {};
  const answer = await fetch(address, { headers, cache: "no-store", credentials: "same-origin" });
  if (answer.status === 304) return null;
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  known.set(address, answer.headers.get("ETag"));
  return answer.json();
}

function say(text) {
  const line = byId("connection");
  line.textContent = text;
  line.hidden = !text;
}

// Calls what is due each so many seconds, less often while nobody looks or the server is away.
function repeat(seconds, call) {
  let wait = seconds;
  const turn = async () => {
    if (!document.hidden) {
      try {
        await call();
        wait = seconds;
        say("");
      } catch (error) {
        wait = Math.min(60, wait * 2);
        say(error instanceof TypeError ? "The server does not answer; what is shown is old." : String(error.message));
      }
    }
    setTimeout(turn, 1000 * wait);
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) call().catch(() => {}); });
  setTimeout(turn, 1000 * seconds);
}

// Puts new parts into the page; what has the focus, is ticked or is open stays so.
function replaceParts(parts) {
  const focus = document.activeElement && document.activeElement.id;
  for (const [name, html] of Object.entries(parts)) {
    const part = byId(`part-${name}`);
    if (!part || part.dataset.html === html) continue;
    const open = [...part.querySelectorAll("details")].map((details) => details.open);
    const ticked = new Set([...part.querySelectorAll("input:checked")].map((box) => box.id));
    const scrolled = [...part.querySelectorAll(".scroll, pre")].map((box) => [box.scrollLeft, box.scrollTop]);
    part.innerHTML = html; // The server has escaped all texts in it.
    part.dataset.html = html;
    part.querySelectorAll("details").forEach((details, place) => { if (place < open.length) details.open = open[place]; });
    part.querySelectorAll("input[type=checkbox]").forEach((box) => { box.checked = ticked.has(box.id); });
    part.querySelectorAll(".scroll, pre").forEach((box, place) => { if (scrolled[place]) box.scrollTo(...scrolled[place]); });
  }
  if (focus && document.activeElement === document.body && byId(focus)) byId(focus).focus();
  ages();
  chosen();
}

function duration(seconds) {
  if (seconds < 60) return `${Math.max(0, seconds).toFixed(0)} s`;
  if (seconds < 3600) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 48 * 3600 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(0)} d`;
}
function ages() {
  const now = Date.now() / 1000;
  document.querySelectorAll("time[data-at]").forEach((time) => { time.textContent = duration(now - Number(time.dataset.at)); });
}

function chosen() {
  const form = byId("choose");
  if (!form) return;
  const count = form.querySelectorAll("input[name=run]:checked").length;
  byId("compare").disabled = count < 1;
  byId("chosen").textContent = count ? `${count} ticked` : "tick two runs or more";
  byId("unchoose").hidden = !count;
}

function startLog() {
  const log = byId("log-text");
  if (!log) return;
  const names = byId("log-name");
  const read = async () => {
    const data = await news(`${log.dataset.log}?name=${encodeURIComponent(names.value)}`);
    if (data === null || data.name !== names.value) return;
    log.textContent = data.problem || data.text || "(empty)";
    const size = data.size < 1e4 ? `${data.size} bytes` : `${(data.size / 1e3).toFixed(0)} kB`;
    byId("log-size").textContent = data.start ? `the end of ${size}` : size;
    if (byId("log-follow").checked) log.scrollTop = log.scrollHeight;
  };
  names.addEventListener("change", () => { known.delete(`${log.dataset.log}?name=${encodeURIComponent(names.value)}`); log.textContent = "…"; read().catch(() => {}); });
  read().catch(() => {});
  repeat(2, read);
}

function startTheme() {
  const button = byId("theme");
  button.hidden = false;
  button.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("jaxdl-theme", root.dataset.theme); } catch { /* Storage may be off. */ }
  });
}

document.addEventListener("submit", (event) => {
  const question = event.target.dataset.confirm;
  if (question && !confirm(question)) event.preventDefault();
});
document.addEventListener("change", (event) => { if (event.target.name === "run") chosen(); });
document.addEventListener("input", (event) => {
  const table = event.target.dataset && event.target.dataset.find && byId(event.target.dataset.find);
  if (!table) return;
  const words = event.target.value.toLowerCase().split(/\s+/);
  table.querySelectorAll("tbody tr").forEach((row) => { row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word)); });
});

startTheme();
startLog();
chosen();
if (byId("unchoose")) byId("unchoose").addEventListener("click", () => {
  document.querySelectorAll("input[name=run]:checked").forEach((box) => { box.checked = false; });
  chosen();
});
if (byId("filter")) byId("filter").querySelectorAll("select").forEach((select) => select.addEventListener("change", () => byId("filter").submit()));
const polled = document.querySelector("[data-poll]");
if (polled) repeat(Number(polled.dataset.every), async () => {
  const data = await news(polled.dataset.poll);
  if (data !== null) replaceParts(data.parts);
});
setInterval(ages, 5000);
const charts = byId("charts");
if (charts) startCharts(charts, news, repeat);
