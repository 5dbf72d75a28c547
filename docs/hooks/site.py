"""MkDocs hooks for this site: formulas, examples that run, and linked files of the repository."""

from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from examples import Examples
from links import PAGES, ROOT, companions, within_site
from mathematics import Mathematics
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference import PARTS

MADE = TemporaryDirectory(prefix="weightscope-docs-")  # removed when the build ends


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

    name = page.file.src_uri
    folder = Path(mkdtemp(dir=MADE.name))
    text = Examples(name, folder, PARTS).fill(markdown)
    made = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    linked = {file for file in made if f"({file})" in text}
    # An HTML page links its tables and figures.
    pages = {Path(file).parent for file in linked if file.endswith(".html")}
    for file in sorted(file for file in made if file in linked or Path(file).parent in pages):
        files.append(File.generated(config, file, abs_src_path=str(folder / file)))
    return within_site(text, name, made, bring)
