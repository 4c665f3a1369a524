// The choice of light or dark is applied before the page is drawn.
"use strict";
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("jaxdl-theme"); } catch { /* Storage may be off. */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
