// All subjects of a page beside one another, such as the workers of a mesh: each memory curve on one scale of bytes.
stow.beside = (() => {
  "use strict";

  const { element } = stow.strip;
  const { button } = stow.panel;
  const { plain, of } = stow.palette;
  const { bytes, shown } = stow.text;
  const HEIGHT = 90;

  const peakOf = ({ curve }) => curve.total[curve.peak] ?? 0;

  // The curve as steps, filled; above it the budget, if there is one.
  function draw(canvas, { curve }, most) {
    const width = canvas.clientWidth;
    if (!width) return;
    canvas.width = width * devicePixelRatio;
    canvas.height = HEIGHT * devicePixelRatio;
    const context = canvas.getContext("2d");
    context.scale(devicePixelRatio, devicePixelRatio);
    const y = (size) => HEIGHT - (size / most) * (HEIGHT - 4);
    const step = width / Math.max(1, curve.total.length);
    context.fillStyle = of("activation");
    context.beginPath();
    context.moveTo(0, HEIGHT);
    curve.total.forEach((size, at) => {
      context.lineTo(at * step, y(size));
      context.lineTo((at + 1) * step, y(size));
    });
    context.lineTo(width, HEIGHT);
    context.fill();
    if (curve.allowed === null) return;
    context.strokeStyle = plain("budget");
    context.setLineDash([4, 4]);
    context.beginPath();
    context.moveTo(0, y(curve.allowed));
    context.lineTo(width, y(curve.allowed));
    context.stroke();
  }

  function curveOf(subject, most, isChosen, choose) {
    const canvas = element("canvas");
    const allowed = subject.curve.allowed === null ? "" : ` of ${bytes(subject.curve.allowed)}`;
    const made = button("", choose, isChosen ? "subject chosen" : "subject");
    made.append(element("b", "", shown(subject.name)), element("span", "", `peak ${bytes(peakOf(subject))}${allowed}`), canvas);
    if (isChosen) made.setAttribute("aria-current", "true");
    new ResizeObserver(() => draw(canvas, subject, most)).observe(canvas);
    return made;
  }

  // `choose` shows the subject of a number in the views above.
  function mount(subjects, chosen, choose) {
    const most = Math.max(1, ...subjects.map((subject) => Math.max(peakOf(subject), subject.curve.allowed ?? 0)));
    const curves = subjects.map((subject, index) => curveOf(subject, most, index === chosen, () => choose(index)));
    const title = element("h2", "", "Side by side: memory while each step runs");
    const note = element("small", "", "one scale for all; dashed: allowed; press one to see it above");
    const root = element("section", "view", element("div", "heading", title, note), element("div", "subjects", ...curves));
    root.id = "beside";
    return root;
  }

  return { mount };
})();
