"""Copies code from examples into pages, below comments such as `<!-- code: x.py:part -->`.

python docs/snippets.py            # after an example changed
python docs/snippets.py --check    # only asks whether pages are up to date
"""

import pathlib
import re
import sys
import textwrap

DOCS = pathlib.Path(__file__).parent
CODE = re.compile(
    r"(<!-- code: ([\w.]+):(\w+) -->\n\n``` \{\.python\}\n).*?(```)", re.DOTALL
)


def filled(match):
    source = (DOCS.parent / "examples" / match[2]).read_text()
    _, _, rest = source.partition(f"# --8<-- [start:{match[3]}]\n")
    code, end, _ = rest.partition(f"# --8<-- [end:{match[3]}]")
    assert end, match[0]
    return match[1] + textwrap.dedent(code).strip() + "\n" + match[4]


if __name__ == "__main__":
    for path in sorted(DOCS.rglob("*.md")):
        old = path.read_text()
        new = CODE.sub(filled, old)
        if new == old:
            continue
        if "--check" in sys.argv:
            sys.exit(f"{path}: run python docs/snippets.py")
        path.write_text(new)
