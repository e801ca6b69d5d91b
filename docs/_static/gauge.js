// Turns the coordinates of site 1 in the drawing of the page on the gauge. Everything is computed from the matrices that
// the drawing holds (docs/images/draw_gauge.py); without JavaScript the drawing stays as it is.
document.addEventListener("DOMContentLoaded", () => {
  const drawing = document.getElementById("gauge-drawing");
  const slider = document.getElementById("gauge-angle");
  if (!drawing || !slider) return;
  const { B1, A1, B2, A2, unit } = JSON.parse(drawing.dataset.matrices);

  const product = (X, Y) => X.map((row) => [0, 1].map((j) => row[0] * Y[0][j] + row[1] * Y[1][j]));
  const mean = (X, Y) => X.map((row, i) => row.map((x, j) => (x + Y[i][j]) / 2));
  const norm = (X) => Math.hypot(...X.flat());
  const apart = (X, Y) => norm(X.map((row, i) => row.map((x, j) => x - Y[i][j]))) / norm(Y);
  const points = ([[a, b], [c, d]]) =>
    [[0, 0], [a, c], [a + b, c + d], [b, d]].map(([x, y]) => `${unit * x},${-unit * y}`).join(" ");
  const show = (name, M) => document.getElementById(`gauge-${name}`).setAttribute("points", points(M));
  const written = (X) => X.map((row) => row.map((x) => x.toFixed(2).padStart(5)).join(" "));

  function turn() {
    const angle = (slider.value * Math.PI) / 180;
    const [c, s] = [Math.cos(angle), Math.sin(angle)];
    const Q = [[c, -s], [s, c]];
    const inverse = [[c, s], [-s, c]];
    const B = product(B1, Q); // what site 1 stores, in the turned coordinates
    const A = product(inverse, A1);
    const one = product(B, A);
    const two = product(B2, A2);
    const truth = mean(one, two);
    const wrong = product(mean(B, B2), mean(A, A2));
    show("one", one);
    show("two", two);
    show("mean", truth);
    show("factors", wrong);
    const off = `${(100 * apart(wrong, truth)).toFixed(0)} %`;
    document.getElementById("gauge-off").textContent = off;
    document.getElementById("gauge-degrees").textContent = `${slider.value}°`;
    const [b, a, w] = [written(B), written(A), written(one)];
    document.getElementById("gauge-numbers").textContent =
      `B₁ Q =  ${b[0]}    Q⁻¹ A₁ =  ${a[0]}\n        ${b[1]}              ${a[1]}\n` +
      `their product =  ${w[0]}\n                 ${w[1]}`;
  }
  slider.addEventListener("input", turn);
  document.getElementById("gauge-controls").hidden = false;
  turn();
});
