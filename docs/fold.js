// Reference pages: each object is one line that opens at a click; a link to an anchor opens what holds it.
document$.subscribe(() => {
  const folds = [...document.querySelectorAll(".md-typeset .doc-object > h3.doc-heading")];
  if (folds.length < 2) return;
  const open = (heading, yes) => {
    heading.classList.toggle("folded", !yes);
    heading.nextElementSibling.hidden = !yes;
  };
  for (const heading of folds) {
    if (heading.nextElementSibling === null) continue;
    open(heading, false);
    heading.addEventListener("click", () => open(heading, heading.classList.contains("folded")));
  }
  const show = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const heading = target && (target.matches("h3") ? target : target.closest(".doc-contents.first")?.previousElementSibling);
    if (!heading || !folds.includes(heading)) return;
    open(heading, true);
    target.scrollIntoView();
  };
  show();
  addEventListener("hashchange", show);
});
