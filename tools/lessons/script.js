"use strict";
const scrolling = "main :is(.wide, .code, .rows, pre, table)";

// The arrow keys lead to the previous and the next stage.
addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  // In a frame that scrolls sideways, the arrows scroll.
  const frame = event.target.closest?.(scrolling);
  if (frame && frame.scrollWidth > frame.clientWidth) return;
  const rel = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  const link = rel && document.querySelector(`a[rel=${rel}]`);
  if (link) location.href = link.href;
});

// A frame that scrolls sideways can be reached by the keyboard.
const frames = new ResizeObserver((changed) => {
  for (const { target } of changed) {
    target.tabIndex = target.scrollWidth > target.clientWidth ? 0 : -1;
  }
});
for (const each of document.querySelectorAll(scrolling)) frames.observe(each);

// An anchor may stand in a folded definition.
const unfold = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  let fold;
  while ((fold = target?.closest("details:not([open])"))) fold.open = true;
  target?.scrollIntoView();
};
addEventListener("hashchange", unfold);
addEventListener("DOMContentLoaded", unfold);

const button = document.querySelector("[data-unfold]");
button?.addEventListener("click", () => {
  const folds = [...document.querySelectorAll("main details")];
  const open = folds.some((each) => !each.open);
  for (const each of folds) each.open = open;
  button.textContent = open ? "fold them again" : "unfold all";
});

// The table of contents is folded where it stands above the text.
const toc = document.querySelector(".toc details");
if (toc) {
  const isWide = document.body.matches(".comparison-page") ? "100rem" : "64rem";
  const wide = matchMedia(`(min-width: ${isWide})`);
  const narrowFold = () => { toc.open = wide.matches; };
  wide.addEventListener("change", narrowFold);
  narrowFold();
}
