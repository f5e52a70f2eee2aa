"""Count the habits that make English hard to read, by kind of text.

    python tests/prose.py              # the table
    python tests/prose.py FILE ...     # the sentences behind it, in these files

Code spans, code blocks, links' targets and formulas are removed. Sentences end at `.:;!?`.
"""

import ast
import io
import pathlib
import re
import sys
import tokenize

ROOT = pathlib.Path(__file__).parents[1]
CODE = {"src": "src", "tests": "tests", "scripts": "benchmarks examples docs"}

START = r"(?:^|\|)\W*(?:Of|That of|Those of)\b"
NOUN = r"\b(?:that|those|is that|are) of\b"
CHAIN = r", (?:of|in|by) which\b"
QUANTITY = r"\b(?:so many|as many|so much|as far as)\b"
IDIOMS = (
    r"\b(?:go(?:es|ing)? on|went on|begins? anew|belongs? into|of (?:your|my|our) own"
    r"|by (?:itself|themselves)|beside|asked for|there (?:is|are))\b"
)


def _sentences(text):
    """The sentences of a text without code, formulas and links' targets."""
    text = re.sub(r"```.*?```|~~~.*?~~~|\$\$.*?\$\$", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->|<[^>\n]+>", " ", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"\$[^$\n]+\$", "FORMULA", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=[-*#|] |\|)|\|", text):
        plain = " ".join(paragraph.split())
        for sentence in re.split(r"(?<=[.:;!?])\s", plain):
            if re.search(r"[A-Za-z]{2}", sentence):
                yield sentence


def _comments(source):
    """Comments; those on consecutive lines are one text."""
    last, lines = (-2, 0), []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            if (row - 1, column) != last and lines:
                yield "\n".join(lines)
                lines = []
            lines.append(token.string.lstrip("# "))
            last = (row, column)
    yield "\n".join(lines)


def texts(path):
    """The texts of a file, each with its kind: docstrings, comments, messages, pages."""
    source = path.read_text()
    if path.suffix == ".md":
        yield "pages", source
        return
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    tree, docstrings = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node):
            docstrings.add(node.body[0].value)
            # Indented code is code.
            text = re.sub(r"(?m)^ {4,}.*$", "", ast.get_docstring(node))
            yield "docstrings", text
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and node not in docstrings and len(text.split()) > 3:
            yield "messages", text
    for comment in _comments(source):
        yield "comments", comment


def files():
    """Every file that a person reads, with where it lies: src, tests, scripts or pages."""
    for place, folders in CODE.items():
        for folder in folders.split():
            for path in sorted((ROOT / folder).rglob("*.py")):
                yield place, path
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        yield "pages", path


class Count:
    """Sums over the sentences of one kind of text."""

    def __init__(self):
        self.words = self.of = self.what = self.reader = 0
        self.start = self.noun = self.chain = self.quantity = self.idiom = 0

    def add(self, sentence):
        def occurrences(pattern):
            return len(re.findall(pattern, sentence, re.IGNORECASE))

        self.words += occurrences(r"[A-Za-z][A-Za-z'-]*")
        self.of += occurrences(r"\bof\b")
        self.what += occurrences(r"\bwhat\b")
        self.reader += occurrences(r"\b(?:you|your|we|our)\b")
        self.start += occurrences(START)
        self.noun += occurrences(NOUN)
        self.chain += occurrences(CHAIN)
        self.quantity += occurrences(QUANTITY)
        self.idiom += occurrences(IDIOMS)

    def per_thousand(self, number):
        return 1000 * number / max(self.words, 1)


def counts():
    """`{(place, kind): Count}`."""
    total = {}
    for place, path in files():
        for kind, text in texts(path):
            count = total.setdefault((place, kind), Count())
            for sentence in _sentences(text):
                count.add(sentence)
    return total


def _table():
    print("| text | words | of | what | you, we | R1 | R2 | R5 | R6 | idioms |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for (place, kind), c in counts().items():
        name = kind if place == kind else f"{place}, {kind}"
        rates = [f"{c.per_thousand(number):.1f}" for number in (c.of, c.what, c.reader)]
        rules = [c.start, c.noun, c.chain, c.quantity, c.idiom]
        print("|", " | ".join(map(str, [name, c.words, *rates, *rules])), "|")


def _offenders(path):
    """Print each sentence with a habit, or with three "of" or more."""
    for kind, text in texts(path):
        for sentence in _sentences(text):
            c = Count()
            c.add(sentence)
            habits = [
                name
                for name in ("start", "noun", "chain", "quantity", "idiom", "what")
                if getattr(c, name)
            ]
            if c.of > 2 or (c.of > 1 and c.words < 12):
                habits.append(f"{c.of} of")
            if habits:
                print(f"{kind}: {', '.join(habits)}: {sentence}")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        _table()
    for name in sys.argv[1:]:
        print(f"== {name}")
        count = {}
        for kind, text in texts(pathlib.Path(name)):
            for sentence in _sentences(text):
                count.setdefault(kind, Count()).add(sentence)
        for kind, c in count.items():
            print(
                f"{kind}: {c.words} words, {c.per_thousand(c.of):.0f} of, {c.per_thousand(c.what):.0f} what"
            )
        _offenders(pathlib.Path(name))
