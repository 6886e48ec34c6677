// SPDX-License-Identifier: Apache-2.0
// What is wrong with the page as it is shown now: a list of sentences. Runs in the browser.
() => {
  const faults = [];
  const name = element => `<${element.tagName.toLowerCase()}> ${(element.src || element.textContent).trim().slice(0, 60)}`;
  const root = document.documentElement;
  if (root.scrollWidth > window.innerWidth) {
    faults.push(`the page is ${root.scrollWidth} pixels wide on a screen of ${window.innerWidth}`);
  }
  for (const image of document.images) {
    if (!image.complete || !image.naturalWidth) faults.push(`does not load: ${name(image)}`);
  }
  // The screen and each ancestor must hold an element, up to the one that scrolls.
  for (const element of document.querySelectorAll("table, pre, pre > code, img, h1, h2, h3, p, li")) {
    const {left, width} = element.getBoundingClientRect();
    const right = left + Math.max(width, element.scrollWidth);  // of what it holds, too
    let above = element;
    for (; above !== root; above = above.parentElement) {
      const overflow = getComputedStyle(above).overflowX;
      if (above !== document.body && (overflow === "auto" || overflow === "scroll")) break;
      if (overflow !== "visible" && right > above.getBoundingClientRect().right + 1) {
        faults.push(`is cut off: ${name(element)}`);
        break;
      }
    }
    if (above === root && right > window.innerWidth + 1) faults.push(`leaves the screen: ${name(element)}`);
  }
  for (const code of document.querySelectorAll("td code, th code")) {
    const text = code.firstChild;
    if (!text || text.nodeType !== Node.TEXT_NODE) continue;
    for (const word of text.data.matchAll(/[\w.]{2,}/g)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) {
        faults.push(`a word of code is broken: ${word[0]} of ${name(code)}`);
      }
    }
  }
  // Four spaces below a list are text of its last point, not code.
  for (const text of document.querySelectorAll("li p")) {
    if (/^(\.\/dev|python -m|pip install|cmake) /.test(text.textContent)) faults.push(`is no code: ${name(text)}`);
  }
  return faults;
}
