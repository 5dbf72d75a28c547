"""What MkDocs does not do by itself for this site: mathematics, examples that are run, files of the repository."""

from pathlib import Path
from tempfile import mkdtemp

from examples import Examples
from links import PAGES, ROOT, within_site
from mathematics import Mathematics
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference import PARTS


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

    name = page.file.src_uri
    folder = Path(mkdtemp(prefix="weightscope-docs-"))
    examples = Examples(name, folder, PARTS)
    text = within_site(examples.fill(markdown), name, bring)
    for made in folder.rglob("*"):
        if made.is_file() and f"({made.relative_to(folder)})" in text:
            files.append(File.generated(config, str(made.relative_to(folder)), abs_src_path=str(made)))
    return text
