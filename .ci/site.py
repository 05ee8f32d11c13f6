"""Hooks of mkdocs: the README is the home page, files of the repository that pages link to are in the site, and lists
are indented as Python-Markdown wants them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_REPOSITORY = "repository"
_TAKEN = ("deploy", "proto", "LICENSE", "CHANGELOG.md", "SECURITY.md")
_HOME = "index.md"
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^\s*(```|~~~)")
_ITEM = re.compile(r"(\d+\. |- )")


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, _HOME, content=(ROOT / "README.md").read_text(encoding="utf-8")))
    for name in _TAKEN:
        path = ROOT / name
        for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
            within = each.relative_to(ROOT).as_posix()
            if _is_shown(each):
                files.append(File.generated(config, f"{_REPOSITORY}/{within}", abs_src_path=str(each)))
        for folder in [path, *sorted(path.rglob("*"))] if path.is_dir() else []:
            if folder.is_dir():
                within = folder.relative_to(ROOT).as_posix()
                files.append(File.generated(config, f"{_REPOSITORY}/{within}/index.md", content=_listing(folder)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = page.file.src_uri
    if source.endswith("/index.md"):
        return markdown
    folder = "docs" if source in {f"{page.stem}.md" for page in (ROOT / "docs").glob("*.md")} else ""
    up = "../" * source.count("/")
    return reindented(_LINK.sub(lambda link: _relinked(link, folder, up), markdown))


def _is_shown(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".")


def _listing(folder: Path) -> str:
    names = "\n".join(
        f"- [{each.relative_to(folder).as_posix()}]({each.relative_to(folder).as_posix()})"
        for each in sorted(folder.rglob("*"))
        if _is_shown(each)
    )
    return f"# {folder.relative_to(ROOT).as_posix()}/\n\n{names}\n"


def _relinked(link: re.Match[str], folder: str, up: str) -> str:
    """`folder`: of the page, in the repository; `up`: from it to the site's top."""
    target, anchor = link.group(1), link.group(2) or ""
    if "://" in target or target.startswith("mailto:"):
        return link.group()
    path = posixpath.normpath(posixpath.join(folder, target))
    if path.startswith("docs/"):
        return f"]({up}{path.removeprefix('docs/')}{anchor})"
    if path == "README.md":
        return f"]({up}{_HOME}{anchor})"
    if path.partition("/")[0] in _TAKEN:
        return f"]({up}{_REPOSITORY}/{path}{'/index.md' if (ROOT / path).is_dir() else ''}{anchor})"
    return link.group()  # mkdocs says that it leads nowhere.


def reindented(markdown: str) -> str:
    """GitHub indents what belongs to a list's item by the width of its mark, Python-Markdown by four; and it wants an
    empty line before a list.
    """
    out: list[str] = []
    width, fenced = 0, False
    for line in markdown.splitlines():
        item = _ITEM.match(line)
        if item is not None and not fenced:
            if not width and out and out[-1].strip():
                out.append("")
            width = item.end()
        elif width and line.startswith(" " * width):
            line = "    " + line[width:]
        elif line.strip() and width and (fenced or not out[-1].strip()):
            width = 0
        if _FENCE.match(line):
            fenced = not fenced
        out.append(line)
    return "\n".join(out) + "\n"
