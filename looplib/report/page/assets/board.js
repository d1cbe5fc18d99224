// Shows the page of the runs, and replaces it when the server has a newer one, at the same place of the page.

const seconds = Number("$seconds");
const news = document.getElementById("news");
const frame = document.getElementById("page");
let tag = "";
let touched = 0;  // when somebody used the page last, which is not replaced under the hands

function place() {
  const inner = frame.contentWindow;
  return inner ? [inner.scrollX, inner.scrollY] : [0, 0];
}

async function refresh() {
  if (document.hidden || (tag && Date.now() - touched < 5000)) return;
  try {
    const answer = await fetch("page", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (answer.status === 200) {
      const text = await answer.text();
      const [x, y] = place();
      tag = answer.headers.get("ETag");
      frame.onload = () => {
        frame.contentWindow.scrollTo(x, y);
        for (const kind of ["pointerdown", "pointermove", "keydown", "wheel"]) {
          frame.contentWindow.addEventListener(kind, () => { touched = Date.now(); }, { passive: true });
        }
      };
      frame.srcdoc = text;
    } else if (answer.status !== 304) {
      news.textContent = await answer.text();
      return;
    }
    news.textContent = "As of " + new Date().toLocaleTimeString() + ", looked at every " + seconds + " s.";
  } catch {
    news.textContent = "The board has ended; start it again with python -m looplib board.";
  }
}

document.addEventListener("visibilitychange", refresh);
setInterval(refresh, 1000 * seconds);
refresh();
