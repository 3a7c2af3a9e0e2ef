// Small drawings, in SVG. Colours come from classes; a drawing says in words what it shows.

const SPARKS = 60;

/** Bars of what came in (upwards) and went out (downwards), the last on the right. */
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
  side(received, "fill-in", true);
  side(sent, "fill-out", false);
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

/**
 * Lines over time. points: {at (ms), values: [number or null]}; series: [{name, style, now}]; top: the value at the upper edge;
 * shown: how a value is written.
 */
function chart(points, series, top, shown, label) {
  const first = points.length ? points[0].at : 0;
  const span = Math.max(1, (points.length ? points[points.length - 1].at : 0) - first);
  const x = (point) => (((point.at - first) / span) * 600).toFixed(1);
  const y = (value) => (126 - (Math.min(value, top) / top) * 122).toFixed(1);
  const drawn = series.map((one, which) => {
    let path = "";
    let pen = false;
    const dots = [];
    points.forEach((point, at) => {
      const value = point.values[which];
      if (value === null) {
        pen = false;
        return;
      }
      path += `${pen ? "L" : "M"}${x(point)} ${y(value)}`;
      const next = points[at + 1];
      if (!pen && (!next || next.values[which] === null)) {
        dots.push(
          svg("rect", {
            class: `dot-${one.style}`,
            x: Math.min(597, Math.max(0, x(point) - 1.5)),
            y: y(value) - 2,
            width: 3,
            height: 4,
          }),
        );
      }
      pen = true;
    });
    return [
      svg("path", { class: `line-${one.style}`, d: path, "vector-effect": "non-scaling-stroke", "stroke-linejoin": "round" }),
      dots,
    ];
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
        h("span", {}, shown(top)),
        h("span", {}, shown(top / 2)),
        h("span", {}, shown(0)),
      ),
      svg("svg", { viewBox: "0 0 600 130", preserveAspectRatio: "none", role: "img", "aria-label": label }, grid, drawn),
      h("div", { class: "times", "aria-hidden": "true" }, h("span", {}, ago(span / 1000)), h("span", {}, "now")),
    ),
    h(
      "p",
      { class: "legend" },
      series.map((one) => h("span", {}, h("i", { class: one.style }), `${one.name} `, h("b", {}, one.now))),
    ),
  ];
}

/** A round number at or above a value. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}
