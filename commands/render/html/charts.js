"use strict";
// Draws figures with plotly in the page's colours, and moves them with buttons and lists.
const charts = (() => {
  let figures = {}, choices = {}, details = [];
  let drawn = {};  // what each chart was drawn with: its range of x at first

  // Colours that begin with @ are the page's, light or dark.
  const colour = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const painted = (value) => {
    if (typeof value === "string") return value[0] === "@" ? colour(value.slice(1)) : value;
    if (Array.isArray(value)) return value.map(painted);
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, v]) => [key, painted(v)]));
    return value;
  };
  const layoutOf = (figure) => {
    const axis = (own) => ({
      gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"),
      ...painted(own),
    });
    return {
      ...painted(figure.layout),
      xaxis: axis(figure.layout.xaxis), yaxis: axis(figure.layout.yaxis),
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, DejaVu Sans, sans-serif", size: 13, color: colour("ink") },
      hoverlabel: { bgcolor: colour("surface"), bordercolor: colour("line"), font: { color: colour("ink") } },
    };
  };
  const config = {
    responsive: true, displayModeBar: false, showTips: false,
  };

  const show = async (told) => {
    ({ figures, choices, details } = told);
    drawn = {};
    delete document.documentElement.dataset.drawn;
    for (const [name, figure] of Object.entries(told.figures)) {
      if (figures !== told.figures) return;  // something newer is shown
      await Plotly.newPlot(name, painted(figure.data), layoutOf(figure), config);
      drawn[name] = [...document.getElementById(name)._fullLayout.xaxis.range];
    }
    document.documentElement.dataset.drawn = Object.keys(drawn).length;
  };
  const repaint = () => {
    for (const [name, figure] of Object.entries(figures)) {
      const chart = document.getElementById(name), layout = layoutOf(figure);
      layout.xaxis.range = [...chart._fullLayout.xaxis.range];
      const data = painted(figure.data);
      data.forEach((trace, index) => { trace.visible = chart.data[index].visible; });
      Plotly.react(name, data, layout, config);
    }
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-zoom]");
    if (!button) return;
    const name = button.dataset.zoom, by = button.dataset.by, whole = drawn[name];
    const [low, high] = document.getElementById(name)._fullLayout.xaxis.range;
    const width = high - low, middle = (low + high) / 2;
    let range = { in: [middle - width / 4, middle + width / 4], out: [middle - width, middle + width],
      left: [low - width / 2, high - width / 2], right: [low + width / 2, high + width / 2],
      all: whole }[by];
    // Moves end at the step's start and end.
    if (range[1] - range[0] >= whole[1] - whole[0]) range = whole;
    const shift = Math.max(0, whole[0] - range[0]) - Math.max(0, range[1] - whole[1]);
    Plotly.relayout(name, { "xaxis.range": [range[0] + shift, range[1] + shift] });
  });
  document.addEventListener("change", (event) => {
    const name = event.target.dataset.choice;
    if (!name) return;
    const shown = new Set(choices[name][event.target.value]), some = new Set(choices[name].flat());
    const chart = document.getElementById(name);
    Plotly.restyle(name, {
      visible: chart.data.map((_, index) => !some.has(index) || shown.has(index)),
    });
  });
  const tell = (event) => {
    const block = event.target.closest(".block");
    if (block) document.getElementById("detail").textContent = details[block.dataset.detail];
  };
  for (const kind of ["mouseover", "focusin", "click"]) document.addEventListener(kind, tell);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  return { show };
})();
