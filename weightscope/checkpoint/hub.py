"""The Hugging Face Hub, through its own client: what a repository has, and its small files.

HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HOME and HF_HUB_ETAG_TIMEOUT are the client's and mean what they mean to it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from weightscope.checkpoint.ranges import RETRIED
from weightscope.errors import CheckpointError

ATTEMPTS = 3
FIRST_WAIT = 0.5  # seconds; doubles from one attempt to the next

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteStat:
    """What a server says of a file before a byte of it is read."""

    url: str
    commit: str
    etag: str
    size: int


def file_identity(repository: str, commit: str, name: str, etag: str, size: int) -> dict[str, Any]:
    """What tells a file on the Hub from another, wherever it is read from."""
    from huggingface_hub import constants

    return {
        "endpoint": constants.ENDPOINT, "repository": repository, "commit": commit,
        "name": name, "etag": etag, "size": size,
    }  # fmt: skip


def cached_identity(path: Path, size: int) -> dict[str, Any] | None:
    """That of a file in the Hub's cache, which names its folders for repository and commit; None elsewhere.

    A file there is a link to one that is named for its etag; where the system has no links the commit has to do.
    """
    match path.parts[-4:]:
        case (folder, "snapshots", commit, name) if folder.startswith("models--"):
            repository = folder.removeprefix("models--").replace("--", "/")
            return file_identity(repository, commit, name, path.resolve().name if path.is_symlink() else "", size)
    return None


@dataclass(frozen=True)
class Repository:
    """A model repository at a revision.

    Attributes
    ----------
    id : str
        `owner/name` or `name`.
    revision : str
        Branch, tag or commit.
    """

    id: str
    revision: str = "main"

    def __str__(self) -> str:
        return self.id if self.revision == "main" else f"{self.id}@{self.revision}"

    def cached(self, name: str) -> Path | None:
        """The file where the Hub's local cache has it."""
        from huggingface_hub import try_to_load_from_cache

        try:
            path = try_to_load_from_cache(self.id, name, revision=self.revision)
        except (OSError, ValueError):
            return None
        return Path(path) if isinstance(path, str) else None

    def stat(self, name: str) -> RemoteStat | None:
        """What the Hub says of a file, or None where the repository has no such file.

        Raises
        ------
        CheckpointError
            The Hub cannot be reached or refuses, or there is no such repository or revision.
        """
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(self.id, name, revision=self.revision)
        metadata = self._asked(lambda: get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT))
        if metadata is None:
            return None
        if not metadata.etag or not metadata.commit_hash or metadata.size is None:
            raise CheckpointError(f"the server does not answer as the Hub does for {name}", file=str(self))
        return RemoteStat(
            hf_hub_url(self.id, name, revision=metadata.commit_hash), metadata.commit_hash, metadata.etag, metadata.size
        )

    def small_file(self, name: str, limit: int) -> Path | None:
        """A small file, from the server into the Hub's cache; None where the repository has no such file.

        Raises
        ------
        CheckpointError
            As for `stat`, or the file has more than `limit` bytes.
        """
        from huggingface_hub import constants, hf_hub_download

        stat = self.stat(name)
        if stat is None:
            return None
        if stat.size > limit:
            raise CheckpointError(f"{name} has {stat.size} bytes; at most {limit} are read", file=str(self))
        path = self._asked(
            lambda: hf_hub_download(self.id, name, revision=self.revision, etag_timeout=constants.HF_HUB_ETAG_TIMEOUT)
        )
        return Path(path) if path else None

    def file_names(self) -> list[str]:
        """All files of the repository; errors as for `stat`."""
        from huggingface_hub import HfApi, constants

        info = self._asked(
            lambda: HfApi().model_info(self.id, revision=self.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        )
        return sorted(file.rfilename for file in (info.siblings if info else None) or [])

    def _asked(self, ask: Callable[[], T]) -> T | None:
        """What the client answers, or None for no such file; its own errors are turned into ours.

        A server that stumbles is asked again.
        """
        from huggingface_hub.errors import (  # type: ignore[attr-defined]
            GatedRepoError,
            HfHubHTTPError,
            HTTPError,
            OfflineModeIsEnabled,
            RemoteEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        def refuse(problem: str) -> CheckpointError:
            return CheckpointError(f"{self}: {problem}")

        for attempt in range(1, ATTEMPTS + 1):
            try:
                return ask()
            except GatedRepoError:
                raise refuse("is gated: accept its terms on the Hub and set HF_TOKEN to a token of yours") from None
            except RepositoryNotFoundError:
                raise refuse(
                    "is neither a local path nor a repository on the Hub (a private one needs HF_TOKEN)"
                ) from None
            except RevisionNotFoundError:
                raise refuse(f"the repository has no revision '{self.revision}'") from None
            except OfflineModeIsEnabled:
                raise refuse("is not in the Hub's cache, and HF_HUB_OFFLINE is set") from None
            except RemoteEntryNotFoundError:
                return None
            except HfHubHTTPError as error:
                status = error.response.status_code
                if status not in RETRIED:
                    raise refuse(f"the Hub answered {status}") from None
                problem = f"the Hub answered {status}, {attempt} times in a row; try again later"
            except (HTTPError, OSError) as error:
                first = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise refuse(
                    f"is not a local path, not in the Hub's cache, and the Hub cannot be reached ({first})"
                ) from None
            except Exception as error:  # a client of another version, or one fed something it did not expect
                first = str(error).splitlines()[0] if str(error) else ""
                raise refuse(f"the Hub's client ended in {type(error).__name__} {first}") from None
            time.sleep(FIRST_WAIT * 2 ** (attempt - 1))
        raise refuse(problem)
