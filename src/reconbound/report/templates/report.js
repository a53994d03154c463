"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const drawn = [];

  for (const id of Object.keys(data.charts)) {
    const place = document.getElementById(id);
    const figure = data.charts[id];
    Plotly.newPlot(place, figure.data, figure.layout, { displayModeBar: false, responsive: true });
    drawn.push(place);
    place.on("plotly_click", (event) => { // a point of a sweep leads to its run
      const link = event.points.length ? event.points[0].customdata : null;
      if (typeof link === "string" && /^trials\/\d+\/index\.html$/.test(link)) window.location.href = link;
    });
  }

  // Paper is narrower or wider than the screen: draw for it, and go back afterwards.
  const PAPER = 640;
  const folded = document.querySelectorAll("details:not([open])");
  function onPaper(printing) {
    for (const some of folded) some.open = printing;
    for (const place of drawn) {
      Plotly.relayout(place, printing ? { width: PAPER, autosize: false } : { width: null, autosize: true });
    }
  }
  window.addEventListener("beforeprint", () => onPaper(true));
  window.addEventListener("afterprint", () => onPaper(false));
  window.matchMedia("print").addEventListener("change", (event) => onPaper(event.matches));

  const range = document.getElementById("threshold");
  if (!range) return;
  const exact = document.getElementById("threshold-exact");
  const sentence = document.getElementById("threshold-sentence");
  const bytes = Uint8Array.from(atob(data.floors), (c) => c.charCodeAt(0));
  const floors = new DataView(bytes.buffer);
  const records = bytes.length / 8;

  function below(threshold) { // records with a floor below it: the floors are sorted
    let low = 0, high = records;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (floors.getFloat64(8 * middle, true) < threshold) low = middle + 1; else high = middle;
    }
    return low;
  }

  function share(part) {
    if (part === 0) return "0 %";
    if (part === records) return "100 %";
    const found = 100 * part / records;
    return found > 99 ? (Math.floor(found * 10) / 10).toFixed(1) + " %" : Number(found.toPrecision(2)) + " %";
  }

  const whole = new Intl.NumberFormat("en-US");
  const short = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3 });
  function show(threshold) {
    const count = below(threshold);
    document.getElementById("threshold-count").textContent = whole.format(count);
    document.getElementById("threshold-value").textContent = short.format(threshold);
    document.getElementById("threshold-share").textContent = share(count);
    sentence.dataset.threshold = threshold.toString();
    sentence.dataset.count = count.toString();
    const chart = document.getElementById("chart-floors");
    const x = Math.log10(threshold);
    Plotly.relayout(chart, { "shapes[0].x1": x, "shapes[1].x0": x, "shapes[1].x1": x });
  }

  const steps = Number(range.max);
  const { low, high, start } = data.slider;
  range.addEventListener("input", () => {
    const threshold = Math.pow(10, low + (high - low) * Number(range.value) / steps);
    exact.value = Number(threshold.toPrecision(4)).toString();
    show(threshold);
  });
  exact.addEventListener("input", () => {
    const threshold = Number(exact.value);
    if (!(threshold > 0) || !isFinite(threshold)) return;
    const share = (Math.log10(threshold) - low) / (high - low);
    range.value = Math.round(steps * Math.min(1, Math.max(0, share))).toString();
    show(threshold);
  });
  show(start);
})();
