// Colours by meaning. They are custom properties of the style sheet, so that dark pages have their own.
stow.palette = (() => {
  "use strict";

  const known = new Map();

  // Asking the style sheet is slow, so it is asked once for each name and again when the page turns dark.
  function read(name) {
    if (!known.has(name)) {
      const style = getComputedStyle(document.documentElement);
      known.set(name, style.getPropertyValue(name).trim() || "#888888");
    }
    return known.get(name);
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => known.clear());

  const plain = (name) => read(`--${name}`);
  // A kind of tensor, a decision or a doing; one that the style sheet does not know is grey.
  const of = (group) => read(`--of-${group}`);

  // Thin white lines over whatever was filled: the mark of a recomputed copy.
  function hatch(context, x, y, width, height) {
    context.save();
    context.beginPath();
    context.rect(x, y, width, height);
    context.clip();
    context.strokeStyle = plain("paper");
    context.lineWidth = 1;
    context.beginPath();
    for (let at = x - height; at < x + width; at += 5) {
      context.moveTo(at, y + height);
      context.lineTo(at + height, y);
    }
    context.stroke();
    context.restore();
  }

  return { plain, of, hatch };
})();
