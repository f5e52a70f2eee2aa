"""Counts habits that make English hard to read, by kind of text.

    python tests/prose.py              # a table for the whole project
    python tests/prose.py FILE ...     # the sentences with a habit in these files

We remove code, formulas and link targets, and split sentences at `.:;!?`.
"""

import ast
import collections
import io
import pathlib
import re
import sys
import tokenize

ROOT = pathlib.Path(__file__).parents[1]
CODE = {
    "src": ["src"],
    "tests": ["tests"],
    "scripts": ["benchmarks", "examples", "docs"],
}
WORDS = {
    "words": r"[A-Za-z][A-Za-z'-]*",
    "of": r"\bof\b",
    "what": r"\bwhat\b",
    "you or we": r"\b(?:you|your|we|our)\b",
}
HABITS = {
    "starts with of": r"^\W*(?:Of|That of|Those of)\b",
    "that of": r"\b(?:that|those|are) of\b",
    ", of which": r", (?:of|in|by) which\b",
    "so many": r"\b(?:so many|as many|so much|as far as)\b",
    "idiom": r"\b(?:go(?:es|ing)? on|went on|begins? anew|belongs? into|by (?:itself|themselves)"
    r"|of (?:your|my|our) own|beside|asked for|there (?:is|are))\b",
}


def sentences(text):
    text = re.sub(r"```.*?```|\$\$.*?\$\$", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->|<[^>\n]+>", " ", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`|\$[^$\n]+\$", "CODE", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=[-*#|] |\|)|\|", text):
        for sentence in re.split(r"(?<=[.:;!?])\s", " ".join(paragraph.split())):
            if re.search(r"[A-Za-z]{2}", sentence):
                yield sentence


def _comments(source):
    """The comments. Those on consecutive lines are one text."""
    last, lines = None, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            if (row - 1, column) != last:
                yield "\n".join(lines)
                lines = []
            lines.append(token.string.lstrip("# "))
            last = row, column
    yield "\n".join(lines)


def texts(path):
    """Pairs of a kind (docstrings, comments, messages or pages) and a text."""
    source = path.read_text()
    if path.suffix == ".md":
        yield "pages", source
        return
    with_docstrings = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes, docstrings = list(ast.walk(ast.parse(source))), set()
    for node in nodes:
        if isinstance(node, with_docstrings) and ast.get_docstring(node):
            docstrings.add(node.body[0].value)
            # Indented lines are code or continue a list.
            yield "docstrings", re.sub(r"(?m)^ {4,}.*$", "", ast.get_docstring(node))
    for node in nodes:
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and node not in docstrings and len(text.split()) > 3:
            yield "messages", text
    for comment in _comments(source):
        yield "comments", comment


def files():
    """Pairs of a place (src, tests, scripts or pages) and a file."""
    for place, folders in CODE.items():
        for folder in folders:
            for path in sorted((ROOT / folder).rglob("*.py")):
                if path != pathlib.Path(__file__):
                    yield place, path
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        yield "pages", path


def count(sentence):
    patterns = {**WORDS, **HABITS}.items()
    return {x: len(re.findall(y, sentence, re.IGNORECASE)) for x, y in patterns}


def totals():
    """For every place and kind: rates per 1,000 words, and the number of each habit."""
    sums = collections.defaultdict(collections.Counter)
    for place, path in files():
        for kind, text in texts(path):
            for sentence in sentences(text):
                sums[place, kind].update(count(sentence))
    for total in sums.values():
        for word in WORDS:
            if word != "words":
                total[word] = round(1000 * total[word] / total["words"], 1)
    return sums


if __name__ == "__main__":
    if len(sys.argv) == 1:
        columns = ["text", *WORDS, *HABITS]
        print("|", " | ".join(columns), "|")
        print("|" + "---|" * len(columns))
        for (place, kind), total in totals().items():
            row = [f"{place}, {kind}", *(total[x] for x in columns[1:])]
            print("|", " | ".join(map(str, row)), "|")
    for name in sys.argv[1:]:
        for kind, text in texts(pathlib.Path(name)):
            for sentence in sentences(text):
                found = count(sentence)
                habits = [x for x in [*HABITS, "what"] if found[x]]
                habits += [f"{found['of']} of"] * (found["of"] > 2)
                if habits:
                    print(f"{name}, {kind}: {', '.join(habits)}: {sentence}")
