// The memory curve: bytes by kind stacked over the steps, the budget, and the curves to compare with.
stow.curve = (() => {
  "use strict";

  const { Strip, element } = stow.strip;
  const { plain, of } = stow.palette;
  const { binarySteps, bytes, seconds, shown, tick, whole } = stow.text;
  // How the curves beside the stack are drawn; those of other subjects are like none of these.
  const BESIDE = {
    baseline: { colour: "beside", width: 1.5, dash: [6, 4] },
    "baseline peak": { colour: "beside", width: 1.5, dash: [2, 4] },
    measured: { colour: "ink", width: 1.5 },
    offloaded: { colour: "of-offload", width: 2 },
  };
  const OTHER = { colour: "other", width: 2 };
  const styleOf = (name) => BESIDE[name] ?? OTHER;

  // For each kind the sum of all kinds up to it, the highest first: each is painted over the one before.
  function stacked(curve) {
    let below = curve.total.map(() => 0);
    const sums = curve.bytes.map((values) => {
      below = values.map((value, step) => value + below[step]);
      return below;
    });
    return sums.toReversed();
  }

  // A value holds for its whole step, the last one too.
  const extended = (values) => [...values, values.at(-1) ?? 0];

  // Steps are drawn as steps while they can be seen; crowded ones as lines, of which uPlot draws only the outline.
  function pathsFor(strip) {
    const [low, high] = strip.state.range;
    return high - low > 2 * strip.plotWidth ? uPlot.paths.linear() : uPlot.paths.stepped({ align: 1 });
  }

  function series(strip, curve) {
    const { model } = strip.state;
    const paths = pathsFor(strip);
    const kinds = curve.kinds.toReversed().map((kind) => {
      const colour = of(model.words.kinds[kind]);
      return { fill: colour, stroke: colour, width: 0, paths, points: { show: false } };
    });
    const beside = curve.beside.map(({ name }) => {
      const { colour, width, dash } = styleOf(name);
      return { stroke: plain(colour), width, dash, paths, points: { show: false } };
    });
    return [{}, ...kinds, ...beside];
  }

  function drawBudget(plot, curve) {
    if (curve.allowed === null) return;
    const { ctx, bbox } = plot;
    const y = Math.round(plot.valToPos(curve.allowed, "y", true));
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = plain("budget");
    ctx.lineWidth = 2 * devicePixelRatio;
    ctx.setLineDash([]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.font = `bold ${11 * devicePixelRatio}px system-ui, sans-serif`;
    // On the side that the peak is not, where the cursor begins.
    const early = curve.peak < curve.total.length / 3;
    ctx.textAlign = early ? "right" : "left";
    ctx.textBaseline = "bottom";
    const x = early ? bbox.left + bbox.width - 4 : bbox.left + 4;
    ctx.strokeStyle = plain("paper"); // a rim, for other curves may cross the words
    ctx.lineWidth = 4 * devicePixelRatio;
    ctx.strokeText(`${bytes(curve.allowed)} allowed`, x, y - 3);
    ctx.fillText(`${bytes(curve.allowed)} allowed`, x, y - 3);
    ctx.restore();
  }

  // The runs of each phase (forward, backward, update) in a row, as long as they follow each other.
  function phasesOf(model) {
    const spans = [];
    for (let step = 0; step < model.steps; step += 1) {
      const phase = model.phase(model.opAt(step));
      if (spans.at(-1)?.phase === phase) spans.at(-1).end = step + 1;
      else spans.push({ phase, begin: step, end: step + 1 });
    }
    return spans;
  }

  // A band along the ground in the colours of the phases; each is named where it first begins, if there is room.
  function drawPhases(plot, state, spans) {
    const { ctx, bbox } = plot;
    const right = bbox.left + bbox.width;
    const at = (step) => Math.min(right, Math.max(bbox.left, plot.valToPos(state.at(step), "x", true)));
    const band = 4 * devicePixelRatio;
    const ground = bbox.top + bbox.height;
    ctx.save();
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textBaseline = "bottom";
    ctx.textAlign = "left";
    const named = new Set();
    let free = bbox.left;
    for (const { phase, begin, end } of spans) {
      const [x, until] = [at(begin), at(end)];
      if (until <= x) continue;
      ctx.fillStyle = of(phase);
      ctx.fillRect(x, ground - band, until - x, band);
      const width = ctx.measureText(phase).width;
      if (named.has(phase) || x < free || x + width > right) continue;
      named.add(phase);
      free = x + width + 2 * band;
      ctx.strokeStyle = plain("paper"); // a rim, for the areas are behind the words
      ctx.lineWidth = 4 * devicePixelRatio;
      ctx.strokeText(phase, x + 2, ground - band - 2);
      ctx.fillText(phase, x + 2, ground - band - 2);
    }
    ctx.restore();
  }

  function options(state, strip, curve, spans) {
    const top = Math.max(1, curve.allowed ?? 0, ...[curve.total, ...curve.beside.map((b) => b.bytes)].map(
      (values) => values.reduce((most, value) => Math.max(most, value), 0)));
    const axis = { stroke: plain("faint"), grid: { stroke: plain("grid"), width: 1 }, font: "11px system-ui" };
    return {
      width: strip.width,
      height: strip.height,
      padding: [10, strip.right, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false, range: () => state.extent }, y: { range: [0, top * 1.08] } },
      axes: [
        { ...axis, size: 26, values: (_, ticks) => ticks.map((place) => mark(place, state)) },
        { ...axis, size: strip.left, values: (_, ticks) => ticks.map(tick), incrs: binarySteps },
      ],
      series: series(strip, curve),
      hooks: { draw: [(plot) => drawPhases(plot, state, spans), (plot) => drawBudget(plot, curve)] },
    };
  }

  const stepMark = (step, state) => (step % 1 || step >= state.model.steps ? "" : whole(step + 1));
  const timeMark = (time, { model }) =>
    model.raw.timed_by === "macs" ? `${time} %` : seconds(time).replace(/\.0+ /, " ");
  const mark = (place, state) => (state.timed ? timeMark : stepMark)(place, state);

  // Two keys for the axis, where ops have times; multiply-accumulates that stand for time are called work.
  function axisKeys(state) {
    const words = ["by step", state.model.raw.timed_by === "macs" ? "by work" : "by time"];
    const keys = words.map((word, index) => {
      const key = element("button", "key", word);
      key.type = "button";
      key.addEventListener("click", () => state.measureBy(index === 1));
      return key;
    });
    const show = () => keys.forEach((key, index) => key.setAttribute("aria-pressed", String(state.timed === (index === 1))));
    state.onChange((what) => what === "range" && show());
    show();
    const root = element("div", "axis", ...keys);
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", "the axis counts");
    return root;
  }

  function legend(model, curve) {
    const entries = curve.kinds.map((kind, index) => ({
      name: model.words.kinds[kind],
      colour: of(model.words.kinds[kind]),
      values: curve.bytes[index],
    }));
    const beside = curve.beside.map((other) => ({
      name: shown(other.name),
      colour: plain(styleOf(other.name).colour),
      values: other.bytes,
      line: true,
    }));
    const items = [...entries, ...beside].map((entry) => {
      const chip = element("i", entry.line ? "chip line" : "chip");
      chip.style.background = entry.colour;
      const value = element("b");
      return { entry, value, node: element("span", "key", chip, entry.name, " ", value) };
    });
    const root = element("div", "legend", ...items.map((item) => item.node));
    const update = (step) => {
      for (const { entry, value } of items) value.textContent = bytes(entry.values[step] ?? 0);
    };
    return { root, update };
  }

  // The picture in words, for those who do not see it.
  function summary({ raw: { curve }, steps }) {
    const allowed = curve.allowed === null ? "" : `, ${bytes(curve.allowed)} allowed`;
    const beside = curve.beside.map((b) => `, ${shown(b.name)} at most ${bytes(b.bytes.reduce((a, c) => Math.max(a, c), 0))}`);
    return `Memory over ${whole(steps)} steps: ${bytes(curve.total[curve.peak])} at the peak, step ${whole(curve.peak + 1)}${allowed}${beside.join("")}`;
  }

  function mount(state) {
    const { model } = state;
    const { curve } = model.raw;
    const keys = legend(model, curve);
    const steps = Array.from({ length: model.steps + 1 }, (_, step) => step);
    const curves = [...stacked(curve).map(extended), ...curve.beside.map((b) => extended(b.bytes))];
    const spans = phasesOf(model);
    let plot = null;
    const ground = element("div", "plot");
    ground.setAttribute("role", "img");
    ground.setAttribute("aria-label", summary(model));
    const draw = (_, strip) => {
      plot?.destroy();
      const places = state.timed ? Array.from(model.times) : steps;
      plot = new uPlot(options(state, strip, curve, spans), [places, ...curves], ground);
    };
    const height = window.innerWidth < 700 ? 200 : 280;
    const strip = new Strip(state, { name: "curve", title: "Memory while each step runs", height, draw });
    strip.body.prepend(ground);
    strip.heading.append(keys.root);
    if (model.duration > 0) strip.heading.append(axisKeys(state));
    keys.update(state.cursor);
    state.onChange((what) => what === "cursor" && keys.update(state.cursor));
    return strip;
  }

  return { mount };
})();
