"""Where a checkpoint is: a folder, a file, or an id on the Hub, brought to a local folder."""

from pathlib import Path

from weightscope.errors import CheckpointError

# What weightscope reads of a repository: nothing that would have to be unpickled or run.
WANTED = ("*.safetensors", "*.safetensors.index.json", "config.json", "tokenizer.json", "vocab.json", "merges.txt")


def resolve_folder(source: str | Path, revision: str | None = None) -> Path:
    """The local folder (or single file) that `source` names, downloading from the Hub when it must.

    A path that exists wins; anything else of the form `name` or `owner/name`, with an optional `@revision`, is looked
    up in the Hub's local cache and then on the Hub.

    Raises
    ------
    CheckpointError
        Nothing of that name exists, or the Hub has it but will not or cannot give it.
    """
    path = Path(source)
    try:
        path = path.expanduser()
        if str(source) and path.exists():
            return path
    except (OSError, RuntimeError) as error:  # a name too long, no permission, a home that nobody has
        raise CheckpointError(f"cannot be read ({error})", file=path) from None
    repository, _, tag = str(source).partition("@")
    if not _may_be_hub_id(repository):
        raise CheckpointError(f"no such file or folder: '{source}'")
    return _from_hub(repository, revision or tag or None)


def _may_be_hub_id(text: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return not text.endswith((".safetensors", ".json", ".npz"))


def _from_hub(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = snapshot_download(repository, revision=revision, allow_patterns=list(WANTED), etag_timeout=10)
    except GatedRepoError:
        raise CheckpointError(f"{repository} is gated: accept its terms on the Hub and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise CheckpointError(f"{repository} is neither a local path nor a repository on the Hub") from None
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"{repository} is not a local path, not in the Hub's cache, and the Hub cannot be reached"
        ) from None
    except Exception as error:  # the client's own errors differ by version; none of them may surface as a traceback
        reason = str(error).splitlines()[0] if str(error) else ""
        raise CheckpointError(f"{repository}: the Hub answered {type(error).__name__} {reason}") from None
    return Path(folder)
