"""MkDocs hooks for this site: formulas, linked files of the repository, and Python's reference."""

from links import PAGES, ROOT, companions, within_site
from mathematics import Mathematics
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import weightscope


def on_config(config: MkDocsConfig) -> None:
    config.markdown_extensions.append(Mathematics())


def on_files(files: Files, config: MkDocsConfig) -> None:
    for source, page in PAGES.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def bring(path: str, target: str) -> None:
        if files.get_file_from_path(target) is None:
            files.append(File.generated(config, target, abs_src_path=str(ROOT / path)))
            for companion in companions(path) if path.endswith(".html") else ():
                bring(companion, companion)

    if page.file.src_uri == "api.md":  # what mkdocstrings reads out of the docstrings
        markdown += "".join(f"\n::: weightscope.{name}\n" for name in weightscope.__all__)
    return within_site(markdown, page.file.src_uri, bring)
