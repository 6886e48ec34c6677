# SPDX-License-Identifier: Apache-2.0
"""What MkDocs cannot know of this project: pages made from docstrings, tessera.h and the command line; pictures of
masks and layouts, drawn by the library from the case that a page names; plots of bench results from the file that a
page names; the changelog; and links that leave docs/."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import sys
import tempfile
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools" / "site")]

import layouts  # noqa: E402  beside this file
import reference  # noqa: E402

_PICTURE = re.compile(r"^```(mask|layout)\n(.+?)\n```$", re.MULTILINE | re.DOTALL)
_PLOT = re.compile(r"^```plot\n(\w+) (\S+\.json)\n```$", re.MULTILINE)
_OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#:]+)")
_OUTSIDE_LINK = re.compile(_OUTSIDE.pattern + r"((?:#[^)]*)?)\)")


def on_files(files, config):
    pages = {path: make() for path, make in reference.pages().items()}
    pages["changelog.md"] = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    for page in list(files.documentation_pages()):
        for link in _OUTSIDE.findall(page.content_string):
            target = _target(link, page.src_path)
            if target != "CHANGELOG.md" and not target.startswith("docs/") and (ROOT / target).exists():
                pages[f"source/{target}.md"] = _listing(target)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    folder, path = posixpath.dirname(page.file.src_path), page.file.src_path

    def source(match):
        target = _target(match[1], path)
        inside = target.removeprefix("docs/") if target.startswith("docs/") else \
            "changelog.md" if target == "CHANGELOG.md" else f"source/{target}.md"
        return f"]({posixpath.relpath(inside, folder)}{match[2]})"

    markdown = _PICTURE.sub(lambda match: _drawn(match[1], match[2].strip(), page, config, files), markdown)
    markdown = _PLOT.sub(lambda match: _plotted(match[1], match[2], page, config, files), markdown)
    return _OUTSIDE_LINK.sub(source, markdown)


def _plotted(kind: str, name: str, page, config, files) -> str:
    """The plot of docs/NAME, which `bench --json` wrote, and the command that draws it for a reader."""
    from tessera.cli import bench, plot
    saved = f"docs/{name}"
    results, against = bench.read_results(str(ROOT / saved))
    path = f"images/plots/{Path(name).stem}-{kind}.png"
    link = _picture(path, page, config, files, lambda target: plot.draw(kind, results, against, target))
    return (f"![{kind} plot of {name}]({link})\n\n"
            f"    ./dev bench --from {saved} --plot {kind}.png --plot-as {kind}")


def _drawn(kind: str, case: str, page, config, files) -> str:
    """The picture of a case, and the command that draws it for a reader."""
    from tessera.cli import mask
    path = f"images/drawn/{kind}-{hashlib.sha256(case.encode()).hexdigest()[:12]}.png"
    link = _picture(path, page, config, files, lambda target: mask.plot(mask.look(case), target, case)
                    if kind == "mask" else layouts.plot(case, Path(target)))
    shown = f'\n\n    python -m tessera mask "{case}"' if kind == "mask" else ""
    return f"![{kind} of {case}]({link}){shown}"


def _picture(path: str, page, config, files, draw) -> str:
    """The link from a page to the picture `path` of the site, which `draw(file name)` makes the first time."""
    if files.get_file_from_path(path) is None:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "picture.png"
            draw(str(target))
            files.append(File.generated(config, path, content=target.read_bytes()))
    return posixpath.relpath(path, posixpath.dirname(page.file.src_path))


def _target(link: str, page: str) -> str:
    """The path in the repository that a page of docs/ names."""
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))


def _listing(target: str) -> str:
    """A page that shows a file of the repository, or the names of a folder."""
    place = ROOT / target
    if place.is_dir():
        text = "\n".join(f"- `{name.name}`" for name in sorted(place.iterdir()))
    elif place.suffix == ".ipynb":
        return _notebook(target)
    else:
        text = f"````{_LANGUAGES.get(place.suffix, 'text')}\n{place.read_text()}\n````"
    return f"# `{target}`\n\n{text}\n"


def _notebook(target: str) -> str:
    """A page with the cells of a notebook. Its links to docs/ lead there from the page, which lies deeper."""
    cells = json.loads((ROOT / target).read_text())["cells"]
    parts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    text = "\n\n".join(source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in parts)
    top = "../" * (target.count("/") + 1)
    text = re.sub(r"\]\((?:\.\./)+docs/", f"]({top}", text)
    return text.replace("\n", f"\n\nThe cells of `{target}`, which runs in Jupyter.\n", 1)


_LANGUAGES = {".h": "cpp", ".cc": "cpp", ".c": "c", ".cu": "cpp", ".cuh": "cpp", ".py": "python", ".sh": "bash"}
