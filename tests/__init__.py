"""The tests, in the folders of weightscope/.

    make test    lint and what a change needs, with NumPy alone: pytest without the marks below
    make check   everything: make test, make docs, types, and what is marked `check`
    make docs    what is marked `docs` (what README, docs/ and figures/ say), then the site
    pytest -m census     every model type, planted deed and converter again: long

A mark stands on a test, or on a whole file as `pytestmark`; `make test` does not even import such a file. `check` is
for what needs PyTorch, a browser, other processes, a notebook, the built wheel, real weights, or more than about two
seconds; `smoke` marks the one test of such a kind that `make test` does run.

    families/fixtures    tiny models as transformers saves them, and what eager attention computes: make_fixtures.py
    families/golden      the same of layers that take a memory or added positions: make_golden.py
    attacks/, fuzz/      hostile files, one line each; mutations of good ones
    support/             what several files share; tiny_models.py opens the fixtures
"""
