"""The site loads nothing from elsewhere, and every page works in a browser.

We build the site, or use the directory `SITE`. The browser is Chromium, or the program
that `CHROMIUM` names. A test page loads the other pages in a frame, and posts a report.
"""

import functools
import html.parser
import http.server
import importlib.util
import json
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import threading

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NEEDED = ("material", "math_core", "mkdocs", "mkdocstrings")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, BROWSERS)), ""
)
WIDTHS = (390, 1400)
FORMULAS = {"derivatives/", "error-bars-derived/", "spectral-functions/", "tolerances/"}
FIGURES = {"", "calibration/", "gallery/"}

# We insert this first in every page, so that it misses no error.
LISTEN = b"""<script>
window.seen = [];
addEventListener("error", e => seen.push(String(e.message || e.target.src || e.target.href)), true);
addEventListener("unhandledrejection", e => seen.push(String(e.reason)));
console.error = (...words) => seen.push(words.join(" "));
</script>"""

LOOK = """<!doctype html><title>look</title><iframe id="frame"></iframe><script>
const frame = document.getElementById("frame"), found = [];
const pause = ms => new Promise(done => setTimeout(done, ms));
const until = async condition => {
  for (let i = 0; i < 100 && !condition(); i++) await pause(100);
  return Boolean(condition());
};
async function open(page, width) {
  frame.style.width = width + "px"; frame.style.height = "900px"; frame.style.border = 0;
  await new Promise(done => { frame.onload = done; frame.src = "/" + page; });
  await pause(100);
  return frame.contentWindow;
}
async function all() {
  for (const page of PAGES) for (const width of WIDTHS) {
    const view = await open(page, width), body = view.document;
    const images = [...body.querySelectorAll("article img")];
    images.forEach(image => image.loading = "eager");
    await until(() => images.every(image => image.complete));
    found.push({
      page, width, errors: view.seen,
      wide: body.documentElement.scrollWidth - body.documentElement.clientWidth,
      formulas: [...body.querySelectorAll("math")].filter(x => x.getBoundingClientRect().width > 0).length,
      images: images.map(image => image.naturalWidth),
      loaded: view.performance.getEntriesByType("resource").map(x => x.name),
    });
  }
  const view = await open("", 1400), body = view.document;
  const input = body.querySelector("[data-md-component=search-query]");
  body.querySelector("#__search").click();
  input.focus(); input.value = "logdet";
  const type = () => input.dispatchEvent(new view.Event("keyup", {bubbles: true}));
  const results = () => [...body.querySelectorAll(".md-search-result__item a")];
  await until(() => { type(); return results().length > 0; });
  return {found, results: results().map(a => a.getAttribute("href"))};
}
all().catch(error => ({failed: String(error)}))
  .then(seen => fetch("/seen", {method: "POST", body: JSON.stringify(seen)}));
</script>"""


class _ForeignAddresses(html.parser.HTMLParser):
    """Finds foreign addresses in a page, and formulas that aren't typeset."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        address = attrs.get("src") or (tag == "link" and attrs.get("href")) or ""
        if address.startswith(("http:", "https:", "//")):
            self.found.append(address)
        if "arithmatex" in (attrs.get("class") or ""):
            self.found.append("a formula that is not typeset")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if "SITE" in os.environ:
        return pathlib.Path(os.environ["SITE"])
    if MISSING:
        pytest.skip(f"the site needs the extra `docs`: no {', '.join(MISSING)}")
    path = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(path),
    ]
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return path


@pytest.fixture(scope="module")
def pages(site):
    folders = sorted(path.parent.relative_to(site) for path in site.rglob("index.html"))
    return ["" if page == pathlib.Path() else f"{page}/" for page in folders]


def test_nothing_is_loaded_from_elsewhere(site, pages):
    for page in pages:
        parser = _ForeignAddresses()
        parser.feed((site / page / "index.html").read_text())
        assert not parser.found, page


def test_pages_are_found_and_searched(site, pages):
    assert {"", "getting-started/", "api/"} | FORMULAS | FIGURES <= set(pages)
    index = json.loads((site / "search/search_index.json").read_text())
    assert any("logdet" in entry["text"] for entry in index["docs"])


def _handler(site, page, reports):
    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            path = site / self.path.partition("?")[0].lstrip("/") / "index.html"
            if self.path == "/look":
                self._send(page.encode())
            elif path.exists():
                self._send(path.read_bytes().replace(b"<head>", b"<head>" + LISTEN, 1))
            else:
                super().do_GET()

        def do_POST(self):
            reports.put(
                json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            )
            self._send(b"")

        def _send(self, content):
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    return functools.partial(Handler, directory=str(site))


@pytest.fixture(scope="module")
def report(site, pages, tmp_path_factory):
    """A browser's report on all pages."""
    if not BROWSER:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    look = LOOK.replace("PAGES", json.dumps(pages)).replace(
        "WIDTHS", json.dumps(WIDTHS)
    )
    answers = queue.Queue()
    handler = _handler(site, look, answers)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu"),
            *("--remote-debugging-port=0", "--disable-background-networking"),
            *("--disable-dev-shm-usage", "--no-first-run", "--window-size=1500,1000"),
            f"--user-data-dir={tmp_path_factory.mktemp('browser')}",
            *os.environ.get("CHROMIUM_FLAGS", "").split(),
            f"http://127.0.0.1:{server.server_port}/look",
        ]
        browser = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            answer = answers.get(timeout=180)
        finally:
            browser.kill()
            browser.wait()
            server.shutdown()
    assert "failed" not in answer, answer
    return answer


def test_pages_load_without_errors_and_fit(report, pages):
    assert len(report["found"]) == len(pages) * len(WIDTHS)
    for view in report["found"]:
        where = (view["page"], view["width"])
        assert not view["errors"], (where, view["errors"])
        assert view["wide"] <= 0, (where, view["wide"])
        assert all(name.startswith("http://127.0.0.1") for name in view["loaded"]), (
            where
        )
        assert (view["formulas"] > 0) >= (view["page"] in FORMULAS), where
        assert bool(view["images"]) >= (view["page"] in FIGURES), where
        assert all(width > 0 for width in view["images"]), where


def test_search_finds(report):
    assert any("logdet" in link for link in report["results"]), report["results"]
