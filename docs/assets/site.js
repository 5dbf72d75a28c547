// What the theme leaves out for keyboards and screen readers: names, and a stop at whatever scrolls.
function mend() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-code__nav").forEach((nav, i) => nav.setAttribute("aria-label", `Code ${i + 1}`));
  document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code").forEach((part) => {
    part.tabIndex = 0;
  });
}

mend();
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
