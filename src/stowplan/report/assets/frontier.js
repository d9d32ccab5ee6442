// The frontier: budget against time. The line is what can be had; points are what was chosen, and what others reach.
stow.frontier = (() => {
  "use strict";

  const { element } = stow.strip;
  const { plain, of } = stow.palette;
  const { binarySteps, shown, tick } = stow.text;
  const HEIGHT = 280;

  function points(frontier) {
    return [
      { name: "baseline", at: [frontier.plain_bytes, 1], colour: plain("beside") },
      ...frontier.plans.map((plan) => ({ name: plan.name, at: [plan.bytes, plan.ratio], colour: plain("budget") })),
      ...frontier.measured.map(([name, size, ratio]) => ({ name: `${name}, measured`, at: [size, ratio], colour: plain("ink") })),
      ...frontier.peers.map(([name, size, ratio]) => ({ name, at: [size, ratio], colour: of("peer") })),
    ];
  }

  function extent(frontier) {
    const all = [...frontier.lines.flat(), ...points(frontier).map((point) => point.at)];
    const sizes = [...all.map(([size]) => size), ...frontier.plans.map((plan) => plan.allowed), ...[frontier.minimum_bytes].filter((size) => size !== null)];
    const ratios = [...all.map(([, ratio]) => ratio), ...frontier.plans.map((plan) => plan.bound)];
    const room = Math.max(0.02, (Math.max(...ratios) - 1) * 0.15);
    return {
      x: [Math.min(...sizes) * 0.94, Math.max(...sizes) * 1.06],
      y: [Math.min(1, ...ratios) - room, Math.max(...ratios) + room],
    };
  }

  // Labels go to the right of their point, or to the left where the right is full, and below one another.
  function drawPoints(plot, found) {
    const { ctx, bbox } = plot;
    const taken = [];
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textBaseline = "middle";
    for (const { name, at, colour } of found) {
      const [x, y] = [plot.valToPos(at[0], "x", true), plot.valToPos(at[1], "y", true)];
      ctx.fillStyle = colour;
      ctx.beginPath();
      ctx.arc(x, y, 4.5 * devicePixelRatio, 0, 2 * Math.PI);
      ctx.fill();
      drawLabel(ctx, bbox, taken, x, y, stow.text.shortened(shown(name), 34));
    }
  }

  function drawLabel(ctx, bbox, taken, x, y, label) {
    const width = ctx.measureText(label).width;
    const gap = 8 * devicePixelRatio;
    const line = 14 * devicePixelRatio;
    const left = x + gap + width > bbox.left + bbox.width ? x - gap - width : x + gap;
    let top = y - line / 2; // above the line that the point stands on
    const meets = (box) => Math.abs(box.y - top) < line && left < box.right && box.left < left + width;
    while (taken.some(meets)) top += line;
    taken.push({ left, right: left + width, y: top });
    ctx.fillStyle = plain("ink");
    ctx.textAlign = "left";
    ctx.strokeStyle = plain("paper"); // a rim, for budgets may cross the words
    ctx.lineWidth = 4 * devicePixelRatio;
    ctx.strokeText(label, left, top);
    ctx.fillText(label, left, top);
  }

  // No schedule in this order is below the bound: a tick under each chosen point.
  function drawBounds(plot, plans) {
    const { ctx } = plot;
    ctx.strokeStyle = plain("faint");
    ctx.lineWidth = devicePixelRatio;
    for (const plan of plans) {
      const [x, y] = [plot.valToPos(plan.bytes, "x", true), plot.valToPos(plan.bound, "y", true)];
      ctx.beginPath();
      ctx.moveTo(x - 7 * devicePixelRatio, y);
      ctx.lineTo(x + 7 * devicePixelRatio, y);
      ctx.moveTo(x, y);
      ctx.lineTo(x, plot.valToPos(plan.ratio, "y", true));
      ctx.stroke();
    }
  }

  function drawBudgets(plot, plans) {
    const { ctx, bbox } = plot;
    ctx.strokeStyle = plain("budget");
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const plan of plans) {
      const x = plot.valToPos(plan.allowed, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.setLineDash([]);
  }

  // All lines on one x axis, each with gaps where it has no value.
  function aligned(lines) {
    const xs = [...new Set(lines.flat().map(([size]) => size))].toSorted((a, b) => a - b);
    const columns = lines.map((line) => {
      const ratios = new Map(line);
      return xs.map((size) => ratios.get(size) ?? undefined);
    });
    return [xs, ...columns];
  }

  function options(frontier, width) {
    const { x, y } = extent(frontier);
    const axis = { stroke: plain("faint"), grid: { stroke: plain("grid"), width: 1 }, font: "11px system-ui" };
    const stepped = uPlot.paths.stepped({ align: 1 });
    const line = { stroke: plain("ink"), width: 1.5, paths: stepped, points: { show: false }, spanGaps: true };
    const draw = (plot) => {
      plot.ctx.save();
      drawBudgets(plot, frontier.plans);
      drawBounds(plot, frontier.plans);
      drawPoints(plot, points(frontier));
      plot.ctx.restore();
    };
    return {
      width,
      height: HEIGHT,
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false, range: x }, y: { range: y } },
      axes: [
        { ...axis, values: (_, ticks) => ticks.map(tick), incrs: binarySteps, space: 90 },
        { ...axis, size: 58, values: (_, ticks) => ticks.map((ratio) => `${ratio.toFixed(2)} x`) },
      ],
      series: [{}, ...frontier.lines.map(() => line)],
      hooks: { draw: [draw] },
    };
  }

  function mount(frontier) {
    const title = element("h2", "", "What a budget costs: bytes against time over the baseline");
    const note = element("small", "", "dashed: allowed; tick: no schedule in this order is faster");
    const ground = element("div", "plot");
    const root = element("section", "view", element("div", "heading", title, note), ground);
    root.id = "frontier";
    let plot = null;
    const paint = () => {
      if (!ground.clientWidth) return;
      plot?.destroy();
      const data = frontier.lines.length ? aligned(frontier.lines) : [[]];
      plot = new uPlot(options(frontier, ground.clientWidth), data, ground);
    };
    new ResizeObserver(paint).observe(ground);
    return root;
  }

  return { mount };
})();
