"use strict";
// Draws the charts of a report with uPlot. Tables, bars and texts are in the page already.
(() => {
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const few = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const digits = { format: v => (Math.abs(v) < 1000 ? few : whole).format(v) };
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
  const short = v => v === null ? "" : Math.abs(v) >= 1e6 ? compact.format(v)
    : v !== 0 && Math.abs(v) < 1e-4 ? v.toExponential(0) : digits.format(v);
  const exact = v => v == null ? "–" : v !== 0 && Math.abs(v) < 1e-4 ? v.toExponential(3) : digits.format(v);

  // Stacked areas are drawn from the largest sum to the smallest, so that each covers the ones before.
  const stacked = series => {
    const sums = [];
    series.forEach((each, i) => sums.push(each.values.map((v, at) => (v ?? 0) + (i ? sums[i - 1][at] : 0))));
    return series.map((each, i) => ({ ...each, drawn: sums[i] })).reverse();
  };

  function marks(spec, ink, back) {
    return u => {
      const { ctx, bbox } = u, ratio = devicePixelRatio;
      const line = (x0, y0, x1, y1) => { ctx.beginPath(); ctx.moveTo(x0, y0); ctx.lineTo(x1, y1); ctx.stroke(); };
      const label = (text, x, y, align) => {
        ctx.textAlign = "left";
        const wide = ctx.measureText(text).width + 8 * ratio, wanted = align === "right" ? x - wide + 4 * ratio : x - 4 * ratio;
        const left = Math.max(0, Math.min(wanted, ctx.canvas.width - wide));
        ctx.fillStyle = back;
        ctx.fillRect(left, y - 9 * ratio, wide, 18 * ratio);
        ctx.fillStyle = ink;
        ctx.fillText(text, left + 4 * ratio, y);
      };
      ctx.save();
      ctx.strokeStyle = ink;
      ctx.lineWidth = ratio;
      ctx.setLineDash([4 * ratio, 3 * ratio]);
      ctx.font = `600 ${12 * ratio}px system-ui, sans-serif`;
      ctx.textBaseline = "middle";
      if (spec.limit) {
        const y = u.valToPos(spec.limit[0], "y", true);
        line(bbox.left, y, bbox.left + bbox.width, y);
        label(spec.limit[1], bbox.left + 6 * ratio, y - 11 * ratio, "left");
      }
      if (spec.mark) {
        const x = u.valToPos(spec.mark[0], "x", true), left = x > bbox.left + bbox.width / 2;
        line(x, bbox.top, x, bbox.top + bbox.height);
        label(spec.mark[1], x + (left ? -8 : 8) * ratio, bbox.top + 10 * ratio, left ? "right" : "left");
      }
      ctx.restore();
    };
  }

  function draw(box, spec) {
    const last = spec.x.length - 1;
    const area = spec.style === "area";
    const series = area ? stacked(spec.series) : spec.series.map(each => ({ ...each, drawn: each.values }));
    const highest = Math.max(...series.flatMap(each => each.drawn.filter(v => v !== null)), spec.limit ? spec.limit[0] : -Infinity);
    const axis = { stroke: color("quiet"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line"), width: 1 }, font: "12px system-ui, sans-serif" };
    const name = i => spec.labels[i] ?? "";
    const longest = spec.labels ? Math.max(...spec.labels.map(each => each.length)) : 0;
    const xAxis = spec.labels
      ? { ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000], space: 7 * longest + 16, values: (u, at) => at.map(name) }
      : { ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6], values: (u, at) => at.map(short) };
    const yAxis = { ...axis, size: 58, values: (u, at) => at.map(short) };
    const yScale = spec.log ? { distr: 3, log: spec.style === "step" ? 2 : 10 }
      : { range: (u, low, high) => area ? [0, highest * 1.3] : spec.unit ? [0, highest * 1.1] : low === null ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true) };
    const edge = spec.labels ? Math.min(60, 3.5 * longest) : 14;
    const chart = new uPlot({
      width: box.clientWidth, height: 260, padding: [10, edge, 0, 0],
      scales: { x: { time: false }, y: yScale },
      axes: [xAxis, yAxis],
      cursor: { y: false, drag: { x: true, y: false } },
      series: [
        { label: spec.labels ? "at" : "step", value: (u, v, s, at) => at == null ? "–" : spec.labels ? name(at) : String(spec.x[at]) },
        ...series.map(each => ({
          label: each.label, stroke: color(`c${each.color % 8}`), width: area ? 1 : 1.75,
          fill: area ? color(`c${each.color % 8}`) : undefined,
          points: { show: area ? false : undefined },
          paths: spec.style === "step" || area ? uPlot.paths.stepped({ align: 1 }) : undefined,
          ...(each.dots ? { paths: () => null, points: { show: true, size: 8, fill: color(`c${each.color % 8}`) } } : {}),
          value: (u, v, s, at) => at == null ? "–" : exact(each.values[at]) + (each.values[at] == null || !spec.unit ? "" : ` ${spec.unit}`),
        })),
      ],
      hooks: {
        draw: [marks(spec, color("text"), color("card"))],
        setCursor: [u => { if (u.cursor.idx == null) rest(u); }],
      },
    }, area ? [[...spec.x, last + 1], ...series.map(each => [...each.drawn, each.drawn[last]])] : [spec.x, ...series.map(each => each.drawn)], box);
    // Without a pointer, the legend shows the marked or the last point.
    function rest(u) { u.setLegend({ idx: spec.mark ? spec.mark[0] : last }); }
    rest(chart);
    return chart;
  }

  const boxes = [...document.querySelectorAll("[data-chart]")];
  let charts = [];
  const drawAll = () => {
    charts.forEach(each => each.destroy());
    charts = boxes.map(box => draw(box, specs[Number(box.dataset.chart)]));
  };
  drawAll();
  const sizes = new ResizeObserver(() => charts.forEach((each, i) => {
    const width = boxes[i].clientWidth;
    if (width && width !== each.width) each.setSize({ width, height: 260 });
  }));
  boxes.forEach(each => sizes.observe(each));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
})();
