"use strict";
// Elements of a page.  Text of a run is only ever inserted by textContent.

function make(parent, tag, properties = {}, text = null) {
  const element = Object.assign(document.createElement(tag), properties);
  if (text !== null) element.textContent = text;
  parent.append(element);
  return element;
}

function table(parent, head, rows) {
  const box = make(parent, "div", { className: "scroll" });
  const element = make(box, "table");
  if (head.length) {
    const row = make(element, "tr");
    for (const cell of head) make(row, "th", {}, cell);
  }
  for (const cells of rows) {
    const row = make(element, "tr");
    for (const cell of cells) make(row, "td", {}, String(cell));
  }
}
