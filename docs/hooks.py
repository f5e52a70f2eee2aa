"""Additions to Markdown: formulas, and figures drawn for a build.

If you set `FIGURES=directory`, its figures replace the ones in `docs/figures`, and pages also
show the figures of the examples.
"""

import ast
import os
import pathlib
import re
from html import unescape

from math_core import LatexToMathML
from mkdocs.structure.files import File

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
FIGURE = re.compile(r"<!-- figure: (\w+) -->")
CONVERTER = LatexToMathML()
ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def mathml(latex, *, block):
    """LaTeX as MathML, which browsers show without a script."""
    # We let unknown commands raise an error, which ends the build.
    return CONVERTER.convert_with_local_state(latex.strip(), displaystyle=block)


def formula(source, language=None, class_name=None, options=None, md=None, **_):
    """The HTML for a `math` fence."""
    return f'<div class="formula">{mathml(source, block=True)}</div>'


def drawn():
    """Figures drawn for this build, by name."""
    directory = os.environ.get("FIGURES")
    if not directory:
        return {}
    paths = sorted(pathlib.Path(directory).glob("*"))
    return {path.name: path for path in paths if path.suffix in (".png", ".svg")}


def examples():
    """The gallery's paragraphs that show the examples."""
    for path in sorted(EXAMPLES.glob("*.py")):
        title = ast.get_docstring(ast.parse(path.read_text())).partition("\n")[0]
        yield f"**{title}** `examples/{path.name}`"
        yield f"<!-- figure: {path.stem} -->"


def on_config(config):
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "formula", "format": formula}]
    return config


def on_files(files, config):
    for name, path in drawn().items():
        uri = f"figures/{name}"
        kept = files.get_file_from_path(uri)
        if kept:
            files.remove(kept)
        content = path.read_bytes()
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    def figure(match):
        name, up = f"{match[1]}.png", "../" * page.file.src_uri.count("/")
        image = f"![Figure from examples/{match[1]}.py]({up}figures/{name})"
        return image if name in drawn() else ""

    if page.file.src_uri == "index.md":
        # The home page is README.
        markdown = (ROOT / "README.md").read_text().replace("](docs/", "](")
        files_of_repository = r"\]\(([A-Z]+(?:\.\w+)?)\)"
        markdown = re.sub(
            files_of_repository, rf"]({config.repo_url}/blob/main/\1)", markdown
        )
    markdown = markdown.replace("<!-- examples -->", "\n\n".join(examples()))
    return FIGURE.sub(figure, markdown)


def on_page_content(html, page, config, files):
    return INLINE.sub(lambda match: mathml(unescape(match[1]), block=False), html)
