"""Hooks of mkdocs: what the site has beside docs/.

The navigation is docs/index.md's list of pages. README, CHANGELOG and CONTRIBUTING become pages,
and so do the public names of each module, from their docstrings. Links to what the site does not
have, such as examples/, become text.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
TEXTS = {  # where the site has pages of the repository; a README.md would be its first page
    "README.md": "overview.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
}
MODULES = ("", "nn", "ops", "autograd", "distributed", "telemetry")
INTEGRATIONS = ("transformers", "megatron", "torchtitan", "transformer_engine", "deepep")
LINK = re.compile(r"(!?\[[^\]]*\])\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    index = (ROOT / "docs/index.md").read_text()
    nav: list[Any] = ["index.md", {"Overview": TEXTS["README.md"]}]
    for section in re.split(r"^## ", index, flags=re.M)[1:]:
        title, body = section.split("\n", 1)
        pages = re.findall(r"\[([^\]]+)\]\(([^)#]+\.md)\)", body)
        found = [{name[0].upper() + name[1:]: _on_site(f"docs/{page}")} for name, page in pages]
        if title == "For maintainers":
            found.append({"Changes": TEXTS["CHANGELOG.md"]})
        nav.append({title: found})
        if title == "Reference":
            nav.append({"API": [{name: f"api/{name}.md"} for name in map(_module, _names())]})
    config.nav = nav
    return config


def on_files(files: Any, config: Any) -> Any:
    for name, page in TEXTS.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for module, names in _names().items():
        title = _module(module)
        text = f"# {title}\n\n" + "".join(f"::: {title}.{name}\n\n" for name in names)
        files.append(File.generated(config, f"api/{title}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links as the site has them, or their text alone."""
    here = page.file.src_uri
    source = next((name for name, page in TEXTS.items() if page == here), f"docs/{here}")

    def replaced(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        whole = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        on_site = _on_site(whole)
        if files.get_file_from_path(on_site) is None:
            if not (ROOT / whole).exists():
                return link[0]  # mkdocs says that it leads nowhere
            return text[1:-1]
        return f"{text}({posixpath.relpath(on_site, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(replaced, markdown)


def _on_site(path: str) -> str:
    """A path of the repository, where the site has it."""
    path = posixpath.normpath(path)
    return TEXTS.get(path, path.removeprefix("docs/"))


def _module(name: str) -> str:
    return f"fp8moe_cutlass.{name}".rstrip(".")


def _names() -> dict[str, list[str]]:
    """The public names of each module, without those that are modules with a page."""
    package = ROOT / "python/fp8moe_cutlass"
    found = {}
    for module in (*MODULES, *(f"integrations.{name}" for name in INTEGRATIONS)):
        path = package.joinpath(*filter(None, module.split(".")))
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        names = next(
            ast.literal_eval(node.value)
            for node in ast.parse(source.read_text()).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        pages = {*MODULES, "integrations", "__version__"}
        found[module] = [name for name in names if module or name not in pages]
    return found
