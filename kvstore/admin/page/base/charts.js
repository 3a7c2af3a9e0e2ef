// Small SVG drawings. Classes define the colours, and each drawing has a text alternative.

const SPARKS = 60;

/** Draw sent bytes as bars upwards and received bytes as bars downwards, the newest on the right. */
function spark(received, sent, most, label) {
  const wide = 100 / SPARKS;
  const drawn = [];
  const side = (values, name, upwards) =>
    values.forEach((value, at) => {
      if (!value) return;
      const high = Math.max(0.6, Math.min(1, value / most) * 10.5);
      drawn.push(
        svg("rect", {
          class: name,
          x: ((SPARKS - values.length + at) * wide).toFixed(2),
          y: (upwards ? 11 - high : 11).toFixed(2),
          width: (wide * 0.8).toFixed(2),
          height: high.toFixed(2),
        }),
      );
    });
  side(received, "fill-in", false);
  side(sent, "fill-out", true);
  return svg(
    "svg",
    { class: "spark", viewBox: "0 0 100 22", preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("rect", { class: "fill-miss", x: 0, y: 10.9, width: 100, height: 0.2 }),
    drawn,
  );
}

function bar(share, label, full) {
  return svg(
    "svg",
    { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("rect", {
      class: full ? "fill-full" : "fill-tier",
      x: 0,
      y: 0,
      width: Math.max(0, Math.min(100, share * 100)).toFixed(2),
      height: 10,
    }),
  );
}

const HOUR_S = 3600;
const SPANS_S = [120, 600, 1800, HOUR_S];
/** With at most so many points, a line has a dot at each of them: a short line alone is overlooked. */
const FEW_POINTS = 12;
const DOT = { width: 6, height: 5 };

/** Length of the time axis: the shortest that shows all points. */
function axisSpan(end_s) {
  const age_s = history.points.length ? end_s - history.points[0].at_s : 0;
  return SPANS_S.find((span_s) => span_s >= age_s) ?? HOUR_S;
}

/**
 * Draw lines over time, up to an hour.
 * points: {at_s, values: [number or null]}; series: [{name, style, now}]; top: value at the upper edge; shown: formats a value.
 */
function chart(points, series, top, shown, label, end_s) {
  const span_s = axisSpan(end_s);
  const x = (point) => (600 - ((end_s - point.at_s) / span_s) * 600).toFixed(1);
  const y = (value) => (126 - (Math.min(value, top) / top) * 122).toFixed(1);
  const visible = points.filter((point) => point.at_s > end_s - span_s);
  const drawn = series.map((one, which) => {
    const known = (at) => visible[at] && visible[at].values[which] !== null;
    const near = (at) => known(at - 1) && visible[at].at_s - visible[at - 1].at_s <= 2 * HISTORY_STEP_S;
    const path = [];
    const dots = [];
    visible.forEach((point, at) => {
      if (!known(at)) return;
      path.push(`${near(at) ? "L" : "M"}${x(point)} ${y(point.values[which])}`);
      if (visible.length > FEW_POINTS && (near(at) || (known(at + 1) && near(at + 1)))) return;
      const left = Math.min(600 - DOT.width, Math.max(0, x(point) - DOT.width / 2));
      dots.push(svg("rect", { class: `dot-${one.style}`, x: left, y: y(point.values[which]) - DOT.height / 2, ...DOT }));
    });
    const line = { class: `line-${one.style}`, d: path.join(""), "vector-effect": "non-scaling-stroke", "stroke-linejoin": "round" };
    return [svg("path", line), dots];
  });
  const grid = [0, 0.5, 1].map((part) =>
    svg("line", { class: "grid", x1: 0, x2: 600, y1: y(top * part), y2: y(top * part), "vector-effect": "non-scaling-stroke" }),
  );
  return [
    h(
      "div",
      { class: "chart" },
      h(
        "div",
        { class: "axis", "aria-hidden": "true" },
        [top, top / 2, 0].map((value) => h("span", {}, shown(value))),
      ),
      svg("svg", { viewBox: "0 0 600 130", preserveAspectRatio: "none", role: "img", "aria-label": label }, grid, drawn),
      timeAxis(end_s),
    ),
    h(
      "p",
      { class: "legend" },
      series.map((one) => h("span", {}, h("i", { class: one.style }), `${one.name} `, h("b", {}, one.now))),
    ),
  ];
}

const timeAxis = (end_s) =>
  h(
    "div",
    { class: "times", "aria-hidden": "true" },
    [axisSpan(end_s), axisSpan(end_s) / 2, 0].map((age) => h("span", {}, minute(end_s - age))),
  );

/** Draw marks over time, up to an hour. marks: {at_s, style}. */
function marksOverTime(marks, label, end_s) {
  const span_s = axisSpan(end_s);
  const drawn = marks
    .filter((mark) => mark.at_s > end_s - span_s)
    .map((mark) => {
      const x = Math.min(597, Math.max(0, 600 - ((end_s - mark.at_s) / span_s) * 600 - 1.5));
      return svg("rect", { class: `fill-${mark.style}`, x: x.toFixed(1), y: mark.style === "full" ? 2 : 11, width: 3, height: 7 });
    });
  return h(
    "div",
    { class: "chart strip-chart" },
    h("div", { class: "axis", "aria-hidden": "true" }, h("span", {}, "faults"), h("span", {}, "events")),
    svg("svg", { viewBox: "0 0 600 20", preserveAspectRatio: "none", role: "img", "aria-label": label }, drawn),
    timeAxis(end_s),
  );
}

/** Round up to 1, 2 or 5 times a power of ten. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}
