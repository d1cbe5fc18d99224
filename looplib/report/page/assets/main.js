// Puts the page together, and draws it again when the colors of the system change.

const report = JSON.parse(document.getElementById("data").textContent);
document.body.append(...(report.runs.length === 1 ? runPage(report.runs[0]) : comparePage(report.title, report.runs)));
sizes.observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
