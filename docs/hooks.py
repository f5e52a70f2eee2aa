"""What the site does beyond Markdown: formulas."""

import re
from html import unescape

from math_core import LatexToMathML

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
CONVERTER = LatexToMathML()


def mathml(latex, *, block):
    """LaTeX as MathML, which browsers show without a script."""
    # Fails where something isn't known, and so does the build.
    return CONVERTER.convert_with_local_state(latex.strip(), displaystyle=block)


def formula(source, language=None, class_name=None, options=None, md=None, **_):
    """What stands for a fence of `math`."""
    return f'<div class="formula">{mathml(source, block=True)}</div>'


def on_config(config):
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "formula", "format": formula}]
    return config


def on_page_content(html, page, config, files):
    return INLINE.sub(lambda found: mathml(unescape(found[1]), block=False), html)
